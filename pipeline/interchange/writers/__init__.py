"""One module for each format that Ingot writes; refusals.py says what a format cannot hold. Table: ../formats.py."""
