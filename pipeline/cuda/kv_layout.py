"""How keys and values lie in a block of the device's KV pool.

    [layer, k|v, kv head, token, width]      codes of all layers
    [layer, k|v, kv head, token]             float16 scales behind them, where the precision has any

One block holds all layers, so that moving a block between tiers is one copy. Its size is a multiple of 16 bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ingot.artifact import KVGeometry
from ingot.pipeline.cuda.launch_program import ELEMENT_BYTES

KVPrecision = Literal["float", "fp8", "int8", "int4"]
KINDS: Mapping[KVPrecision, int] = {"float": 0, "fp8": 1, "int8": 2, "int4": 3}  # kernels/kv_precision.py
_TYPES: Mapping[KVPrecision, str] = {"fp8": "fp8e4nv", "int8": "i8", "int4": "u8"}
_ALIGNMENT = 16


@dataclass(frozen=True)
class KVLayout:
    """`type` is that of the pool's elements: the activations' where the precision is float."""

    geometry: KVGeometry
    precision: KVPrecision
    type: str

    @classmethod
    def of(cls, geometry: KVGeometry, precision: KVPrecision, activation_type: str) -> "KVLayout":
        """The layout for a program that computes in `activation_type`."""
        return cls(geometry, precision, _TYPES.get(precision, activation_type))

    @property
    def width(self) -> int:
        """Elements of one vector: two dims share a byte of int4."""
        return self.geometry.head_dim // (2 if self.precision == "int4" else 1)

    @property
    def _vectors(self) -> int:
        return self.geometry.num_layers * 2 * self.geometry.num_kv_heads * self.geometry.block_tokens

    @property
    def code_bytes(self) -> int:
        """Bytes of a block's codes, padded so that scales behind them are aligned."""
        return _rounded(self._vectors * self.width * ELEMENT_BYTES[self.type])

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.code_bytes + (0 if self.precision == "float" else _rounded(2 * self._vectors))

    def pool_offset(self, layer: int) -> int:
        """Elements from a block's beginning to the layer's keys."""
        return layer * 2 * self.head_stride * self.geometry.num_kv_heads

    def scale_offset(self, layer: int) -> int:
        """float16 elements from a block's beginning to the scales of the layer's keys."""
        return self.code_bytes // 2 + layer * 2 * self.geometry.num_kv_heads * self.geometry.block_tokens

    @property
    def head_stride(self) -> int:
        """Elements of one head's vectors in a block."""
        return self.geometry.block_tokens * self.width

    def strides(self) -> dict[str, int]:
        """The kernels' arguments, by name."""
        return {
            "block_stride": self.block_bytes // ELEMENT_BYTES[self.type],
            "head_stride": self.head_stride,
            "value_offset": self.geometry.num_kv_heads * self.head_stride,
            "scale_block_stride": self.block_bytes // 2,
            "scale_value_offset": self.geometry.num_kv_heads * self.geometry.block_tokens,
        }


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
