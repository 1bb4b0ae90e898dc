"""The kernels of one instruction set by ctypes (kernels.h): one matmul or row at a time, for trials, tests, benchmarks.

A step calls them from C (launch_program.c).
"""

from ctypes import CFUNCTYPE, POINTER, Structure, addressof, byref, c_char_p, c_int, c_int64, c_void_p, pointer
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.programs.operation_row import LANES
from ingot.artifact.programs.recurrent import CHANNEL_TILE, STATE_TILE
from ingot.errors import EngineError
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.cpu.native.structures import (
    CombineOperation,
    ConvolveOperation,
    DeltaRuleOperation,
    EmbedOperation,
    ExpertsOperation,
    LinearOperation,
    LowRankAt,
    MatrixAt,
    NormalizeOperation,
    ScanOperation,
)
from ingot.runtime.forward_batch import FloatArray


class LowRankRows(Structure):
    """kernels.h's struct low_rank_rows."""

    _fields_ = (
        ("changes", c_void_p),
        ("slots", c_void_p),
        ("places", c_void_p),
        ("results", c_void_p),
        ("stride", c_int64),
    )


class PackedActivations(Structure):
    """kernels.h's struct activations."""

    _fields_ = (
        ("values", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("count", c_int),
        ("low_rank", c_void_p),
    )


_LINEAR, _ROWS = POINTER(LinearOperation), POINTER(PackedActivations)


class Stretch(Structure):
    """kernels.h's struct stretch."""

    _fields_ = (("first", c_int64), ("slot", c_int64), ("count", c_int), ("is_fresh", c_int))


class Kernels(Structure):
    """kernels.h's struct kernels."""

    _fields_ = (
        ("name", c_char_p),
        ("max_height", c_int),
        ("round_row", CFUNCTYPE(None, _LINEAR, c_void_p, _ROWS, c_int, c_int, c_int, c_void_p)),
        ("multiply", CFUNCTYPE(None, _LINEAR, _ROWS, c_int, c_int, c_int)),
        ("project_rows", CFUNCTYPE(None, POINTER(MatrixAt), c_void_p, c_int, c_void_p, c_int64, c_int, c_int)),
        ("embed_row", CFUNCTYPE(None, POINTER(EmbedOperation), c_int64, c_int64)),
        ("normalize_row", CFUNCTYPE(None, POINTER(NormalizeOperation), c_int64, c_int64)),
        ("combine_row", CFUNCTYPE(None, POINTER(CombineOperation), c_int64, c_int64)),
        ("score_row", CFUNCTYPE(None, POINTER(ExpertsOperation), c_void_p, c_void_p)),
        (
            "add_experts_row",
            CFUNCTYPE(None, POINTER(ExpertsOperation), c_void_p, c_int64, c_void_p, c_void_p, c_int64),
        ),
        ("convolve_tile", CFUNCTYPE(None, POINTER(ConvolveOperation), POINTER(Stretch), c_int)),
        ("delta_rule_tile", CFUNCTYPE(None, POINTER(DeltaRuleOperation), POINTER(Stretch), c_int, c_int)),
        ("scan_tile", CFUNCTYPE(None, POINTER(ScanOperation), POINTER(Stretch), c_int, c_int)),
    )

    def run_recurrent(self, operation: Structure, tokens: int, slot: int) -> None:
        """Run a recurrent layer over the first `tokens` tokens of a sequence."""
        rows = Stretch(0, slot, tokens, True)
        if isinstance(operation, ConvolveOperation):
            for tile in range(-(-operation.channels // CHANNEL_TILE)):
                self.convolve_tile(byref(operation), byref(rows), tile)
            return
        is_scan = isinstance(operation, ScanOperation)
        run = self.scan_tile if is_scan else self.delta_rule_tile
        columns, heads = (
            (operation.head_dim, operation.num_heads) if is_scan else (operation.value_dim, operation.num_value_heads)
        )
        for head in range(heads):
            for tile in range(-(-columns // STATE_TILE)):
                run(byref(operation), byref(rows), head, tile)


def find_kernels(name: str) -> Kernels:
    """Return the kernels of an instruction set; EngineError when this CPU or build does not have it."""
    library = native_library()
    if library is None:
        raise EngineError(f"kernels of {name}: the library was not built; install with a C compiler")
    library.find_kernels.argtypes, library.find_kernels.restype = (c_char_p,), POINTER(Kernels)
    found = library.find_kernels(name.encode())
    if not found:
        raise EngineError(f"kernels of {name}: this CPU or the library does not have the instruction set")
    kernels: Kernels = found.contents
    return kernels


class RoundedRows:
    """Rows x [rows, k] as `multiply` reads them: normed and rounded by `linear`."""

    def __init__(self, kernels: Kernels, linear: LinearOperation, x: FloatArray) -> None:
        matrix, rows = linear.matrix.contents, len(x)
        self.count = rows
        self._values = aligned((rows, matrix.padded_k), np.int8 if linear.rounding else np.float32)
        blocks = -(-matrix.padded_k // max(1, matrix.block))
        self._scales, self._sums = aligned((rows, blocks), np.float32), aligned((rows, blocks), np.int32)
        self.structure = PackedActivations(
            *(array.ctypes.data for array in (self._values, self._scales, self._sums)), rows
        )
        scratch = aligned((-(-matrix.padded_k // LANES) * LANES,), np.float32)
        for first in range(0, rows, kernels.max_height):
            height = min(rows - first, kernels.max_height)
            for m in range(height):
                row = np.ascontiguousarray(x[first + m], np.float32)
                place = (first, height, m, scratch.ctypes.data)
                kernels.round_row(byref(linear), row.ctypes.data, byref(self.structure), *place)

    def change(self, kernels: Kernels, change: LowRankAt, is_changed: NDArray[np.bool_], x: FloatArray) -> None:
        """Let `multiply` add a low-rank change to the rows that are marked [rows]; x [rows, k], before rounding."""
        slots, places = np.where(is_changed, 0, -1).astype(np.int32), np.arange(len(x), dtype=np.int32)
        results = aligned((len(x), change.a.n), np.float32)
        for row in range(len(x)):
            one = c_void_p(x[row].ctypes.data)
            tiles = change.a.n // LANES
            kernels.project_rows(byref(change.a), addressof(one), 1, results[row].ctypes.data, change.a.n, 0, tiles)
        changes = (POINTER(LowRankAt) * 1)(pointer(change))
        rows = LowRankRows(addressof(changes), slots.ctypes.data, places.ctypes.data, results.ctypes.data, change.a.n)
        self._held = (slots, places, results, changes, rows)
        self.structure.low_rank = addressof(rows)

    def multiply(self, kernels: Kernels, linear: LinearOperation, begin: int, end: int) -> None:
        """Fill tiles begin .. end of linear's output columns."""
        kernels.multiply(byref(linear), byref(self.structure), self.count, begin, end)


def aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array that begins at 64 bytes, filled with bytes that are NaN as floats."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(size + 64, 255, np.uint8)
    start = -memory.ctypes.data % 64
    array: NDArray[Any] = memory[start : start + size].view(dtype).reshape(shape)
    return array
