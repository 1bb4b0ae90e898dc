"""Entry point: the command group, and the one place where an error becomes a message and an exit code.

0 done, all gates pass    1 error    2 usage    3 a gate failed    4 a gate is undecided    130 interrupted
"""

import sys

import click

from ingot.cli.commands import COMMANDS, CommandGroup
from ingot.errors import IngotError, UsageError

_EXTRAS = {"onnx": "compiler", "onnx_ir": "compiler"}  # package -> the extra of Ingot that installs it


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
    """Run the command line and exit with its code."""
    sys.exit(run(args))


def run(args: list[str] | None = None) -> int:
    """Run the command line; return its exit code. No traceback for a user's mistake."""
    try:
        outcome = cli.main(args=args, prog_name="ingot", standalone_mode=False)
        return outcome if isinstance(outcome, int) else 0
    except IngotError as error:
        _print_error(str(error))
        return error.exit_code
    except click.ClickException as error:
        where = f" (see `{error.ctx.command_path} --help`)" if isinstance(error, click.UsageError) and error.ctx else ""
        _print_error(f"{error.format_message()}{where}")
        return UsageError.exit_code
    except (click.Abort, KeyboardInterrupt):
        _print_error("interrupted")
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone
        return 1
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        _print_error(f"this command needs {error.name}, part of the {extra}; pip install 'ingot[{extra}]'")
        return 1
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _print_error(f"{place}{error.strerror or error}")
        return 1


def _print_error(message: str) -> None:
    from ingot.cli.console import print_error  # loads rich, which help does without

    print_error(message)
