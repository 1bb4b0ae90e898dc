"""The `ingot` command: `commands` declares the commands, the other files implement them.

`main` runs one, and turns errors into messages and exit codes.
"""

from ingot.cli.main import main

__all__ = ["main"]
