"""Declaration of a command: its arguments, options and help; its code is imported when it runs.

This file and those that use it import only click, so that help and completion are quick and work without the compiler's
packages.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ingot.cli import completion
from ingot.cli.command import Command

COMMANDS: dict[str, Command] = {}


def command(name: str, implementation: str, takes: str = "") -> Callable[[Callable[[], None]], Command]:
    """Declare a command by a function with its options as decorators, its help as docstring and no body.

    `takes` is what its first argument must be, a key of ingot.cli.sources.CHECKS.
    """

    def declare(declaration: Callable[[], None]) -> Command:
        COMMANDS[name] = click.command(name, cls=Command, implementation=implementation, takes=takes)(declaration)
        return COMMANDS[name]

    return declare


Decorated = Callable[[Callable[..., None]], Callable[..., None]]


def path(*names: str, complete: completion.Complete | None = None, **attributes: Any) -> Decorated:
    """An option whose value is a path."""
    return click.option(*names, type=click.Path(path_type=Path), shell_complete=complete, **attributes)


def progress_options(declaration: Callable[..., None]) -> Callable[..., None]:
    """Options of commands that take long; see ingot.cli.command.Command for who reads them."""
    kinds = click.Choice(["auto", "plain", "bar", "none"])
    progress = click.option(
        "--progress",
        type=kinds,
        default="auto",
        envvar="INGOT_PROGRESS",
        help="plain: lines, bar: bars; auto: bars at a terminal, else lines.  [env: INGOT_PROGRESS]",
    )
    quiet = click.option("-q", "--quiet", is_flag=True, help="Print results and errors, but no progress and notes.")
    return quiet(progress(declaration))
