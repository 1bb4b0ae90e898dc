"""Codes are packed as documented, and unpacking undoes it. Small floats: zero, subnormals, largest number, NaN."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.pipeline.checkpoint.formats.codes import (
    from_e2m1,
    from_e4m3,
    from_e8m0,
    num_words,
    pack_words,
    unpack_words,
)


@given(st.sampled_from([2, 3, 4, 8]), st.integers(1, 5), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_unpacking_undoes_packing(bits: int, rows: int, count: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, count)).astype(np.uint8)
    words = pack_words(codes, bits)
    assert words.shape == (rows, num_words(count, bits))
    assert np.array_equal(unpack_words(words, bits, count), codes)


@pytest.mark.parametrize(
    ("bits", "codes", "word"),
    [(4, [1, 2, 3, 4, 5, 6, 7, 8], 0x87654321), (2, [1, 2, 3] + [0] * 13, 0b111001), (8, [1, 2, 3, 4], 0x04030201)],
)
def test_the_first_code_is_in_the_lowest_bits(bits: int, codes: list[int], word: int) -> None:
    assert pack_words(np.array([codes]), bits).view(np.uint32).tolist() == [[word]]


def test_three_bit_codes_cross_words() -> None:
    codes = np.zeros((1, 32), np.uint8)
    codes[0, 10] = 0b111  # bits 30 to 32
    assert pack_words(codes, 3).view(np.uint32).tolist() == [[0xC0000000, 1, 0]]


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
