"""Which bound the logits of an artifact are held to."""

from pathlib import Path

import pytest

from ingot.pipeline.targets.cuda.program_builder import Bucket
from ingot.validation.verify import open_subject
from tests.runtime.cuda.artifacts import CONTEXT, model_of, write_artifact


@pytest.mark.parametrize(("invariant", "bound"), [(False, 2e-2), (True, 0.0)])
def test_a_batch_invariant_artifact_must_have_equal_bits(tmp_path: Path, invariant: bool, bound: float) -> None:
    given = (Bucket.ragged(1, CONTEXT, 1), Bucket.ragged(8, CONTEXT, 1))
    artifact = write_artifact(model_of(), tmp_path / "artifact", given, "fp16", batch_invariant=invariant)
    subject = open_subject(artifact)
    assert subject.logits_bound == bound
    assert subject.keeps_logits == (False, True)  # both ways to choose tokens


def test_the_option_is_part_of_the_identity(tmp_path: Path) -> None:
    given, model = (Bucket.ragged(8, CONTEXT, 1),), model_of()
    made = [write_artifact(model, tmp_path / str(flag), given, "fp16", batch_invariant=flag) for flag in (False, True)]
    assert len({artifact.manifest.identity for artifact in made}) == 2
