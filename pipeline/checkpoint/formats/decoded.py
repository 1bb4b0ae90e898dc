"""Quantized weights of a checkpoint: where they are stored, and the codes and scales that they decode to.

    EncodedTensor     a weight in a file, under its plain name; decoded each time it is read
    DecodedWeight     codes, scales, zero points and offsets: what every format decodes to

A decoded weight dequantizes to

    W[o, i] = (codes[o, i] - zero_points[o, g]) * scales[o, g] + offsets[o, g]        g = g_idx[i], or i // group_size
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.safetensors import StoredTensor
from ingot.errors import CheckpointError, shown
from ingot.pipeline.checkpoint.formats.activations import InputScheme
from ingot.pipeline.checkpoint.formats.codes import FloatArray


@dataclass(frozen=True)
class DecodedWeight:
    """The codes and scales of a weight [out, in], as a format stores them.

    codes          [out, in]      int8 or uint8; float32 if codes are floats themselves (fp8, fp4)
    scales         [out, groups]  float32
    zero_points    [out, groups]  int16, or None: codes are centred at zero. They may be outside the codes' range.
    offsets        [out, groups]  float32, added last (GGUF's minima), or None
    group_size     columns that share a scale; the row's width if a whole row does
    g_idx          [in]           the group of each column if groups are not contiguous (activation order), or None
    bits           width of a stored code; 0: unknown
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
        """The kind of the codes, by their dtype."""
        return "float" if self.codes.dtype == np.float32 else "integer"

    @property
    def groups_of_columns(self) -> NDArray[np.int32]:
        """The group of each column, [in]."""
        if self.g_idx is not None:
            return self.g_idx
        return np.arange(self.codes.shape[1], dtype=np.int32) // np.int32(self.group_size)

    def dequantize(self) -> FloatArray:
        """Return the weight [out, in] as float32; every operation rounds once, in the order of the formula."""
        rows, columns = self.codes.shape
        weight: FloatArray = self.codes.astype(np.float32)
        if self.g_idx is None and columns % self.group_size == 0:
            grouped = weight.reshape(rows, -1, self.group_size)  # a view; values of a group are broadcast
            self._apply(grouped, lambda values: values[:, :, None])
        else:
            groups = self.groups_of_columns
            self._apply(weight, lambda values: values[:, groups])
        return weight

    def _apply(self, weight: FloatArray, spread: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
        """Apply the formula in place; `spread` broadcasts [out, groups] to the weight's shape."""
        if self.zero_points is not None:
            weight -= spread(self.zero_points.astype(np.float32))
        weight *= spread(self.scales)
        if self.offsets is not None:
            weight += spread(self.offsets)

    def without_trivial_order(self) -> "DecodedWeight":
        """Return the weight without g_idx if its groups are contiguous."""
        if self.g_idx is None:
            return self
        plain = np.arange(len(self.g_idx)) // self.group_size
        return replace(self, g_idx=None) if np.array_equal(self.g_idx, plain) else self

    def rows_in_order(self, order: NDArray[np.intp]) -> "DecodedWeight":
        """Return the weight with its rows reordered."""
        zero_points = None if self.zero_points is None else self.zero_points[order]
        offsets = None if self.offsets is None else self.offsets[order]
        return replace(
            self, codes=self.codes[order], scales=self.scales[order], zero_points=zero_points, offsets=offsets
        )


_READ = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E8M0", "I64", "I32", "I16", "I8", "U8")


@dataclass(frozen=True)
class EncodedTensor:
    """A weight in a file, under its plain name and shape.

    decode         reads and decodes it; nothing is kept
    parts          the stored tensors that it is decoded from, by leaf name
    storage        their storage format, for methods with several
    matrices       of a tensor [matrices, in, out]: decodes one matrix, [out, in]
    activations    how the layer's inputs are quantized, if they are
    """

    name: str
    shape: tuple[int, ...]
    file: Path
    decode: Callable[[], DecodedWeight | FloatArray]
    parts: Mapping[str, StoredTensor] = field(default_factory=dict)
    storage: str = ""
    activations: InputScheme | None = None
    matrices: Callable[[int], DecodedWeight] | None = None

    def matrix(self, index: int, name: str, rows: NDArray[np.intp]) -> "EncodedTensor":
        """Some rows of one matrix [out, in] of a tensor of several, as a weight of that name."""
        assert self.matrices is not None
        decode = self.matrices
        shape = (len(rows), self.shape[1])
        return EncodedTensor(name, shape, self.file, lambda: decode(index).rows_in_order(rows))

    def chosen_rows(self, rows: NDArray[np.intp], name: str) -> "EncodedTensor":
        """Some rows of a weight [out, in], as a weight of that name."""
        decode = self.decode

        def chosen() -> DecodedWeight | FloatArray:
            content = decode()
            return content.rows_in_order(rows) if isinstance(content, DecodedWeight) else content[rows]

        return EncodedTensor(name, (len(rows), *self.shape[1:]), self.file, chosen)

    def read(self) -> DecodedWeight | FloatArray:
        """Return codes and scales, or floats. CheckpointError when they do not fit together or are not finite."""
        try:
            with np.errstate(invalid="ignore", over="ignore"):  # values that are not finite are refused below
                content = self.decode()
        except ValueError as error:
            raise CheckpointError(f"{self.file}: {shown(self.name)}: {error}; the checkpoint is damaged") from error
        self._check(content)
        return content

    def dequantize(self) -> FloatArray:
        """Return the weight as float32."""
        content = self.read()
        return content.dequantize() if isinstance(content, DecodedWeight) else content

    def _check(self, content: DecodedWeight | FloatArray) -> None:
        shape = content.codes.shape if isinstance(content, DecodedWeight) else content.shape
        if shape != self.shape:
            raise CheckpointError(f"{self.file}: {shown(self.name)} decodes to {list(shape)}, not {list(self.shape)}")
        for part, values in _floats(content):
            bad = values.size - int(np.count_nonzero(np.isfinite(values)))
            if bad:
                raise CheckpointError(
                    f"{self.file}: {shown(self.name)}: {bad} of its {values.size} {part} are NaN or infinite; the "
                    "checkpoint is damaged or its quantization failed; use another one"
                )


def _floats(content: DecodedWeight | FloatArray) -> list[tuple[str, FloatArray]]:
    if not isinstance(content, DecodedWeight):
        return [("values", content)]
    found = [("scales", content.scales)]
    if content.offsets is not None:
        found.append(("offsets", content.offsets))
    return [*found, ("codes", content.codes)] if content.kind == "float" else found


def load(stored: StoredTensor) -> NDArray[Any]:
    """Read the tensor into an array: bfloat16 as float32, fp8 as bytes. CheckpointError for other dtypes."""
    if stored.dtype not in _READ:
        raise CheckpointError(
            f"{stored.file}: {shown(stored.name)} is {stored.dtype}; quantized checkpoints are read with "
            f"{', '.join(_READ)}"
        )
    return stored.array()
