"""`ingot init-demo` fetches a repository by git, at the tag of this version, or says in one line why it cannot."""

import os
import subprocess
from pathlib import Path

import pytest

import ingot
from ingot.cli.compiler import init_demo
from ingot.cli.main import run
from ingot.pipeline.recipe.load import load_recipe
from tests.data_paths import ROOT


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository like the project's: the recipe `demo` of two versions, the first of which has this version's tag."""
    folder = tmp_path / "repository"
    (folder / "recipes").mkdir(parents=True)
    (folder / "examples/models/stdlib-llama-6m").mkdir(parents=True)
    (folder / "examples/models/stdlib-llama-6m/README.md").write_text("the model\n")
    (folder / "recipes/demo.yaml").write_text((ROOT / "recipes/demo.yaml").read_text())
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    git(folder, "tag", f"v{ingot.__version__}")
    (folder / "newer").touch()
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "second")
    return folder


def test_the_source_is_fetched_at_the_tag_of_this_version(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "my demo"
    assert run(["init-demo", str(target), "--from", repository.as_uri()]) == 0
    shown = capsys.readouterr()
    assert f"tag v{ingot.__version__}" in shown.err
    assert f"ingot build '{target}/recipes/demo.yaml'" in shown.out
    assert not (target / "newer").exists()
    assert load_recipe(target / "recipes/demo.yaml").require_checkpoint() == target / "examples/models/stdlib-llama-6m"


def test_without_such_a_tag_the_newest_version_is_fetched(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    git(repository, "tag", "--delete", f"v{ingot.__version__}")
    assert run(["init-demo", "--from", repository.as_uri()]) == 0
    assert "the newest version" in capsys.readouterr().err
    assert (tmp_path / "ingot-demo/newer").exists()


def test_the_project_s_source_is_the_default(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init_demo, "project_source", lambda: str(repository))
    assert run(["init-demo", str(tmp_path / "demo")]) == 0
    assert (tmp_path / "demo/recipes/demo.yaml").is_file()


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of an error."""
    assert run(["init-demo", *arguments]) in (1, 2)
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("fetching")]
    assert len(lines) == 1
    return lines[0]


def test_what_cannot_be_fetched_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = (tmp_path / "nothing").as_uri()
    line = error_of(capsys, str(tmp_path / "demo"), "--from", missing)
    assert line.startswith(f"error: '{missing}': cannot be fetched: ")
    assert "give another with --from URL" in line
    assert not (tmp_path / "demo").exists()
    assert "cannot be fetched" in error_of(capsys, str(tmp_path / "demo"), "--from", "--upload-pack=touch x")


def test_a_repository_without_the_demo_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    git(other, "commit", "--quiet", "--allow-empty", "-m", "empty")
    line = error_of(capsys, str(tmp_path / "demo"), "--from", str(other))
    assert "has no recipes/demo.yaml" in line


def test_a_folder_that_cannot_be_made_is_named(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    line = error_of(capsys, str(tmp_path / "file/demo"), "--from", str(repository))
    assert line == f"error: {tmp_path}/file/demo: Not a directory"


def test_a_clone_that_fails_leaves_no_folder(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for damaged in (repository / ".git/objects").glob("[0-9a-f][0-9a-f]/*"):
        damaged.unlink()
    assert "cannot be fetched" in error_of(capsys, str(tmp_path / "demo"), "--from", repository.as_uri())
    assert not (tmp_path / "demo").exists()


def test_a_git_that_is_killed_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    killed = '#!/bin/sh\ncase "$*" in *clone*) echo "warning: slow" >&2; touch demo/part; kill -KILL $$;; esac\n'
    (tmp_path / "git").write_text(killed)
    (tmp_path / "git").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert "git ended with exit code -9" in error_of(capsys, "demo", "--from", "https://example.org/ingot")
    assert not (tmp_path / "demo").exists()


def test_a_folder_with_files_is_not_replaced(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    for name in ("mine", "mine/file"):
        assert "exists already, and is not replaced" in error_of(
            capsys, str(tmp_path / name), "--from", str(repository)
        )


def test_without_git_the_address_to_download_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    line = error_of(capsys, "demo", "--from", "https://example.org/ingot")
    assert "init-demo needs git; install it, or download https://example.org/ingot" in line


def test_without_an_installed_ingot_the_address_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(init_demo, "project_source", lambda: None)
    assert "give it with --from URL" in error_of(capsys, "demo")
