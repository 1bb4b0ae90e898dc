"""Shell completion: what a shell gets for the words typed so far, and that it needs no packages."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from pydantic import BaseModel

from ingot.artifact.metrics import METRICS
from ingot.cli.compiler_commands import FORMATS
from ingot.cli.main import cli
from ingot.options import options_of
from ingot.passes.registry import pass_names
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.recipe.shipped import list_recipes
from ingot.runtime import EngineOptions, SpeculationOptions
from ingot.runtime.speculation_options import DRAFTERS
from tests.cli.test_commands import HEAVY


def completed(*words: str) -> list[str]:
    """What completes the last word."""
    *before, incomplete = words
    completer = ShellComplete(cli, {}, "ingot", "_INGOT_COMPLETE")
    return [item.value for item in completer.get_completions(list(before), incomplete)]


@pytest.fixture(autouse=True)
def _a_folder_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "artifacts/demo/manifest.json",
        "artifacts/old/x",
        "my-model/config.json",
        "m.gguf",
        "mine.yaml",
        "notes",
        ".hidden/manifest.json",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("")


def test_commands_recipes_and_passes_are_completed() -> None:
    assert completed("qu") == ["quantize-report"]
    assert completed("build", "") == [*(name for name, _ in list_recipes()), "artifacts/", "mine.yaml"]
    assert completed("recipes", "int8") == ["int8-cpu"]
    assert completed("passes", "") == pass_names()
    assert completed("build", "demo", "--print-ir-after", "a") == ["all", "attention-reference", "awq"]


def test_artifacts_checkpoints_and_formats_are_completed() -> None:
    assert completed("run", "") == ["artifacts/demo", "artifacts/old/", "artifacts/"]
    assert completed("run", "artifacts/d") == ["artifacts/demo"]
    assert completed("inspect", ".") == [".hidden"]
    assert completed("build", "int4-cpu", "m") == ["m.gguf", "my-model"]
    assert completed("validate", "artifacts/demo", "--checkpoint", "my") == ["my-model"]
    assert completed("export", "demo", "--to", "") == list(FORMATS)
    assert completed("build", "demo", "--progress", "b") == ["bar"]


@pytest.mark.parametrize("word", ["nowhere/x", "~nosuchuser/", "x" * 5000 + "/"])
def test_a_folder_that_cannot_be_read_completes_nothing(word: str) -> None:
    assert completed("run", word) == []


def test_all_keys_of_recipes_are_completed() -> None:
    keys = {word.removesuffix("=") for word in completed("build", "demo", "--set", "")}
    # Keys of a list's items cannot be set by themselves.
    settable = {key for key in keys_of(Recipe) if not key.startswith("devices.")}
    assert keys - {key for key in keys if key.startswith(("passes.", "gates."))} == settable
    assert {key for key in keys if key.startswith("passes.")} == {f"passes.{name}." for name in pass_names()}
    assert {f"gates.{metric}.max" for metric in METRICS} < keys
    paths = completed("build", "demo", "--set", "checkpoint=m")
    assert paths == [f"checkpoint={name}" for name in ("m.gguf", "mine.yaml", "my-model/")]


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for part in getattr(field.annotation, "__args__", (field.annotation,)):
            if isinstance(part, type) and issubclass(part, BaseModel) and name not in ("passes", "gates"):
                yield from keys_of(part, f"{prefix}{name}.")


def test_the_options_of_an_engine_are_completed() -> None:
    options = {**options_of(EngineOptions), **options_of(SpeculationOptions)}
    keys = {f"{name}=" for name, option in options.items() if not option.flag.name}
    assert set(completed("run", "a", "--set", "")) == keys
    assert completed("run", "a", "--set", "kv_disk_path=my") == ["kv_disk_path=my-model/"]


def test_drafters_are_completed_one_after_the_other() -> None:
    assert completed("run", "a", "--speculate", "") == [*DRAFTERS, "artifacts/demo", "artifacts/old/"]
    assert completed("serve", "a", "--speculate", "su") == ["suffix"]
    assert completed("run", "a", "--speculate", "suffix+artifacts/d") == ["suffix+artifacts/demo"]
    for command in ("run", "serve"):
        (option,) = (each for each in cli.commands[command].params if each.name == "speculate")
        assert all(name in getattr(option, "help", "") for name in DRAFTERS)


def test_a_key_is_completed_with_its_description() -> None:
    completer = ShellComplete(cli, {}, "ingot", "_INGOT_COMPLETE")
    (item,) = completer.get_completions(["build", "demo", "--set"], "engine.max")
    assert item.value.startswith("engine.max_batch_tokens")
    assert item.help


@pytest.mark.parametrize("words", [["build", ""], ["passes", ""], ["build", "demo", "--set", ""], ["run", ""]])
def test_completion_imports_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys; from click.shell_completion import ShellComplete; from ingot.cli.main import cli;"
        "found = ShellComplete(cli, {}, 'ingot', '_INGOT_COMPLETE').get_completions(sys.argv[1:-1], sys.argv[-1]);"
        f"print(len(found) > 1, sorted({HEAVY!r} & set(sys.modules)))"
    )
    shown = subprocess.check_output([sys.executable, "-c", code, *words], text=True)
    assert shown == "True []\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_printed(shell: str) -> None:
    environment = {"_INGOT_COMPLETE": f"{shell}_source", "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-m", "ingot"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "_INGOT_COMPLETE" in shown.stdout
