"""Results close to numpy's, and the same bits whatever the number of threads."""

import hashlib
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ingot.passes.numerics import linear_algebra
from ingot.passes.numerics.linear_algebra import cholesky, gram_matrix, lower_inverse, matmul, one_blas_thread
from tests.each_case import each_case

RNG = np.random.default_rng(3)


@each_case("dtype", [np.float32, np.float64])
@each_case(("rows", "inner", "columns"), [(1, 1, 1), (256, 64, 3), (700, 333, 40)])
def test_a_matmul_is_numpys(rows: int, inner: int, columns: int, dtype: type) -> None:
    left: NDArray[Any] = RNG.standard_normal((rows, inner)).astype(dtype)
    right: NDArray[Any] = RNG.standard_normal((columns, inner)).astype(dtype)
    found = matmul(left, right.T)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, left @ right.T, rtol=1e-4, atol=1e-4)


def test_a_gram_matrix_is_symmetric_to_the_bit() -> None:
    rows = RNG.standard_normal((300, 600)).astype(np.float32)
    found = gram_matrix(rows)
    assert (found == found.T).all()
    np.testing.assert_allclose(found, rows.T @ rows, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [1, 256, 257, 700])
def test_a_factor_and_its_inverse(size: int) -> None:
    rows = RNG.standard_normal((size + 50, size))
    matrix = rows.T @ rows + 0.1 * np.eye(size)
    lower = cholesky(matrix)
    assert (lower == np.tril(lower)).all()
    np.testing.assert_allclose(lower @ lower.T, matrix, rtol=1e-9, atol=1e-8 * size)
    inverse = lower_inverse(lower)
    assert (inverse == np.tril(inverse)).all()
    np.testing.assert_allclose(inverse @ lower, np.eye(size), atol=1e-6)


def test_a_matrix_that_is_not_positive_definite_is_refused() -> None:
    matrix = np.eye(300)
    matrix[299, 299] = -1
    with pytest.raises(np.linalg.LinAlgError):
        cholesky(matrix)


def digests() -> list[str]:
    """Digests of every function's result on seeded values; needs one_blas_thread to be of any use."""
    rng = np.random.default_rng(0)
    found = []
    with one_blas_thread():
        for dtype in (np.float32, np.float64):
            rows = rng.standard_normal((520, 333)).astype(dtype)
            gram = gram_matrix(rows)
            lower = cholesky(gram.astype(np.float64) + np.eye(333))
            for array in (gram, matmul(rows, gram), lower, lower_inverse(lower)):
                found.append(hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest())
    return found


def test_the_number_of_threads_changes_no_bit() -> None:
    code = "from tests.passes.numerics.test_linear_algebra import digests; print(*digests())"
    shown = set()
    for threads in ("1", "2", "4"):
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": threads, "INGOT_THREADS": threads}
        shown.add(subprocess.check_output([sys.executable, "-c", code], text=True, env=environment))
    assert len(shown) == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_errors_of_numbers_are_handled_as_the_caller_chose_on_any_number_of_threads(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_algebra, "num_threads", lambda: threads)
    rows = np.full((600, 300), np.inf, np.float32)
    rows[::2] = 0  # inf * 0
    with np.errstate(invalid="ignore"):
        assert np.isnan(matmul(rows, rows.T)).any()
    with np.errstate(invalid="raise"), pytest.raises(FloatingPointError, match="invalid value"):
        matmul(rows, rows.T)
