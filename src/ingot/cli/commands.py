"""Every command by its name."""

from ingot.cli import compiler_commands, runtime_commands  # noqa: F401 - which declare them
from ingot.cli.command import COMMANDS

__all__ = ["COMMANDS"]
