"""How a command is declared: its arguments, options and help; what it does is imported when it runs.

This file and those that use it import only click, so that help and completion are quick and work without the compiler's
packages.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin

import click

from ingot.cli import completion
from ingot.cli.command import Command
from ingot.options import Option, options_of

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


def options_from(declaring: type) -> Decorated:
    """A command line option for each option that a dataclass declares, in its order.

    Only types are checked here: the class refuses what is out of range, see `naming_options`.
    """

    def declare(declaration: Callable[..., None]) -> Callable[..., None]:
        for option in reversed([*options_of(declaring).values()]):
            declaration = _click_option(option)(declaration)
        return declaration

    return declare


def _click_option(option: Option) -> Decorated:
    kind = get_args(option.single)[0] if option.range else option.single
    is_list = get_origin(kind) is tuple
    attributes: dict[str, Any] = {"default": option.default, "show_default": option.doc.none or bool(option.default)}
    if kind is bool:
        attributes["is_flag"] = True
    elif is_list:
        attributes["multiple"] = True
    elif option.choices:
        attributes["type"] = click.Choice(option.choices)
    else:
        attributes["type"] = click.Path(path_type=Path) if kind is Path else kind
    sentence = f"{option.doc.text[0].upper()}{option.doc.text[1:]}{'; repeatable' if is_list else ''}."
    flag = option.flag.name or f"--{option.name.replace('_', '-')}"
    return click.option(flag, option.name, metavar=option.flag.metavar, help=sentence, **attributes)


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
