"""`ingot quantize-report`: the table and its sentences, JSON, and what cannot be."""

import json

import pytest

from ingot.cli.main import run
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL, FIXTURES


def test_the_worst_weights_are_shown_with_a_summary(
    build_unmeasured: BuildArtifact, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = build_unmeasured("int4-cpu").path
    assert run(["quantize-report", str(artifact), "--top", "3"]) == 0
    printed = capsys.readouterr()
    assert "4 bits, blocks of" in printed.out
    assert "25 weights, 5,767,168 numbers" in printed.out
    assert "KL of single weights was not measured: the recipe has no evaluation text." in printed.out
    assert "3 of 25 weights are shown" in printed.err


def test_json_has_every_weight(build_unmeasured: BuildArtifact, capsys: pytest.CaptureFixture[str]) -> None:
    artifact = build_unmeasured("int4-cpu").path
    assert run(["quantize-report", str(artifact), "--checkpoint", str(DEMO_MODEL), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["weights"]) == told["summary"]["num_weights"] == 25
    assert told["remarks"] == []
    assert all(len(weight["code_histogram"]) == 16 for weight in told["weights"])


def test_an_artifact_in_floats_has_nothing_to_report(
    build_unmeasured: BuildArtifact, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = build_unmeasured("fp32-cpu", FIXTURES / "checkpoints" / "llama", "generate=null").path
    assert run(["quantize-report", str(artifact)]) == 0
    assert "no weight is quantized" in capsys.readouterr().out


def test_a_text_alone_is_a_usage_error(build_unmeasured: BuildArtifact, capsys: pytest.CaptureFixture[str]) -> None:
    artifact = build_unmeasured("int4-cpu").path
    assert run(["quantize-report", str(artifact), "--text", "held-out.txt"]) == 2
    assert "name it with --checkpoint FOLDER" in capsys.readouterr().err
