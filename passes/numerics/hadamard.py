"""Hadamard matrices, and rotations of channels made of them.

A Hadamard matrix has entries +1 and -1 and orthogonal rows. There is one here for any size 2^k * m, where m is 1 or one
of Paley's orders:

    H(2n) = [[H(n), H(n)], [H(n), -H(n)]]         Sylvester
    m = q + 1,     q a prime power, 3 mod 4       Paley I (12, 20, 24, 28, 44, ...)
    m = 2 (q + 1), q a prime power, 1 mod 4       Paley II (12, 20, 28, 36, 52, ...)

Paley, On orthogonal matrices, J. Math. Phys. 12 (1933). Both use the quadratic character of the field GF(q). Sizes
without such an m (of the multiples of 4, 92 is the first) need other constructions, which are not implemented.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from ingot.errors import PassError

Signs = NDArray[np.int8]
FloatArray = TypeVar("FloatArray", bound=NDArray[Any])
Matrix = Literal["hadamard", "random-hadamard", "orthogonal"]
Array = NDArray[Any]
_CHUNK_ELEMENTS = 1 << 20


def paley_factor(size: int) -> int | None:
    """The smallest m with size = 2^k * m that is 1 or one of Paley's orders; None if no such m exists."""
    if size < 1:
        return None
    odd = size // (size & -size)
    candidates = (odd << shift for shift in range((size // odd).bit_length()))
    return next((m for m in candidates if m == 1 or _paley_field(m)), None)


def multiply_hadamard(rows: FloatArray) -> FloatArray:
    """Multiply rows [..., n] by the Hadamard matrix [n, n], in the rows' dtype: the fast Walsh-Hadamard transform.

    A row of n = 2^k * m takes n (k + m) multiply-adds. Divide by sqrt(n) for a rotation. ValueError for an unsupported
    size.
    """
    size = rows.shape[-1]
    factor = paley_factor(size)
    if factor is None:
        raise ValueError(f"no Hadamard matrix of size {size} is known")
    parts = rows.reshape(-1, size // factor, factor)
    if factor > 1:
        parts = parts @ _paley(factor).astype(rows.dtype)
    span = parts.shape[1] // 2
    while span:
        halves = parts.reshape(len(parts), -1, 2, span, factor)
        parts = np.stack([halves[:, :, 0] + halves[:, :, 1], halves[:, :, 0] - halves[:, :, 1]], axis=2)
        span //= 2
    result: FloatArray = parts.reshape(rows.shape)  # type: ignore[assignment]
    return result


def _paley_field(order: int) -> tuple[int, int, int] | None:
    """Construction (1 or 2) and field of an order as (construction, p, k) with q = p^k; None if it is not Paley's."""
    for kind, q in ((1, order - 1), (2, order // 2 - 1)):
        prime = _prime_of_power(q)
        if prime and q % 4 == (3 if kind == 1 else 1) and order % 4 == 0:
            return kind, *prime
    return None


def _prime_of_power(number: int) -> tuple[int, int] | None:
    """(p, k) with number = p^k and p prime; None if the number is not a prime power."""
    if number < 2:
        return None
    prime = next((p for p in range(2, int(number**0.5) + 1) if number % p == 0), number)
    exponent = 0
    while number % prime == 0:
        number //= prime
        exponent += 1
    return (prime, exponent) if number == 1 else None


@cache
def _paley(order: int) -> Signs:
    """Paley's matrix [order, order], of construction I where both have that order."""
    field = _paley_field(order)
    assert field is not None
    kind, prime, exponent = field
    character = _character_of_differences(prime, exponent)
    border = np.ones(len(character), np.int8)
    sign = -1 if kind == 1 else 1
    core = np.block([[np.zeros((1, 1), np.int8), border[None, :]], [sign * border[:, None], character]])
    identity = np.eye(len(core), dtype=np.int8)
    if kind == 1:
        return np.asarray(core + identity, np.int8)
    plus, minus = np.array([[1, 1], [1, -1]], np.int8), np.array([[1, -1], [-1, -1]], np.int8)
    return np.asarray(np.kron(core, plus) + np.kron(identity, minus), np.int8)


def _character_of_differences(prime: int, exponent: int) -> Signs:
    """chi(a - b) for all a, b of GF(p^k) [q, q]: 1 for a square, -1 for a non-square, 0 on the diagonal."""
    elements = np.array(list(itertools.product(range(prime), repeat=exponent)))  # [q, k], coefficients of 1, x, ...
    weights = prime ** np.arange(exponent)[::-1]
    character = np.zeros(len(elements), np.int8)
    powers = _powers_of_generator(prime, exponent) @ weights
    character[powers[0::2]], character[powers[1::2]] = 1, -1
    differences = (elements[:, None] - elements[None, :]) % prime
    found: Signs = character[differences @ weights]
    return found


def _powers_of_generator(prime: int, exponent: int) -> NDArray[np.int64]:
    """1, x, x^2, ... [q - 1, k] modulo the first polynomial x^k = c(x) for which these are all nonzero elements."""
    one = (1, *([0] * (exponent - 1)))
    for reduced in itertools.product(range(prime), repeat=exponent):
        powers = [one]
        while True:
            *lower, top = powers[-1]
            following = tuple((a + top * c) % prime for a, c in zip((0, *lower), reduced, strict=True))
            if following == one or not any(following) or len(powers) == prime**exponent:
                break
            powers.append(following)
        if following == one and len(powers) == prime**exponent - 1:
            return np.array(powers)
    raise AssertionError(f"every field has a generator, GF({prime}^{exponent}) too")


@dataclass(frozen=True)
class Rotation:
    """Orthogonal matrices Q, one for each of `parts` equal pieces of the channels.

    signs       [parts, size]: Q = diag(signs) H / sqrt(size)
    matrices    [parts, size, size]: Q itself; with neither signs nor matrices, Q = H / sqrt(size)
    """

    parts: int
    size: int
    signs: Array | None = None
    matrices: Array | None = None

    def __call__(self, rows: Array) -> Array:
        """Multiply rows [..., parts * size] by Q, piece by piece, in float64; the result has the rows' dtype."""
        flat = rows.reshape(-1, self.parts, self.size)
        result = np.empty_like(flat, order="C")
        step = max(1, _CHUNK_ELEMENTS // (self.parts * self.size))
        for start in range(0, len(flat), step):
            result[start : start + step] = self._rotate(flat[start : start + step].astype(np.float64))
        return result.reshape(rows.shape)

    def _rotate(self, pieces: Array) -> Array:
        if self.matrices is not None:
            return np.stack([pieces[:, part] @ matrix for part, matrix in enumerate(self.matrices)], axis=1)
        signed = pieces if self.signs is None else pieces * self.signs
        turned: Array = multiply_hadamard(signed) / self.size**0.5
        return turned


def make_rotation(matrix: Matrix, parts: int, size: int, seed: tuple[int, ...]) -> Rotation:
    """Make a rotation, random ones from the seed; PassError for a size without a Hadamard matrix."""
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
    """A matrix uniform over all orthogonal ones: QR of a normal one, R's diagonal made positive (Mezzadri 2007)."""
    q, r = np.linalg.qr(random.standard_normal((size, size)))
    uniform: Array = q * np.sign(np.diag(r))
    return uniform


def of_columns(rotation: Rotation, scale: Array | None = None) -> Callable[[Array], Array]:
    """Return the change W [out, in] -> W diag(scale) Q of a layer that reads rotated channels."""
    return lambda weight: rotation(weight if scale is None else weight * scale)


def of_rows(rotation: Rotation, rows: slice) -> Callable[[Array], Array]:
    """Return the change of rows W [out, in] -> Q^T W, or b [out] -> b Q, of a layer that makes rotated channels."""

    def change(weight: Array) -> Array:
        weight[rows] = rotation(weight[rows].T).T
        return weight

    return change


def of_heads(rotation: Rotation, group: int) -> Callable[[Array], Array]:
    """Return the change of W [out, heads * dim] that multiplies each head's columns by Q of its group.

    A group is `group` heads that share values.
    """

    def change(weight: Array) -> Array:
        shape = (len(weight), rotation.parts, group, rotation.size)
        grouped = weight.reshape(shape).swapaxes(1, 2)  # [out, group, kv heads, dim]
        turned = rotation(grouped.reshape(len(weight), group, -1)).reshape(grouped.shape)
        return turned.swapaxes(1, 2).reshape(weight.shape)

    return change
