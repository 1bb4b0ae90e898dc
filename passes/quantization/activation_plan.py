"""Input channels that keep their precision beside quantized activations (Dettmers et al., LLM.int8, arXiv:2208.07339).

    Matched         y = Gemm(x, W, b?, transB=1)

    Replacement     y = Gemm(Mul(x, kept), W', b?, transB=1) + MatMul(Gather(x, channels, axis=1), W_channels)

    channels        [n] int64, the outliers              kept          [in], 0 at the outliers, else 1
    W_channels      [n, out] float32: W[:, channels]^T   W'            W with zeros there, where it is not yet quantized

A few channels with large values would set the scale for all others; without them the rest is rounded finely. The second
product is a MatMul, so that no pass over linear layers takes it for one.

What quantize-activations decides of one input: its scheme and outliers, as metadata and as recorded arrays.

The range of a static activation scale, from calibration data.

absmax        the largest |x| of all calibration tokens: nothing is cut off
percentile    that percentile of |x| over a sample of tokens: what lies above saturates
mse           the range, at most absmax, whose rounding has the smallest squared error on the sample
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.calibration import Arrays, CalibrationStage, Float32Array, Float64Array, fact_arrays, recorded_facts
from ingot.passes.quantization.activation_quantization import (
    ACTIVATIONS_KEY,
    LARGEST,
    ActivationScheme,
    Kind,
    constant,
    qdq,
)
from ingot.passes.quantization.quantize_weights import QUANTIZATION_KEY
from ingot.passes.quantization.quantized_tensors import float_value
from ingot.passes.rewriting import add_initializer
from ingot.passes.weights import apply_to_array, float32_values

RangeMethod = Literal["absmax", "percentile", "mse"]
SAMPLE_ROWS = 2048
_SHRINK_FACTORS = tuple(1.0 - 0.025 * step for step in range(37))  # 1.0 down to 0.1


def static_scheme(kind: Kind, method: RangeMethod, peak: float, percentile: float, x: Float32Array) -> ActivationScheme:
    """The scheme for inputs with that largest |x|, of which `x` [rows, in] is a sample; `peak` is above 0."""
    if method == "mse":
        trials = [_scheme(kind, peak * factor) for factor in _SHRINK_FACTORS]
        return min(trials, key=lambda trial: squared_error(x, trial))
    inside = peak if method == "absmax" else float(np.quantile(np.abs(x), percentile / 100))
    return _scheme(kind, min(inside or peak, peak))


def squared_error(x: Float32Array, scheme: ActivationScheme) -> float:
    """Sum of (x - x')^2 over x [rows, in]."""
    return float(np.square(x - qdq(x, scheme), dtype=np.float64).sum())


def _scheme(kind: Kind, largest: float) -> ActivationScheme:
    return ActivationScheme(kind, float(np.float32(largest / LARGEST[kind])))


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


@dataclass(frozen=True)
class Planned:
    """What is to become of one input: the layers that read it, in graph order."""

    source: ir.Value
    linears: tuple[ir.Node, ...]
    scheme: ActivationScheme
    peak: float | None = None
    outliers: Channels = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def facts(self) -> dict[str, object]:
        """As the metadata has them."""
        facts = {**self.scheme.facts}
        if self.peak is not None:
            facts["peak"] = self.peak
        return facts | ({"outliers": len(self.outliers)} if len(self.outliers) else {})


def planned_arrays(planned: Planned) -> dict[str, NDArray[Any]]:
    """For a build that is cut off: what CalibrationStage.record keeps."""
    name, scheme = planned.linears[0].name or "", planned.scheme
    facts = {"kind": scheme.kind, "scale": scheme.scale, "peak": planned.peak}
    return {f"{name}.outliers": planned.outliers, **fact_arrays(name, facts)}


def recorded_plan(arrays: Arrays, source: ir.Value, linears: tuple[ir.Node, ...]) -> Planned:
    """What planned_arrays was given."""
    name = linears[0].name or ""
    facts = recorded_facts(arrays, name)
    scheme = ActivationScheme(facts["kind"], facts["scale"])
    return Planned(source, linears, scheme, facts["peak"], arrays[f"{name}.outliers"])


def finite_peaks(stage: CalibrationStage, source: ir.Value, linears: Sequence[ir.Node]) -> Float64Array:
    """Largest |x| of each channel [in]; PassError when one is NaN or infinite."""
    peaks = stage.max_absolute(source)
    if not np.isfinite(peaks).all():
        channel = int(np.argmin(np.isfinite(peaks)))
        raise PassError(
            f"{linears[0].name!r} reads {source.name!r}, whose channel {channel} is NaN or infinite on calibration "
            "data; check the checkpoint with `ingot lint-checkpoint`"
        )
    return peaks


def record_plan(model: ir.Model, plan: Sequence[Planned]) -> None:
    """Write the choices to the metadata, and into the statistics of weights that are quantized already."""
    rows = [{"layers": [node.name for node in planned.linears], **planned.facts} for planned in plan]
    before = json.loads(model.metadata_props.get(ACTIVATIONS_KEY, "[]"))
    model.metadata_props[ACTIVATIONS_KEY] = json.dumps([*before, *rows])
    if QUANTIZATION_KEY not in model.metadata_props:
        return
    by_layer = {node.name: planned.scheme.facts for planned in plan for node in planned.linears}
    statistics = json.loads(model.metadata_props[QUANTIZATION_KEY])
    for row in statistics["weights"]:
        if row["name"] in by_layer:
            row["activations"] = by_layer[row["name"]]
    model.metadata_props[QUANTIZATION_KEY] = json.dumps(statistics)
