"""`ingot verify` prints the matrix, repeats a pair, writes its result, and says why it refuses."""

import json
from pathlib import Path

import pytest

from ingot.artifact import Artifact
from ingot.cli.main import run
from ingot.errors import UsageError
from ingot.runtime.forward_batch import ForwardBatch
from ingot.runtime.scheduling.batch_builder import BatchBuilder
from ingot.runtime.scheduling.sequence import ScheduledBatch
from ingot.validation.verify import VerifyResult
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL

Captured = pytest.CaptureFixture[str]
PAIR = ["--quick", "--only", "chunked-prefill+batch-mates"]


@pytest.fixture
def artifact(build_unmeasured: BuildArtifact, two_layers: Path) -> Artifact:
    return build_unmeasured("int4-cpu", two_layers)


def test_the_list_names_every_feature(artifact: Artifact, capsys: Captured) -> None:
    assert run(["verify", str(artifact.path), "--list"]) == 0
    assert "prefix-hit" in capsys.readouterr().out
    assert run(["verify", str(artifact.path), "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["unavailable"] for row in listed}["prefix-hit"] is None


def test_one_pair_prints_what_its_run_did_and_how_to_repeat_it(artifact: Artifact, capsys: Captured) -> None:
    text = ["--prompts", str(DEMO_MODEL / "heldout.txt")]
    assert run(["verify", str(artifact.path), *PAIR, *text]) == 0
    shown = capsys.readouterr().out
    assert "chunked-prefill+batch-mates: OK" in shown
    assert "shared steps" in shown
    assert (
        f"ingot verify {artifact.path} --prompts {text[1]} --quick --only chunked-prefill+batch-mates --seed 0" in shown
    )
    assert "windows of the given text" in shown
    assert "logits bit-equal" in shown


def test_several_cells_are_shown_as_a_matrix_and_written_as_json(
    artifact: Artifact, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "verify.json"
    cells = ["--only", "batch-mates", "--only", "batch-mates+chunked-prefill", "--quick"]
    assert run(["verify", str(artifact.path), *cells, "-o", str(file)]) == 0
    assert "2 chunked-prefill" in capsys.readouterr().out
    result = VerifyResult.model_validate_json(file.read_text())
    assert result.identity == artifact.manifest.identity
    assert [cell.verdict for cell in result.cells] == ["OK", "OK"]


def test_a_draft_is_named_in_the_command_that_repeats_a_cell(artifact: Artifact, capsys: Captured) -> None:
    cell = ["--quick", "--only", "draft+batch-mates"]
    assert run(["verify", str(artifact.path), *cell]) == 4
    assert "no draft artifact was given; name one with --draft" in " ".join(capsys.readouterr().out.split())
    assert run(["verify", str(artifact.path), *cell, "--draft", str(artifact.path)]) == 4
    said = " ".join(capsys.readouterr().err.split())
    assert f"--draft {artifact.path} --quick --only batch-mates+draft" in said


def test_a_draft_that_cannot_draft_is_a_usage_error(
    artifact: Artifact, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(draft: Artifact, target: Artifact) -> None:
        raise UsageError(f"{draft.path} cannot draft")

    monkeypatch.setattr("ingot.validation.verify.subject.require_draft", refuse)
    assert run(["verify", str(artifact.path), "--only", "draft", "--draft", str(artifact.path)]) == 2
    assert f"{artifact.path} cannot draft" in " ".join(capsys.readouterr().err.split())


def test_a_difference_has_code_3_and_names_the_pair(
    artifact: Artifact, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = BatchBuilder.build

    def wrong(self: BatchBuilder, batch: ScheduledBatch) -> ForwardBatch:
        made = build(self, batch)
        if len(batch.entries) > 1:
            made.input_ids[-1] = 1
        return made

    monkeypatch.setattr(BatchBuilder, "build", wrong)
    assert run(["verify", str(artifact.path), *PAIR]) == 3
    assert "chunked-prefill+batch-mates DIFFERS: request" in " ".join(capsys.readouterr().err.split())
    assert run(["verify", str(artifact.path), *PAIR, "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "FAIL"
    assert found["cells"][0]["differences"]


def test_what_it_refuses(artifact: Artifact, tmp_path: Path, capsys: Captured) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    assert run(["verify", str(artifact.path), "--only", "swaps"]) == 2
    assert run(["verify", str(artifact.path), *PAIR, "-o", str(artifact.path / "verify.json")]) == 2
    assert run(["verify", str(artifact.path), *PAIR, "-o", "-"]) == 2
    assert run(["verify", str(artifact.path), *PAIR, "--prompts", str(short)]) == 1
    assert run(["verify", str(artifact.path), *PAIR, "--prompts", str(tmp_path / "none.txt")]) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "unknown feature 'swaps'" in shown
    assert "is in the artifact, which is sealed" in shown
    assert "-o -: standard output is not a file; use --json" in shown
    assert "Give a longer text" in shown
