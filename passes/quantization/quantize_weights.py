"""The pass quantize-weights: weight matrices to 2, 3, 4 or 8 bits, without data.

    Matched         W = initializer [out, in], or Cast(initializer)
                    Gemm(x, W, b?, transB=1)                Gather(W, input_ids)

    Replacement     W' = DequantizeLinear(q, scale, zero_point?, axis=1, block_size)       per channel: axis=0
                    Gemm(x, W', b?, transB=1)               Gather(W', input_ids)

    q            [out, in]              int4 | int8 symmetric, uint4 | uint8 asymmetric, named <weight>.q;
                                        2 and 3 bits are int4 | uint4 too, see weight_nodes.py
    scale        [out, ceil(in/block)]  float32, <weight>.scale          per channel: [out]
                                        with scale_dtype float16, numbers that float16 holds exactly
    zero_point   as scale, dtype of q   asymmetric only, <weight>.zero_point

`embedding` and `lm_head` choose bits for the table and the head, whose other options are those of all weights. A scheme
that mixed-precision assigned to a weight replaces these options (schemes.py); `overrides` come last. Tied weights whose
settings agree share one quantized tensor. Where they differ (say, the table left at 16 bits and the head at 4), each
has its own copy, which costs its bytes, and the statistics name the copy.

With `scale_dtype: float16` codes are chosen with scales that are float16 numbers already, so that the errors in the
statistics are those of what engines and files with 16-bit scales store. A weight with a scale that float16 holds only
roughly or not at all (below 2^-17 or above 2^15 before the clip) keeps float32 scales, and the build notes it.

Weights are read one at a time. Statistics are written to the model's metadata "ingot.quantization" as JSON:
{"weights": [{name, tensor, bits, block_size, symmetric, elements, mse, relative_error, clip, clipped_share,
scale_dtype, and those of weight_statistics.py}, ...]}; `activations` where the layer's inputs are quantized, too.

Refuses: a NaN or infinite weight, by name; a pattern of `overrides` that matches nothing; a Gemm that is not
x @ W.T + b. Weights that are already quantized are left alone.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.base import Pass, PassKind
from ingot.passes.model_facts import Fact, WeightFacts, record_weights
from ingot.passes.numerics.rounding import RoundedWeight, round_weight
from ingot.passes.numerics.scheme import FLOAT16_RANGE, BlockSize, ScaleDtype, Scheme, WeightBits
from ingot.passes.numerics.weight_statistics import weight_statistics
from ingot.passes.quantization.activation_nodes import activation_facts
from ingot.passes.quantization.schemes import Override, assigned_scheme, parse_overrides
from ingot.passes.quantization.weight_nodes import insert_dequantize, replace_weight
from ingot.passes.rewriting import require_plain_gemm
from ingot.passes.weights import WeightSite, apply_to_array, require_matches, weight_sites
from ingot.progress import note, report_progress
from ingot.settings import num_threads

QUANTIZATION_FACTS = Fact("ingot.quantization", WeightFacts)  # see the module's docstring

Bits = Literal["none", 2, 3, 4, 8]
Key = tuple[ir.Value, Scheme]
Groups = dict[Key, list[WeightSite]]  # weights to quantize, with the sites that share one quantized tensor
Rounder = Callable[[NDArray[Any]], RoundedWeight]


@dataclass(frozen=True)
class QuantizeWeights(Pass):
    """Options:

    bits          2, 3, 4 or 8
    block_size    columns that share a scale: 16, 32, 64, 128, 256; 0 or "channel": a whole row
    symmetric     signed codes without a zero point; else unsigned codes with one
    clip          search for the scale with the smallest error; else take it from the largest value
    scale_dtype   float32, or float16: choose codes with scales rounded to it, where it holds all of a weight's
    lm_head       bits of the head, or "none" to leave it as it is
    embedding     bits of the table, or "none" to leave it as it is
    overrides     pattern -> {bits, block_size, symmetric, clip, scale_dtype}, or "none" or 16 to leave the weight as
                  it is; patterns are fnmatch's, on module paths and tensor names; the last that matches wins
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
    scale_dtype: ScaleDtype = "float32"
    lm_head: Bits = 8
    embedding: Bits = 8
    overrides: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_overrides(self.name, self.overrides)

    @property
    def rounds_weights(self) -> Literal["some", "all"]:
        """All, unless an override leaves some unquantized."""
        return "some" if None in parse_overrides(self.name, self.overrides).values() else "all"

    def requires(self, model: ir.Model) -> None:
        """Every Gemm is x @ W.T + b, and every pattern matches a module."""
        sites = weight_sites(model)
        for site in sites:
            require_plain_gemm(site.node)
        require_matches(sites, "override", self.overrides)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Quantize one weight after the other."""
        groups = self.plan(model)
        total, done = sum(num_elements(weight) for weight, _ in groups), 0
        statistics: list[dict[str, object]] = []
        for key, sites in groups.items():
            statistics.append(self._quantize(model.graph, key, sites))
            done += num_elements(key[0])
            report_progress(self.name, done, total)
        if statistics:
            append_statistics(model, statistics)
        return ir.passes.PassResult(model, modified=bool(statistics))

    def ensures(self, model: ir.Model) -> None:
        """Every chosen weight is quantized."""
        left = [site.node.name for sites in self.plan(model).values() for site in sites]
        if left:
            raise PassError(f"{left[0]!r} and {len(left) - 1} more were left unquantized")

    def plan(self, model: ir.Model) -> Groups:
        """Sites that the pass would quantize, by weight and scheme: equal schemes share a tensor. Changes nothing."""
        overrides = parse_overrides(self.name, self.overrides)
        groups: Groups = defaultdict(list)
        for site in weight_sites(model):
            scheme = self._scheme(site, overrides)
            if scheme is not None and not site.is_quantized:
                groups[site.weight, scheme].append(site)
        return groups

    def _scheme(self, site: WeightSite, overrides: Mapping[str, Override | None]) -> Scheme | None:
        roles = {"linear": self.bits, "head": self.lm_head, "embedding": self.embedding, "router": "none"}
        bits = roles[site.role]
        base = Scheme.of(
            self.bits if bits == "none" else bits, self.block_size, self.symmetric, self.clip, self.scale_dtype
        )
        scheme = assigned_scheme(site.node, base, None if bits == "none" else base)
        for pattern, override in overrides.items():
            if site.matches([pattern]):
                scheme = None if override is None else replace(base, **override)
        return scheme

    def _quantize(
        self, graph: ir.Graph, key: Key, sites: list[WeightSite], rounder: Rounder | None = None
    ) -> dict[str, object]:
        """Give all sites one quantized tensor, made by `rounder` or round_weight; return its statistics."""
        weight, scheme = key
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
        if scheme.scale_dtype == "float16" and rounded.scale_dtype != "float16":
            note(
                f"{self.name}: {weight.name} keeps float32 scales, {rounded.scale.min():.2g} to "
                f"{rounded.scale.max():.2g}: float16 holds {FLOAT16_RANGE}"
            )
        dequantize = insert_dequantize(graph, weight, sites[0].node, rounded, scheme)
        replace_weight(graph, sites, dequantize)
        for site in sites:
            if site.role == "embedding":
                site.node.outputs[0].dtype = ir.DataType.FLOAT  # a 16-bit table gave 16-bit rows
        return {**_statistics(sites[0], dequantize, rounded, scheme), **spread, **activation_facts(sites[0].node)}


def num_elements(weight: ir.Value) -> int:
    """Elements of a stored weight."""
    assert weight.const_value is not None
    return weight.const_value.size


def _round(weight: NDArray[Any], rounder: Rounder, scheme: Scheme) -> tuple[RoundedWeight, dict[str, Any]]:
    rounded = rounder(weight)
    return rounded, weight_statistics(weight, rounded, scheme)


def _statistics(site: WeightSite, dequantize: ir.Node, rounded: RoundedWeight, scheme: Scheme) -> dict[str, object]:
    codes = dequantize.inputs[0]
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
    """Append rows, one per weight, to those in the model's metadata."""
    record_weights(model, QUANTIZATION_FACTS, statistics)
