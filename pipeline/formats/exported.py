"""The weights of a compiled model as an export sees them: the checkpoint's own tensors, or codes with their scales."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import UsageError
from ingot.passes.quantization.activation_outliers import split_layers
from ingot.passes.quantization.channel_folds import INPUT_SCALE
from ingot.passes.quantization.quantized_tensors import weight_bits
from ingot.passes.weight_sites import apply_to_array
from ingot.pipeline.formats.activations import ActivationScheme, activations_of_node
from ingot.pipeline.formats.layers import ExportedWeight, PlainWeight, QuantizedLayer, facts_of
from ingot.pipeline.formats.quantized import QuantizedWeight
from ingot.pipeline.tensors import EMBEDDING, HEAD

_CODE_TYPES = {
    ir.DataType.INT4: np.int8,
    ir.DataType.INT8: np.int8,
    ir.DataType.UINT4: np.uint8,
    ir.DataType.UINT8: np.uint8,
    ir.DataType.FLOAT8E4M3FN: np.float32,
}


def exported_weights(model: ir.Model, names: Iterable[str]) -> dict[str, ExportedWeight]:
    """The named weights of a model that no pass but quantization has changed, and a tied head's own copy if any.

    Every quantized weight is read once for its facts. UsageError when layers keep channels aside or scale inputs.
    """
    _refuse_split_layers(model.graph)
    _refuse_input_scales(model.graph)
    initializers = model.graph.initializers
    copies = [name for name in (HEAD,) if name in initializers or f"{name}.q" in initializers]
    found = {name: _exported(initializers, name) for name in dict.fromkeys([*names, *copies])}
    if _is_heads_alone(initializers):  # the codes of a tied head bear the table's name
        found |= {EMBEDDING: PlainWeight(EMBEDDING, _tensor(initializers[EMBEDDING]))}
        found[HEAD] = _exported(initializers, EMBEDDING, HEAD)
    return found


def _is_heads_alone(initializers: Mapping[str, ir.Value]) -> bool:
    """Whether the codes of the embedding table are a tied head's, and the table itself is not quantized."""
    if f"{EMBEDDING}.q" not in initializers or EMBEDDING not in initializers:
        return False
    node = next(iter(initializers[f"{EMBEDDING}.q"].consumers()))
    return all(reader.op_type != "Gather" for reader in node.outputs[0].consumers())


def _refuse_split_layers(graph: ir.Graph) -> None:
    split = split_layers(graph)
    if split:
        raise UsageError(
            f"{split[0]!r} and {len(split) - 1} more layers keep outlier channels beside their 8-bit inputs; no "
            "checkpoint format has a place for them: set outliers and outlier_threshold to 0, or export to onnx"
        )


def _refuse_input_scales(graph: ir.Graph) -> None:
    scaled = [name.removesuffix(INPUT_SCALE) for name in graph.initializers if name.endswith(INPUT_SCALE)]
    if scaled:
        raise UsageError(
            f"{scaled[0]!r} and {len(scaled) - 1} more layers have their inputs scaled by a Mul; no checkpoint "
            "format has a place for it: give awq `fold: exact`, or export to onnx"
        )


def _exported(initializers: Mapping[str, ir.Value], name: str, exported_as: str | None = None) -> ExportedWeight:
    if f"{name}.q" not in initializers:
        return PlainWeight(name, _tensor(initializers[name]))
    node = next(iter(initializers[f"{name}.q"].consumers()))
    read = partial(_read, node)
    return QuantizedLayer(exported_as or name, facts_of(read()), read, _activations(node))


def _activations(node: ir.Node) -> ActivationScheme | None:
    """How the linear layer behind a weight's DequantizeLinear has its inputs quantized."""
    reader = next(iter(node.outputs[0].consumers()))
    maker = None if reader.op_type != "Gemm" or reader.inputs[0] is None else reader.inputs[0].producer()
    return None if maker is None else activations_of_node(maker.metadata_props)


def _read(node: ir.Node) -> QuantizedWeight:
    """The operands of a DequantizeLinear."""
    codes, scales, *zero_point = (_tensor(value) for value in node.inputs if value is not None)
    kind = _CODE_TYPES[codes.dtype]
    stored = apply_to_array(codes, lambda values: values.astype(kind))
    return QuantizedWeight(
        codes=stored,
        scales=_columns(np.asarray(scales.numpy())).astype(np.float32),
        group_size=node.attributes.get_int("block_size", 0) or stored.shape[1],
        zero_points=_columns(np.asarray(zero_point[0].numpy())).astype(np.int16) if zero_point else None,
        bits=weight_bits(node),
    )


def _columns(values: NDArray[Any]) -> NDArray[Any]:
    return values[:, None] if values.ndim == 1 else values


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    assert value.const_value is not None
    return value.const_value
