"""The demo model through the whole of validation: real artifacts, real engines."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from ingot.builder import build
from ingot.builder.baseline import baseline_artifact
from ingot.errors import DataError, GateFailed, UsageError
from ingot.pipeline.recipe.load import load_recipe
from ingot.validation.evidence import Evidence, MeasureOptions, measure, write_evidence
from ingot.validation.gates import GateSpec, raise_for
from ingot.validation.options import AccuracyOptions, LatencyLoad, MemoryOptions
from tests.data_paths import DEMO_MODEL

TEXT = DEMO_MODEL / "heldout.txt"
REFERENCE_PERPLEXITY = 22.6681  # transformers 5.23.0 in fp32, the first 6,144 tokens, windows of 512
OPTIONS = MeasureOptions(
    text=TEXT,
    accuracy=AccuracyOptions(tokens=2048, window_tokens=256),
    latency=LatencyLoad(concurrency=(1, 2), prompt_tokens=16, output_tokens=4, requests=2, rounds=2),
    memory=MemoryOptions(probes=2, prompt_tokens=8, output_tokens=2),
    gates=(GateSpec("perplexity_ratio", "max", 1.1), GateSpec("size_ratio", "max", 0.01)),
)


@dataclass(frozen=True)
class Pair:
    """Two artifacts of the demo model."""

    candidate: Path
    baseline: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("artifacts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INGOT_CACHE", str(folder / "cache"))
        overrides = ["evaluation=null", "latency=null", "gates={}"]
        candidate = build("demo", overrides, folder / "demo").artifact.path
        return Pair(candidate, baseline_artifact(load_recipe("demo", overrides)))


@pytest.fixture(scope="module")
def evidence(pair: Pair) -> Evidence:
    return measure(pair.candidate, pair.baseline, OPTIONS)


@pytest.mark.slow
def test_everything_is_measured_on_real_artifacts(evidence: Evidence) -> None:
    assert 1.0 < evidence.measured["perplexity_ratio"].estimate.value < 1.1
    assert 0 < evidence.measured["kl_mean"].estimate.value < evidence.measured["kl_p99"].estimate.value
    assert 0.8 < evidence.measured["top1_agreement"].estimate.value < 1
    assert evidence.measured["size_ratio"].estimate.value < 0.4
    assert {"tpot_ratio@1", "tpot_ratio@2", "peak_memory_ratio"} < set(evidence.measured)


@pytest.mark.slow
def test_a_tight_gate_fails_with_its_name_value_and_limit(evidence: Evidence) -> None:
    with pytest.raises(GateFailed, match=r"size_ratio is 0\.\d+ .*requires <= 0\.01"):
        raise_for(evidence.gates, evidence.measured)


@pytest.mark.slow
def test_the_files_are_complete_and_contain_no_path_of_this_machine(
    evidence: Evidence, pair: Pair, tmp_path: Path
) -> None:
    files = write_evidence(evidence, tmp_path / "evidence")
    assert {file.name for file in files} == {
        *("summary.json", "accuracy.json", "latency.json", "environment.json", "report.html", "report.md"),
    }
    assert len(json.loads((tmp_path / "evidence" / "accuracy.json").read_text())["items"]) == 8
    for file in files:
        assert str(pair.candidate) not in file.read_text()
        assert str(DEMO_MODEL) not in file.read_text()
        assert not re.search(rf"\b{re.escape(os.uname().nodename)}\b", file.read_text())


@pytest.mark.slow
def test_accuracy_is_bit_identical_when_measured_again(evidence: Evidence, pair: Pair) -> None:
    again = measure(pair.candidate, pair.baseline, MeasureOptions(text=TEXT, accuracy=OPTIONS.accuracy))
    assert evidence.accuracy
    assert again.accuracy
    assert again.accuracy.items == evidence.accuracy.items


@pytest.mark.slow
def test_the_baseline_has_the_perplexity_that_transformers_computes(pair: Pair) -> None:
    found = measure(pair.baseline, pair.baseline, MeasureOptions(text=TEXT, accuracy=AccuracyOptions(tokens=6144)))
    assert found.accuracy
    assert found.accuracy.baseline_perplexity == pytest.approx(REFERENCE_PERPLEXITY, abs=2e-4)
    assert found.measured["perplexity_ratio"].estimate.value == 1.0
    assert found.measured["top1_agreement"].estimate.value == 1.0


@pytest.mark.slow
def test_a_text_that_is_too_short_is_refused(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("import os\n")
    options = MeasureOptions(text=tmp_path / "short.txt", accuracy=OPTIONS.accuracy)
    with pytest.raises(DataError, match=r"short.txt: the text has \d+ tokens; 8 windows of 256 need 2049"):
        measure(pair.candidate, pair.baseline, options)


def test_accuracy_without_a_text_is_refused() -> None:
    with pytest.raises(UsageError, match="accuracy requires an evaluation text"):
        MeasureOptions(accuracy=AccuracyOptions())
