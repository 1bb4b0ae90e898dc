"""Hadamard matrices: entries +1 and -1, orthogonal rows. Of any size 2^k * m where m is 1 or one of Paley's orders.

    H(2n) = [[H(n), H(n)], [H(n), -H(n)]]         Sylvester
    m = q + 1,     q a prime power, 3 mod 4       Paley I (12, 20, 24, 28, 44, ...)
    m = 2 (q + 1), q a prime power, 1 mod 4       Paley II (12, 20, 28, 36, 52, ...)

Paley, On orthogonal matrices, J. Math. Phys. 12 (1933). Both stand on the quadratic character of the field GF(q).
Sizes with no such m (of the multiples of 4, 92 is the first) have matrices by other constructions, not made here.
"""

from functools import cache
from itertools import product
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Signs = NDArray[np.int8]
FloatArray = TypeVar("FloatArray", bound=NDArray[Any])


def paley_factor(size: int) -> int | None:
    """The smallest m with size = 2^k * m that is 1 or one of Paley's orders; None where there is none."""
    if size < 1:
        return None
    odd = size // (size & -size)
    candidates = (odd << shift for shift in range((size // odd).bit_length()))
    return next((m for m in candidates if m == 1 or _paley_field(m)), None)


def hadamard_matrix(size: int) -> Signs:
    """The Hadamard matrix [size, size] that `multiply_hadamard` multiplies by. ValueError where none is known."""
    return multiply_hadamard(np.eye(size)).round().astype(np.int8)


def multiply_hadamard(rows: FloatArray) -> FloatArray:
    """rows [..., n] times the Hadamard matrix [n, n], in the rows' dtype; the fast Walsh-Hadamard transform.

    n = 2^k * m takes n (k + m) additions and products for a row. Divide by sqrt(n) for a rotation. ValueError where no
    matrix of that size is known.
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
    """The field behind an order as (type of the construction, p, k) with q = p^k; None where it is not Paley's."""
    for kind, q in ((1, order - 1), (2, order // 2 - 1)):
        prime = _prime_of_power(q)
        if prime and q % 4 == (3 if kind == 1 else 1) and order % 4 == 0:
            return kind, *prime
    return None


def _prime_of_power(number: int) -> tuple[int, int] | None:
    """(p, k) with number = p^k and p prime; None where there are none."""
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
    """Paley's matrix [order, order], of type I where both have that order."""
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
    """chi(a - b) for all a, b of GF(p^k) [q, q]: 1 for a square, -1 for another, 0 on the diagonal."""
    elements = np.array(list(product(range(prime), repeat=exponent)))  # [q, k], coefficients of 1, x, ...
    weights = prime ** np.arange(exponent)[::-1]
    character = np.zeros(len(elements), np.int8)
    powers = _powers_of_generator(prime, exponent) @ weights
    character[powers[0::2]], character[powers[1::2]] = 1, -1
    differences = (elements[:, None] - elements[None, :]) % prime
    found: Signs = character[differences @ weights]
    return found


def _powers_of_generator(prime: int, exponent: int) -> NDArray[np.int64]:
    """1, x, x^2, ... [q - 1, k] modulo the first polynomial x^k = c(x) for which they are all but zero."""
    one = (1, *([0] * (exponent - 1)))
    for reduced in product(range(prime), repeat=exponent):
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
