"""Every other form of a weight has the same float32 values; a form that does not exist is refused with the reason."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ingot.passes.numerics.rounding import dequantize
from ingot.pipeline.checkpoint.formats import awq, compressed_weights, gptq
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.checkpoint.formats.exact_forms import (
    Zeros,
    as_integers,
    dequantize_operands,
    differences,
    regrouped,
    signed,
    unsigned,
)
from ingot.pipeline.checkpoint.formats.gguf_blocks import BLOCK_TYPES, decode_rows, encode_rows
from ingot.pipeline.interchange.layers import facts_of, minima_of
from tests.each_case import each_case

ROWS, COLUMNS = 32, 192
KINDS: tuple[Zeros, ...] = ("middle", "from zero", "from one")
Q4_1 = next(kind for kind in BLOCK_TYPES.values() if kind.name == "Q4_1")


@st.composite
def weights(draw: st.DrawFn, float16: bool = False) -> DecodedWeight:
    """Codes of 2 to 8 bits, signed or not, symmetric or not, in groups, some in activation order."""
    bits, group = draw(st.integers(2, 8)), draw(st.sampled_from([16, 32, 64, 96, 192]))
    is_signed, has_zeros, ordered = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    low = -(1 << (bits - 1)) if is_signed else 0
    groups = COLUMNS // group
    points = rng.integers(low, low + (1 << bits) + (not is_signed), (ROWS, groups)).astype(np.int16)
    middle = np.full_like(points, low + (1 << (bits - 1)))
    scales = rng.uniform(0.01, 1, (ROWS, groups)) * draw(st.sampled_from([1, -1]))
    return DecodedWeight(
        codes=rng.integers(low, low + (1 << bits), (ROWS, COLUMNS)).astype(np.int8 if is_signed else np.uint8),
        scales=scales.astype(np.float16 if float16 else np.float32).astype(np.float32),
        group_size=group,
        zero_points=points if has_zeros else (None if is_signed else middle),
        g_idx=rng.permutation(np.arange(COLUMNS) // group).astype(np.int32) if ordered else None,
        bits=bits,
    ).without_trivial_order()


@given(weights(), st.sampled_from(KINDS), st.integers(2, 8))
def test_codes_of_any_width_that_fits_have_the_same_values(made: DecodedWeight, zeros: Zeros, bits: int) -> None:
    needed = differences(made).bits(zeros)
    assume(needed is not None and bits >= needed)
    for form in (unsigned(made, bits, zeros), signed(made, bits, zeros)):
        assert np.array_equal(form.dequantize(), made.dequantize())
    shifted = unsigned(made, bits, zeros)
    assert shifted.zero_points is not None
    assert int(shifted.codes.max()) < 1 << bits
    first, last = {"middle": (1 << (bits - 1),) * 2, "from zero": (0, (1 << bits) - 1), "from one": (1, 1 << bits)}[
        zeros
    ]
    assert first <= int(shifted.zero_points.min()) <= int(shifted.zero_points.max()) <= last


@given(weights(), st.sampled_from(KINDS))
def test_no_zero_points_fit_in_fewer_bits_than_needed(made: DecodedWeight, zeros: Zeros) -> None:
    needed = differences(made).bits(zeros) or 9
    found = differences(made)
    for bits in range(2, needed):
        points = found.zero_points(bits, zeros, np.zeros_like(found.lowest))
        codes_fit = (points + found.lowest >= 0).all() and (points + found.highest < 1 << bits).all()
        ends = {"middle": (1 << (bits - 1),) * 2, "from zero": (0, (1 << bits) - 1), "from one": (1, 1 << bits)}[zeros]
        assert not (codes_fit and ends[0] <= points.min() and points.max() <= ends[1])


@given(weights(), st.sampled_from([16, 32, 48, 96]))
def test_smaller_groups_repeat_scales(made: DecodedWeight, group: int) -> None:
    assume(made.g_idx is None and made.group_size % group == 0)
    smaller = regrouped(made, group)
    assert smaller.scales.shape == (ROWS, COLUMNS // group)
    assert np.array_equal(smaller.dequantize(), made.dequantize())


@given(weights(float16=True))
def test_every_codec_gives_back_what_fits_it(made: DecodedWeight) -> None:
    facts, expected = facts_of(made), made.dequantize()
    group = -1 if made.group_size == COLUMNS else made.group_size
    kinds: tuple[tuple[int, Zeros], ...] = ((1, "from one"), (2, "from zero"))
    for version, zeros in kinds:
        if bits := facts.code_bits(zeros, gptq.BITS):
            leaves = gptq.encode(unsigned(made, bits, zeros), bits, version)
            again = gptq.decode(**leaves, bits=bits, group_size=group, version=version)
            assert np.array_equal(again.dequantize(), expected)
    if (bits := facts.code_bits("from zero")) is not None:
        leaves = compressed_weights.encode(signed(made, bits, "from zero"), bits)
        size = None if group == -1 else group
        packed = compressed_weights.decode(leaves, "pack-quantized", bits=bits, group_size=size, block=None)
        assert np.array_equal(packed.dequantize(), expected)
    if facts.bits_for["from zero"] in range(2, 5) and made.g_idx is None:
        leaves = awq.encode(unsigned(made, 4, "from zero"))
        assert np.array_equal(awq.decode(**leaves, group_size=group).dequantize(), expected)


@given(st.integers(2, 4), st.sampled_from([32, 64, 96, 192]), st.integers(0, 2**32 - 1))
def test_q4_1_holds_zero_points_whose_minima_are_float16(bits: int, group: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (ROWS, COLUMNS // group)
    made = DecodedWeight(
        codes=rng.integers(0, 1 << bits, (ROWS, COLUMNS)).astype(np.uint8),
        scales=rng.uniform(0.01, 1, shape).astype(np.float16).astype(np.float32),
        group_size=group,
        zero_points=rng.choice([0, 1, 2], shape).astype(np.int16),  # powers of two lengthen no mantissa
        bits=bits,
    )
    assert facts_of(made).q4_1
    nibbles = unsigned(regrouped(made, 32), 4, "from zero")
    raw = encode_rows(replace(nibbles, zero_points=None, offsets=minima_of(nibbles)), "Q4_1")
    again = decode_rows(raw, Q4_1, ROWS, COLUMNS)
    assert np.array_equal(again.dequantize(), made.dequantize())
    integers = as_integers(again)
    assert isinstance(integers, DecodedWeight), "its minima are whole multiples of its scales"
    assert np.array_equal(integers.dequantize(), made.dequantize())


def test_fp4_numbers_are_halves_of_integers_and_fp8_ones_are_not() -> None:
    rng = np.random.default_rng(0)
    fp4 = rng.choice(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -6], np.float32), (ROWS, COLUMNS))
    scales = np.exp2(rng.integers(-9, 3, (ROWS, 6))).astype(np.float32)
    made = DecodedWeight(fp4, scales, 32, bits=4)
    integers = as_integers(made)
    assert isinstance(integers, DecodedWeight)
    assert np.array_equal(integers.dequantize(), made.dequantize())
    assert as_integers(replace(made, codes=fp4 + np.float32(0.0625))) == "its codes are floats (fp8)"


def test_a_group_of_equal_minima_is_not_read_as_zero_points() -> None:
    weight = DecodedWeight(
        np.zeros((1, 32), np.uint8), np.zeros((1, 1), np.float32), 32, offsets=np.full((1, 1), 0.5, np.float32), bits=4
    )
    assert as_integers(weight) == "its minima are not whole multiples of its scales"
    assert facts_of(weight).q4_1


RNG = np.random.default_rng(0)


def weight(
    low: int, high: int, zeros: tuple[int, int] | None, group: int, columns: int = 192, bits: int = 0
) -> DecodedWeight:
    groups = -(-columns // group)
    codes = RNG.integers(low, high, (8, columns)).astype(np.int8 if low < 0 else np.uint8)
    scales = RNG.uniform(0.1, 1, (8, groups)).astype(np.float32)
    points = None if zeros is None else RNG.integers(*zeros, (8, groups)).astype(np.int16)
    return DecodedWeight(codes, scales, group, points, bits=bits)


@each_case(
    ("made", "bits", "block", "signed"),
    [
        (weight(0, 16, (8, 9), 64), 4, 64, True),  # GPTQ symmetric: one zero point for all
        (weight(0, 16, (1, 16), 32), 4, 32, False),
        (weight(0, 16, (1, 17), 32), 8, 32, False),  # GPTQ version 1: the zero point 16
        (weight(0, 8, (0, 8), 96), 4, 32, False),  # 3 bits, groups of 96
        (weight(0, 8, (4, 5), 64, bits=3), 3, 64, True),
        (weight(0, 8, (1, 9), 64, bits=3), 4, 64, False),  # the zero point 8 takes a fourth bit
        (weight(0, 4, (0, 4), 64, bits=2), 2, 64, False),
        (weight(-8, 8, (-8, 8), 64), 4, 64, False),  # compressed-tensors asymmetric
        (weight(-128, 128, None, 192), 8, 0, True),
        (weight(-32, 32, None, 16), 8, 16, True),  # Q6_K
        (weight(0, 256, (1, 256), 128, columns=200), 8, 128, False),
    ],
)
def test_the_operands_dequantize_to_the_same_bits(made: DecodedWeight, bits: int, block: int, signed: bool) -> None:
    form = dequantize_operands(made)
    assert not isinstance(form, str)
    assert (form.bits, form.block_size, form.codes.dtype == np.int8) == (bits, block, signed)
    columns = made.codes.shape[1]
    scale = form.scale.reshape(8, -1)
    points = None if form.zero_point is None else form.zero_point.reshape(8, -1)
    assert np.array_equal(dequantize(form.codes, scale, points, block or columns), made.dequantize())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"codes": np.full((8, 192), 0.25, np.float32), "zero_points": None}, "its codes are floats"),
        ({"offsets": np.ones((8, 3), np.float32)}, "its minima are not whole multiples of its scales"),
        ({"g_idx": np.arange(192, dtype=np.int32) % 3}, "its groups are in activation order"),
        ({"zero_points": RNG.integers(1, 400, (8, 3)).astype(np.int16)}, "its zero points are outside of 8 bits"),
    ],
)
def test_a_weight_that_the_ir_cannot_hold_gives_the_reason(changes: dict[str, Any], reason: str) -> None:
    made = weight(0, 16, (1, 16), 64)
    parts = {"codes": made.codes, "scales": made.scales, "group_size": 64, "zero_points": made.zero_points, **changes}
    form = dequantize_operands(DecodedWeight(**parts))
    assert isinstance(form, str)
    assert reason in form


def test_groups_of_partial_blocks_are_refused() -> None:
    assert dequantize_operands(weight(0, 16, (1, 16), 24)) == "groups of 24 columns are not whole blocks of 16"
