"""Entry point: the command group, and the one place where an error becomes a message and an exit code.

See failure.py for the exit codes.
"""

import io
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import click

from ingot.cli import compiler_commands, runtime_commands  # noqa: F401 (they declare commands)
from ingot.cli.command import CommandGroup
from ingot.cli.declarations import COMMANDS
from ingot.cli.failure import READER_GONE, Failure, ReaderGone, Terminated, failure_of
from ingot.cli.output import output, set_output

__all__ = ["COMMANDS", "main"]


def _print_version(context: click.Context, option: click.Parameter, is_wanted: bool) -> None:
    if is_wanted:
        import ingot

        click.echo(f"ingot, version {ingot.__version__}")
        context.exit()


@click.group(
    cls=CommandGroup,
    commands=COMMANDS,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
@click.pass_context
def cli(context: click.Context) -> None:
    """Compile an LLM checkpoint into an artifact that proves itself, and run it.

    \b
    ingot build demo                              build, measure and gate the demo model
    ingot run artifacts/demo "def read_file("     generate from it
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(args: list[str] | None = None) -> None:
    """Run the command line in this process and exit with its code."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, _terminate)):
        # A shell lets programs in the background ignore SIGINT.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
    code = _open_standard_streams() or run(args)
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while Python shuts down prints no traceback
    sys.exit(code)


def run(args: list[str] | None = None) -> int:
    """Run the command line; return its exit code. No traceback for a user's mistake."""
    words = sys.argv[1:] if args is None else args
    set_output()
    try:
        outcome = cli.main(args=args, prog_name="ingot", standalone_mode=False)
        sys.stdout.flush()  # now, so that a full disk is an error
    except (BrokenPipeError, ReaderGone):
        return _drop_output()
    except (Exception, KeyboardInterrupt, Terminated) as error:
        failure = failure_of(error)
        if failure is None:
            raise
        return _report(failure, _wants_json(words))
    return outcome if isinstance(outcome, int) else 0


def _report(failure: Failure, as_json: bool) -> int:
    """Print the error to stderr and, with --json, as an object to stdout unless the command has printed one."""
    from ingot.cli.console import print_error, print_json  # load rich, which help does without

    print_error(failure.message)
    try:
        if as_json and not output.printed_json:
            print_json({"error": failure.as_json()})
            sys.stdout.flush()
    except OSError:
        return _drop_output() and failure.exit_code
    return failure.exit_code


def _wants_json(words: Sequence[str]) -> bool:
    """Whether --json is among the arguments, also of a command line that cannot be parsed."""
    options = words[: words.index("--")] if "--" in words else words
    return "--json" in options


def _drop_output() -> int:
    """Drop what is still buffered, as nothing reads it; return the exit code that a shell shows for SIGPIPE."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
    return READER_GONE


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _open_standard_streams() -> int:
    """Make stdin, stdout and stderr usable; return an exit code if there is nowhere to print results.

    A stream that the caller closed leaves its number free for the next file that is opened, which whatever prints would
    then write into. Characters that the terminal's encoding lacks are printed as escapes.
    """
    is_closed = {number: _is_closed(number) for number in (0, 1, 2)}
    for _ in filter(None, is_closed.values()):
        os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # the stream was closed at the start
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")
    if is_closed[1]:
        message = "standard output is closed; redirect it to a file, or to /dev/null"
        return _report(Failure("OSError", message, 1), as_json=False)
    return 0


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False
