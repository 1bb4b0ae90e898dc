"""Wherever checkpoint and artifact lie and however their paths are written; and checkpoints without a tokenizer."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.artifact import open_artifact
from ingot.cli.main import run
from ingot.runtime import Engine, SamplingParams
from tests.conftest import UNMEASURED
from tests.data_paths import FIXTURES

TINY = FIXTURES / "checkpoints" / "llama"
Captured = pytest.CaptureFixture[str]


def build_in(checkpoint: str, output: str, *settings: str) -> int:
    overrides = [part for s in (f"checkpoint={checkpoint}", *UNMEASURED, *settings) for part in ("--set", s)]
    return run(["build", "int4-cpu", *overrides, "-o", output])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with the tiny checkpoint in it, and a working folder next to it."""
    shutil.copytree(TINY, tmp_path / "home/my models/größe 1")
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("checkpoint", "output"),
    [
        ("../home/my models/größe 1", "out put/ä"),
        ("../home/my models/größe 1/", "./out put/ä/"),
        ("~/my models/größe 1", "~/out put/ä"),
        ("{home}/my models/größe 1", "{home}/ä"),
    ],
)
def test_paths_may_be_relative_absolute_or_in_the_home_folder(home: Path, checkpoint: str, output: str) -> None:
    output = output.replace("{home}", str(home))
    assert build_in(checkpoint.replace("{home}", str(home)), output) == 0
    open_artifact(Path(output).expanduser())
    assert not Path("~").exists()


def test_the_recipe_s_output_may_be_in_the_home_folder(home: Path) -> None:
    overrides = ["checkpoint=~/my models/größe 1", *UNMEASURED, "output=~/made"]
    assert run(["build", "int4-cpu", *(part for s in overrides for part in ("--set", s))]) == 0
    open_artifact(home / "made")


def link_files(real: Path, links: Path) -> None:
    """As the hub's cache does it: a folder of links to files elsewhere, under other names."""
    blobs = links.parent / "blobs"
    blobs.mkdir()
    links.mkdir()
    for number, file in enumerate(real.iterdir()):
        shutil.copyfile(file, blobs / str(number))
        (links / file.name).symlink_to(Path("..") / "blobs" / str(number))


@pytest.mark.parametrize("link", [link_files, lambda real, links: links.symlink_to(real)], ids=["files", "folder"])
def test_a_checkpoint_may_be_made_of_links(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    assert build_in(str(TINY), str(tmp_path / "plain")) == 0
    link(TINY, tmp_path / "llama")
    assert build_in(str(tmp_path / "llama"), str(tmp_path / "linked")) == 0
    plain, linked = (open_artifact(tmp_path / name).manifest for name in ("plain", "linked"))
    assert linked.identity == plain.identity


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, capsys: Captured) -> None:
    tmp_path.chmod(0o555)
    assert build_in(str(TINY), str(tmp_path / "out")) == 1
    assert "cannot write there: Permission denied; choose another output folder" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["file", "file/below"])
def test_an_output_at_or_below_a_file_is_refused(tmp_path: Path, capsys: Captured, output: str) -> None:
    (tmp_path / "file").write_text("mine")
    assert build_in(str(TINY), str(tmp_path / output)) == 1
    assert str(tmp_path / output) in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_without_a_tokenizer_token_ids_are_served_and_texts_refused(tmp_path: Path, capsys: Captured) -> None:
    assert not (TINY / "tokenizer.json").exists()
    assert build_in(str(TINY), str(tmp_path / "tiny")) == 0
    with Engine.load(tmp_path / "tiny", kv_blocks=4) as engine:
        assert len(engine.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3
    assert run(["run", str(tmp_path / "tiny"), "text"]) == 2
    assert "the artifact has no tokenizer, so it takes no text" in capsys.readouterr().err


@pytest.mark.parametrize("wanting", ["evaluation={text: text.txt}", "generate={prompt: text}"])
def test_without_a_tokenizer_what_wants_a_text_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, wanting: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some text\n" * 10_000)
    assert build_in(str(TINY), "out/tiny", wanting) == 1
    assert "holds no tokenizer.json, so no text can be evaluated or generated" in capsys.readouterr().err
    assert not Path("out").exists()
