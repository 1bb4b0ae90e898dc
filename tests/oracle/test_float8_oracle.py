"""float8_e4m3fn in numpy and in onnxruntime against torch, to the last bit."""

import numpy as np
import pytest

from ingot.passes.numerics.activation_rounding import LEAST_PEAK, ActivationScheme, round_activations
from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.numerics.float8 import to_float8
from ingot.pipeline.checkpoint.formats.codes import from_e4m3
from tests.passes.quantization.test_activation_nodes import rows, through

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch")


def values() -> Float32Array:
    """Every code, numbers around it, and random ones of all sizes that saturate at most."""
    rng = np.random.default_rng(0)
    codes = from_e4m3(np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF]))
    near = [codes * np.float32(factor) for factor in (1, 1.03125, 1.0625, 1.09375, 0.96875, 1.0624999, 1.0625001)]
    spread = (rng.standard_normal(200_000) * 10.0 ** rng.uniform(-6, 2, 200_000)).astype(np.float32)
    found: Float32Array = np.clip(np.concatenate([*near, spread]), -448, 448)
    return found


def test_codes_are_torchs_bit_for_bit() -> None:
    expected = torch.from_numpy(values()).to(torch.float8_e4m3fn)
    assert np.array_equal(to_float8(values()).view(np.uint8), expected.view(torch.uint8).numpy())
    assert np.array_equal(from_e4m3(expected.view(torch.uint8).numpy()), expected.float().numpy())


def test_tokens_are_rounded_as_torch_rounds_them() -> None:
    x = torch.from_numpy(rows())
    scale = x.abs().amax(dim=1, keepdim=True).clamp(min=float(LEAST_PEAK)) / 448
    expected = ((x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).numpy()
    scheme = ActivationScheme("float")
    np.testing.assert_array_equal(round_activations(rows(), scheme), expected)


def test_onnxruntime_saturates_a_static_scale_as_torch_does_after_a_clamp() -> None:
    scheme, x = ActivationScheme("float", 0.007), torch.from_numpy(rows())
    scale = np.float32(0.007)
    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(through(scheme, rows()), codes * scale)
