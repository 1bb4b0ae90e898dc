"""round-scales: scales become float16 numbers, codes stay, and a scale too large for float16 is refused."""

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.quantization.round_scales import RoundScales
from ingot.passes.registry import make_pass
from tests.passes.snippets import Snippet, random


def quantized() -> ir.Model:
    """One linear layer of 8 x 32 with 4-bit codes."""
    s = Snippet()
    x, w = s.input("x", "T", 32), s.weight("w", random(8, 32))
    model = s.output(s.node("Gemm", "y", [x, w], "T", 8, transB=1))
    make_pass("quantize-weights", {"block_size": 16, "lm_head": 4})(model)
    return model


def values(model: ir.Model, name: str) -> np.ndarray:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return np.asarray(tensor.numpy())


def test_scales_become_float16_numbers_and_codes_stay() -> None:
    model = quantized()
    codes, before = values(model, "w.q").copy(), values(model, "w.scale").copy()
    assert RoundScales()(model).modified
    assert np.array_equal(values(model, "w.scale"), before.astype(np.float16).astype(np.float32))
    assert np.array_equal(values(model, "w.q"), codes)
    assert not RoundScales()(model).modified


def test_a_scale_beyond_float16_is_refused_by_name() -> None:
    model = quantized()
    scale = model.graph.initializers["w.scale"]
    scale.const_value = ir.Tensor(values(model, "w.scale") * np.float32(1e7), name="w.scale")
    with pytest.raises(PassError, match=r"round-scales: 'w.scale' holds .* above float16's largest number, 65504"):
        RoundScales().call(model)
