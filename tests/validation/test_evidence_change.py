"""Evidence of two artifacts is compared where both were measured on the same text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.artifact import Artifact, GateOutcome
from ingot.artifact.manifest import FileEntry
from ingot.errors import ArtifactError
from ingot.validation.evidence_change import evidence_change, most_ratio, paired_accuracy, perplexity_ratio
from ingot.validation.evidence_json import SealedAccuracy
from tests.conftest import BuildArtifact

WINDOWS = 20
RNG = np.random.default_rng(0)
NLL = RNG.uniform(2.0, 2.8, WINDOWS)  # [windows], nats a token: texts differ much more than artifacts


@pytest.fixture(scope="module")
def built(build_unmeasured: BuildArtifact, two_layers: Path) -> Artifact:
    return build_unmeasured("int8-cpu", two_layers)


class Measured:
    """Makes artifacts with evidence of their own."""

    def __init__(self, built: Artifact, folder: Path) -> None:
        self._built, self._folder, self._count = built, folder, 0

    def __call__(self, times: float = 1.0, *, first: int = 0, sha256: str = "a" * 64, **manifest: Any) -> Artifact:
        """An artifact whose perplexity is so many times as high, on windows from `first` on."""
        items = [
            {"start": 512 * index, "tokens": 512, "candidate_nll": 512 * float(NLL[index] + np.log(times)), "kl": 0.0}
            for index in range(first, WINDOWS)
        ]
        perplexity = float(np.exp(NLL[first:].mean()) * times)
        text = {"name": "heldout.txt", "sha256": sha256}
        return self.with_content({"text": text, "candidate_perplexity": perplexity, "items": items}, **manifest)

    def with_content(self, content: object, **manifest: Any) -> Artifact:
        """An artifact with this as accuracy.json."""
        self._count += 1
        folder = self._folder / str(self._count)
        (folder / "evidence").mkdir(parents=True)
        (folder / "evidence" / "accuracy.json").write_text(json.dumps(content))
        entry = FileEntry(bytes=1, sha256="0" * 64)
        files = {**self._built.manifest.files, "evidence/accuracy.json": entry, **manifest.pop("files", {})}
        return Artifact(folder, self._built.manifest.model_copy(update={"files": files, **manifest}))


@pytest.fixture
def measured(built: Artifact, tmp_path: Path) -> Measured:
    return Measured(built, tmp_path)


def gates(limit: float) -> tuple[GateOutcome, ...]:
    return (
        GateOutcome(name="perplexity_ratio", verdict="PASS", measured=1.0, low=1.0, high=1.0, limit=limit, bound="max"),
    )


def test_an_artifact_that_predicts_the_text_much_worse_is_described(measured: Measured) -> None:
    change = evidence_change(measured(), measured(3.2))
    assert change
    before, now = np.exp(NLL.mean()), np.exp(NLL.mean()) * 3.2
    assert f"a perplexity of {now:.4g} against {before:.4g} on the same text, 3.2 times as much" in change
    assert "at most 1.1 times is allowed" in change


@pytest.mark.parametrize("times", [0.3, 1.0, 1.05, 1.1])
def test_one_that_is_better_or_a_little_worse_is_not(measured: Measured, times: float) -> None:
    assert evidence_change(measured(), measured(times)) is None


def test_a_gate_of_the_new_artifact_says_how_much_within_bounds(measured: Measured) -> None:
    assert evidence_change(measured(), measured(1.08, gates=gates(1.03))) is not None
    assert evidence_change(measured(), measured(1.04, gates=gates(1.03))) is None
    assert evidence_change(measured(), measured(1.2)) is not None
    assert evidence_change(measured(), measured(1.2, gates=gates(1.25))) is None
    assert most_ratio(measured(gates=gates(100.0))) == 1.5
    assert evidence_change(measured(), measured(1.6, gates=gates(100.0))) is not None


def test_windows_that_only_one_evidence_has_do_not_count(measured: Measured) -> None:
    ratio = perplexity_ratio(measured(), measured(2.0, first=5))
    assert ratio
    assert ratio.items == WINDOWS - 5
    assert ratio.value == pytest.approx(2.0)
    assert perplexity_ratio(measured(), measured(2.0, first=WINDOWS - 1)) is None


def test_evidence_of_another_text_or_tokenizer_and_none_cannot_be_compared(measured: Measured, built: Artifact) -> None:
    other = {"tokenizer/tokenizer.json": FileEntry(bytes=1, sha256="1" * 64)}
    for new in (measured(9.0, sha256="b" * 64), measured(9.0, files=other), built):
        assert evidence_change(measured(), new) is None
        assert evidence_change(new, measured(9.0)) is None or new is not built


@pytest.mark.parametrize(
    "content",
    [{}, {"text": {"name": "a", "sha256": "b"}, "candidate_perplexity": 1, "items": [{"start": 0, "tokens": 0}]}],
)
def test_evidence_that_is_not_valid_is_refused(measured: Measured, content: object) -> None:
    with pytest.raises(ArtifactError, match="invalid accuracy of the evidence"):
        evidence_change(measured(), measured.with_content(content))


def accuracy(nll: Sequence[float], kl: Sequence[float], agreements: Sequence[int], sha256: str = "a") -> SealedAccuracy:
    items = [
        {"start": 10 * index, "tokens": 10, "candidate_nll": each, "kl": kl[index], "agreements": agreements[index]}
        for index, each in enumerate(nll)
    ]
    text = {"name": "held-out.txt", "sha256": sha256 * 64}
    return SealedAccuracy.model_validate({"text": text, "candidate_perplexity": 1.0, "items": items})


def test_two_artifacts_are_paired_window_by_window() -> None:
    one = accuracy([21.0, 32.0, 43.0], [2.0, 3.0, 4.0], [8, 9, 7])
    other = accuracy([20.0, 31.0, 42.0, 50.0], [1.0, 2.0, 3.0, 0.0], [9, 10, 8, 1])
    found = paired_accuracy(one, other)
    assert found["perplexity_ratio"].value == pytest.approx(np.exp(0.1))
    assert found["perplexity_ratio"].low == pytest.approx(found["perplexity_ratio"].high)  # texts differ, pairs do not
    assert found["kl_mean"].value == pytest.approx(0.1)
    assert found["top1_agreement"].value == pytest.approx(-0.1)
    assert found["kl_mean"].items == 3
    assert paired_accuracy(one, accuracy([20.0, 31.0], [1.0, 2.0], [9, 9], "b")) == {}
    assert paired_accuracy(one, accuracy([20.0], [1.0], [9])) == {}
