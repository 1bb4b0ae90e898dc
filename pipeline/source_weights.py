"""A checkpoint's weights as the writers of formats take them, straight from its files: no IR, no change of a value."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import ConfigError
from ingot.pipeline.checkpoint import WEIGHT_DTYPES, Checkpoint
from ingot.pipeline.config import read_config
from ingot.pipeline.formats.encoded import EncodedTensor
from ingot.pipeline.formats.format_writer import lazy_tensor, stored_tensor
from ingot.pipeline.formats.layers import ExportedWeight, PlainWeight, QuantizedLayer, facts_of
from ingot.pipeline.formats.quantized import QuantizedWeight
from ingot.pipeline.tensors import check_tensors
from ingot.progress import Progress, silent


@dataclass(frozen=True)
class SourceWeights:
    """weights in the order they are written; left_out says what of the checkpoint is not among them."""

    weights: Sequence[ExportedWeight]
    left_out: Sequence[str]


def source_weights(checkpoint: Checkpoint, progress: Progress = silent) -> SourceWeights:
    """Every tensor that the model needs; all there are when Ingot does not know the model's family.

    Each quantized layer is read once for its facts. CheckpointError when tensors are missing, damaged or left over.
    """
    names = _names(checkpoint)
    weights: list[ExportedWeight] = []
    for done, name in enumerate(names, start=1):
        encoded = checkpoint.encoded.get(name)
        weights.append(_decoded(encoded) if encoded else PlainWeight(name, stored_tensor(checkpoint.tensor(name))))
        progress("reading weights", done, len(names))
    return SourceWeights(weights, _left_out([name for name in checkpoint.shapes if name not in set(names)]))


def _left_out(names: Sequence[str]) -> list[str]:
    biases = sorted(name for name in names if name.endswith(".bias"))
    found = [f"{name}, which is computed or a copy" for name in names if name not in biases]
    return found + ([f"{len(biases)} biases of zeros, {biases[0]} the first"] if biases else [])


def _names(checkpoint: Checkpoint) -> Sequence[str]:
    try:
        config = read_config(checkpoint)
    except ConfigError:
        return list(checkpoint.shapes)
    return check_tensors(checkpoint, config)


def _decoded(tensor: EncodedTensor) -> ExportedWeight:
    content = tensor.read()
    if isinstance(content, QuantizedWeight):
        read = partial(_read, tensor)
        return QuantizedLayer(tensor.name, facts_of(content), read, tensor.activations, tensor.storage, tensor.parts)
    dtype = WEIGHT_DTYPES.get(tensor.storage, ir.DataType.FLOAT)
    return PlainWeight(tensor.name, lazy_tensor(tensor.name, dtype, tensor.shape, partial(_floats, tensor, dtype)))


def _read(tensor: EncodedTensor) -> QuantizedWeight:
    content = tensor.read()
    assert isinstance(content, QuantizedWeight)
    return content


def _floats(tensor: EncodedTensor, dtype: ir.DataType) -> NDArray[np.generic]:
    return tensor.dequantize().astype(dtype.numpy())
