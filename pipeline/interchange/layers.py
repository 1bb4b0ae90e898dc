"""A model's weights as a format's writer sees them: plain tensors, and quantized layers with the facts of each.

A writer decides from the facts whether its format holds a layer. Finding them reads every layer once, one at a time;
the layer is read again when it is written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.safetensors import StoredTensor
from ingot.passes.numerics.scheme import is_float16, survives_float16
from ingot.pipeline.checkpoint.formats.activations import InputScheme
from ingot.pipeline.checkpoint.formats.codes import FloatArray
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.checkpoint.formats.exact_forms import Zeros, as_integers, differences, unsigned
from ingot.pipeline.checkpoint.safetensors_writer import IR_DTYPES

Q4_1_BITS = 4
Strategy = Literal["tensor", "channel", "group", "block"]


@dataclass(frozen=True)
class LayerFacts:
    """Requirements of one layer on a format that stores it.

    shape              [out, in]
    bits               width of a stored code
    group_size         columns that share a scale; the row's width where a whole row does
    strategy           what shares a scale: the tensor, a row, a group of columns, or a square block
    bits_for           fewest bits that hold the weight with each kind of zero points; None: more than 8
    not_integers       why no integer codes have the same values; "" where some do
    float16_scales     whether every scale is exact in float16
    float16_range      whether rounding to float16 makes no scale zero or infinite
    q4_1               whether 4-bit codes with float16 minima hold the weight exactly
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
    float16_range: bool
    q4_1: bool

    @property
    def symmetric(self) -> bool:
        """Whether zero points in the middle of the range fit the bits of the codes."""
        return (self.bits_for["middle"] or self.bits + 1) <= self.bits

    @property
    def scheme(self) -> str:
        """The scheme as text, for messages."""
        groups = "per channel" if self.group_size == self.shape[1] else f"in blocks of {self.group_size}"
        if self.kind == "float":
            return f"fp{self.bits} {groups}"
        sides = "symmetric" if self.symmetric else "asymmetric"
        found = f"{self.bits} bits {'with minima' if self.minima else sides} {groups}"
        return f"{found} in activation order" if self.act_order else found

    def code_bits(self, zeros: Zeros, among: tuple[int, ...] = tuple(range(2, 9))) -> int | None:
        """Return the narrowest of the widths `among` that holds the codes and is at least their stored width."""
        needed = self.bits_for[zeros]
        if needed is None:
            return None
        stored = self.bits if self.kind == "integer" else needed
        return next((bits for bits in among if bits >= max(needed, stored)), None)


@dataclass(frozen=True)
class PlainWeight:
    """A tensor that is written unchanged."""

    name: str
    tensor: ir.TensorProtocol

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(self.tensor.shape.numpy())


@dataclass(frozen=True)
class QuantizedLayer:
    """A quantized weight under its plain name, such as "model.layers.0.mlp.up_proj.weight".

    read           decodes the weight; each call reads the file again
    activations    how the layer's inputs are quantized, if they are
    parts          the tensors that a checkpoint stores for the layer; empty for other sources
    storage        the storage format of `parts`
    """

    name: str
    facts: LayerFacts
    read: Callable[[], DecodedWeight]
    activations: InputScheme | None = None
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
        """The scheme as text, for messages."""
        return self.facts.scheme

    def integers(self) -> DecodedWeight:
        """Return integer codes and zero points; the caller has checked facts.not_integers."""
        found = as_integers(self.read())
        assert isinstance(found, DecodedWeight)
        return found

    def as_floats(self) -> PlainWeight:
        """Return the layer dequantized to float32 when it is written."""
        floats = lazy_tensor(self.name, ir.DataType.FLOAT, self.shape, lambda: self.read().dequantize())
        return PlainWeight(self.name, floats)


Weight = PlainWeight | QuantizedLayer


def lazy_tensor(
    name: str, dtype: ir.DataType, shape: tuple[int, ...], make: Callable[[], NDArray[Any]]
) -> ir.LazyTensor:
    """Return a tensor that `make` computes each time it is read; float8 values may come as bytes."""
    return ir.LazyTensor(lambda: _tensor(make(), dtype), dtype, ir.Shape(shape), name=name)


def stored_tensor(stored: StoredTensor, name: str | None = None) -> ir.LazyTensor:
    """Return a checkpoint's tensor unchanged, of any type; it is read from its file when it is written."""
    dtype = _DTYPES[stored.dtype]

    def read() -> NDArray[Any]:
        return stored.read(np.uint8).view(dtype.numpy()).reshape(stored.shape)

    return lazy_tensor(name or stored.name, dtype, stored.shape, read)


def facts_of(weight: DecodedWeight) -> LayerFacts:
    """Return the facts of a decoded layer."""
    rows, columns = weight.codes.shape
    integers = as_integers(weight)
    scales = weight.scales if isinstance(integers, str) else integers.scales
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
        float16_scales=is_float16(scales),
        float16_range=survives_float16(scales),
        q4_1=_fits_q4_1(weight, integers, needed["from zero"]),
    )


def minima_of(weight: DecodedWeight) -> FloatArray:
    """Return the minima of a weight with unsigned codes, [out, groups]: what Q4_1 adds to code * scale."""
    if weight.offsets is not None:
        return weight.offsets
    assert weight.zero_points is not None
    return -(weight.zero_points.astype(np.float32) * weight.scales)


_DTYPES = {name: dtype for dtype, name in IR_DTYPES.items()}


def _tensor(values: NDArray[Any], dtype: ir.DataType) -> ir.TensorProtocol:
    content = np.ascontiguousarray(values)
    return ir.Tensor(content if content.dtype == dtype.numpy() else content.view(dtype.numpy()), dtype)


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
