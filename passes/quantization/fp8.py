"""The pass fp8: weights of linear layers as float8_e4m3fn, and what they read, too, if wanted.

    Matched         y = Gemm(x, W, b?, transB=1)

    Replacement     y = Gemm(x', W', b?, transB=1)
                    W' = DequantizeLinear(codes [out, in] float8_e4m3fn, scale [out], axis=0)        fp8.py
                    x' as quantize-activations makes it, of float8; x itself with `activations: none`

Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433. e4m3fn has 3 bits of mantissa, no infinities, and
448 as its largest number; everything saturates there and is rounded to the nearest, ties to even.

The IR says what a GPU with float8 units computes, up to the order of its sums, so that accuracy can be judged on a CPU:
there codes are widened to 32-bit floats when a segment is loaded, and inputs are rounded to float8 and back. That is an
emulation: the artifact is as small as with 8 bits, memory and speed are those of 32-bit floats.

The embedding table stays as it is, and so does the head unless `lm_head` is set. Statistics are quantize-weights', with
kind "float". Refuses NaN or infinite weights, by name, and what quantize-activations refuses.

Weights as float8_e4m3fn: rounding them, and what the CPU makes of them.

A row [in], or the whole weight, shares one scale s; the codes are round(w / s), saturating at 448, ties to even:

    W' = DequantizeLinear(codes [out, in] float8_e4m3fn, scale [out], axis=0)

One scale for the whole weight stands once per row, too, and the DequantizeLinear says "tensor" in its metadata
"ingot.strategy". Plain rounding takes s = max|w| / 448; the search tries smaller ones, as for integers (rounding.py).
(Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433.)

onnxruntime has no float8 matmul on CPUs. The artifact holds the codes, 8 bits each, and the graph says

    W' = Mul(Cast(codes, to=FLOAT), scale [out, 1])

which onnxruntime computes once, when it loads the segment: the same bits, 32-bit floats in memory, speed of float32.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.base import Pass, PassKind
from ingot.passes.calibration import Float32Array
from ingot.passes.quantization.activation_plan import RangeMethod
from ingot.passes.quantization.activation_quantization import activation_facts
from ingot.passes.quantization.quantize_activations import QuantizeActivations
from ingot.passes.quantization.quantize_weights import append_statistics, outliers, scale_range
from ingot.passes.quantization.quantized_tensors import STRATEGY_KEY, float_value
from ingot.passes.quantization.smoothing import ActivationScale
from ingot.passes.rewriting import add_initializer
from ingot.passes.weights import WeightSite, apply_to_array, drop_if_unused, weight_sites
from ingot.progress import report_progress

FLOAT8 = ir.DataType.FLOAT8E4M3FN
LARGEST = np.float32(448)

_SHRINK_FACTORS = tuple(np.float32(1.0 - 0.05 * step) for step in range(11))
_ZERO_BELOW = np.float32(1e-30)


@dataclass(frozen=True)
class Float8Weight:
    """codes [out, in] float8_e4m3fn; scale [out] float32; sums over all elements in float64."""

    codes: NDArray[Any]
    scale: Float32Array
    squared_error: float
    squared_norm: float
    clipped_share: float

    @property
    def relative_error(self) -> float:
        """||W - W'|| / ||W||, Frobenius norms; 0 for a zero weight."""
        return (self.squared_error / self.squared_norm) ** 0.5 if self.squared_norm else 0.0


def to_float8(values: Float32Array) -> NDArray[Any]:
    """Rounded to the nearest float8_e4m3fn, ties to even, saturating at 448."""
    return np.clip(values, -LARGEST, LARGEST).astype(FLOAT8.numpy())


def round_float8(weight: Float32Array, *, per_tensor: bool, clip: bool) -> Float8Weight:
    """Quantize weight [out, in]; `clip` searches the scale. ValueError when a value is NaN or infinite."""
    peak = np.abs(weight).max(axis=None if per_tensor else 1, keepdims=True)  # [1, 1] or [out, 1]
    if not np.isfinite(peak).all():
        raise ValueError("NaN or infinite")
    peak = np.where(peak < _ZERO_BELOW, LARGEST, peak)
    best, factor = np.full(peak.shape, np.inf), np.ones_like(peak)
    for trial in _SHRINK_FACTORS if clip else _SHRINK_FACTORS[:1]:
        error = _squared_error(weight, peak * trial / LARGEST, per_tensor)
        better = error < best
        best, factor = np.where(better, error, best), np.where(better, trial, factor)
    scale: Float32Array = (peak * factor / LARGEST).astype(np.float32)
    return Float8Weight(
        codes=to_float8(weight / scale),
        scale=np.ascontiguousarray(np.broadcast_to(scale[:, 0], len(weight))),
        squared_error=float(best.sum()),
        squared_norm=float(np.square(weight, dtype=np.float64).sum()),
        clipped_share=float((factor < 1).mean()),
    )


def insert_float8_weight(
    graph: ir.Graph, name: str, before: ir.Node, rounded: Float8Weight, *, per_tensor: bool
) -> ir.Value:
    """Add the initializers and a DequantizeLinear in front of a node; return what it makes, [out, in] float32."""
    base = name if f"{name}.q" not in graph.initializers else f"{before.name}.weight"
    tensors = ir.Tensor(rounded.codes, name=f"{base}.q"), ir.Tensor(rounded.scale, name=f"{base}.scale")
    inputs = [add_initializer(graph, tensor) for tensor in tensors]
    made = float_value(f"{base}.dequantized", rounded.codes.shape)
    path = f"{base.removesuffix('.weight')}.dequantize"
    node = ir.node("DequantizeLinear", inputs, {"axis": 0}, name=path, outputs=[made])
    if per_tensor:
        node.metadata_props[STRATEGY_KEY] = "tensor"
    graph.insert_before(before, node)
    return made


def widen_float8_weights(graph: ir.Graph) -> bool:
    """Replace every DequantizeLinear over stored float8 codes; whether there was one."""
    found = [node for node in graph if _is_float8_weight(node)]
    for node in found:
        _widen(graph, node)
    return bool(found)


def _squared_error(weight: Float32Array, scale: Float32Array, per_tensor: bool) -> NDArray[np.float64]:
    error = weight - to_float8(weight / scale).astype(np.float32) * scale
    total: NDArray[np.float64] = np.square(error, dtype=np.float64).sum(axis=None if per_tensor else 1, keepdims=True)
    return total


def _is_float8_weight(node: ir.Node) -> bool:
    codes = node.inputs[0] if node.op_type == "DequantizeLinear" else None
    return codes is not None and codes.is_initializer() and codes.dtype == FLOAT8


def _widen(graph: ir.Graph, node: ir.Node) -> None:
    codes, scale = node.inputs[0], node.inputs[1]
    assert codes is not None
    assert scale is not None
    assert scale.const_value is not None
    column = ir.Tensor(np.asarray(scale.const_value.numpy()).reshape(-1, 1), name=f"{scale.name}.column")
    shape = tuple(int(size) for size in (codes.shape or ir.Shape(())).numpy())
    wide = ir.node(
        "Cast",
        [codes],
        {"to": ir.DataType.FLOAT},
        name=f"{node.name}.widen",
        outputs=[float_value(f"{node.name}.widen", shape)],
    )
    inputs = [wide.outputs[0], add_initializer(graph, column)]
    scaled = ir.node("Mul", inputs, name=f"{node.name}.scale", outputs=[float_value(f"{node.name}.scale", shape)])
    old = [value for value in node.inputs if value is not None]
    new = [wide, scaled]
    ir.convenience.replace_nodes_and_values(graph, node, [node], new, [node.outputs[0]], [scaled.outputs[0]])
    for value in old:
        drop_if_unused(graph, value)


@dataclass(frozen=True)
class Fp8(Pass):
    """Options:

    weights              "channel" or "tensor": who shares a scale
    activations          "none"; "dynamic": a scale per token; "static": one per layer, from calibration data
    range, percentile    of static scales, as in quantize-activations
    clip                 search the weights' scales for the smallest error; else take them from the largest values
    lm_head              the head's weight, too; its inputs stay 32-bit floats
    exclude              patterns of layers that stay as they are
    """

    name: ClassVar[str] = "fp8"
    kind: ClassVar[PassKind] = "quantization"
    summary: ClassVar[str] = "Rounds weights, and activations if wanted, to float8 (e4m3), emulated exactly on CPUs."
    changes_weights: ClassVar[bool] = False
    needs_float8: ClassVar[bool] = True

    weights: Literal["channel", "tensor"] = "channel"
    activations: ActivationScale = "none"
    range: RangeMethod = "absmax"
    percentile: float = 99.99
    clip: bool = False
    lm_head: bool = False
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._quantize_activations()  # whose options are checked when it is made

    @property
    def needs_calibration(self) -> bool:
        """Static scales need data."""
        return self.activations == "static"

    def requires(self, model: ir.Model) -> None:
        """Every layer is x @ W.T + b, and every pattern matches one."""
        self._quantize_activations().requires(model)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Activations first: statistics of the weights then know them."""
        modified = self.activations != "none" and self._quantize_activations().call(model).modified
        wanted = self._wanted(model)
        statistics = []
        for done, (weight, sites) in enumerate(wanted.items()):
            statistics.append(self._quantize(model.graph, weight, sites))
            report_progress(self.name, done + 1, len(wanted))
        if statistics:
            append_statistics(model, statistics)
        return ir.passes.PassResult(model, modified or bool(statistics))

    def ensures(self, model: ir.Model) -> None:
        """What should be quantized is."""
        left = [site.node.name for sites in self._wanted(model).values() for site in sites]
        if left:
            raise PassError(f"{left[0]!r} and {len(left) - 1} more were left unquantized")

    def _wanted(self, model: ir.Model) -> Mapping[ir.Value, list[WeightSite]]:
        """Sites to quantize, by weight."""
        found: dict[ir.Value, list[WeightSite]] = defaultdict(list)
        for site in weight_sites(model):
            has_role = site.role == "linear" or (self.lm_head and site.role == "head")
            if has_role and not site.matches(self.exclude) and not site.is_quantized:
                found[site.weight].append(site)
        return found

    def _quantize(self, graph: ir.Graph, weight: ir.Value, sites: list[WeightSite]) -> dict[str, object]:
        """Give all sites one tensor of codes; return its statistics."""
        tensor = weight.const_value
        assert tensor is not None, "the manager verifies that initializers hold tensors"
        try:
            rounded, spread = apply_to_array(tensor, self._round)
        except ValueError as error:
            raise PassError(
                f"{self.name}: weight {weight.name!r} holds {error} values; check the checkpoint, or leave it out with "
                "exclude"
            ) from error
        operands = {site.operand for site in sites}
        per_tensor = self.weights == "tensor"
        dequantized = insert_float8_weight(graph, weight.name or "", sites[0].node, rounded, per_tensor=per_tensor)
        for site in sites:
            site.node.replace_input_with(site.index, dequantized)
        for operand in operands:
            drop_if_unused(graph, operand)
        return {**self._statistics(sites[0], dequantized, rounded), **spread, **activation_facts(sites[0].node)}

    def _round(self, values: NDArray[Any]) -> tuple[Float8Weight, dict[str, float]]:
        rounded = round_float8(values.astype(np.float32), per_tensor=self.weights == "tensor", clip=self.clip)
        codes = rounded.codes.astype(np.float32)
        ends = {"end_share": float((np.abs(codes) == 448).mean())}
        return rounded, {**scale_range(rounded.scale), **outliers(values), **ends}

    def _statistics(self, site: WeightSite, dequantized: ir.Value, rounded: Float8Weight) -> dict[str, object]:
        producer = dequantized.producer()
        assert producer is not None
        assert producer.inputs[0] is not None
        return {
            "name": site.node.name,
            "tensor": producer.inputs[0].name,
            "bits": 8,
            "kind": "float",
            "strategy": self.weights,
            "block_size": 0,
            "symmetric": True,
            "elements": rounded.codes.size,
            "mse": rounded.squared_error / rounded.codes.size,
            "relative_error": rounded.relative_error,
            "clip": self.clip,
            "clipped_share": rounded.clipped_share,
        }

    def _quantize_activations(self) -> QuantizeActivations:
        mode = "dynamic" if self.activations == "none" else self.activations
        return _Activations(
            dtype="float8", mode=mode, range=self.range, percentile=self.percentile, exclude=self.exclude
        )


class _Activations(QuantizeActivations):
    """Speaks in this pass's name."""

    name: ClassVar[str] = "fp8"
