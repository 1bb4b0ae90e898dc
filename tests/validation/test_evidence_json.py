"""The JSON files of the evidence."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ingot.artifact import ArtifactWriter, Program, open_artifact
from ingot.errors import ArtifactError
from ingot.validation.evidence_json import evidence_files, sealed_summary, summary
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
