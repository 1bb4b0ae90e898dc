"""A path of the wrong kind is refused with the command that was meant, ready to paste."""

import shlex
from pathlib import Path

import pytest

from ingot.cli.main import run
from ingot.cli.sources import kind_of, shipped_recipes
from ingot.pipeline.recipe.shipped import list_recipes
from tests.each_case import each_case

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _a_folder_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """my-model (a checkpoint), packed (a quantized one), artifacts/mine, artifacts/bad.rejected, mine.yaml."""
    monkeypatch.chdir(tmp_path)
    for name in ("my-model/config.json", "my-model/model.safetensors", "artifacts/mine/manifest.json", "x.gguf"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}")
    Path("packed").mkdir()
    Path("packed/config.json").write_text('{"quantization_config": {}}')
    Path("imported").mkdir()
    for name in ("config.json", "recipe.yaml"):
        Path("imported", name).write_text("{}")
    Path("artifacts/bad.rejected").mkdir()
    Path("artifacts/bad.rejected/recipe.yaml").write_text("")
    for name in ("mine.yaml", "new.yaml"):
        Path(name).write_text("checkpoint: my-model\n")
    Path("notes.txt").write_text("")
    Path("empty").mkdir()


@each_case(
    ("path", "kind"),
    [
        ("my-model", "checkpoint"),
        ("x.gguf", "checkpoint"),
        ("my-model/model.safetensors", "weights"),
        ("artifacts/mine", "artifact"),
        ("artifacts/bad.rejected", "rejected"),
        ("mine.yaml", "recipe"),
        ("notes.txt", "file"),
        ("empty", "folder"),
        ("nowhere", "missing"),
        ("x" * 5000, "missing"),
        ("a\0b", "missing"),
        ("~nosuchuser/x", "missing"),
    ],
)
def test_the_kind_of_a_path(path: str, kind: str) -> None:
    assert kind_of(path) == kind


def test_the_shipped_recipes_are_those_that_load() -> None:
    assert shipped_recipes() == [name for name, _ in list_recipes()]


@each_case(
    ("line", "what", "meant"),
    [
        ("build my-model", "my-model is a checkpoint", ["build int4-cpu my-model"]),
        ("build ./my-model/ --eval t -o out", "is a checkpoint", ["build int4-cpu ./my-model/ --eval t -o out"]),
        ("build packed -o out", "packed is a checkpoint", ["build fp32-cpu packed -o out"]),
        ("build imported -o out", "imported is a checkpoint", ["build imported/recipe.yaml -o out"]),
        ("run imported", "imported is a checkpoint", ["build imported/recipe.yaml -o", "run artifacts/imported"]),
        ("build x.gguf -o out", "x.gguf is a checkpoint", ["build fp32-cpu x.gguf -o out"]),
        ("build my-model int8-cpu -o out", "my-model is a checkpoint", ["build int8-cpu my-model -o out"]),
        ("build my-model mine.yaml", "my-model is a checkpoint", ["build mine.yaml my-model"]),
        ("build my-model/model.safetensors", "one file of a checkpoint", ["build int4-cpu my-model"]),
        (
            "build artifacts/mine",
            "is an artifact",
            ["run artifacts/mine", "build artifacts/mine/recipe.yaml"],
        ),
        ("build int4-cpu artifacts/mine", "is an artifact", ["export artifacts/mine --to safetensors"]),
        ("build int4-cpu --set checkpoint=artifacts/mine", "is an artifact", ["export artifacts/mine"]),
        ("build int4-cpu my-model/model.safetensors", "one file of a checkpoint", ["build int4-cpu my-model"]),
        ("build owner/model", "Hugging Face", ["build int4-cpu model"]),
        ("build int4-cpu owner/model -o out", "Hugging Face", ["build int4-cpu model -o out"]),
        ("build int4-cpu --set checkpoint=owner/model", "Hugging Face", ["build int4-cpu --set checkpoint=model"]),
        ("run mine.yaml hello", "is a recipe", ["run artifacts/mine hello"]),
        ("run new.yaml hello", "is a recipe", ["build new.yaml -o artifacts/new", "run artifacts/new hello"]),
        ("run demo", "is a recipe", ["build demo -o artifacts/demo", "run artifacts/demo"]),
        ("run int4-cpu", "is a recipe", ["build int4-cpu CHECKPOINT -o artifacts/int4-cpu", "run artifacts/int4-cpu"]),
        ("run my-model 'a b'", "is a checkpoint", ["build int4-cpu my-model -o", "run artifacts/my-model 'a b'"]),
        ("inspect x.gguf --json", "is a checkpoint", ["build fp32-cpu x.gguf -o", "inspect artifacts/x --json"]),
        ("quantize-report owner/model", "Hugging Face", ["build int4-cpu model -o", "quantize-report artifacts/model"]),
        (
            "validate artifacts/mine --checkpoint artifacts/mine",
            "use --baseline",
            ["validate artifacts/mine --base"],
        ),
        (
            "validate artifacts/mine --baseline=my-model",
            "use --checkpoint",
            ["validate artifacts/mine --check"],
        ),
        ("quantize-report artifacts/mine --checkpoint artifacts/mine", "is an artifact", ["export artifacts/mine"]),
        ("validate artifacts/mine --checkpoint owner/model", "Hugging Face", ["validate artifacts/mine --ch"]),
        ("export my-model --to gguf -o out", "is a checkpoint", ["export int4-cpu my-model --to gguf -o out"]),
        ("lint-checkpoint artifacts/mine", "is an artifact", ["validate artifacts/mine"]),
        ("transcode artifacts/mine --to gguf -o out", "is an artifact", ["export artifacts/mine --to gguf -o out"]),
        ("import owner/model -o out", "Hugging Face", ["import model -o out"]),
    ],
)
def test_the_command_that_was_meant_is_shown(line: str, what: str, meant: list[str], capsys: Captured) -> None:
    assert run(shlex.split(line)) == 2
    first, *commands = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ")
    assert what in first
    commands = [
        command for command in commands if not command.startswith("  hf download owner/model --local-dir model")
    ]
    assert len(commands) == len(meant)
    for command, beginning in zip(commands, meant, strict=True):
        assert command.startswith(f"  ingot {beginning}")


@each_case(
    ("line", "wanted"),
    [
        ("build int4-cpu my-mdel", "no such checkpoint; a checkpoint is a folder with config.json, or a .gguf file"),
        ("build int4-cpu my-mdel", "Did you mean 'my-model'?"),
        ("build y.gguf", "no such file"),
        ("validate artifacts/mine --checkpoint my-mdel", "no such checkpoint"),
        ("validate artifacts/mine --baseline artifacts/mien", "no such artifact"),
        ("build empty", "neither a recipe nor a checkpoint"),
        ("build int4-cpu notes.txt", "notes.txt is a file; a checkpoint is"),
        ("run artifacts/mien", "no such artifact; `ingot build` makes one. Did you mean 'mine'?"),
        ("run artifacts/demo", "no such artifact; `ingot build demo` makes one"),
        ("run artifacts/bad.rejected", "a gate rejected: there is no artifact. See artifacts/bad.rejected/evidence"),
        ("run " + "x" * 5000, "'... (5,000 characters): no such artifact"),
    ],
)
def test_what_is_not_there_is_named(line: str, wanted: str, capsys: Captured) -> None:
    assert run(shlex.split(line)) == 2
    shown = capsys.readouterr().err
    assert wanted in shown
    assert len(shown) < 400
