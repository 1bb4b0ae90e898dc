"""Program -> disk: program/segment-000.onnx ..., and one program/weights.safetensors that all of them point into."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ingot.artifact import Program
from ingot.artifact.writer import explain_full_disk
from ingot.passes.lowering.nbits_packing import STORAGE_KEY
from ingot.passes.weights import apply_to_array
from ingot.pipeline.checkpoint.safetensors_writer import FileSpan, weights_file_bytes, write_weights
from ingot.pipeline.targets.segments.split import WEIGHTS, cut_tensors, split_program

INLINE_BYTES = 1024  # initializers up to this size stay in the ONNX file


def write_program(model: ir.Model, folder: Path) -> tuple[Program, list[ir.Model]]:
    """Write a partitioned model to folder/program; return its steps and segments, whose weights are now in the file.

    Each weight is written once, even if several segments read it in several shapes, and is read or made one at a time.
    Two writes of one model give the same bytes. Raises PassError when the model is not
    partitioned, BuildError when the disk is full.
    """
    program, segments = split_program(model)
    directory = folder / "program"
    directory.mkdir(parents=True, exist_ok=True)
    storage, names = _stored(model, segments)
    weights = list(names)
    spans = write_weights(directory / WEIGHTS, storage.tensors)
    for value in weights:
        value.const_value = _external(value, spans[names[value]])
    for segment in segments:
        _write_onnx(segment, directory / f"{segment.graph.name}.onnx")
    return program, segments


def segment_weight_bytes(model: ir.Model) -> int:
    """Bytes of the weights' file that `write_program` writes of a partitioned model. Reads no large weight."""
    return weights_file_bytes(_stored(model, split_program(model)[1])[0].tensors)


def _stored(model: ir.Model, segments: Sequence[ir.Model]) -> tuple["_Storage", dict[ir.Value, str]]:
    """The tensors of the weights' file, and the name there of each segment's weights."""
    storage = _Storage()
    for tensor in cut_tensors(model):
        name = storage.name_of(tensor)
        assert name == tensor.name, f"the program names the tensor {tensor.name}, which is stored as {name}"
    weights = [value for segment in segments for value in _weights(segment)]
    return storage, {value: storage.name_of(value) for value in weights}


def write_model(model: ir.Model, file: Path) -> Path:
    """Write a whole model to `file`, its weights to weights.safetensors in the same folder; return the file."""
    storage = _Storage()
    weights = _weights(model)
    names = {value: storage.name_of(value) for value in weights}
    spans = write_weights(file.parent / WEIGHTS, storage.tensors)
    for value in weights:
        value.const_value = _external(value, spans[names[value]])
    _write_onnx(model, file, "the graph")
    return file


class _Storage:
    """Finds initializers with the same bytes: the same tensor, the same part of a file, or a view of another."""

    def __init__(self) -> None:
        self._tensors: dict[str, ir.TensorProtocol] = {}
        self._names: dict[object, str] = {}

    @property
    def tensors(self) -> Sequence[tuple[str, ir.TensorProtocol]]:
        """The tensors to store, by name, in the order of first use."""
        return list(self._tensors.items())

    def name_of(self, value: ir.Value) -> str:
        """The name under which the value's bytes are stored."""
        tensor = value.const_value
        assert tensor is not None
        name = tensor.metadata_props.get(STORAGE_KEY, value.name or "")
        name = self._names.setdefault(_identity(tensor), name)
        known = self._tensors.setdefault(name, tensor)
        assert known.nbytes == tensor.nbytes, f"{value.name} is not a view of {name}"
        return name


def _identity(tensor: ir.TensorProtocol) -> object:
    if isinstance(tensor, ir.ExternalTensor):
        return tensor.path, tensor.offset, tensor.nbytes
    return id(tensor)  # unique: the model holds every tensor until the end of the write


def _weights(segment: ir.Model) -> list[ir.Value]:
    """Initializers that go to the weights file; the others are made part of the segment."""
    large: list[ir.Value] = []
    for value in segment.graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None
        if tensor.nbytes > INLINE_BYTES:
            large.append(value)
        else:
            value.const_value = ir.Tensor(apply_to_array(tensor, np.array), dtype=tensor.dtype, name=value.name)
    return large


def _external(value: ir.Value, span: FileSpan) -> ir.ExternalTensor:
    assert value.const_value is not None
    assert value.dtype is not None
    shape = ir.Shape(value.const_value.shape.numpy())
    return ir.ExternalTensor(WEIGHTS, span.offset, span.length, value.dtype, shape=shape, name=value.name or "")


def _write_onnx(model: ir.Model, path: Path, what: str = "a segment") -> None:
    content = ir.to_proto(model).SerializeToString(deterministic=True)
    with explain_full_disk(path, what, len(content)):
        path.write_bytes(content)
