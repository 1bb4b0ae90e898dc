"""`ingot serve` of a checkpoint or a recipe: built once, again where a file has changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.artifact import open_artifact
from ingot.cli.runtime import build_to_serve
from ingot.cli.runtime.build_to_serve import artifact_of, needs_build
from ingot.errors import BuildError
from tests.data_paths import FIXTURES


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would build: each makes an empty artifact."""
    seen: list[list[str]] = []

    def build(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        seen.append(command[4:])
        place = Path(command[command.index("-o") + 1])
        place.mkdir(parents=True, exist_ok=True)
        (place / "manifest.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("ingot.cli.runtime.build_to_serve.subprocess.run", build)
    return seen


def model(path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "checkpoints/llama", path))


def test_a_checkpoint_is_built_once_under_its_own_name(tmp_path: Path, commands: list[list[str]]) -> None:
    checkpoint = str(model(tmp_path / "my model"))
    assert needs_build(checkpoint)
    place = artifact_of(checkpoint)
    assert Path(place).is_relative_to(tmp_path / "cache/artifacts")
    assert commands == [["int4-cpu", checkpoint, "-o", place]]
    assert not needs_build(checkpoint)
    assert artifact_of(checkpoint) == artifact_of("./my model") == place
    assert len(commands) == 1


def test_a_checkpoint_whose_file_changed_is_built_again(tmp_path: Path, commands: list[list[str]]) -> None:
    checkpoint = model(tmp_path / "model")
    artifact_of(str(checkpoint))
    new = tmp_path / "config.json"
    shutil.copy(checkpoint / "config.json", new)
    os.utime(new, (0, 0))
    new.replace(checkpoint / "config.json")  # an older file in its place
    assert needs_build(str(checkpoint))
    artifact_of(str(checkpoint))
    assert len(commands) == 2


def test_checkpoints_of_one_name_in_two_folders_have_artifacts_of_their_own(
    tmp_path: Path, commands: list[list[str]]
) -> None:
    one, other = model(tmp_path / "a/model"), model(tmp_path / "b/model")
    assert artifact_of(str(one)) != artifact_of(str(other))
    assert len(commands) == 2


def test_a_recipe_that_names_its_checkpoint_is_built_into_its_usual_folder(commands: list[list[str]]) -> None:
    Path("mine.yaml").write_text("extends: int4-cpu\ncheckpoint: model\n")
    assert artifact_of("mine.yaml") == "artifacts/mine"
    assert artifact_of("demo") == "artifacts/demo"
    assert artifact_of("demo") == "artifacts/demo"
    assert commands == [["mine.yaml", "-o", "artifacts/mine"], ["demo", "-o", "artifacts/demo"]]
    assert artifact_of("int4-cpu") == "int4-cpu", "it names no checkpoint"
    assert artifact_of("artifacts/demo") == "artifacts/demo"


def test_the_demo_of_an_installed_package_is_built_from_the_source_that_is_fetched(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[Path] = []

    def fetch(folder: Path) -> None:
        folder.mkdir(parents=True)
        fetched.append(folder)

    monkeypatch.setattr(build_to_serve, "source_only", lambda path: "is in Ingot's source")
    monkeypatch.setattr(build_to_serve, "fetch_source", fetch)
    assert artifact_of("demo") == "artifacts/demo"
    assert fetched == [tmp_path / "cache/source/ingot"]
    assert commands == [[str(fetched[0] / "recipes/demo.yaml"), "-o", "artifacts/demo"]]


def test_a_build_that_fails_is_one_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint = model(tmp_path / "model")
    (checkpoint / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(BuildError, match=r"model was not built, .* \(exit code 1\); nothing is served"):
        artifact_of(str(checkpoint))
    shown = capfd.readouterr()
    assert "unheard-of" in shown.err
    assert shown.out == ""


@pytest.mark.slow
def test_a_checkpoint_becomes_an_artifact_that_opens(tmp_path: Path) -> None:
    assert sys.executable
    built = open_artifact(artifact_of(str(model(tmp_path / "my model"))))
    assert built.manifest.name == "my-model"
