"""The pass quantize-weights: weight matrices to 2, 3, 4 or 8 bits, without data.

    Matched         W = initializer [out, in], or Cast(initializer)
                    Gemm(x, W, b?, transB=1)                Gather(W, input_ids)

    Replacement     W' = DequantizeLinear(q, scale, zero_point?, axis=1, block_size)       per channel: axis=0
                    Gemm(x, W', b?, transB=1)               Gather(W', input_ids)

    q            [out, in]              int4 | int8 symmetric, uint4 | uint8 asymmetric, named <weight>.q;
                                        2 and 3 bits are int4 | uint4 too, see quantized_tensors.py
    scale        [out, ceil(in/block)]  float32, <weight>.scale          per channel: [out]
    zero_point   as scale, dtype of q   asymmetric only, <weight>.zero_point

`embedding` and `lm_head` choose bits for the table and the head; everything else is as for the other weights. What
mixed-precision assigned to a weight takes the place of these options (schemes.py); `overrides` come last. Tied
weights whose settings agree share one quantized tensor. Where they differ each gets a copy of its own (say, the table
left at 16 bits and the head at 4): that costs its bytes, and the statistics name the copy.

Weights are read one at a time. Statistics go to the model's metadata "ingot.quantization" as JSON:
{"weights": [{name, tensor, bits, block_size, symmetric, elements, mse, relative_error, clip, clipped_share,
and those of quantize_weights.py}, ...]}; `activations` where the layer's inputs are quantized, too.

Refuses: a NaN or infinite weight, by name; a pattern of `overrides` that matches nothing; a Gemm that is not
x @ W.T + b. What is already quantized is left alone.

What a weight and its codes look like: how far its largest values stand out, how its scales spread, where codes end.

    scale_min, scale_median, scale_max    over all blocks
    outlier_share                         share of weights with |w| above OUTLIER_RMS times the root mean square; 6e-5
                                          for normally distributed weights
    peak_over_rms                         the largest |w| over the root mean square
    end_share                             share of codes at either end of their range

A weight far above its rms costs the other weights of its block their resolution; codes at the ends are those that a
clip cut off, and, asymmetric, one at each end of every block.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.base import Pass, PassKind
from ingot.passes.numerics.rounding import CodeArray, RoundedWeight, round_weight
from ingot.passes.numerics.scale_search import FloatArray, Scheme, WeightBits
from ingot.passes.quantization.activation_quantization import activation_facts
from ingot.passes.quantization.quantized_tensors import insert_dequantize
from ingot.passes.quantization.schemes import Override, assigned_scheme, parse_overrides
from ingot.passes.rewriting import require_plain_gemm
from ingot.passes.weights import WeightSite, apply_to_array, drop_if_unused, require_matches, weight_sites
from ingot.progress import report_progress
from ingot.settings import num_threads

OUTLIER_RMS = 4.0
_CHUNK_ELEMENTS = 1 << 20


def weight_statistics(weight: NDArray[Any], rounded: RoundedWeight, scheme: Scheme) -> dict[str, float]:
    """All of the module's figures for a weight [out, in] of any float dtype and what it was rounded to."""
    low, high = scheme.code_range
    return {
        **scale_range(rounded.scale),
        **outliers(weight),
        "end_share": end_share(rounded.codes, low, high),
    }


def scale_range(scales: FloatArray) -> dict[str, float]:
    """Of scales of any shape."""
    found = {"min": scales.min(), "median": np.median(scales), "max": scales.max()}
    return {f"scale_{name}": float(value) for name, value in found.items()}


def outliers(weight: NDArray[Any]) -> dict[str, float]:
    """Share of outliers and peak over rms, from a few rows at a time; zeros for a zero weight."""
    square = sum(float(np.einsum("ri,ri->", rows, rows, dtype=np.float64)) for rows in _float32_rows(weight))
    rms = (square / weight.size) ** 0.5
    if not rms:
        return {"outlier_share": 0.0, "peak_over_rms": 0.0}
    beyond, peak = 0, 0.0
    for rows in _float32_rows(weight):
        magnitudes = np.abs(rows)
        beyond += int(np.count_nonzero(magnitudes > OUTLIER_RMS * rms))
        peak = max(peak, float(magnitudes.max()))
    return {"outlier_share": beyond / weight.size, "peak_over_rms": peak / rms}


def end_share(codes: CodeArray, low: int, high: int) -> float:
    """Share of codes that are the lowest or the highest of their range."""
    return float(np.count_nonzero(codes == low) + np.count_nonzero(codes == high)) / codes.size


def _float32_rows(weight: NDArray[Any]) -> Iterator[FloatArray]:
    step = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    return (weight[start : start + step].astype(np.float32) for start in range(0, len(weight), step))


QUANTIZATION_KEY = "ingot.quantization"  # model.metadata_props: JSON, see the module's docstring

BlockSize = Literal[0, 16, 32, 64, 128, 256, "channel"]
Bits = Literal["none", 2, 3, 4, 8]
Group = dict[tuple[ir.Value, Scheme], list[WeightSite]]
Rounder = Callable[[NDArray[Any]], RoundedWeight]


@dataclass(frozen=True)
class QuantizeWeights(Pass):
    """Options:

    bits          2, 3, 4 or 8
    block_size    columns that share a scale: 16, 32, 64, 128, 256; 0 or "channel": a whole row
    symmetric     signed codes without a zero point; else unsigned codes with one
    clip          search the scale with the smallest error; else take it from the largest value
    lm_head       bits of the head, or "none" to leave it as it is
    embedding     bits of the table, or "none" to leave it as it is
    overrides     pattern -> {bits, block_size, symmetric, clip}, or "none" or 16 to leave the weight as it is;
                  patterns are fnmatch's, on module paths and tensor names; the last that matches wins
    """

    name: ClassVar[str] = "quantize-weights"
    kind: ClassVar[PassKind] = "quantization"
    summary: ClassVar[str] = "Rounds weight matrices to 2 to 8 bits with an error-minimising clip; needs no data."
    changes_weights: ClassVar[bool] = False
    applies_schemes: ClassVar[bool] = True

    bits: WeightBits = 4
    block_size: BlockSize = 32
    symmetric: bool = False
    clip: bool = True
    lm_head: Bits = 8
    embedding: Bits = 8
    overrides: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_overrides(self.name, self.overrides)

    def requires(self, model: ir.Model) -> None:
        """Every Gemm is x @ W.T + b, and every pattern matches a module."""
        sites = weight_sites(model)
        for site in sites:
            require_plain_gemm(site.node)
        require_matches(sites, "override", self.overrides)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Quantize one weight after the other."""
        groups = self._groups(weight_sites(model))
        total, done = sum(_elements(weight) for weight, _ in groups), 0
        statistics: list[dict[str, object]] = []
        for (weight, scheme), sites in groups.items():
            statistics.append(self._quantize(model.graph, weight, scheme, sites))
            done += _elements(weight)
            report_progress(self.name, done, total)
        if statistics:
            append_statistics(model, statistics)
        return ir.passes.PassResult(model, modified=bool(statistics))

    def ensures(self, model: ir.Model) -> None:
        """What should be quantized is."""
        left = [site.node.name for sites in self._groups(weight_sites(model)).values() for site in sites]
        if left:
            raise PassError(f"{left[0]!r} and {len(left) - 1} more were left unquantized")

    def plan(self, model: ir.Model) -> Group:
        """What the pass would quantize, and how: (weight, scheme) -> the places that read it. Nothing is changed."""
        return self._groups(weight_sites(model))

    def _groups(self, sites: Iterable[WeightSite]) -> Group:
        """Sites not yet quantized, by weight and scheme: those that agree share a tensor."""
        overrides = parse_overrides(self.name, self.overrides)
        groups: Group = defaultdict(list)
        for site in sites:
            scheme = self._scheme(site, overrides)
            if scheme is not None and not site.is_quantized:
                groups[site.weight, scheme].append(site)
        return groups

    def _scheme(self, site: WeightSite, overrides: Mapping[str, Override | None]) -> Scheme | None:
        block_size = 0 if self.block_size == "channel" else self.block_size
        bits = {"linear": self.bits, "head": self.lm_head, "embedding": self.embedding}[site.role]
        base = Scheme(self.bits if bits == "none" else bits, block_size, self.symmetric, self.clip)
        scheme = assigned_scheme(site.node, base, None if bits == "none" else base)
        for pattern, override in overrides.items():
            if site.matches([pattern]):
                scheme = None if override is None else replace(base, **override)
        return scheme

    def _quantize(
        self,
        graph: ir.Graph,
        weight: ir.Value,
        scheme: Scheme,
        sites: list[WeightSite],
        rounder: Rounder | None = None,
    ) -> dict[str, object]:
        """Give all sites one quantized tensor, made by `rounder` or round_weight; return its statistics."""
        rounder = rounder or partial(round_weight, scheme=scheme, num_threads=num_threads())
        tensor = weight.const_value
        assert tensor is not None, "the manager verifies that initializers hold tensors"
        try:
            rounded, spread = apply_to_array(tensor, lambda values: _round(values, rounder, scheme))
        except ValueError as error:
            raise PassError(
                f"{self.name}: weight {weight.name!r} holds {error} values; check the checkpoint, or leave this "
                'weight out with overrides: {pattern: "none"}'
            ) from error
        operands = {site.operand for site in sites}
        dequantized = insert_dequantize(graph, weight, sites[0].node, rounded, scheme)
        for site in sites:
            site.node.replace_input_with(site.index, dequantized)
            if site.role == "embedding":
                site.node.outputs[0].dtype = ir.DataType.FLOAT  # a 16-bit table gave 16-bit rows
        for operand in operands:
            drop_if_unused(graph, operand)
        return {**_statistics(sites[0], dequantized, rounded, scheme), **spread, **activation_facts(sites[0].node)}


def _elements(weight: ir.Value) -> int:
    assert weight.const_value is not None
    return weight.const_value.size


def _round(weight: NDArray[Any], rounder: Rounder, scheme: Scheme) -> tuple[RoundedWeight, dict[str, float]]:
    rounded = rounder(weight)
    return rounded, weight_statistics(weight, rounded, scheme)


def _statistics(site: WeightSite, dequantized: ir.Value, rounded: RoundedWeight, scheme: Scheme) -> dict[str, object]:
    producer = dequantized.producer()
    assert producer is not None
    codes = producer.inputs[0]
    assert codes is not None
    return {
        "name": site.node.name,
        "tensor": codes.name,
        "bits": scheme.bits,
        "block_size": scheme.block_size,
        "symmetric": scheme.symmetric,
        "elements": rounded.codes.size,
        "mse": rounded.mean_squared_error,
        "relative_error": rounded.relative_error,
        "clip": scheme.clip,
        "clipped_share": rounded.clipped_share,
    }


def append_statistics(model: ir.Model, statistics: list[dict[str, object]]) -> None:
    """Add rows, one per weight, to those that the model's metadata holds."""
    before = json.loads(model.metadata_props.get(QUANTIZATION_KEY, '{"weights": []}'))
    model.metadata_props[QUANTIZATION_KEY] = json.dumps({"weights": [*before["weights"], *statistics]})
