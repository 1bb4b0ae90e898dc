"""The JSON files of the evidence."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from ingot.artifact import ArtifactWriter, Program, open_artifact
from ingot.errors import ArtifactError
from ingot.validation.evidence import write_evidence
from ingot.validation.evidence_json import evidence_files, read_recorded, sealed_summary, summary
from ingot.validation.prediction import PredictedFigure, Prediction, read_prediction
from ingot.validation.verify import VerifyResult
from tests.artifact.tiny_artifact import describe
from tests.validation.sample_evidence import sample_evidence
from tests.validation.verify.results import sample_result


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return evidence_files(sample_evidence())


def test_every_file_is_json_and_the_same_each_time(files: dict[str, str]) -> None:
    assert set(files) == {"summary.json", "accuracy.json", "latency.json", "quantization.json", "environment.json"}
    for text in files.values():
        json.loads(text)
    assert evidence_files(sample_evidence()) == files


def test_perplexity_can_be_recomputed_from_the_items(files: dict[str, str]) -> None:
    accuracy = json.loads(files["accuracy.json"])
    tokens = sum(item["tokens"] for item in accuracy["items"])
    nll = sum(item["candidate_nll"] for item in accuracy["items"])
    assert tokens == accuracy["predicted_tokens"]
    assert accuracy["candidate_perplexity"] == pytest.approx(2.718281828459045 ** (nll / tokens))


def test_latencies_can_be_recomputed_from_the_requests(files: dict[str, str]) -> None:
    latency = json.loads(files["latency.json"])
    assert len(latency["runs"]) == 5 * 2 * 2
    for request in (request for run in latency["runs"] for request in run["requests"]):
        moments = request["token_seconds"]
        assert request["ttft"] == pytest.approx(moments[0] - request["submitted"], abs=2e-6)
        assert request["tpot"] == pytest.approx((request["e2e"] - request["ttft"]) / (len(moments) - 1), abs=2e-6)


def test_the_summary_has_every_metric_and_gate() -> None:
    evidence = sample_evidence()
    found = summary(evidence)
    assert set(found["metrics"]) == set(evidence.measured)
    assert found["verdict"] == "FAIL"
    assert [gate["name"] for gate in found["gates"]] == [gate.name for gate in evidence.gates]
    assert found["metrics"]["tpot_ratio@4"]["concurrency"] == 4
    assert found["metrics"]["size_ratio"]["method"] == "exact"


def test_parts_that_were_not_measured_have_no_file() -> None:
    small = evidence_files(sample_evidence((), with_runs=False))
    assert set(small) == {"summary.json", "environment.json"}
    assert json.loads(small["summary.json"])["memory"] is None


def test_arrays_of_numbers_are_on_one_line(files: dict[str, str]) -> None:
    assert max(len(text.splitlines()) for text in files.values()) < 2_500


def seal_summary(target: Path, text: str | None) -> Path:
    """A tiny artifact with this text as its summary."""
    with ArtifactWriter(target) as writer:
        if text is not None:
            (writer.path / "evidence").mkdir()
            (writer.path / "evidence" / "summary.json").write_text(text)
        describe(writer, Program())
        return writer.seal()


def test_origin_date_load_and_samples_are_read_back_from_a_sealed_artifact(
    tmp_path: Path, files: dict[str, str]
) -> None:
    evidence = sample_evidence()
    found = sealed_summary(open_artifact(seal_summary(tmp_path / "a", files["summary.json"])))
    assert found is not None
    assert (found.measured_at, found.origin) == ("2026-01-31T12:00:00Z", evidence.notes.origin)
    assert (found.load, found.samples) == (evidence.load, evidence.notes.samples)
    assert found.load is not None
    assert found.samples[0].baseline == "self):\n    pass"


def test_an_older_summary_has_none_of_them_and_an_unmeasured_artifact_no_summary(tmp_path: Path) -> None:
    older = sealed_summary(open_artifact(seal_summary(tmp_path / "a", '{"verdict": "PASS"}')))
    assert older is not None
    assert (older.measured_at, older.origin, older.load, older.samples) == ("", None, None, ())
    assert sealed_summary(open_artifact(seal_summary(tmp_path / "b", None))) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must be an object"),
        ('{"load": {"others": "x"}}', r"invalid summary of the evidence \(load\.others"),
    ],
)
def test_a_damaged_summary_is_refused_by_name(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ArtifactError, match=rf"summary\.json: .*{reason}"):
        sealed_summary(open_artifact(seal_summary(tmp_path / "a", text)))


def test_the_summary_marks_what_got_worse_and_better() -> None:
    metrics = summary(sample_evidence())["metrics"]
    assert metrics["size_ratio"]["change"] == "better"
    assert metrics["kl_mean"]["change"] is None


def test_a_verification_is_a_file_of_its_own() -> None:
    verified = replace(sample_evidence(), verification=sample_result())
    assert VerifyResult.model_validate_json(evidence_files(verified)["verify.json"]) == sample_result()
    assert "verify.json" not in evidence_files(sample_evidence())


def test_evidence_is_read_as_it_was_written(tmp_path: Path) -> None:
    evidence = sample_evidence()
    write_evidence(evidence, tmp_path / "evidence")
    recorded = read_recorded(tmp_path / "evidence")
    assert recorded.measured.keys() == evidence.measured.keys()
    for key, measured in evidence.measured.items():
        read = recorded.measured[key]
        assert (read.metric, read.level) == (measured.metric, measured.level)
        assert (read.estimate.value, read.estimate.low, read.estimate.high) == pytest.approx(
            (measured.estimate.value, measured.estimate.low, measured.estimate.high)
        )
        assert read.candidate == pytest.approx(measured.candidate)
    assert evidence.accuracy
    assert evidence.memory
    assert recorded.accuracy
    assert [item.kl for item in recorded.accuracy.items] == pytest.approx([i.kl for i in evidence.accuracy.items])
    assert recorded.peak_bytes == tuple(probe.generated.peak_bytes for probe in evidence.memory.candidate)
    for kind in ("ttft", "tpot", "throughput"):
        rounds = recorded.rounds(kind, 4)
        ratios = [own / other for own, other in zip(rounds, recorded.rounds(kind, 4, "baseline"), strict=True)]
        assert math.prod(ratios) ** (1 / 5) == pytest.approx(
            evidence.measured[f"{kind}_ratio@4"].estimate.value, rel=1e-3
        )


def test_damaged_evidence_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"summary\.json: cannot be read: .*; measure again"):
        read_recorded(tmp_path)
    write_evidence(sample_evidence(), tmp_path / "evidence")
    folder = tmp_path / "evidence"
    whole = (folder / "summary.json").read_text()
    (folder / "summary.json").write_text(whole.replace('"kl_p99"', '"kl_p98"'))
    with pytest.raises(ArtifactError, match=r"summary\.json: has the metric .?kl_p98"):
        read_recorded(folder)
    (folder / "summary.json").write_text(whole)
    (folder / "latency.json").write_text('{"runs": [{"round": -1}]}')
    with pytest.raises(ArtifactError, match=r"latency\.json: .*runs\.0\.round"):
        read_recorded(folder)


def test_a_prediction_is_a_file_of_its_own(tmp_path: Path) -> None:
    evidence, figure = sample_evidence(), PredictedFigure(value=1.0, low=0.9, high=1.1, source="steps")
    prediction = Prediction(made_at="2026-01-31T12:00:00Z", figures={"tpot_seconds@1": figure}).scored(
        {"tpot_seconds@1": 1.05}
    )
    predicted = replace(evidence, notes=replace(evidence.notes, prediction=prediction))
    write_evidence(predicted, tmp_path / "evidence")
    assert read_prediction(tmp_path / "evidence" / "prediction.json") == prediction
    assert summary(predicted)["prediction"] == prediction.model_dump(mode="json")
    assert "prediction.json" not in evidence_files(evidence)
    assert summary(evidence)["prediction"] is None
