"""A model's weights as a writer of a format sees them: plain tensors, and quantized layers with the facts of each.

Facts are what a format must have room for. They are found by reading every layer once, one at a time; the layer itself
is read again when it is written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx_ir as ir

from ingot.artifact.safetensors import StoredTensor
from ingot.pipeline.checkpoint.formats.activations import ActivationScheme
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight, FloatArray
from ingot.pipeline.checkpoint.formats.exact_forms import Zeros, as_integers, differences, is_float16, unsigned

Q4_1_BITS = 4
Strategy = Literal["tensor", "channel", "group", "block"]


@dataclass(frozen=True)
class LayerFacts:
    """What one layer needs.

    shape              [out, in]
    bits               of a code as it is stored
    group_size         columns that share a scale: the width where a row shares one
    strategy           what shares a scale: the tensor, a row, a group of columns, a block of as many rows as columns
    bits_for           the fewest bits that hold the weight with zero points of each kind; None: more than 8
    not_integers       why there are no integer codes of the same values; "" where there are
    float16_scales     whether float16 holds every scale (and minimum) as it is
    q4_1               whether 4 bits and float16 minima hold it
    """

    shape: tuple[int, int]
    bits: int
    kind: Literal["integer", "float"]
    group_size: int
    strategy: Strategy
    bits_for: Mapping[Zeros, int | None]
    not_integers: str
    act_order: bool
    minima: bool
    float16_scales: bool
    q4_1: bool

    @property
    def symmetric(self) -> bool:
        """Whether zero points in the middle take no more bits than the codes have."""
        return (self.bits_for["middle"] or self.bits + 1) <= self.bits

    @property
    def scheme(self) -> str:
        """The scheme in words, for messages."""
        groups = "per channel" if self.group_size == self.shape[1] else f"in blocks of {self.group_size}"
        if self.kind == "float":
            return f"fp{self.bits} {groups}"
        sides = "symmetric" if self.symmetric else "asymmetric"
        found = f"{self.bits} bits {'with minima' if self.minima else sides} {groups}"
        return f"{found} in activation order" if self.act_order else found

    def code_bits(self, zeros: Zeros, among: tuple[int, ...] = tuple(range(2, 9))) -> int | None:
        """The narrowest of the widths `among` that holds the codes, and is no narrower than they are stored."""
        needed = self.bits_for[zeros]
        if needed is None:
            return None
        stored = self.bits if self.kind == "integer" else needed
        return next((bits for bits in among if bits >= max(needed, stored)), None)


@dataclass(frozen=True)
class PlainWeight:
    """A tensor that stays as the checkpoint has it."""

    name: str
    tensor: ir.TensorProtocol

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        return tuple(self.tensor.shape.numpy())


@dataclass(frozen=True)
class QuantizedLayer:
    """A quantized weight by its plain name; `read` decodes it anew each time.

    activations    how the layer's inputs are quantized, if they are
    storage        the format that `parts`, the tensors as they lie in a file, are in; "" when there are none
    """

    name: str
    facts: LayerFacts
    read: Callable[[], DecodedWeight]
    activations: ActivationScheme | None = None
    storage: str = ""
    parts: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """The weight's name without ".weight"."""
        return self.name.removesuffix(".weight")

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        return self.facts.shape

    @property
    def scheme(self) -> str:
        """The scheme in words, for messages."""
        return self.facts.scheme

    def integers(self) -> DecodedWeight:
        """Integer codes and zero points; the caller has seen that the layer has them."""
        found = as_integers(self.read())
        assert isinstance(found, DecodedWeight)
        return found


Weight = PlainWeight | QuantizedLayer


def facts_of(weight: DecodedWeight) -> LayerFacts:
    """The facts of a decoded layer."""
    rows, columns = weight.codes.shape
    integers = as_integers(weight)
    needed: dict[Zeros, int | None] = {"middle": None, "from zero": None, "from one": None}
    if isinstance(integers, DecodedWeight):
        found = differences(integers)
        needed = {zeros: found.bits(zeros) for zeros in needed}
    return LayerFacts(
        shape=(rows, columns),
        bits=weight.bits or _bits(weight, needed),
        kind=weight.kind,
        group_size=min(weight.group_size, columns),
        strategy=_strategy(weight),
        bits_for=needed,
        not_integers=integers if isinstance(integers, str) else "",
        act_order=weight.g_idx is not None,
        minima=weight.offsets is not None,
        float16_scales=is_float16(weight.scales) if isinstance(integers, str) else is_float16(integers.scales),
        q4_1=_fits_q4_1(weight, integers, needed["from zero"]),
    )


def minima_of(weight: DecodedWeight) -> FloatArray:
    """What Q4_1 adds to code * scale, [out, groups], of a weight with integer codes in unsigned form."""
    if weight.offsets is not None:
        return weight.offsets
    assert weight.zero_points is not None
    return -(weight.zero_points.astype(np.float32) * weight.scales)


def _strategy(weight: DecodedWeight) -> Strategy:
    scales = weight.scales
    if scales.shape[1] == 1:
        points = weight.zero_points
        return (
            "tensor" if (scales == scales[0]).all() and (points is None or (points == points[0]).all()) else "channel"
        )
    first = scales[np.arange(len(scales)) // weight.group_size * weight.group_size]
    may_be = weight.kind == "float" and len(scales) > weight.group_size > 1
    return "block" if may_be and np.array_equal(first, scales) else "group"


def _bits(weight: DecodedWeight, needed: Mapping[Zeros, int | None]) -> int:
    if weight.kind == "float":
        return 8
    return needed["from zero"] or needed["from one"] or 8


def _fits_q4_1(weight: DecodedWeight, integers: DecodedWeight | str, needed: int | None) -> bool:
    if weight.offsets is not None:
        fits = weight.bits <= Q4_1_BITS and int(weight.codes.min()) >= 0 and int(weight.codes.max()) < 1 << Q4_1_BITS
        return fits and is_float16(weight.offsets)
    if isinstance(integers, str) or (needed or 9) > Q4_1_BITS:
        return False
    return is_float16(minima_of(unsigned(integers, Q4_1_BITS, "from zero")))
