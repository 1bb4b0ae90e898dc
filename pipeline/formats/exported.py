"""The weights of a compiled model as an export sees them: the checkpoint's own tensors, or codes with their scales."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.quantized_tensors import weight_bits
from ingot.passes.weight_sites import apply_to_array
from ingot.pipeline.formats.quantized import FloatArray, QuantizedWeight


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
    """The operands of a DequantizeLinear. Codes are read when they are asked for; scales and zero points are small.

    scales, zero_points    [out, groups]; a row shares one scale where groups is 1
    """

    name: str
    codes: ir.TensorProtocol
    scales: FloatArray
    zero_points: NDArray[np.int16] | None
    block_size: int  # 0: a whole row
    bits: int  # 2, 3, 4 or 8

    @property
    def module(self) -> str:
        """The weight's name without ".weight"."""
        return self.name.removesuffix(".weight")

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        rows, columns = self.codes.shape.numpy()
        return rows, columns

    @property
    def symmetric(self) -> bool:
        """Whether codes are signed and centred at zero."""
        return self.zero_points is None

    @property
    def scheme(self) -> str:
        """The scheme in words, for messages."""
        blocks = f"in blocks of {self.block_size}" if self.block_size else "per channel"
        return f"{self.bits} bits {'symmetric' if self.symmetric else 'asymmetric'} {blocks}"

    def signed(self) -> QuantizedWeight:
        """Codes from -2 ** (bits - 1); symmetric weights have no zero points."""
        codes, half = self._codes(), np.int16(0 if self.symmetric else 1 << (self.bits - 1))
        zero_points = None if self.zero_points is None else self.zero_points - half
        return self._weight((codes - half).astype(np.int8), zero_points)

    def unsigned(self) -> QuantizedWeight:
        """Codes from 0, always with zero points."""
        codes, half = self._codes(), np.int16(1 << (self.bits - 1) if self.symmetric else 0)
        zero_points = np.full_like(self.scales, half, np.int16) if self.zero_points is None else self.zero_points
        return self._weight((codes + half).astype(np.uint8), zero_points)

    def _codes(self) -> NDArray[np.int16]:
        return apply_to_array(self.codes, lambda values: values.astype(np.int16))

    def _weight(self, codes: NDArray[Any], zero_points: NDArray[np.int16] | None) -> QuantizedWeight:
        return QuantizedWeight(codes, self.scales, self.block_size or codes.shape[1], zero_points)


ExportedWeight = PlainWeight | QuantizedLayer


def exported_weights(model: ir.Model, names: Iterable[str]) -> dict[str, ExportedWeight]:
    """The named weights of a model that no pass but quantization has changed, and a tied head's own copy if any."""
    initializers = model.graph.initializers
    copies = [name for name in ("lm_head.weight",) if f"{name}.q" in initializers]
    return {name: _exported(initializers, name) for name in dict.fromkeys([*names, *copies])}


def _exported(initializers: Mapping[str, ir.Value], name: str) -> ExportedWeight:
    if f"{name}.q" not in initializers:
        return PlainWeight(name, _tensor(initializers[name]))
    codes, scales = _tensor(initializers[f"{name}.q"]), _values(initializers[f"{name}.scale"])
    zero_point = initializers.get(f"{name}.zero_point")
    node = next(iter(initializers[f"{name}.q"].consumers()))
    blocks = node.attributes.get_int("block_size", 0)
    zeros = None if zero_point is None else _columns(_values(zero_point)).astype(np.int16)
    return QuantizedLayer(name, codes, _columns(scales).astype(np.float32), zeros, blocks, weight_bits(node))


def _columns(values: NDArray[Any]) -> NDArray[Any]:
    return values[:, None] if values.ndim == 1 else values


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    assert value.const_value is not None
    return value.const_value


def _values(value: ir.Value) -> NDArray[Any]:
    return np.asarray(_tensor(value).numpy())
