"""Every error becomes a message, an exit code and, with --json, an object; closed streams give no traceback."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import click
import pytest

from ingot.cli.failure import Terminated, failure_of
from ingot.cli.main import COMMANDS, cli, run
from ingot.errors import GateUndecided, Problem, RecipeError
from ingot.version import install_command
from tests.data_paths import DEMO_MODEL, ROOT
from tests.each_case import each_case

Captured = pytest.CaptureFixture[str]


def shell(script: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of sh."""
    line = script.replace("ingot ", f"{sys.executable} -m ingot ")
    return subprocess.run(["sh", "-c", line], env={**os.environ, **environment}, capture_output=True, timeout=120)


@each_case(
    ("error", "kind", "code"),
    [
        (GateUndecided("x"), "GateUndecided", 4),
        (click.UsageError("x"), "UsageError", 2),
        (KeyboardInterrupt(), "Interrupted", 130),
        (Terminated(), "Terminated", 143),
        (OSError(28, "No space left on device"), "OSError", 1),
        (MemoryError(), "MemoryError", 1),
        (RuntimeError("Could not determine home directory."), "UsageError", 2),
    ],
)
def test_each_error_has_a_type_and_a_code(error: BaseException, kind: str, code: int) -> None:
    failure = failure_of(error)
    assert failure is not None
    assert (failure.type, failure.exit_code) == (kind, code)


def test_a_mistake_of_ours_is_not_reported_as_the_user_s() -> None:
    assert failure_of(ZeroDivisionError()) is None
    assert failure_of(RuntimeError("something")) is None
    assert failure_of(ModuleNotFoundError("x", name="ours")) is None


def test_what_an_interruption_causes_is_an_interruption() -> None:
    try:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interruption:
            raise ImportError("initialization failed") from interruption
    except ImportError as error:
        failure = failure_of(error)
    assert failure is not None
    assert failure.exit_code == 130


def test_a_signal_while_a_command_is_imported_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def importing(name: str) -> object:
        seen.extend((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("ingot.cli.command.import_module", importing)
    with pytest.raises(ModuleNotFoundError):
        COMMANDS["passes"].load()
    assert seen == [handler if handler is signal.SIG_IGN else signal.SIG_DFL for handler in before]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_signal_that_the_caller_ignores_stays_ignored() -> None:
    code = "import signal, sys; from ingot.__main__ import main; sys.argv[1:] = ['--version']; main()"
    check = "import atexit; atexit.register(lambda: print(signal.getsignal(signal.SIGINT).name))"
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    shown = subprocess.check_output([sys.executable, "-c", f"{ignoring}; {check}; {code}"], text=True)
    assert shown.splitlines()[-1] == "SIG_IGN"


def test_problems_of_a_recipe_are_listed_as_objects() -> None:
    failure = failure_of(RecipeError([Problem("mine.yaml", 3, "unknown key")]))
    assert failure is not None
    (problem,) = failure.problems
    assert (problem["file"], problem["line"], problem["message"]) == ("mine.yaml", 3, "unknown key")
    assert failure.as_json()["problems"] == [problem]


def test_a_missing_option_is_named_with_what_it_takes() -> None:
    with pytest.raises(click.MissingParameter) as caught:
        cli.main(["export", "artifacts/demo"], standalone_mode=False)
    failure = failure_of(caught.value)
    assert failure is not None
    assert re.match(r"Missing option '--to'\. One of [\w-]+(, [\w-]+)+\. \(see `.*export --help`\)$", failure.message)


def test_a_prompt_without_quotes_is_refused_with_the_reason(capsys: Captured) -> None:
    assert run(["run", "artifacts/demo", "def", "read_file(path):"]) == 2
    assert "extra argument (read_file(path):); an argument with spaces, such as a prompt, needs quotes" in (
        " ".join(capsys.readouterr().err.split())
    )


def test_a_long_path_is_cut() -> None:
    failure = failure_of(OSError(36, "File name too long", "x" * 5000))
    assert failure is not None
    assert failure.message.endswith("(5,000 characters): File name too long")
    assert len(failure.message) < 200


WITH_JSON = [name for name, command in COMMANDS.items() if any(one.name == "as_json" for one in command.params)]


@each_case("name", WITH_JSON)
def test_json_has_an_object_for_an_error_and_stderr_the_usual_line(name: str, capsys: Captured) -> None:
    assert run([name, "--no-such-option", "--json"]) == 2
    shown = capsys.readouterr()
    error = json.loads(shown.out)["error"]
    assert (error["type"], error["exit_code"]) == ("UsageError", 2)
    assert shown.err == f"error: {error['message']}\n"


def test_json_of_a_recipe_lists_its_problems(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "mine.yaml").write_text("nmae: x\nsed: 3\n")
    assert run(["build", str(tmp_path / "mine.yaml"), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert [(problem["line"], "unknown key" in problem["message"]) for problem in error["problems"]] == [
        (1, True),
        (2, True),
    ]


def test_after_two_dashes_json_is_a_word(capsys: Captured) -> None:
    assert run(["passes", "--", "--json"]) == 2
    assert capsys.readouterr().out == ""


@each_case(
    ("script", "code", "message"),
    [
        ("ingot recipes >&-", 1, b"error: standard output is closed; redirect it to a file, or to /dev/null\n"),
        ("ingot recipes --json >&-", 1, b"error: standard output is closed; redirect it to a file, or to /dev/null\n"),
        ("ingot recipes > /dev/full", 1, b"error: the output cannot be written: No space left on device\n"),
        ("ingot passes nope --json > /dev/full", 2, b"error: unknown pass 'nope'; passes: "),
        ("ingot recipes <&- > /dev/null", 0, b""),
        ("ingot build '~nosuchuser/x.yaml'", 2, b"error: the home folder of ~ is not known"),
        ("ingot recipes demo --set \"$(printf 'seed=\\377')\"", 2, b"error: --set: 'seed=\\udcff' is not UTF-8 text\n"),
        ("ingot build demo --set 'checkpoint=\"a\\0b\"'", 2, b"error: --set:checkpoint: checkpoint 'a\\x00b' is not"),
        ("ingot recipes demo --set \"$(printf 'x\\033[2J=1')\"", 2, b"error: --set:x\\x1b[2J: "),
        ("ingot inspect \"$(printf 'a\\033]0;x\\007\\nb')\"", 2, b"error: a\\x1b]0;x\\x07\nb: no such artifact"),
        ("ingot passes nope 2>&-", 2, b""),
    ],
)  # fmt: skip
def test_closed_streams_and_hostile_arguments_give_one_error(script: str, code: int, message: bytes) -> None:
    done = shell(script)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(message)
    assert b"Traceback" not in done.stderr
    assert done.stderr.count(b"error: ") <= 1


def test_a_reader_that_goes_away_is_no_error() -> None:
    done = shell("{ ingot passes; echo $? >&2; } | head -1")
    assert done.stdout.splitlines()[0].startswith(b"pass")
    assert done.stderr in (b"141\n", b"0\n")  # 0 if all was written before head ended


@each_case(
    "environment",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"COLUMNS": "1"},
        {"TERM": "dumb"},
        {"NO_COLOR": "1"},
        {"HOME": "/nonexistent"},
    ],
)
def test_results_are_printed_in_any_environment(environment: dict[str, str]) -> None:
    done = shell("ingot passes gptq; ingot recipes", **environment)
    assert done.returncode == 0, done.stderr
    assert b"int4-cpu" in done.stdout
    assert done.stderr == b""


SIGNALS = [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]


@pytest.mark.parametrize(("number", "code", "word"), SIGNALS)
def test_a_signal_ends_a_build_without_a_trace(number: signal.Signals, code: int, word: str, tmp_path: Path) -> None:
    text = f"evaluation={{text: {DEMO_MODEL / 'heldout.txt'}}}"
    command = [sys.executable, "-m", "ingot", "build", "int4-cpu", str(DEMO_MODEL), "--set", text, "-o", "out/mine"]
    child = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("out/.*/*")):  # until the build writes its first file
        assert child.poll() is None
        time.sleep(0.02)
    child.send_signal(number)
    out, error = child.communicate(timeout=120)
    assert child.returncode == code
    assert error.splitlines()[-1] == f"error: {word}"
    assert "Traceback" not in error
    assert out == ""
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("extra", ["compiler", "serve"])
def test_every_package_of_an_extra_is_reported_with_it(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for requirement in project["optional-dependencies"][extra]:
        package = re.split("[^a-z0-9-]", requirement)[0].replace("-", "_")
        failure = failure_of(ModuleNotFoundError("gone", name=f"{package}.part"))
        assert failure is not None, package
        assert install_command(extra) in failure.message
