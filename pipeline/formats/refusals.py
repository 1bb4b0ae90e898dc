"""What a format cannot hold, said with the scheme at hand, the layer, and the setting that would fit."""

from collections.abc import Sequence

import numpy as np

from ingot.errors import UsageError
from ingot.pipeline.formats.exported import ExportedWeight, PlainWeight, QuantizedLayer
from ingot.pipeline.tensors import EMBEDDING, HEAD


def require_linear_layers_only(name: str, layers: Sequence[QuantizedLayer]) -> None:
    """Refuse a quantized embedding or head."""
    for layer in layers:
        if layer.name in (EMBEDDING, HEAD):
            option = "embedding" if layer.name == EMBEDDING else "lm_head"
            raise UsageError(
                f"{name} keeps {layer.name} in floats, but it has {layer.scheme}; "
                f"set {option} to none, such as with --set passes.quantize-weights.{option}=none, or export to gguf"
            )


def require_one_scheme(name: str, layers: Sequence[QuantizedLayer]) -> QuantizedLayer:
    """Refuse layers of different schemes, and a model without any; return the first layer."""
    if not layers:
        raise UsageError(f"{name} holds quantized layers, but nothing is quantized; add quantize-weights to the recipe")
    first = layers[0]
    for layer in layers:
        if (layer.bits, layer.block_size, layer.symmetric) != (first.bits, first.block_size, first.symmetric):
            raise UsageError(
                f"{name} has one scheme for all layers, but {first.module} has {first.scheme} and {layer.module} "
                f"{layer.scheme}; take the overrides out, or export to compressed-tensors or gguf"
            )
    return first


def require_float16_scales(name: str, layers: Sequence[QuantizedLayer]) -> None:
    """Refuse scales that change when they are stored in 16 bits."""
    for layer in layers:
        with np.errstate(over="ignore"):
            stored = layer.scales.astype(np.float16).astype(np.float32)
        if not np.array_equal(stored, layer.scales):
            raise UsageError(
                f"{name} stores scales as float16, and those of {layer.module} would change; add the pass "
                "round-scales behind the quantization (ingot export --round-scales does), or export to "
                "compressed-tensors"
            )


def require_multiple(name: str, layer: QuantizedLayer, axis: int, of: int) -> None:
    """Refuse a side of a weight that does not fill whole words or blocks."""
    if layer.shape[axis] % of:
        side = ("rows", "columns")[axis]
        raise UsageError(
            f"{name} wants {side} in multiples of {of}, but {layer.module} is {list(layer.shape)}; leave it out with "
            'overrides: {NAME: "none"} where the format allows that, or export to compressed-tensors'
        )


def quantized_layers(weights: Sequence[ExportedWeight]) -> list[QuantizedLayer]:
    """Those of the weights that are quantized."""
    return [weight for weight in weights if isinstance(weight, QuantizedLayer)]


def plain_linear_modules(weights: Sequence[ExportedWeight]) -> list[str]:
    """Linear layers, the head among them, that are left in floats."""
    return [
        weight.name.removesuffix(".weight")
        for weight in weights
        if isinstance(weight, PlainWeight) and len(weight.shape) == 2 and weight.name != EMBEDDING
    ]
