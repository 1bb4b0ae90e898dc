"""calibration.json as it is shown: read from a sealed artifact, absent where nothing was calibrated, refused by key."""

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.artifact import Artifact, ArtifactWriter, Program, open_artifact
from ingot.artifact.calibration_record import read_calibration
from ingot.artifact.manifest import CALIBRATION_FILE
from ingot.errors import ArtifactError
from tests.artifact.tiny_artifact import describe

FACTS = {
    "text": "train.txt",
    "sha256": "ab" * 32,
    "text_tokens": 9000,
    "tokens": 4096,
    "sequences": 16,
    "documents": 3,
    "packing": "packed",
    "seed": 7,
    "a key of a later version": 1,
}


def sealed(folder: Path, facts: dict[str, Any] | None) -> Artifact:
    with ArtifactWriter(folder) as writer:
        if facts is not None:
            (writer.path / CALIBRATION_FILE).write_text(json.dumps(facts))
        describe(writer, Program())
        return open_artifact(writer.seal())


def test_the_record_is_read_and_shown(tmp_path: Path) -> None:
    record = read_calibration(sealed(tmp_path / "a", FACTS))
    assert str(record) == (
        f"4,096 of 9,000 tokens of train.txt (SHA-256 {'ab' * 8}): 16 sequences of 3 documents, packed, seed 7"
    )
    record = read_calibration(sealed(tmp_path / "b", {**FACTS, "evaluation_overlap": 0.1}))
    assert str(record).endswith("; it has 10.00% of the evaluated tokens")


def test_an_artifact_without_calibration_has_none(tmp_path: Path) -> None:
    assert read_calibration(sealed(tmp_path / "a", None)) is None


@pytest.mark.parametrize("wrong", [{"tokens": "many"}, {"sha256": None}])
def test_a_wrong_value_is_refused_by_its_key(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match=rf"calibration\.json: {next(iter(wrong))}"):
        read_calibration(sealed(tmp_path / "a", {**FACTS, **wrong}))
