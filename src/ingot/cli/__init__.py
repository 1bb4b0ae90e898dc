"""The `ingot` command: one file per command, `main` joins them and turns errors into messages and exit codes."""

from ingot.cli.main import main

__all__ = ["main"]
