"""QuantizedWeight: what every format decodes to, codes and the numbers that make floats of them.

W[o, i] = (codes[o, i] - zero_points[o, g]) * scales[o, g] + offsets[o, g]        g = g_idx[i], or i // group_size
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [out, in] as its format stores it.

    codes          [out, in]      int8 or uint8; float32 where codes are floats themselves (fp8, fp4)
    scales         [out, groups]  float32
    zero_points    [out, groups]  int16, or None: codes are centred at zero. They may lie outside the codes' range.
    offsets        [out, groups]  float32, added last (GGUF's minima), or None
    group_size     columns that share a scale; the width of a row where a row shares one
    g_idx          [in]           the group of each column where groups are not contiguous (act-order), or None
    bits           of a stored code; 0: not said
    """

    codes: NDArray[Any]
    scales: FloatArray
    group_size: int
    zero_points: NDArray[np.int16] | None = None
    offsets: FloatArray | None = None
    g_idx: NDArray[np.int32] | None = None
    bits: int = 0

    def __post_init__(self) -> None:
        assert self.codes.ndim == self.scales.ndim == 2
        assert self.g_idx is not None or self.scales.shape[1] == -(-self.codes.shape[1] // self.group_size)

    @property
    def kind(self) -> Literal["integer", "float"]:
        """Whether codes are integers."""
        return "float" if self.codes.dtype == np.float32 else "integer"

    @property
    def groups_of_columns(self) -> NDArray[np.int32]:
        """The group of each column, [in]."""
        if self.g_idx is not None:
            return self.g_idx
        return np.arange(self.codes.shape[1], dtype=np.int32) // np.int32(self.group_size)

    def dequantize(self) -> FloatArray:
        """The weight itself, [out, in] float32; every operation is rounded once, in the order of the formula."""
        rows, columns = self.codes.shape
        weight: FloatArray = self.codes.astype(np.float32)
        if self.g_idx is None and columns % self.group_size == 0:
            grouped = weight.reshape(rows, -1, self.group_size)  # a view; what a group shares is broadcast
            self._apply(grouped, lambda values: values[:, :, None])
        else:
            groups = self.groups_of_columns
            self._apply(weight, lambda values: values[:, groups])
        return weight

    def _apply(self, weight: FloatArray, spread: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
        """The formula in place, with `spread` from [out, groups] to the weight's shape."""
        if self.zero_points is not None:
            weight -= spread(self.zero_points.astype(np.float32))
        weight *= spread(self.scales)
        if self.offsets is not None:
            weight += spread(self.offsets)

    def without_trivial_order(self) -> "QuantizedWeight":
        """Without g_idx where it says no more than contiguous groups do."""
        if self.g_idx is None:
            return self
        plain = np.arange(len(self.g_idx)) // self.group_size
        return replace(self, g_idx=None) if np.array_equal(self.g_idx, plain) else self

    def rows_in_order(self, order: NDArray[np.intp]) -> "QuantizedWeight":
        """The same with its rows reordered."""
        zero_points = None if self.zero_points is None else self.zero_points[order]
        offsets = None if self.offsets is None else self.offsets[order]
        return replace(
            self, codes=self.codes[order], scales=self.scales[order], zero_points=zero_points, offsets=offsets
        )
