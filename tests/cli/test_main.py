"""The command group: help with examples, names that are wrong, errors as messages and exit codes."""

import re
import subprocess
import sys
from collections.abc import Callable

import pytest

import ingot
from ingot.cli import main
from ingot.cli.main import COMMANDS, run
from ingot.errors import BuildError, GateFailed, GateUndecided, UsageError
from ingot.version import install_command
from tests.each_case import each_case

Captured = pytest.CaptureFixture[str]


@each_case("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(command: str, capsys: Captured) -> None:
    assert run([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Example" in shown
    assert re.search(rf"^    ingot {command}( |$)", shown, re.MULTILINE)
    assert all(line.split("  ", 3)[-1].strip() for line in shown.splitlines() if line.startswith("  --"))


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_a_command_the_commands_are_listed(arguments: list[str], capsys: Captured) -> None:
    assert run(arguments) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Usage: ingot")
    assert all(f"\n  {command} " in shown.out for command in COMMANDS)
    assert shown.err == ""


def test_the_version_is_the_package_s(capsys: Captured) -> None:
    assert run(["--version"]) == 0
    assert ingot.__version__ in capsys.readouterr().out


def test_an_unknown_option_points_to_the_help(capsys: Captured) -> None:
    assert run(["inspect", "--fils", "x"]) == 2
    assert "--fils" in (shown := capsys.readouterr().err)
    assert "(see `ingot inspect --help`)" in shown


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@each_case(
    ("error", "code", "message"),
    [
        (BuildError("no room"), 1, "error: no room"),
        (UsageError("no such thing"), 2, "error: no such thing"),
        (GateFailed("kl_mean"), 3, "error: kl_mean"),
        (GateUndecided("kl_mean"), 4, "error: kl_mean"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (PermissionError(13, "Permission denied", "there/file"), 1, "error: there/file: Permission denied"),
        (ModuleNotFoundError("gone", name="onnx_ir"), 1, "error: this command needs onnx_ir"),
        (UsageError("[bold]as it is[/bold]"), 2, "error: [bold]as it is[/bold]"),
    ],
)
def test_an_error_becomes_a_message_and_an_exit_code(
    error: BaseException, code: int, message: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.passes.registry.pass_names", raising(error))
    assert run(["passes"]) == code
    shown = capsys.readouterr()
    assert shown.err.lstrip().startswith(message)  # an interruption begins a new line
    assert shown.out == ""


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.passes.registry.pass_names", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        run(["passes"])


def test_main_exits_with_the_code(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["passes", "clean-upp"])
    assert exit_info.value.code == 2


def test_the_module_runs_and_a_reader_that_goes_away_is_no_traceback() -> None:
    command = [sys.executable, "-m", "ingot", "passes"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.close()
    _, shown = child.communicate(timeout=60)
    assert b"Traceback" not in shown
    assert child.returncode == 141


def test_generating_imports_nothing_of_the_compiler() -> None:
    names = ("onnx", "onnx_ir", "ingot.pipeline")
    code = f"import sys, ingot.cli.runtime.run; print([name for name in {names} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_a_command_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setitem(sys.modules, "onnx_ir", None)  # an import fails as it does where the package is missing
    for module in [name for name in sys.modules if name.startswith(("ingot.passes", "ingot.cli.compiler.catalog"))]:
        monkeypatch.delitem(sys.modules, module)
    assert run(["passes"]) == 1
    assert install_command("compiler") in capsys.readouterr().err


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words, first in ((["help"], "Usage: ingot [OPTIONS]"), (["help", "build"], "Usage: ingot build [OPTIONS]")):
        assert run(words) == 0
        assert capsys.readouterr().out.startswith(first)
    assert run(["help", "biuld"]) == 2
    assert "unknown command 'biuld'. Did you mean 'build'?" in capsys.readouterr().err
