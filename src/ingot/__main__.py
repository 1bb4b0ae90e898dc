"""`python -m ingot` is the `ingot` command."""

from ingot.cli import main

main()
