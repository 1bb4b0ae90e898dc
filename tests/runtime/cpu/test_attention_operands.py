"""Rotary tables and sinks are mapped, and refused when they do not fit the model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ingot.artifact import Artifact, FileEntry, RotaryTables, SinkTensor
from ingot.errors import ArtifactError, EngineError
from ingot.runtime.cpu.attention_operands import StepTensors
from tests.runtime.programs import make_artifact

FILE = "program/weights.safetensors"
TABLES = RotaryTables(file=FILE, cos="cos", sin="sin", rotary_dim=8)


def artifact_with(folder: Path, *shape: int, dtype: type = np.float32) -> Artifact:
    """An artifact for a context of 256 tokens, with tables of this shape."""
    artifact = make_artifact(folder / "artifact")
    table: NDArray[np.floating] = np.random.default_rng(0).random(shape).astype(dtype)
    save_file({"other": np.zeros(3, np.int8), "cos": table, "sin": 2 * table}, artifact.path / FILE)
    files = {**artifact.manifest.files, FILE: FileEntry(bytes=1, sha256="0" * 64)}
    return replace(artifact, manifest=artifact.manifest.model_copy(update={"files": files}))


def test_tables_are_read_as_they_are_stored_and_shared_by_all_steps(tmp_path: Path) -> None:
    tensors = StepTensors(artifact_with(tmp_path, 300, 4))
    rotation = tensors.rotation(TABLES)
    assert rotation is not None
    np.testing.assert_array_equal(rotation.cos, np.random.default_rng(0).random((300, 4)).astype(np.float32))
    np.testing.assert_array_equal(rotation.sin, 2 * rotation.cos)
    assert rotation.rotary_dim == 8
    assert tensors.rotation(TABLES.model_copy()) is rotation


def test_sinks_are_read_and_refused_with_another_type_or_number_of_heads(tmp_path: Path) -> None:
    tensors = StepTensors(artifact_with(tmp_path, 4))
    found = tensors.sinks(SinkTensor(file=FILE, name="cos"), 4)
    np.testing.assert_array_equal(found, np.random.default_rng(0).random(4).astype(np.float32))
    assert tensors.sinks(None, 4) is None
    with pytest.raises(EngineError, match=r"'cos' is F32 \[4\]; it must be F32 \[8\]"):
        tensors.sinks(SinkTensor(file=FILE, name="cos"), 8)
    with pytest.raises(EngineError, match=r"'other' is I8 \[3\]; it must be F32 \[3\]"):
        tensors.sinks(SinkTensor(file=FILE, name="other"), 3)


def test_tables_that_are_missing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"weights.safetensors: holds no tensor 'tan'; build the artifact again"):
        StepTensors(artifact_with(tmp_path, 300, 4)).rotation(TABLES.model_copy(update={"sin": "tan"}))


@pytest.mark.parametrize(
    ("shape", "dtype", "found"),
    [
        ((255, 4), np.float32, r"F32 \[255, 4\]"),
        ((300, 8), np.float32, r"F32 \[300, 8\]"),
        ((300, 4), np.float16, r"F16 \[300, 4\]"),
        ((1200,), np.float32, r"F32 \[1200\]"),
    ],
)
def test_tables_that_do_not_fit_the_context_or_the_heads_are_refused(
    tmp_path: Path, shape: tuple[int, ...], dtype: type, found: str
) -> None:
    with pytest.raises(EngineError, match=f"'cos' is {found}; .* needs F32 with at least 256 rows of 4"):
        StepTensors(artifact_with(tmp_path, *shape, dtype=dtype)).rotation(TABLES)
