"""Tuned codes: they change under a lasting gradient, and not under noise."""

import numpy as np

from ingot.passes.numerics.rounding import round_weight
from ingot.passes.numerics.scheme import ScaleDtype, Scheme, is_float16
from ingot.passes.numerics.tuning import TunedWeight


def tuned_weight(scale_dtype: ScaleDtype = "float32") -> TunedWeight:
    """3-bit codes, symmetric, in blocks of 32."""
    scheme = Scheme(3, 32, True, scale_dtype=scale_dtype)
    rounded = round_weight(np.random.default_rng(1).standard_normal((64, 172)).astype(np.float32), scheme)
    return TunedWeight(
        rounded.codes,
        rounded.scale,
        np.zeros_like(rounded.scale),
        scheme.code_range,
        32,
        tune_codes=True,
        keep_zeros=False,
        scale_dtype=scale_dtype,
    )


def test_a_code_changes_only_under_a_lasting_gradient() -> None:
    tuned, held, random = tuned_weight(), tuned_weight(), np.random.default_rng(0)
    start = tuned.values()
    lasting = random.standard_normal(start.shape).astype(np.float32)
    for _ in range(30):
        tuned.step(lasting, codes_rate=0.02, scales_rate=1e-9)
        held.step(random.standard_normal(start.shape).astype(np.float32), codes_rate=0.02, scales_rate=1e-9)
    moved, kept = (np.mean(np.abs(each.values() - start) > 1e-6) for each in (tuned, held))
    assert moved > 0.5  # codes at the ends of their range cannot move outwards
    assert kept < 0.05


def test_float16_scales_are_tuned_to_float16_scales() -> None:
    tuned = tuned_weight("float16")
    start = tuned.scales
    for _ in range(20):
        tuned.step(tuned.values(), codes_rate=1e-9, scales_rate=0.002)
    assert is_float16(tuned.scales)
    assert (tuned.scales < start).mean() > 0.9
