"""Packing is what the layouts say, and unpacking undoes it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.pipeline.formats.bits import num_words, pack_words, unpack_words


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
def test_the_first_code_stands_in_the_lowest_bits(bits: int, codes: list[int], word: int) -> None:
    assert pack_words(np.array([codes]), bits).view(np.uint32).tolist() == [[word]]


def test_three_bit_codes_cross_words() -> None:
    codes = np.zeros((1, 32), np.uint8)
    codes[0, 10] = 0b111  # bits 30 to 32
    assert pack_words(codes, 3).view(np.uint32).tolist() == [[0xC0000000, 1, 0]]
