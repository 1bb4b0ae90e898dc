"""How far ahead few rows fetch a matrix's codes: tried at load, with the weights in the memory where they will be read.

No rule was found: on one CPU 256 bytes ahead are 1.7 times as fast as 8 KiB for rows of 2,048 columns in blocks of 128,
and 1.3 times as slow in blocks of 32 (docs/log.md). The results' bits do not depend on it.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from ctypes import pointer
from itertools import cycle

import numpy as np

from ingot.artifact.programs.operation_row import LANES
from ingot.runtime.cpu.native.kernels import Kernels, RoundedRows, aligned
from ingot.runtime.cpu.native.structures import LinearOperation, MatrixAt, ViewAt
from ingot.sizes import round_up

# 0: as the kernels do where nothing was tried.
DISTANCES = (0, 256, 2048)
# Of all matrices: fewer stay in a cache, from which nothing needs to be fetched ahead.
_LEAST_BYTES = 64 << 20
# Of the matrices of one layout: fewer are little of a step.
_LEAST_LAYOUT_BYTES = 4 << 20
_TRIAL_BYTES = 16 << 20
_ROUNDS = 4
# By which another distance must be faster than the usual one, as times vary.
_LEAST_GAIN = 1.03


def choose_distances(kernels: Kernels, operations: Sequence[LinearOperation]) -> None:
    """Set `fetch_ahead` of the operations' matrices, layout by layout, to the distance that reads them fastest.

    Takes some 10 ms for each of a model's few layouts, and nothing for a model that a cache holds.
    """
    by_layout = defaultdict[tuple[int, ...], list[LinearOperation]](list)
    for operation in operations:
        by_layout[_layout(operation)].append(operation)
    sizes = {layout: sum(_num_bytes(one) for one in alike) for layout, alike in by_layout.items()}
    if sum(sizes.values()) < _LEAST_BYTES:
        return
    trials = [_Trial(kernels, alike) for layout, alike in by_layout.items() if sizes[layout] >= _LEAST_LAYOUT_BYTES]
    for _ in range(_ROUNDS):
        for distance in DISTANCES:
            for trial in trials:
                trial.run(distance)
    for trial in trials:
        trial.choose()


class _Trial:
    """Operations whose matrices have one layout, multiplied in turn by one row."""

    def __init__(self, kernels: Kernels, alike: Sequence[LinearOperation]) -> None:
        self._kernels, self._matrices = kernels, [operation.matrix.contents for operation in alike]
        self._best = dict.fromkeys(DISTANCES, float("inf"))
        output = aligned((1, round_up(max(matrix.n for matrix in self._matrices), LANES)), np.float32)
        view = ViewAt(output.ctypes.data, output.shape[1])
        # The plain result of the matmul goes to memory of the trial's own.
        plain = [
            LinearOperation(
                matrix=pointer(matrix),
                output=view,
                rounding=operation.rounding,
                static_scale=operation.static_scale,
                alpha=1.0,
            )
            for operation, matrix in zip(alike, self._matrices, strict=True)
        ]
        self._row = RoundedRows(kernels, plain[0], np.zeros((1, self._matrices[0].k), np.float32))
        self._in_turn = cycle([piece for operation in plain for piece in _pieces(operation)])
        self._held = output

    def run(self, distance: int) -> None:
        """Multiply by some megabytes of the matrices, and keep the least time for a byte."""
        for matrix in self._matrices:
            matrix.fetch_ahead = distance
        num_bytes, begin = 0, time.perf_counter()
        while num_bytes < _TRIAL_BYTES:
            operation, first, end = next(self._in_turn)
            self._row.multiply(self._kernels, operation, first, end)
            num_bytes += (end - first) * operation.matrix.contents.tile_bytes
        self._best[distance] = min(self._best[distance], (time.perf_counter() - begin) / num_bytes)

    def choose(self) -> None:
        """Leave the matrices with the distance that was best."""
        best = min(self._best, key=self._best.__getitem__)
        if self._best[0] < _LEAST_GAIN * self._best[best]:
            best = 0
        for matrix in self._matrices:
            matrix.fetch_ahead = best


def _pieces(operation: LinearOperation) -> Iterator[tuple[LinearOperation, int, int]]:
    """The operation with first and end of its tiles, in pieces of about a trial's bytes."""
    matrix = operation.matrix.contents
    tiles, step = _num_tiles(matrix), max(1, _TRIAL_BYTES // matrix.tile_bytes)
    return ((operation, first, min(tiles, first + step)) for first in range(0, tiles, step))


def _num_bytes(operation: LinearOperation) -> int:
    matrix = operation.matrix.contents
    return _num_tiles(matrix) * int(matrix.tile_bytes)


def _num_tiles(matrix: MatrixAt) -> int:
    return -(-int(matrix.n) // LANES)


def _layout(operation: LinearOperation) -> tuple[int, ...]:
    """Return all that the order of reading depends on: no address, and no number of tiles."""
    matrix = operation.matrix.contents
    fields = (name for name, *_ in MatrixAt._fields_ if name not in {"tiles", "n", "fetch_ahead"})
    return (*(int(getattr(matrix, name)) for name in fields), operation.rounding)
