"""Common part of GPTQ and AWQ: one scheme of integer codes for all layers of a checkpoint, packed in 32-bit words."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd

from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.checkpoint.formats.exact_forms import regrouped
from ingot.pipeline.interchange.folder import WriteOptions
from ingot.pipeline.interchange.layers import QuantizedLayer
from ingot.pipeline.interchange.writers.refusals import LEAST_GROUP, SchemeError, changed_form, whole_group


@dataclass(frozen=True)
class OneScheme:
    """Bits and group size of every layer. group_size 0: each row is a group."""

    bits: int
    group_size: int

    def columns_of_group(self, layer: QuantizedLayer) -> int:
        """Return the columns of the layer that share a scale."""
        return self.group_size or layer.shape[1]

    def num_groups(self, layer: QuantizedLayer) -> int:
        """Return the groups of one row."""
        return layer.shape[1] // self.columns_of_group(layer)

    def integers(self, layer: QuantizedLayer) -> DecodedWeight:
        """Return the layer's integer codes in groups of this size."""
        return regrouped(layer.integers(), self.columns_of_group(layer))

    def change(self, layer: QuantizedLayer) -> str:
        """Describe the layer's change of form; "" when it has none."""
        return changed_form(layer, self.bits, self.columns_of_group(layer))


def require_integers(name: str, layers: Sequence[QuantizedLayer]) -> None:
    """Refuse codes that are floats, and minima that are not whole multiples of their scales."""
    for layer in layers:
        if layer.facts.not_integers:
            raise SchemeError(
                f"{name} holds integer codes with zero points, but {layer.module} has {layer.scheme}: "
                f"{layer.facts.not_integers}"
            )


def require_same_scheme(name: str, layers: Sequence[QuantizedLayer], options: WriteOptions) -> None:
    """Refuse layers of several widths, or symmetric ones next to asymmetric ones, unless widening is allowed."""
    first = layers[0]
    for layer in layers:
        same = (layer.facts.bits, layer.facts.symmetric) == (first.facts.bits, first.facts.symmetric)
        if not (same or options.widen):
            raise SchemeError(
                f"{name} has one scheme for all layers, but {first.module} has {first.scheme} and {layer.module} "
                f"{layer.scheme}; remove the overrides, or export to compressed-tensors or gguf"
            )


def require_multiple(name: str, layer: QuantizedLayer, axis: int, of: int) -> None:
    """Refuse a weight whose rows (axis 0) or columns (axis 1) do not fill whole words."""
    if layer.shape[axis] % of:
        side = ("rows", "columns")[axis]
        raise SchemeError(
            f"{name} needs {side} in multiples of {of}, but {layer.module} is {list(layer.shape)}; leave it out with "
            'overrides: {NAME: "none"} where the format allows that, or export to compressed-tensors'
        )


def common_group(name: str, layers: Sequence[QuantizedLayer]) -> int:
    """Return the largest group size that divides every layer's groups; 0 when each layer has one scale per row."""
    if all(layer.facts.group_size == layer.shape[1] for layer in layers):
        return 0
    group = reduce(gcd, (whole_group(layer) for layer in layers))
    for layer in layers:
        if group < LEAST_GROUP or (layer.facts.act_order and group != layer.facts.group_size):
            raise SchemeError(
                f"{name} has one group size for all layers, and {layer.module} {list(layer.shape)} has {layer.scheme}; "
                f"the largest that all share is {group}; write compressed-tensors"
            )
    return group
