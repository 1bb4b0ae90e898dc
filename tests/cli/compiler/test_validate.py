"""`ingot validate` checks digests or measures again; `ingot quantize-report` prints weights, JSON and refusals."""

import json
from pathlib import Path

import pytest

from ingot.artifact import Artifact
from ingot.cli.main import run
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL, FIXTURES

Captured = pytest.CaptureFixture[str]


pytestmark = pytest.mark.usefixtures("memory_of_this_process")

MEASURED = [
    f"evaluation={{text: {DEMO_MODEL / 'heldout.txt'}, tokens: 256, window_tokens: 64}}",
    "gates={top1_agreement: {min: 0.5}}",
]
SETTINGS = [part for setting in MEASURED for part in ("--set", setting)]


@pytest.fixture
def artifact(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("int4-cpu")


def test_without_a_baseline_the_digests_are_checked(artifact: Artifact, capsys: Captured) -> None:
    assert run(["validate", str(artifact.path)]) == 0
    shown = capsys.readouterr()
    assert f"identity {artifact.manifest.identity}" in shown.out
    assert "nothing was measured" in shown.err
    assert run(["validate", str(artifact.path), "--json"]) == 0
    facts = {"identity": artifact.manifest.identity, "verdict": "not measured", "gates": []}
    assert json.loads(capsys.readouterr().out) == {**facts, "files": len(artifact.manifest.files)}


@pytest.mark.parametrize(("option", "value"), [("--set", "evaluation.tokens=256"), ("--evidence", "evidence")])
def test_options_of_a_measurement_are_refused_without_a_baseline(
    artifact: Artifact, option: str, value: str, capsys: Captured
) -> None:
    assert run(["validate", str(artifact.path), option, value]) == 2
    expected = f"{option} is for measuring again; add --checkpoint FOLDER or --baseline ARTIFACT"
    assert expected in " ".join(capsys.readouterr().err.split())


def test_with_a_baseline_it_measures_and_writes_evidence(
    artifact: Artifact, build_unmeasured: BuildArtifact, tmp_path: Path, capsys: Captured
) -> None:
    baseline = ["--baseline", str(build_unmeasured("fp32-cpu").path)]
    evidence = ["--evidence", str(tmp_path / "evidence")]
    assert run(["validate", str(artifact.path), *baseline, *SETTINGS, *evidence]) == 0
    shown = capsys.readouterr().out
    assert "top1_agreement" in shown
    assert f"report {tmp_path / 'evidence/report.html'}" in shown
    summary = json.loads((tmp_path / "evidence/summary.json").read_text())
    assert summary["metrics"]["top1_agreement"]["value"] > 0.5


def test_a_gate_that_fails_has_code_3_and_the_json_all_the_same(
    artifact: Artifact, build_unmeasured: BuildArtifact, capsys: Captured
) -> None:
    baseline = ["--baseline", str(build_unmeasured("fp32-cpu").path)]
    tight = ["--set", "gates.perplexity_ratio.max=0.5"]
    assert run(["validate", str(artifact.path), *baseline, *SETTINGS, *tight, "--json"]) == 3
    shown = capsys.readouterr()
    assert {gate["verdict"] for gate in json.loads(shown.out)["gates"]} == {"PASS", "FAIL"}
    assert "gate failed: perplexity_ratio" in shown.err


@pytest.mark.parametrize("name", ["plain", "a: b", "no #1", "[x]", "'it\"s", "ü"])
def test_an_artifact_whose_recipe_measures_nothing_says_what_to_set_whatever_the_checkpoint_is_called(
    artifact: Artifact, tmp_path: Path, capsys: Captured, name: str
) -> None:
    (tmp_path / name).symlink_to(DEMO_MODEL)
    assert run(["validate", str(artifact.path), "--checkpoint", str(tmp_path / name)]) == 2
    assert "measures nothing: set evaluation.text or latency" in capsys.readouterr().err


def test_the_worst_weights_are_shown_with_a_summary(
    build_unmeasured: BuildArtifact, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = build_unmeasured("int4-cpu").path
    assert run(["quantize-report", str(artifact), "--top", "3"]) == 0
    printed = capsys.readouterr()
    assert "4 bits, blocks of" in printed.out
    assert "25 weights, 5,767,168 elements" in printed.out
    assert "KL of single weights was not measured: the recipe has no evaluation text." in printed.out
    assert "3 of 25 weights are shown" in printed.err


def test_json_has_every_weight(build_unmeasured: BuildArtifact, capsys: pytest.CaptureFixture[str]) -> None:
    artifact = build_unmeasured("int4-cpu").path
    assert run(["quantize-report", str(artifact), "--checkpoint", str(DEMO_MODEL), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["weights"]) == report["summary"]["num_weights"] == 25
    assert report["remarks"] == []
    assert all(len(weight["code_histogram"]) == 16 for weight in report["weights"])


def test_an_artifact_in_floats_has_nothing_to_report(
    build_unmeasured: BuildArtifact, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = build_unmeasured("fp32-cpu", FIXTURES / "checkpoints" / "llama", "generate=null").path
    assert run(["quantize-report", str(artifact)]) == 0
    assert "no weight is quantized" in capsys.readouterr().out


def test_a_text_alone_is_a_usage_error(build_unmeasured: BuildArtifact, capsys: pytest.CaptureFixture[str]) -> None:
    artifact = build_unmeasured("int4-cpu").path
    assert run(["quantize-report", str(artifact), "--text", "held-out.txt"]) == 2
    assert "--text requires the checkpoint's weights; add --checkpoint FOLDER" in capsys.readouterr().err
