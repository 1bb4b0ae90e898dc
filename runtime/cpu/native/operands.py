"""What attention is bound to: its operands, and the tables of its rotary embedding."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ingot.runtime.batch import FloatArray, Int64Array


class Operands(NamedTuple):
    """query [rows, heads * dim], key and value [rows, kv heads * dim], float32.

    Columns lie side by side; rows may be further apart, so that all three may be parts of one matrix.
    """

    query: FloatArray
    key: FloatArray
    value: FloatArray


@dataclass(frozen=True)
class Rotation:
    """cos and sin [positions, rotary_dim / 2], float32, C-contiguous."""

    cos: FloatArray
    sin: FloatArray

    def __post_init__(self) -> None:
        assert self.cos.shape == self.sin.shape
        assert all(table.flags.c_contiguous and table.dtype == np.float32 for table in (self.cos, self.sin))

    @property
    def rotary_dim(self) -> int:
        """Leading elements of a head that are turned."""
        return 2 * int(self.cos.shape[1])

    def turn(self, heads: FloatArray, positions: Int64Array) -> FloatArray:
        """Turn heads [n, ..., dim] of the tokens at `positions` [n]: elements d and d + rotary_dim / 2 are a pair."""
        half = self.rotary_dim // 2
        ones = (1,) * (heads.ndim - 2)
        cos, sin = (table[positions].reshape(-1, *ones, half) for table in (self.cos, self.sin))
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return np.concatenate((first * cos - second * sin, second * cos + first * sin, rest), axis=-1)
