"""float8 weights: codes as in the table of e4m3fn, scales per row or per tensor, refusals."""

import numpy as np
import pytest

from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.numerics.float8 import round_float8, to_float8
from ingot.pipeline.checkpoint.formats.codes import from_e4m3


def weight(rows: int = 40, columns: int = 172) -> Float32Array:
    rng = np.random.default_rng(1)
    return (rng.standard_normal((rows, columns)) * 10.0 ** rng.uniform(-4, 2, (rows, 1))).astype(np.float32)


def test_every_code_is_rounded_to_itself() -> None:
    codes = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])  # NaN
    assert to_float8(from_e4m3(codes)).view(np.uint8).tolist() == codes.tolist()


def test_numbers_between_two_codes_are_rounded_to_nearest_and_ties_to_even() -> None:
    table = np.sort(from_e4m3(np.arange(0x7F, dtype=np.uint8)))
    low, high = table[:-1], table[1:]
    middle = ((low.astype(np.float64) + high) / 2).astype(np.float32)
    found = to_float8(middle).astype(np.float32)
    even = np.where(np.arange(len(low)) % 2 == 0, low, high)
    np.testing.assert_array_equal(found, even)
    np.testing.assert_array_equal(to_float8(np.nextafter(middle, high)).astype(np.float32), high)


def test_numbers_that_are_too_large_saturate() -> None:
    huge = np.array([449.0, 1e30, -1e30, 480.0], np.float32)
    assert to_float8(huge).astype(np.float32).tolist() == [448.0, 448.0, -448.0, 448.0]


@pytest.mark.parametrize("per_tensor", [False, True])
def test_the_largest_code_is_448_and_the_search_loses_no_more(per_tensor: bool) -> None:
    plain, searched = (round_float8(weight(), per_tensor=per_tensor, clip=clip) for clip in (False, True))
    peaks = np.abs(plain.codes.astype(np.float32)).max(axis=1)
    assert (peaks.max() if per_tensor else peaks.min()) == 448
    assert len(np.unique(plain.scale)) == (1 if per_tensor else 40)
    assert searched.squared_error <= plain.squared_error
    restored = plain.codes.astype(np.float32) * plain.scale[:, None]
    assert plain.squared_error == pytest.approx(float(np.square(weight() - restored, dtype=np.float64).sum()), rel=1e-5)


def test_rows_of_zeros_stay_and_nan_is_refused() -> None:
    zero = weight()
    zero[3] = 0
    assert not round_float8(zero, per_tensor=False, clip=True).codes[3].astype(np.float32).any()
    zero[3, 1] = np.inf
    with pytest.raises(ValueError, match="NaN or infinite"):
        round_float8(zero, per_tensor=False, clip=True)
