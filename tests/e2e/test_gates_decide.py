"""Gates decide what is sealed: on two layers of the demo model, with real measurements."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.artifact import open_artifact
from ingot.cli.main import run
from tests.conftest import BuildArtifact

FAST = (
    "evaluation.tokens=2048",
    "evaluation.window_tokens=128",
    "evaluation.layer_kl_tokens=0",
    "latency=null",
    "gates={perplexity_ratio: {max: 1.05}, top1_agreement: {min: 0.85}, size_ratio: {max: 0.6}}",
)


BuildDemo = Callable[..., int]


@pytest.fixture(scope="module")
def build_demo(two_layers: Path, memory_of_this_process: None) -> BuildDemo:
    """build_demo(output, *settings) -> exit code of the recipe `demo`."""

    def build(output: Path, *settings: str) -> int:
        overrides = [part for s in (f"checkpoint={two_layers}", *FAST, *settings) for part in ("--set", s)]
        return run(["build", "demo", *overrides, "-o", str(output)])

    return build


@pytest.fixture(scope="module")
def sealed(build_demo: BuildDemo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact, measured and sealed."""
    output = tmp_path_factory.mktemp("sealed") / "demo"
    assert build_demo(output) == 0
    return output


def test_a_build_whose_gates_pass_is_sealed_with_its_evidence(sealed: Path) -> None:
    artifact = open_artifact(sealed)
    assert {gate.verdict for gate in artifact.manifest.gates} == {"PASS"}
    assert {"evidence/accuracy.json", "evidence/report.html", "evidence/report.md"} <= set(artifact.manifest.files)
    assert [entry.name for entry in sealed.parent.iterdir()] == ["demo"]


def test_a_gate_too_tight_fails_with_code_3_and_leaves_no_artifact(
    build_demo: BuildDemo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build_demo(tmp_path / "demo", "gates.top1_agreement.min=0.9999") == 3
    shown = capsys.readouterr()
    assert "gate failed: top1_agreement is 0.9" in shown.err
    assert "the gate requires >= 0.9999" in shown.err
    assert "FAIL" in shown.out
    assert [entry.name for entry in tmp_path.iterdir()] == ["demo.rejected"]
    assert (tmp_path / "demo.rejected/evidence/report.html").is_file()


def test_a_refused_build_leaves_the_artifact_that_stood_there_and_the_next_clears_the_refusal(
    build_demo: BuildDemo, sealed: Path, tmp_path: Path
) -> None:
    shutil.copytree(sealed, tmp_path / "demo")
    before = open_artifact(sealed).manifest
    assert build_demo(tmp_path / "demo", "gates.top1_agreement.min=0.9999") == 3
    assert open_artifact(tmp_path / "demo").manifest == before
    assert build_demo(tmp_path / "demo") == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["demo"]


def test_a_gate_at_the_measured_value_is_undecided_with_code_4(
    build_demo: BuildDemo, sealed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = json.loads((sealed / "evidence/summary.json").read_text())["metrics"]["kl_mean"]["value"]
    assert build_demo(tmp_path / "again", f"gates.kl_mean.max={value}") == 4
    assert "gate undecided: kl_mean" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_validate_measures_again_and_finds_the_same(
    two_layers: Path, sealed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["validate", str(sealed), "--checkpoint", str(two_layers), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    summary = json.loads((sealed / "evidence/summary.json").read_text())
    for metric in ("perplexity", "kl_mean", "top1_agreement", "size_ratio"):
        assert again["metrics"][metric]["value"] == summary["metrics"][metric]["value"]


def test_validate_takes_a_baseline_that_is_there(
    two_layers: Path, sealed: Path, build_unmeasured: BuildArtifact, capsys: pytest.CaptureFixture[str]
) -> None:
    against = ["--baseline", str(build_unmeasured("fp32-cpu", two_layers).path)]
    assert run(["validate", str(sealed), *against, "--checkpoint", str(two_layers), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["baseline"]["name"] == "fp32-cpu"
    assert run(["validate", str(sealed), *against]) == 2
    assert "set it with --set checkpoint=FOLDER" in capsys.readouterr().err


def test_equal_recipes_have_equal_identity_wherever_they_are_built(
    build_demo: BuildDemo, sealed: Path, tmp_path: Path
) -> None:
    second = tmp_path / "elsewhere/second"
    assert build_demo(second) == 0
    assert open_artifact(second).manifest.identity == open_artifact(sealed).manifest.identity
