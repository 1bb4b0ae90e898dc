"""Int8 weights with one scale for the whole matrix, in the form of one scale per row."""

from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.calibration import Float32Array
from ingot.passes.numerics.rounding import RoundedWeight, round_weight
from ingot.passes.numerics.scale_search import Scheme
from ingot.passes.quantization.quantize_weights import QuantizeWeights, Rounder
from ingot.passes.quantization.quantized_tensors import STRATEGY_KEY
from ingot.passes.weights import WeightSite


def round_per_tensor(weight: Float32Array, clip: bool) -> RoundedWeight:
    """One scale for the whole weight [out, in], given once per row."""
    whole = round_weight(weight.reshape(1, -1), Scheme(8, 0, True, clip))
    scale = np.repeat(whole.scale, len(weight), axis=0)
    codes = whole.codes.reshape(weight.shape)
    return RoundedWeight(codes, scale, None, whole.squared_error, whole.squared_norm, whole.clipped_share)


class PerTensorWeights(QuantizeWeights):
    """Linear layers with one scale for the whole weight; the DequantizeLinear says so."""

    def _quantize(
        self,
        graph: ir.Graph,
        weight: ir.Value,
        scheme: Scheme,
        sites: list[WeightSite],
        rounder: Rounder | None = None,
    ) -> dict[str, object]:
        if sites[0].role != "linear":
            return super()._quantize(graph, weight, scheme, sites, rounder)
        found = super()._quantize(graph, weight, scheme, sites, partial(_round, clip=scheme.clip))
        dequantized = sites[0].operand.producer()
        assert dequantized is not None
        dequantized.metadata_props[STRATEGY_KEY] = "tensor"
        return found | {"strategy": "tensor"}


def _round(weight: NDArray[Any], clip: bool) -> RoundedWeight:
    return round_per_tensor(weight.astype(np.float32), clip)
