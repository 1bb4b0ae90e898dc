"""Segments that are damaged, or that do not fit the artifact's weights, are refused by file and weight."""

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from ingot.artifact import Artifact, SegmentStep, open_artifact
from ingot.errors import ArtifactError
from ingot.pipeline.interchange.artifact_weights import weights_of_artifact
from ingot.pipeline.interchange.segment_files import read_segment
from tests.artifact.tiny_artifact import reseal
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.parity import CHECKPOINTS

Change = Callable[[onnx.ModelProto], object]


@pytest.fixture(scope="module")
def artifact(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured(
        "int4-cpu", CHECKPOINTS / "llama", "passes.quantize-weights.block_size=16", "cpu.engine=onnxruntime"
    )


def stored(model: onnx.ModelProto, end: str = "") -> onnx.TensorProto:
    """The first tensor whose bytes are in another file."""
    found: onnx.TensorProto = next(t for t in model.graph.initializer if t.external_data and t.name.endswith(end))
    return found


def place(model: onnx.ModelProto, key: str, value: str) -> None:
    next(entry for entry in stored(model).external_data if entry.key == key).value = value


def resealed(artifact: Artifact, folder: Path, change: Change) -> tuple[Artifact, str]:
    """Change the first segment that stores codes, and seal the copy again."""
    copy = folder / "a"
    shutil.copytree(artifact.path, copy)
    for step in artifact.manifest.program.steps:
        if isinstance(step, SegmentStep):
            model = onnx.load(copy / step.file, load_external_data=False)
            if any(tensor.external_data and tensor.name.endswith(".q") for tensor in model.graph.initializer):
                change(model)
                (copy / step.file).write_bytes(model.SerializeToString())
                reseal(copy)
                return open_artifact(copy), step.file
    raise AssertionError("no segment stores codes")


def retype(end: str, kind: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        next(tensor for tensor in model.graph.initializer if tensor.name.endswith(end)).data_type = kind

    return change


@each_case(
    ("change", "message"),
    [
        (
            lambda model: place(model, "location", "../recipe.yaml"),
            "is in 'program/../recipe.yaml', which the manifest",
        ),
        (
            lambda model: place(model, "location", "/etc/passwd"),
            "is in '/etc/passwd', which the manifest does not list",
        ),
        (
            lambda model: place(model, "offset", str(2**40)),
            r"bytes up to byte \d+ of program/weights\.safetensors, which",
        ),
        (lambda model: place(model, "length", "3"), r"takes \d+ bytes up to byte"),
        (retype(".q", onnx.TensorProto.INT8), "as int8; it must be uint8"),
        (retype(".scale", onnx.TensorProto.INT32), "as int32; it must be float or"),
    ],
)
def test_a_segment_that_does_not_fit_its_weights_is_refused(
    artifact: Artifact, tmp_path: Path, change: Change, message: str
) -> None:
    changed, name = resealed(artifact, tmp_path, change)
    with pytest.raises(ArtifactError, match=message):
        read_segment(changed, name)
    with pytest.raises(ArtifactError, match=message):
        weights_of_artifact(changed)


def test_codes_of_another_shape_are_refused(artifact: Artifact, tmp_path: Path) -> None:
    def reshape(model: onnx.ModelProto) -> None:
        codes = stored(model, ".q")
        codes.dims[0], codes.dims[1] = codes.dims[0] * 2, codes.dims[1] // 2

    changed, _ = resealed(artifact, tmp_path, reshape)
    with pytest.raises(ArtifactError, match=r"has \d+ rows|do not fit together"):
        weights_of_artifact(changed)


@pytest.mark.parametrize("content", [b"", b"no model at all", b"\xff" * 100])
def test_a_file_that_is_not_onnx_is_refused(artifact: Artifact, tmp_path: Path, content: bytes) -> None:
    changed, name = resealed(artifact, tmp_path, lambda model: None)
    (changed.path / name).write_bytes(content)
    reseal(changed.path)
    with pytest.raises(ArtifactError, match=r"is not an ONNX segment|the program reads no"):
        weights_of_artifact(open_artifact(changed.path))
