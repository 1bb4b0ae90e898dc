"""The pass fp8: weights of linear layers as float8_e4m3fn, and what they read, too, if wanted.

    Matched         y = Gemm(x, W, b?, transB=1)

    Replacement     y = Gemm(x', W', b?, transB=1)
                    W' = DequantizeLinear(codes [out, in] float8_e4m3fn, scale [out], axis=0)        float8_weights.py
                    x' as quantize-activations makes it, of float8; x itself with `activations: none`

Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433. e4m3fn has 3 bits of mantissa, no infinities, and
448 as its largest number; everything saturates there and is rounded to the nearest, ties to even.

The IR says what a GPU with float8 units computes, up to the order of its sums, so that accuracy can be judged on a CPU:
there codes are widened to 32-bit floats when a segment is loaded, and inputs are rounded to float8 and back. That is an
emulation: the artifact is as small as with 8 bits, memory and speed are those of 32-bit floats.

The embedding table stays as it is, and so does the head unless `lm_head` is set. Statistics are quantize-weights', with
kind "float". Refuses NaN or infinite weights, by name, and what quantize-activations refuses.
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
from ingot.passes.progress import report_progress
from ingot.passes.quantization.activation_quantization import activation_facts
from ingot.passes.quantization.activation_ranges import RangeMethod
from ingot.passes.quantization.float8_weights import Float8Weight, insert_float8_weight, round_float8
from ingot.passes.quantization.quantize_activations import QuantizeActivations
from ingot.passes.quantization.quantize_weights import append_statistics
from ingot.passes.quantization.smoothing import ActivationScale
from ingot.passes.quantization.weight_statistics import outliers, scale_range
from ingot.passes.weight_sites import WeightSite, apply_to_array, drop_if_unused, weight_sites


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
    needs_calibration: ClassVar[bool] = True

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
    def asks_calibration(self) -> bool:
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
