"""How a command is declared, and what is the same for all before and after the command's own function runs.

This file and those that declare commands import only click, so that help and completion are quick and work without the
compiler's packages.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

import click

from ingot.cli import completion, other_names
from ingot.cli.failure import ReaderGone
from ingot.cli.sources import CHECKS, CommandLine
from ingot.cli.terminal.output import set_output
from ingot.errors import UsageError, shown, unknown

if TYPE_CHECKING:
    from ingot.options import Option

_WORDS = "ingot.words"  # key of the context's meta: the command line after the command's name
PARAMETER_GROUPS: Mapping[str, Sequence[str]] = {
    "processes": ("stages", "tensor_parallel", "expert_parallel"),
    "sizes": ("prompt_tokens", "output_tokens", "spread", "shared_tokens", "num_prefixes"),
}
"""Parameters that a command's function gets as one, by their names: those of its options that go on together."""


class Command(click.Command):
    """A command whose function, "module:function", is imported when it is invoked.

    The function gets the command's parameters, some of them as a group, except for those that are handled here: --quiet
    and --progress set up the output, --junit and --summary become the parameter `reports`.
    """

    def __init__(
        self, *args: Any, implementation: str, takes: str = "", declared: Mapping[str, Sequence[str]], **options: Any
    ) -> None:
        self._declared = dict(declared)
        super().__init__(*args, **options)
        self.implementation = implementation
        self.takes = takes  # what its first argument must be, a key of CHECKS

    @property
    def params(self) -> list[click.Parameter]:
        """The parameters, with those of dataclasses, which are imported when they are needed."""
        if self._declared:
            declared, self._declared = self._declared, {}
            self._params += [flag for place, names in declared.items() for flag in declared_flags(place, names)]
        return self._params

    @params.setter
    def params(self, params: list[click.Parameter]) -> None:
        self._params = params

    def load(self) -> Callable[..., int | None]:
        """Import the function that implements the command."""
        module, _, function = self.implementation.partition(":")
        with _signals_end_the_process():
            loaded: Callable[..., int | None] = getattr(import_module(module), function)
        return loaded

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, and keep the given ones for messages."""
        ctx.meta[_WORDS] = tuple(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption:
            self._refuse_other_names(ctx)
            raise
        except click.UsageError as error:
            if error.message.startswith("Got unexpected extra argument"):
                hint = "an argument with spaces, such as a prompt, needs quotes"
                raise click.UsageError(f"{error.message}; {hint}", ctx) from error
            raise

    def _refuse_other_names(self, ctx: click.Context) -> None:
        """Raise UsageError for an option that another program has, with what replaces it."""
        own = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for word in ctx.meta[_WORDS]:
            name = word.partition("=")[0]
            if name not in own and (instead := other_names.OPTIONS.get(self.name or "", {}).get(name)):
                raise UsageError(f"`ingot {self.name}` has no option {name}; {instead}")

    def invoke(self, ctx: click.Context) -> int | None:
        """Run the command with the parameters that were parsed; returns its exit code."""
        from ingot.cli.terminal.console import show_log  # loads rich, which help does without

        given = dict(ctx.params)
        for group, names in PARAMETER_GROUPS.items():
            if given.keys() >= {*names}:
                given[group] = {name: given.pop(name) for name in names}
        show_log()
        set_output(quiet=given.pop("quiet", False), progress=given.pop("progress", "auto"))
        with _reports(self.name or "", given):
            self._check(CommandLine(self.name or "", ctx.meta[_WORDS]), ctx.params)
            try:
                return ctx.invoke(self.load(), **given)
            except BrokenPipeError as error:
                raise ReaderGone from error

    def _check(self, line: CommandLine, given: Mapping[str, Any]) -> None:
        """Raise UsageError for text that is not UTF-8, and for a path of the wrong kind."""
        for parameter in self.params:
            if isinstance(parameter.type, click.types.StringParamType):
                _refuse_undecoded(parameter, given[parameter.name or ""])
        if self.takes:
            CHECKS[self.takes](line, given)


def given_words() -> tuple[str, ...]:
    """Return the words of the command line after the command's name."""
    context = click.get_current_context(silent=True)
    return context.meta[_WORDS] if context else ()


@contextmanager
def naming_options() -> Iterator[None]:
    """Have a UsageError that begins with the name of a parameter begin with the option that sets it."""
    try:
        yield
    except UsageError as error:
        context, message = click.get_current_context(silent=True), str(error)
        for parameter in context.command.params if context else ():
            if message.startswith(f"{parameter.name} "):
                error.args = (f"{parameter.opts[0]}{message.removeprefix(parameter.name or '')}",)
        raise


class CommandGroup(click.Group):
    """The group of all commands; an unknown one is refused with the nearest name. `help` is --help of what follows."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args == ["help"]:
            click.echo(ctx.get_help())
            ctx.exit()
        args = [args[1], "--help"] if args[0] == "help" else args
        if args[0] in other_names.COMMANDS:
            raise UsageError(f"unknown command {shown(args[0])}; {other_names.COMMANDS[args[0]]}")
        if args[0] not in self.commands and not args[0].startswith("-"):
            raise UsageError(unknown("command", args[0], self.commands, "commands"))
        return super().resolve_command(ctx, args)


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
    names = [flag, *option.flag.aliases, option.name]
    return click.Option(names, metavar=option.flag.metavar, help=sentence, **attributes)


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


@contextmanager
def _signals_end_the_process() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the process at once, while nothing is written yet.

    As exceptions they would be swallowed by callbacks of the import system and of native modules, with a traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in handlers.items():
        if callable(handler):  # signals that the caller made this process ignore stay ignored
            signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handler)


@contextmanager
def _reports(command: str, given: dict[str, Any]) -> Iterator[None]:
    """Replace the parameters junit and summary by `reports`, and write both files when the command ends."""
    if "junit" not in given:
        yield
        return
    from ingot.cli.ci_reports import CIReports

    subject = "_".join(str(given.get("recipe") or given["artifact"]).split())
    given["reports"] = CIReports(f"ingot {command} {subject}", given.pop("junit"), given.pop("summary"))
    with given["reports"]:
        yield


def _refuse_undecoded(parameter: click.Parameter, value: object) -> None:
    """Raise UsageError for an argument with bytes that are not UTF-8, which Python passes on as lone surrogates."""
    for text in [value] if isinstance(value, str) else value if isinstance(value, tuple) else ():
        try:
            text.encode()
        except UnicodeEncodeError:
            name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.human_readable_name
            raise UsageError(f"{name}: {shown(text)} is not UTF-8 text") from None
