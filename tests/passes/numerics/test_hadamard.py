"""Hadamard matrices: orthogonal signs of every documented size, and the fast multiplication by them."""

from collections.abc import Iterable
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from ingot.passes.numerics.hadamard import Signs, multiply_hadamard, paley_factor
from tests.data_paths import shared_data
from tests.each_case import each_case

SUPPORTED = [n for n in range(1, 260) if paley_factor(n)]


def hadamard_matrix(size: int) -> Signs:
    """The Hadamard matrix [size, size] that `multiply_hadamard` multiplies by."""
    return multiply_hadamard(np.eye(size)).round().astype(np.int8)


@each_case("size", SUPPORTED)
def test_rows_are_signs_and_orthogonal(size: int) -> None:
    matrix = hadamard_matrix(size).astype(np.int64)
    assert set(np.unique(matrix)) <= {-1, 1}
    np.testing.assert_array_equal(matrix @ matrix.T, size * np.eye(size))


def test_every_multiple_of_four_up_to_256_is_supported_except_where_paley_has_no_matrix() -> None:
    assert [n for n in range(4, 257, 4) if n not in SUPPORTED] == [92, 116, 156, 172, 184, 188, 232, 236]


@each_case("size", [576, 896, 960, 1536, 2304, 2560, 3072, 3584, 5120, 6656, 11008, 14336])
def test_widths_of_real_models_are_supported(size: int) -> None:
    assert paley_factor(size)


@each_case("size", [0, 3, 6, 10, 92, 98])
def test_other_sizes_are_not_supported(size: int) -> None:
    assert paley_factor(size) is None


def test_an_unsupported_size_is_refused() -> None:
    with pytest.raises(ValueError, match="no Hadamard matrix of size 92 is known"):
        multiply_hadamard(np.ones((2, 92)))


@given(size=st.sampled_from(SUPPORTED), rows=st.integers(1, 4), seed=st.integers(0, 99))
def test_the_fast_transform_equals_the_matmul(size: int, rows: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((rows, 2, size))
    np.testing.assert_allclose(multiply_hadamard(values), values @ hadamard_matrix(size), atol=1e-12 * size)


@given(size=st.sampled_from(SUPPORTED), seed=st.integers(0, 99))
def test_lengths_and_angles_stay(size: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((3, size))
    turned = multiply_hadamard(values) / size**0.5
    np.testing.assert_allclose(turned @ turned.T, values @ values.T, atol=1e-10 * size)


def test_published_tables_have_every_size_and_equivalent_matrices() -> None:
    """Profiles do not change when rows and columns are permuted or negated; equivalent matrices have the same."""
    known = load_file(shared_data("golden/hadamards.safetensors"))
    assert {n for n in SUPPORTED if n <= 256} <= {int(name) for name in known}
    for size in (1, 2, 4, 8, 12, 36, 44, 60, 68):  # ours and theirs are of one type there
        assert profile(hadamard_matrix(size)) == profile(known[str(size)]), size


def profile(matrix: Signs) -> list[tuple[int, int]]:
    """Histogram of |sum over columns of four rows multiplied| (Cooper, Milas, Wallis)."""
    wide = matrix.astype(np.int32)
    pairs = np.array([wide[a] * wide[b] for a, b in combinations(range(len(wide)), 2)])
    if not len(pairs):
        return []
    return histogram(np.abs(part @ pairs.T) for part in np.array_split(pairs, max(1, len(pairs) // 500)))


def histogram(parts: Iterable[np.ndarray]) -> list[tuple[int, int]]:
    counts: dict[int, int] = {}
    for part in parts:
        for value, count in zip(*np.unique(part, return_counts=True), strict=True):
            counts[int(value)] = counts.get(int(value), 0) + int(count)
    return sorted(counts.items())
