"""Small float formats at their edges: zero, subnormals, the largest number, NaN."""

import numpy as np

from ingot.pipeline.formats.float_codes import from_bfloat16, from_e2m1, from_e4m3, from_e8m0


def test_e4m3_has_subnormals_no_infinity_and_448_as_its_largest() -> None:
    codes = np.array([0x00, 0x01, 0x08, 0x38, 0x7E, 0x80, 0xB8, 0xFE], np.uint8)
    assert from_e4m3(codes).tolist() == [0, 2.0**-9, 2.0**-6, 1, 448, 0, -1, -448]
    assert np.isnan(from_e4m3(np.array([0x7F, 0xFF], np.uint8))).all()


def test_e2m1_counts_to_six_and_has_a_sign() -> None:
    assert from_e2m1(np.arange(16, dtype=np.uint8)).tolist()[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert from_e2m1(np.array([9, 15], np.uint8)).tolist() == [-0.5, -6]


def test_e8m0_is_powers_of_two() -> None:
    assert from_e8m0(np.array([0, 126, 127, 254], np.uint8)).tolist() == [2.0**-127, 0.5, 1, 2.0**127]
    assert np.isnan(from_e8m0(np.array([255], np.uint8))).all()


def test_bfloat16_is_the_upper_half_of_a_float32() -> None:
    assert from_bfloat16(np.array([0x3F80, 0xC000], np.uint16)).tolist() == [1, -2]
