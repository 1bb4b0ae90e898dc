"""The layout of a block of the KV pool.

    [layer, k|v, kv head, token, width]      elements of all layers
    [layer, k|v, kv head, token]             then float16 scales, if the type is quantized

One block holds all layers, so that moving a block between tiers is one copy.
"""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ingot.sizes import round_up

KVType = Literal["float32", "float16", "bfloat16", "fp8", "int8", "int4"]
QUANTIZED: tuple[KVType, ...] = ("fp8", "int8", "int4")  # a vector is stored as codes and one scale

_ELEMENT_BYTES: Mapping[KVType, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "int8": 1, "int4": 1}
MAX_SIZE = 2**16  # of each axis of a block
_SCALE_BYTES = 2
_ALIGNMENT = 16  # bytes, of the scales and of the next block


class KVGeometry(BaseModel):
    """Shape of one KV block: [layer, k|v, kv head, token, dim], all layers contiguous."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_layers: int = Field(ge=1, le=MAX_SIZE)
    num_kv_heads: int = Field(ge=1, le=MAX_SIZE)
    head_dim: int = Field(ge=1, le=MAX_SIZE)
    block_tokens: int = Field(default=16, ge=1, le=MAX_SIZE)
    dtype: KVType = "float32"

    @model_validator(mode="after")
    def _whole_bytes(self) -> Self:
        if self.dtype == "int4" and self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; int4 stores two dims in a byte, so it must be even")
        return self

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[layers, 2, kv heads, block tokens, elements of a vector]."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_tokens, self.width)

    @property
    def is_quantized(self) -> bool:
        """Whether vectors are stored as codes with a scale."""
        return self.dtype in QUANTIZED

    @property
    def width(self) -> int:
        """Elements of one vector; an element of int4 is a byte of two dims."""
        return self.head_dim // (2 if self.dtype == "int4" else 1)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return _ELEMENT_BYTES[self.dtype]

    @property
    def code_bytes(self) -> int:
        """Bytes of a block's elements, padded if scales follow them."""
        size = self._vectors * self.width * self.element_bytes
        return round_up(size, _ALIGNMENT) if self.is_quantized else size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys, values and scales of all layers."""
        return self.code_bytes + (round_up(_SCALE_BYTES * self._vectors, _ALIGNMENT) if self.is_quantized else 0)

    @property
    def head_stride(self) -> int:
        """Elements of one head's vectors in a block."""
        return self.block_tokens * self.width

    def pool_offset(self, layer: int) -> int:
        """Elements from the start of a block to the layer's keys."""
        return layer * 2 * self.head_stride * self.num_kv_heads

    def scale_offset(self, layer: int) -> int:
        """float16 elements from the start of a block to the scales of the layer's keys."""
        return self.code_bytes // _SCALE_BYTES + layer * 2 * self.num_kv_heads * self.block_tokens

    def strides(self) -> dict[str, int]:
        """Strides of the pool by kernel argument, in elements; those of scales in float16 elements."""
        return {
            "block_stride": self.block_bytes // self.element_bytes,
            "head_stride": self.head_stride,
            "value_offset": self.num_kv_heads * self.head_stride,
            "scale_block_stride": self.block_bytes // _SCALE_BYTES,
            "scale_value_offset": self.num_kv_heads * self.block_tokens,
        }

    @property
    def _vectors(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.block_tokens
