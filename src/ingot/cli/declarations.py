"""How a command is declared: its arguments, options and help; what it does is imported when it runs.

This file and those that use it import only click, so that help and completion are quick and work without the compiler's
packages.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

import click

from ingot.cli import completion
from ingot.cli.command import Command

if TYPE_CHECKING:
    from ingot.options import Option

COMMANDS: dict[str, Command] = {}


def command(
    name: str, implementation: str, takes: str = "", declared: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> Callable[[Callable[[], None]], Command]:
    """Declare a command by a function with its options as decorators, its help as docstring and no body.

    takes     what its first argument must be, a key of ingot.cli.sources.CHECKS
    declared  dataclasses, "module:class", whose options it takes too: those with these names, or all
    """

    def declare(declaration: Callable[[], None]) -> Command:
        facts = {"implementation": implementation, "takes": takes, "declared": declared}
        COMMANDS[name] = click.command(name, cls=Command, **facts)(declaration)
        return COMMANDS[name]

    return declare


Decorated = Callable[[Callable[..., None]], Callable[..., None]]


def path(*names: str, complete: completion.Complete | None = None, **attributes: Any) -> Decorated:
    """An option whose value is a path."""
    return click.option(*names, type=click.Path(path_type=Path), shell_complete=complete, **attributes)


def declared_flags(place: str, names: Sequence[str]) -> Iterator[click.Option]:
    """Make the flags of the options that a dataclass declares, of all or of some; see ingot.options.

    They check types alone: the class refuses what is out of range, see `naming_options`.
    """
    from ingot.options import options_of

    module, _, declaring = place.partition(":")
    declared = options_of(getattr(import_module(module), declaring))
    return (_flag(declared[name]) for name in names or declared)


def _flag(option: "Option") -> click.Option:
    kind = get_args(option.single)[0] if option.range else option.single
    is_list = isinstance(option.default, tuple)
    is_shown = not (option.default is None or option.default is False or option.default == ())
    attributes: dict[str, Any] = {"default": option.default, "show_default": option.doc.none or is_shown}
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
    return click.Option([flag, option.name], metavar=option.flag.metavar, help=sentence, **attributes)


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
