"""Rotations of channels: random or fixed Hadamard matrices, or random orthogonal ones, applied to rows of numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.rotation.hadamard import multiply_hadamard, paley_factor

Matrix = Literal["hadamard", "random-hadamard", "orthogonal"]
Array = NDArray[Any]
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Rotation:
    """Orthogonal matrices Q, one for each of `parts` equal pieces of the channels.

    signs       [parts, size] of random Hadamard matrices: Q = diag(signs) H / sqrt(size)
    matrices    [parts, size, size] of orthogonal ones; with neither, Q = H / sqrt(size)
    """

    parts: int
    size: int
    signs: Array | None = None
    matrices: Array | None = None

    def __call__(self, rows: Array) -> Array:
        """rows [..., parts * size] times Q piece by piece, computed in float64, in the rows' dtype."""
        flat = rows.reshape(-1, self.parts, self.size)
        result = np.empty_like(flat, order="C")
        step = max(1, _CHUNK_ELEMENTS // (self.parts * self.size))
        for start in range(0, len(flat), step):
            result[start : start + step] = self._turn(flat[start : start + step].astype(np.float64))
        return result.reshape(rows.shape)

    def _turn(self, pieces: Array) -> Array:
        if self.matrices is not None:
            return np.stack([pieces[:, part] @ matrix for part, matrix in enumerate(self.matrices)], axis=1)
        signed = pieces if self.signs is None else pieces * self.signs
        turned: Array = multiply_hadamard(signed) / self.size**0.5
        return turned


def make_rotation(matrix: Matrix, parts: int, size: int, seed: tuple[int, ...]) -> Rotation:
    """A rotation drawn from the seed; PassError where no Hadamard matrix of that size is known."""
    random = np.random.default_rng(seed)
    if matrix == "orthogonal":
        return Rotation(parts, size, matrices=np.stack([_orthogonal(random, size) for _ in range(parts)]))
    if paley_factor(size) is None:
        raise PassError(
            f"no Hadamard matrix of size {size} is known (2^k * m, m one of Paley's orders); set matrix: orthogonal"
        )
    signs = random.choice([-1.0, 1.0], (parts, size)) if matrix == "random-hadamard" else None
    return Rotation(parts, size, signs)


def _orthogonal(random: np.random.Generator, size: int) -> Array:
    """Uniform over all orthogonal matrices: QR of a normal one with R's diagonal made positive (Mezzadri 2007)."""
    q, r = np.linalg.qr(random.standard_normal((size, size)))
    uniform: Array = q * np.sign(np.diag(r))
    return uniform


def of_columns(rotation: Rotation, scale: Array | None = None) -> Callable[[Array], Array]:
    """W [out, in] -> W diag(scale) Q: a layer that reads rotated channels."""
    return lambda weight: rotation(weight if scale is None else weight * scale)


def of_rows(rotation: Rotation, rows: slice) -> Callable[[Array], Array]:
    """W [out, in] -> Q^T W on some rows, or b [out] -> b Q: a layer that gives rotated channels."""

    def change(weight: Array) -> Array:
        weight[rows] = rotation(weight[rows].T).T
        return weight

    return change


def of_heads(rotation: Rotation, group: int) -> Callable[[Array], Array]:
    """W [out, heads * dim] -> columns of each head times the Q of its group of `group` heads that share values."""

    def change(weight: Array) -> Array:
        shape = (len(weight), rotation.parts, group, rotation.size)
        grouped = weight.reshape(shape).swapaxes(1, 2)  # [out, group, kv heads, dim]
        turned = rotation(grouped.reshape(len(weight), group, -1)).reshape(grouped.shape)
        return turned.swapaxes(1, 2).reshape(weight.shape)

    return change
