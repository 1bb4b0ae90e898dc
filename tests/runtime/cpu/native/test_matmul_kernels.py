"""The matmul kernels of each instruction set that runs here: near float64; bits depend on the row alone."""

import numpy as np
import pytest

from ingot.artifact.programs.cpu_program import Rounding
from ingot.artifact.programs.operation_row import Form
from ingot.runtime.forward_batch import FloatArray
from tests.each_case import each_case
from tests.runtime.cpu.native.kernel_cases import FORMS, INTEGERS, SETS, LinearCase, needs_library, random_weight

pytestmark = needs_library

FLOAT_ERROR = 2e-6  # of the largest output: up to 700 terms in float32
INTEGER_ERROR = 4e-7  # of the largest output: one rounding per block

# block, one scale per row, zeros, bytes of a scale, rounding
INTEGER_CASES: tuple[tuple[int, bool, bool, int, Rounding], ...] = (
    (32, False, False, 2, "block"),
    (128, False, True, 2, "block"),
    (16, False, True, 4, "block"),
    (48, False, True, 2, "token"),
    (256, False, False, 4, "static"),
    (64, True, False, 4, "token"),
    (64, True, True, 2, "static"),
    (32, True, True, 2, "block"),
)


def random_rows(rng: np.random.Generator, rows: int, k: int) -> FloatArray:
    """Rows of different sizes."""
    return (rng.standard_normal((rows, k)) * np.exp(rng.standard_normal((rows, 1)))).astype(np.float32)


def check(case: LinearCase, x: FloatArray, limit: float, before: float = 0.0) -> None:
    """Compare the first instruction set with float64, and each number of rows with it, bit for bit."""
    want = case.expected(x, before)
    reference = case.run(SETS[0], x, before)
    assert np.abs(reference - want).max() <= limit * np.abs(want).max()
    for name in SETS:
        for rows in (len(x), 64, *range(9, 0, -1)):
            got = case.run(name, x[:rows], before)
            assert got.tobytes() == reference[:rows].tobytes(), (name, rows)


@each_case(("block", "per_row", "zeros", "scale_bytes", "rounding"), INTEGER_CASES)
@each_case("form", INTEGERS)
def test_integers_are_exact_within_a_block_and_depend_on_the_row_alone(
    form: Form, block: int, per_row: bool, zeros: bool, scale_bytes: int, rounding: Rounding
) -> None:
    rng = np.random.default_rng(block)
    weight = random_weight(rng, 56, 328, form, block=block, per_row=per_row, zeros=zeros, scale_bytes=scale_bytes)
    case = LinearCase(weight, rounding, static_scale=0.02 if rounding == "static" else 0.0)
    check(case, random_rows(rng, 70, 328), INTEGER_ERROR)


@each_case("k", [331, 4, 700])
@each_case("form", FORMS[:4])
def test_floats_are_near_float64_and_depend_on_the_row_alone(form: Form, k: int) -> None:
    rng = np.random.default_rng(k)
    check(LinearCase(random_weight(rng, 56, k, form)), random_rows(rng, 70, k), FLOAT_ERROR)


@each_case("form", FORMS)
def test_512_rows_equal_the_same_rows_alone(form: Form) -> None:
    rng = np.random.default_rng(3)
    case = LinearCase(random_weight(rng, 40, 96, form), "block" if form in INTEGERS else "none")
    x = random_rows(rng, 512, 96)
    together = case.run(SETS[0], x)
    for name in SETS:
        assert case.run(name, x).tobytes() == together.tobytes()
    for row in (0, 11, 12, 300, 511):
        assert case.run(SETS[0], x[row : row + 1]).tobytes() == together[row : row + 1].tobytes()


@each_case(("block", "rounding"), [(256, "static"), (512, "token"), (1024, "static")])
@each_case("form", INTEGERS)
def test_the_sum_of_a_block_of_equal_codes_is_exact_beyond_16_bits(form: Form, block: int, rounding: Rounding) -> None:
    rng = np.random.default_rng(block)
    weight = random_weight(rng, 24, 1024, form, block=block, zeros=True, scale_bytes=4)
    case = LinearCase(weight, rounding, static_scale=1.0 if rounding == "static" else 0.0)
    check(case, np.full((13, 1024), -500.0, np.float32), INTEGER_ERROR)


@each_case("form", INTEGERS)
@each_case("zero", ["low", "middle", "high"])
def test_the_largest_codes_do_not_saturate(form: Form, zero: str) -> None:
    """All codes at one end, activations -128 and 127, a whole block: the sum is exact."""
    rng = np.random.default_rng(1)
    weight = random_weight(rng, 32, 256, form, block=256, zeros=zero != "middle", scale_bytes=4)
    top = (1 << int(form[3:])) - 1
    weight.codes[:16], weight.codes[16:] = 0, top
    assert weight.scales is not None
    weight.scales[:] = 1
    if weight.zeros is not None:
        weight.zeros[:] = 0 if zero == "low" else top
    weight.__post_init__()
    x = np.stack([np.full(256, value, np.float32) for value in (-500.0, -127.0, 127.0, 500.0)])
    x = np.vstack([x, x * np.where(np.arange(256) % 2, 1, -1)])
    case = LinearCase(weight, "static", static_scale=1.0)
    want = np.clip(x, -128, 127).astype(np.float64) @ weight.values.T
    for name in SETS:
        np.testing.assert_array_equal(case.run(name, x.astype(np.float32)), want)


@each_case("rounding", ["block", "token", "static"])
@each_case("form", INTEGERS)
def test_rows_that_are_not_finite_become_nan_and_no_others(form: Form, rounding: Rounding) -> None:
    rng = np.random.default_rng(2)
    case = LinearCase(random_weight(rng, 40, 96, form, zeros=True), rounding, static_scale=0.02)
    x = random_rows(rng, 16, 96)
    clean = case.run(SETS[0], x)
    bad = {1: np.nan, 5: np.inf, 13: -np.inf}
    for row, value in bad.items():
        x[row, 7 * row] = value
    for name in SETS:
        got = case.run(name, x)
        for row in range(16):
            expected = np.full_like(clean[row], np.nan) if row in bad else clean[row]
            np.testing.assert_array_equal(got[row], expected)


@each_case("form", FORMS)
def test_rows_of_zeros_give_zeros(form: Form) -> None:
    rng = np.random.default_rng(4)
    case = LinearCase(random_weight(rng, 40, 96, form, zeros=True), "block" if form in INTEGERS else "none")
    x = random_rows(rng, 5, 96)
    x[3] = 0
    x[4, 32:64] = 0  # one block
    for name in SETS:
        got = case.run(name, x)
        assert not got[3].any()
        np.testing.assert_allclose(got, case.expected(x), atol=1e-5)


@pytest.mark.parametrize("form", ["float16", "int4"])
def test_a_share_of_the_columns_leaves_the_others_alone(form: Form) -> None:
    rng = np.random.default_rng(5)
    case = LinearCase(random_weight(rng, 200, 64, form), "block" if form in INTEGERS else "none")
    x = random_rows(rng, 14, 64)
    whole = case.run(SETS[0], x, before=np.nan)
    for name in SETS:
        for begin, end in ((0, 1), (3, 9), (9, 13)):
            got = case.run(name, x, before=np.nan, units=(begin, end))
            columns = slice(16 * begin, min(16 * end, 200))
            np.testing.assert_array_equal(got[:, columns], whole[:, columns])
            got[:, columns] = np.nan
            assert np.isnan(got).all()
