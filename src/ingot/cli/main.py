"""Entry point: the command group, and the one place where an error becomes a message and an exit code.

0 done, all gates pass    1 error    2 usage    3 a gate failed    4 a gate is undecided    130 interrupted
"""

import sys
from importlib import import_module

import click

import ingot
from ingot.cli.console import print_error, show_log
from ingot.errors import IngotError, UsageError, did_you_mean

COMMANDS: dict[str, str] = {
    "build": "ingot.cli.build:build_command",
    "export": "ingot.cli.checkpoints:export_command",
    "import": "ingot.cli.checkpoints:import_command",
    "inspect": "ingot.cli.inspect:inspect_command",
    "lint-checkpoint": "ingot.cli.checkpoints:lint_checkpoint_command",
    "passes": "ingot.cli.catalog:passes_command",
    "quantize-report": "ingot.cli.validate:quantize_report_command",
    "recipes": "ingot.cli.catalog:recipes_command",
    "run": "ingot.cli.run:run_command",
    "transcode": "ingot.cli.checkpoints:transcode_command",
    "tune": "ingot.cli.tune:tune_command",
    "validate": "ingot.cli.validate:validate_command",
}


class _LazyGroup(click.Group):
    """Imports a command when it is used: `ingot run` must not wait for the compiler's imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = did_you_mean(args[0], COMMANDS)
            raise UsageError(f"unknown command {args[0]!r}; commands: {', '.join(sorted(COMMANDS))}.{hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=_LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(ingot.__version__, prog_name="ingot")
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
    show_log()
    try:
        outcome = cli.main(args=args, prog_name="ingot", standalone_mode=False)
        return outcome if isinstance(outcome, int) else 0
    except IngotError as error:
        print_error(str(error))
        return error.exit_code
    except click.ClickException as error:
        where = f" (see `{error.ctx.command_path} --help`)" if isinstance(error, click.UsageError) and error.ctx else ""
        print_error(f"{error.format_message()}{where}")
        return UsageError.exit_code
    except (click.Abort, KeyboardInterrupt):
        print_error("interrupted")
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone
        return 1
    except ModuleNotFoundError as error:
        if error.name not in {"onnx", "onnx_ir"}:
            raise
        print_error(f"this command needs {error.name}, part of the compiler; pip install 'ingot[compiler]'")
        return 1
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print_error(f"{place}{error.strerror or error}")
        return 1
