"""Round-to-nearest with the clip search: its error, its bounds, and the same bits on every machine."""

import os
import subprocess
import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.passes.numerics.rounding import round_per_tensor, round_weight
from ingot.passes.numerics.scheme import Scheme
from tests.each_case import each_case

SCHEMES = [
    Scheme(bits, block, symmetric, clip)
    for bits in (4, 8)
    for block in (0, 16, 32, 256)
    for symmetric in (True, False)
    for clip in (True, False)
]


@each_case("scheme", SCHEMES, ids=str)
def test_reported_error_is_the_error_of_the_dequantized_weight(scheme: Scheme) -> None:
    weight = np.random.default_rng(0).standard_normal((40, 172)).astype(np.float32)
    rounded = round_weight(weight, scheme)
    error = np.square(weight - rounded.restored(scheme).astype(np.float64)).sum()
    assert rounded.squared_error == pytest.approx(error, rel=1e-4)
    assert rounded.squared_norm == pytest.approx(np.square(weight.astype(np.float64)).sum(), rel=1e-5)
    assert rounded.codes.min() >= scheme.code_range[0]
    assert rounded.codes.max() <= scheme.code_range[1]


@pytest.mark.parametrize("scheme", [Scheme(4, 32, True), Scheme(4, 32, False), Scheme(4, 0, False)], ids=str)
def test_clip_search_never_makes_any_block_worse(scheme: Scheme) -> None:
    weight = np.random.default_rng(1).standard_t(3, (64, 256)).astype(np.float32)
    plain = round_weight(weight, Scheme(scheme.bits, scheme.block_size, scheme.symmetric, False)).restored(scheme)
    clipped = round_weight(weight, scheme).restored(scheme)
    shape = (64, -1, scheme.block_columns(256))
    before = np.square(weight - plain).reshape(shape).sum(-1)
    after = np.square(weight - clipped).reshape(shape).sum(-1)
    assert (after <= before * (1 + 1e-5)).all()
    assert after.sum() < 0.97 * before.sum()


def test_without_clip_every_weight_is_within_half_a_step() -> None:
    weight = np.random.default_rng(2).standard_normal((8, 100)).astype(np.float32)
    for symmetric in (True, False):
        scheme = Scheme(8, 32, symmetric, clip=False)
        rounded = round_weight(weight, scheme)
        step = np.repeat(rounded.scale, 32, axis=1)[:, :100]
        bound = 0.5 if symmetric else 1.0  # the zero point is rounded too
        assert (np.abs(weight - rounded.restored(scheme)) <= bound * step * (1 + 1e-4)).all()


@each_case("scheme", SCHEMES, ids=str)
@each_case("constant", [0.0, 0.37, -0.37, 1e-35, 6e-8, 3.0e38, -3.0e38])
def test_constant_blocks_survive_at_any_magnitude(scheme: Scheme, constant: float) -> None:
    weight = np.full((2, 40), constant, np.float32)
    rounded = round_weight(weight, scheme)
    assert np.isfinite(rounded.scale).all()
    assert (rounded.scale > 0).all()
    assert rounded.restored(scheme) == pytest.approx(weight, rel=1e-6, abs=1e-30)


def test_a_partial_last_block_is_rounded_like_a_weight_of_its_own() -> None:
    weight = np.random.default_rng(3).standard_normal((5, 172)).astype(np.float32)
    for symmetric in (True, False):
        scheme = Scheme(4, 32, symmetric)
        whole, last = round_weight(weight, scheme), round_weight(weight[:, 160:], scheme)
        assert whole.scale.shape == (5, 6)
        np.testing.assert_array_equal(whole.codes[:, 160:], last.codes)
        np.testing.assert_array_equal(whole.scale[:, 5:], last.scale)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused(bad: float) -> None:
    weight = np.ones((300, 64), np.float16)
    weight[299, 63] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        round_weight(weight, Scheme(4, 32, False))


def test_threads_and_the_weights_dtype_do_not_change_a_code() -> None:
    weight = np.random.default_rng(4).standard_normal((700, 320)).astype(ml_dtypes.bfloat16)
    one = round_weight(weight, Scheme(4, 64, False), num_threads=1)
    two = round_weight(weight.astype(np.float32), Scheme(4, 64, False), num_threads=2)
    np.testing.assert_array_equal(one.codes, two.codes)
    np.testing.assert_array_equal(one.scale, two.scale)
    assert one.squared_error == two.squared_error


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 70),
    scheme=st.sampled_from(SCHEMES),
    exponent=st.integers(-20, 30),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_magnitude_keeps_the_error_bounded(
    rows: int, columns: int, scheme: Scheme, exponent: int, seed: int
) -> None:
    weight = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) * np.float32(
        10.0**exponent
    )
    rounded = round_weight(weight, scheme)
    assert rounded.relative_error <= (0.6 if scheme.bits == 4 else 0.04)
    assert np.isfinite(rounded.restored(scheme)).all()


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 70),
    scheme=st.sampled_from([replace(scheme, scale_dtype="float16") for scheme in SCHEMES]),
    exponent=st.integers(-9, 9),
    seed=st.integers(0, 2**16),
)
def test_float16_scales_are_part_of_the_search_or_left_out_of_it(
    rows: int, columns: int, scheme: Scheme, exponent: int, seed: int
) -> None:
    weight = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    weight *= np.float32(10.0**exponent)
    wide, narrow = round_weight(weight, replace(scheme, scale_dtype="float32")), round_weight(weight, scheme)
    if narrow.scale_dtype == "float32":
        np.testing.assert_array_equal(narrow.codes, wide.codes)
        np.testing.assert_array_equal(narrow.scale, wide.scale)
        assert wide.scale.min() < 2**-16 or wide.scale.max() > 2**14
    error = np.square(weight - narrow.restored(scheme).astype(np.float64)).sum()
    assert narrow.squared_error == pytest.approx(error, rel=1e-3, abs=1e-9 * narrow.squared_norm)
    assert narrow.relative_error <= 1.05 * wide.relative_error + 0.01
    low, high = scheme.code_range
    points = narrow.codes if narrow.zero_point is None else narrow.zero_point
    assert low <= min(narrow.codes.min(), points.min())
    assert high >= max(narrow.codes.max(), points.max())


def test_float16_scales_cost_next_to_nothing() -> None:
    weight = np.random.default_rng(5).standard_normal((64, 512)).astype(np.float32) * np.float32(0.02)
    for scheme in SCHEMES:
        wide, narrow = round_weight(weight, scheme), round_weight(weight, replace(scheme, scale_dtype="float16"))
        assert narrow.scale_dtype == "float16"
        assert narrow.relative_error < wide.relative_error * (1.0005 if scheme.bits == 4 else 1.02)


def test_one_block_out_of_float16s_range_gives_the_whole_weight_float32_scales() -> None:
    scheme = Scheme(4, 32, False, scale_dtype="float16")
    for scale in (1e-7, 1e7):
        weight = np.random.default_rng(6).standard_normal((4096, 64)).astype(np.float32)
        weight[4095, 32:] *= np.float32(scale)
        assert round_weight(weight, scheme, num_threads=2).scale_dtype == "float32"


def test_zero_blocks_do_not_decide_the_type_of_the_scales() -> None:
    weight = np.random.default_rng(7).standard_normal((4, 64)).astype(np.float32)
    weight[1], weight[2, :32] = 0, 1e-35
    rounded = round_weight(weight, Scheme(8, 32, True, scale_dtype="float16"))
    assert rounded.scale_dtype == "float16"
    assert not rounded.codes[1].any()


def test_per_tensor_without_the_search_the_scale_is_that_of_the_largest_value() -> None:
    weight = np.random.default_rng(0).standard_normal((8, 12)).astype(np.float32)
    found = round_per_tensor(weight, Scheme(8, 0, True, clip=False))
    np.testing.assert_allclose(found.scale, np.abs(weight).max() / 127, rtol=1e-6)
    assert found.scale.shape == (8, 1)


DIGEST = """
import hashlib
import numpy as np
from ingot.passes.numerics.rounding import round_weight
from ingot.passes.numerics.scheme import Scheme
bits = np.random.default_rng(0).integers(0, 2**16, (64, 2816), dtype=np.uint16)
weight = bits.astype(np.float32) / 65536 - 0.5  # exact, so that it is the same for every instruction set
digest = hashlib.sha256()
for block_size in (0, 32, 128):
    for symmetric in (True, False):
        rounded = round_weight(weight * weight * weight, Scheme(4, block_size, symmetric))
        digest.update(rounded.codes.tobytes() + rounded.scale.tobytes() + repr(rounded.squared_error).encode())
print(digest.hexdigest())
"""


def test_numpys_choice_of_instructions_does_not_change_a_bit() -> None:
    extensions = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    if not extensions:
        pytest.skip("numpy has only its baseline here")
    digests = set()
    for disabled in ("", " ".join(extensions)):
        environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": disabled}
        done = subprocess.run([sys.executable, "-c", DIGEST], env=environment, capture_output=True, check=True)
        digests.add(done.stdout)
    assert len(digests) == 1
