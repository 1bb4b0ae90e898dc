"""The pass fp8: weights of linear layers as float8_e4m3fn, and, as an option, their inputs.

    Matched         y = Gemm(x, W, b?, transB=1)

    Replacement     y = Gemm(x', W', b?, transB=1)
                    W' = DequantizeLinear(codes [out, in] float8_e4m3fn, scale [out], axis=0)
                    x' as quantize-activations makes it, of float8; x itself with `activations: none`

A row, or the whole weight, shares one scale: see numerics/float8.py (Micikevicius et al., FP8 Formats for Deep
Learning, arXiv:2209.05433). One scale for the whole weight is stored once per row, too, and the DequantizeLinear has
"tensor" in its metadata "ingot.strategy".

The IR computes what a GPU with float8 units computes, up to the order of its sums, so that accuracy can be judged on a
CPU: there codes are widened to 32-bit floats when a segment is loaded, and inputs are rounded to float8 and back. That
is an emulation: the artifact is as small as with 8 bits, memory and speed are those of 32-bit floats.

The embedding table stays unquantized, and the head unless `lm_head` is set. Statistics are quantize-weights', with
kind "float". Refuses NaN or infinite weights, by name, and what quantize-activations refuses.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.base import Pass, PassKind
from ingot.passes.numerics.activation_rounding import RangeMethod
from ingot.passes.numerics.float8 import LARGEST, Float8Weight, round_float8
from ingot.passes.numerics.weight_statistics import outliers, scale_statistics
from ingot.passes.quantization.activation_nodes import activation_facts
from ingot.passes.quantization.quantize_activations import PERCENTILE, ActivationScale, QuantizeActivations
from ingot.passes.quantization.quantize_weights import append_statistics
from ingot.passes.quantization.weight_nodes import STRATEGY_KEY, insert_float8_dequantize, replace_weight
from ingot.passes.weights import WeightSite, apply_to_array, weight_sites
from ingot.progress import report_progress


@dataclass(frozen=True)
class Fp8(Pass):
    """Options:

    weights              "channel" or "tensor": what shares a scale
    activations          "none"; "dynamic": a scale per token; "static": one per layer, from calibration data
    range, percentile    of static scales, as in quantize-activations
    clip                 search for the weights' scales with the smallest error; else take them from the largest values
    lm_head              quantize the head's weight, too; its inputs stay 32-bit floats
    exclude              patterns of layers that stay as they are
    """

    name: ClassVar[str] = "fp8"
    kind: ClassVar[PassKind] = "quantization"
    summary: ClassVar[str] = "Rounds weights, and optionally activations, to float8 (e4m3), emulated exactly on CPUs."
    changes_weights: ClassVar[bool] = False
    needs_float8: ClassVar[bool] = True

    weights: Literal["channel", "tensor"] = "channel"
    activations: ActivationScale = "none"
    range: RangeMethod = "absmax"
    percentile: Annotated[float, PERCENTILE] = 99.99
    clip: bool = False
    lm_head: bool = False
    exclude: tuple[str, ...] = ()

    @property
    def rounds_weights(self) -> Literal["some", "all"]:
        """All, unless some are excluded."""
        return "some" if self.exclude else "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._quantize_activations()  # checks its own options

    @property
    def needs_calibration(self) -> bool:
        """Static scales need data."""
        return self.activations == "static"

    @property
    def parts(self) -> tuple[QuantizeActivations, ...]:
        """The pass that it runs before it rounds weights, if any."""
        return () if self.activations == "none" else (self._quantize_activations(),)

    def requires(self, model: ir.Model) -> None:
        """Every layer is x @ W.T + b, and every pattern matches one."""
        self._quantize_activations().requires(model)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Quantize activations first: the statistics of the weights include them."""
        modified = self.activations != "none" and self._quantize_activations().call(model).modified
        weights = self.unquantized(model)
        statistics = []
        for done, (weight, sites) in enumerate(weights.items()):
            statistics.append(self._quantize(model.graph, weight, sites))
            report_progress(self.name, done + 1, len(weights))
        if statistics:
            append_statistics(model, statistics)
        return ir.passes.PassResult(model, modified or bool(statistics))

    def ensures(self, model: ir.Model) -> None:
        """Every chosen weight is quantized."""
        left = [site.node.name for sites in self.unquantized(model).values() for site in sites]
        if left:
            raise PassError(f"{left[0]!r} and {len(left) - 1} more were left unquantized")

    def unquantized(self, model: ir.Model) -> Mapping[ir.Value, list[WeightSite]]:
        """Sites that are left to quantize, by weight."""
        found: dict[ir.Value, list[WeightSite]] = defaultdict(list)
        for site in weight_sites(model):
            has_role = site.role == "linear" or (self.lm_head and site.role == "head")
            if has_role and not site.matches(self.exclude) and not site.is_quantized:
                found[site.weight].append(site)
        return found

    def _quantize(self, graph: ir.Graph, weight: ir.Value, sites: list[WeightSite]) -> dict[str, object]:
        """Let all sites read one quantized tensor; return its statistics."""
        tensor = weight.const_value
        assert tensor is not None, "the manager verifies that initializers hold tensors"
        try:
            rounded, spread = apply_to_array(tensor, self._round)
        except ValueError as error:
            raise PassError(
                f"{self.name}: weight {weight.name!r} holds {error} values; check the checkpoint, or leave it out with "
                "exclude"
            ) from error
        dequantize = insert_float8_dequantize(graph, weight, sites[0].node, rounded)
        if self.weights == "tensor":
            dequantize.metadata_props[STRATEGY_KEY] = "tensor"
        replace_weight(graph, sites, dequantize)
        return {**self._statistics(sites[0], dequantize, rounded), **spread, **activation_facts(sites[0].node)}

    def _round(self, values: NDArray[Any]) -> tuple[Float8Weight, dict[str, Any]]:
        rounded = round_float8(values.astype(np.float32), per_tensor=self.weights == "tensor", clip=self.clip)
        codes = rounded.codes.astype(np.float32)
        ends = {"end_share": float((np.abs(codes) == LARGEST).mean())}
        return rounded, {**scale_statistics(rounded.scale), **outliers(values), **ends}

    def _statistics(self, site: WeightSite, dequantize: ir.Node, rounded: Float8Weight) -> dict[str, object]:
        codes = dequantize.inputs[0]
        assert codes is not None
        return {
            "name": site.node.name,
            "tensor": codes.name,
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
    """Reports errors in this pass's name."""

    name: ClassVar[str] = "fp8"
