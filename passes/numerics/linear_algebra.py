"""Matmul, Cholesky factor and its inverse with the same bits on any number of threads.

BLAS splits a matmul among its threads, and its kernels sum in other orders at the edges of the parts. So the last bits
of a result depend on the number of threads, and with them a quantized weight and the identity of its artifact. Here
BLAS computes on one thread (`one_blas_thread`), and threads of our own share the work in tiles of a fixed size.

The bits still depend on the kernels that BLAS has for this kind of processor.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context, copy_context
from functools import cache
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

from ingot.settings import num_threads

Float64Array = NDArray[np.float64]

_TILE_ROWS = 256
_LEAST_SHARED = 1 << 21  # multiplications below which starting threads costs more than it saves


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Compute with one BLAS thread in the block, in all threads of the process."""
    with ThreadpoolController().limit(limits=1, user_api="blas"):
        yield


def matmul(left: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
    """left [rows, inner] @ right [inner, columns]."""
    result = np.empty((len(left), right.shape[1]), np.result_type(left, right))

    def compute(tile: slice) -> None:
        np.matmul(left[tile], right, out=result[tile])

    _each(compute, _tiles(len(left)), left.shape[1] * result.size)
    return result


def gram_matrix(rows: NDArray[Any]) -> NDArray[Any]:
    """rows.T @ rows, symmetric to the bit: the tiles on and above the diagonal are computed, the others mirrored."""
    columns = rows.shape[1]
    result = np.empty((columns, columns), rows.dtype)

    def compute(tile: slice) -> None:
        part = rows[:, tile].T @ rows[:, tile.start :]
        width = tile.stop - tile.start
        corner, beyond = part[:, :width], part[:, width:]
        result[tile, tile] = np.triu(corner) + np.triu(corner, 1).T
        result[tile, tile.stop :], result[tile.stop :, tile] = beyond, beyond.T

    _each(compute, _tiles(columns), len(rows) * columns * columns // 2)
    return result


def cholesky(matrix: Float64Array) -> Float64Array:
    """L, lower, with matrix = L L^T, by columns of tiles. LinAlgError if the matrix is not positive definite."""
    left, lower = np.array(matrix, np.float64), np.zeros(matrix.shape)
    for tile in _tiles(len(left)):
        corner = np.linalg.cholesky(left[tile, tile])
        lower[tile, tile] = corner
        below = slice(tile.stop, None)
        if tile.stop < len(left):
            panel = matmul(left[below, tile], np.linalg.inv(corner).T)
            lower[below, tile] = panel
            left[below, below] -= matmul(panel, panel.T)
    return lower


def lower_inverse(lower: Float64Array) -> Float64Array:
    """The inverse of a lower triangular matrix, by halves: [[A, 0], [B, C]]^-1 = [[A', 0], [-C' B A', C']]."""
    size = len(lower)
    if size <= _TILE_ROWS:
        return np.tril(np.linalg.inv(lower))
    half = size // 2
    result = np.zeros_like(lower)
    first, second = lower_inverse(lower[:half, :half]), lower_inverse(lower[half:, half:])
    result[:half, :half], result[half:, half:] = first, second
    result[half:, :half] = -matmul(second, matmul(lower[half:, :half], first))
    return result


def _tiles(rows: int) -> list[slice]:
    return [slice(at, min(at + _TILE_ROWS, rows)) for at in range(0, rows, _TILE_ROWS)]


def _each(compute: Callable[[slice], None], tiles: Sequence[slice], multiplications: int) -> None:
    """Compute all tiles, on several threads if that pays. Which thread computes a tile does not change its bits.

    Threads compute in the caller's context, so np.errstate holds in them too.
    """
    threads = num_threads()
    if threads == 1 or multiplications < _LEAST_SHARED:
        for tile in tiles:
            compute(tile)
    else:
        contexts = [copy_context() for _ in tiles]  # each for one thread at a time
        list(_pool(threads).map(Context.run, contexts, repeat(compute), tiles))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "ingot-matmul")
