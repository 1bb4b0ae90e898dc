"""Input channels that keep their precision beside quantized activations (Dettmers et al., LLM.int8, arXiv:2208.07339).

    Matched         y = Gemm(x, W, b?, transB=1)

    Replacement     y = Gemm(Mul(x, kept), W', b?, transB=1) + MatMul(Gather(x, channels, axis=1), W_channels)

    channels        [n] int64, the outliers              kept          [in], 0 at the outliers, else 1
    W_channels      [n, out] float32: W[:, channels]^T   W'            W with zeros there, where it is not yet quantized

A few channels with large values would set the scale for all others; without them the rest is rounded finely. The second
product is a MatMul, so that no pass over linear layers takes it for one.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.calibration import Float32Array, Float64Array
from ingot.passes.quantization.activation_quantization import constant
from ingot.passes.quantization.quantized_tensors import float_value
from ingot.passes.rewriting import add_initializer
from ingot.passes.weight_sites import apply_to_array
from ingot.passes.weight_values import float32_values

OUTLIERS_KEY = "ingot.outliers"  # metadata_props of the second product: name of the layer that it belongs to

Channels = NDArray[np.int64]


def outlier_channels(peaks: Float64Array, outliers: float, threshold: float) -> Channels:
    """Channels to keep, ascending, by the largest |x| of each [in].

    outliers     at most so many: a number from 1, or below 1 a share of all; 0: all that lie above the threshold
    threshold    only those whose |x| exceeds it; 0 for no threshold. Without either there are none.
    """
    count = int(outliers) if outliers >= 1 else round(outliers * len(peaks))
    if outliers == 0:
        count = len(peaks) if threshold else 0
    largest = np.argsort(-peaks, kind="stable")[: min(count, len(peaks) - 1)]  # one channel at least stays
    return np.sort(largest[peaks[largest] > threshold]).astype(np.int64)


def split_outliers(graph: ir.Graph, source: ir.Value, readers: Sequence[ir.Node], channels: Channels) -> ir.Value:
    """Give the readers (linear layers over `source` [T, in]) a second product; return Mul(x, kept), which they read."""
    assert source.shape is not None
    path, rows, width = f"{readers[0].name}.input", str(source.shape[0]), int(str(source.shape[1]))
    index = constant(graph, f"{path}.outliers", channels, ir.DataType.INT64)
    kept = np.ones(width, np.float32)
    kept[channels] = 0
    taken = _node("Gather", f"{path}.outlier_columns", [source, index], (rows, len(channels)), axis=1)
    masked = _node("Mul", f"{path}.kept", [source, constant(graph, f"{path}.kept_columns", kept, ir.DataType.FLOAT)])
    masked.outputs[0].shape = source.shape
    graph.insert_before(readers[0], [taken, masked])
    for reader in readers:
        _add_product(graph, reader, taken.outputs[0], channels)
        reader.replace_input_with(0, masked.outputs[0])
    return masked.outputs[0]


def split_layers(graph: ir.Graph) -> list[str]:
    """Names of the layers that have a second product."""
    return [node.metadata_props[OUTLIERS_KEY] for node in graph if OUTLIERS_KEY in node.metadata_props]


def _add_product(graph: ir.Graph, gemm: ir.Node, columns: ir.Value, channels: Channels) -> None:
    weight, result, path = gemm.inputs[1], gemm.outputs[0], f"{gemm.name}.outliers"
    assert weight is not None
    kept: Float32Array = np.ascontiguousarray(float32_values(weight)[:, channels].T)
    operand = add_initializer(graph, ir.Tensor(kept, name=f"{path}.weight"))
    shape = tuple(size if isinstance(size, int) else str(size) for size in result.shape or ())
    product = _node("MatMul", path, [columns, operand], shape)
    product.metadata_props[OUTLIERS_KEY] = gemm.name or ""
    total = _node("Add", f"{path}.add", [result, product.outputs[0]], shape)
    result.replace_all_uses_with(total.outputs[0])
    total.replace_input_with(0, result)
    graph.insert_after(gemm, [product, total])
    if weight.is_initializer() or weight.producer().op_type == "Cast":  # type: ignore[union-attr]  # one or the other
        _clear_columns(graph, gemm, weight, channels)


def _clear_columns(graph: ir.Graph, gemm: ir.Node, operand: ir.Value, channels: Channels) -> None:
    """Zeros in the weight's columns, when it is read; a weight that others read too is left as it is."""
    producer = operand.producer()
    stored = operand if producer is None else producer.inputs[0]
    assert stored is not None
    assert stored.const_value is not None
    if len(stored.uses()) != 1 or len(operand.uses()) != 1:
        return
    tensor, dtype = stored.const_value, stored.const_value.dtype
    make = partial(_cleared, tensor, channels)
    stored.const_value = ir.LazyTensor(make, dtype, ir.Shape(tensor.shape.numpy()), name=stored.name)


def _cleared(tensor: ir.TensorProtocol, channels: Channels) -> ir.TensorProtocol:
    array = apply_to_array(tensor, np.array)
    array[:, channels] = 0
    return ir.Tensor(array, dtype=tensor.dtype, name=tensor.name)


def _node(
    op_type: str, name: str, inputs: list[ir.Value], shape: tuple[int | str, ...] = (), **attributes: int
) -> ir.Node:
    return ir.node(op_type, inputs, attributes, name=name, outputs=[float_value(name, shape)])
