"""calibration.json of an artifact: the text that its passes were calibrated on, and its share in the evaluation."""

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ingot.artifact.json_text import first_problem
from ingot.artifact.manifest import CALIBRATION_FILE
from ingot.artifact.reader import Artifact
from ingot.errors import ArtifactError


@dataclass(frozen=True)
class CalibrationRecord:
    """The facts in the file that are shown; see CalibrationFacts in passes/calibration.py for all of them.

    evaluation_overlap  share of the evaluated tokens that are in runs which the text has too; None without evaluation
    """

    text: str
    sha256: str
    text_tokens: int
    tokens: int
    sequences: int
    documents: int
    packing: str
    seed: int
    evaluation_overlap: float | None = None

    def __str__(self) -> str:
        overlap = f"; it has {self.evaluation_overlap:.2%} of the evaluated tokens" if self.evaluation_overlap else ""
        return (
            f"{self.tokens:,} of {self.text_tokens:,} tokens of {self.text} (SHA-256 {self.sha256[:16]}): "
            f"{self.sequences} sequences of {self.documents:,} documents, {self.packing}, seed {self.seed}{overlap}"
        )


def read_calibration(artifact: Artifact) -> CalibrationRecord | None:
    """Read the file; None if no pass was calibrated. ArtifactError for one that is damaged."""
    if not artifact.has(CALIBRATION_FILE):
        return None
    try:
        return TypeAdapter(CalibrationRecord).validate_python(artifact.json_object(CALIBRATION_FILE))
    except ValidationError as error:
        file = artifact.file(CALIBRATION_FILE)
        raise ArtifactError(f"{file}: {first_problem(error)}; build the artifact again") from error
