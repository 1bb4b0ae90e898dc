"""What fits the IR's form is held exactly; what does not says why."""

from typing import Any

import numpy as np
import pytest

from ingot.passes.quantization.rounding import dequantize
from ingot.pipeline.formats.integer_form import integer_form
from ingot.pipeline.formats.quantized import QuantizedWeight

RNG = np.random.default_rng(0)


def weight(
    low: int, high: int, zeros: tuple[int, int] | None, group: int, columns: int = 192, bits: int = 0
) -> QuantizedWeight:
    groups = -(-columns // group)
    codes = RNG.integers(low, high, (8, columns)).astype(np.int8 if low < 0 else np.uint8)
    scales = RNG.uniform(0.1, 1, (8, groups)).astype(np.float32)
    points = None if zeros is None else RNG.integers(*zeros, (8, groups)).astype(np.int16)
    return QuantizedWeight(codes, scales, group, points, bits=bits)


@pytest.mark.parametrize(
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
def test_the_form_dequantizes_to_the_same_bits(made: QuantizedWeight, bits: int, block: int, signed: bool) -> None:
    form = integer_form(made)
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
        ({"offsets": np.ones((8, 3), np.float32)}, "its minima are no whole multiples of its scales"),
        ({"g_idx": np.arange(192, dtype=np.int32) % 3}, "its groups are in activation order"),
        ({"zero_points": RNG.integers(1, 400, (8, 3)).astype(np.int16)}, "its zero points lie outside of 8 bits"),
    ],
)
def test_what_the_ir_cannot_hold_says_why(changes: dict[str, Any], reason: str) -> None:
    made = weight(0, 16, (1, 16), 64)
    parts = {"codes": made.codes, "scales": made.scales, "group_size": 64, "zero_points": made.zero_points, **changes}
    form = integer_form(QuantizedWeight(**parts))
    assert isinstance(form, str)
    assert reason in form


def test_groups_that_are_no_whole_blocks_say_so() -> None:
    assert integer_form(weight(0, 16, (1, 16), 24)) == "groups of 24 columns are no whole blocks of 16"
