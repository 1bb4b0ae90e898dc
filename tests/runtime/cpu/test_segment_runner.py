"""Integer products: the hand-written model is what onnx reads, and unsigned weights give the bits of signed ones."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime  # type: ignore[import-untyped]
import pytest

from ingot.passes.quantization.activation_quantization import ActivationScheme
from ingot.runtime.cpu import segment_runner
from ingot.runtime.cpu.segment_runner import (
    PRECISION_OPTION,
    product_model,
    products_saturate,
    session_options,
    use_thread_pool,
)
from tests.passes.lowering.test_integer_matmul import DYNAMIC, STATIC, lowered, quantized, rows


def test_the_model_is_a_valid_onnx_file() -> None:
    model = onnx.load_from_string(product_model())
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node] == ["MatMulInteger"]


def test_what_was_found_agrees_with_the_largest_sum_that_onnxruntime_computes() -> None:
    use_thread_pool(None)
    session = onnxruntime.InferenceSession(product_model(), session_options())
    codes, weights = np.full((1, 16), 255, np.uint8), np.full((16, 16), 127, np.int8)
    exact = bool((session.run(None, {"a": codes, "b": weights})[0] == 16 * 255 * 127).all())
    assert exact == (not products_saturate())


@pytest.mark.parametrize("saturates", [False, True])
def test_the_option_is_set_where_products_saturate(monkeypatch: pytest.MonkeyPatch, saturates: bool) -> None:
    monkeypatch.setattr(segment_runner, "products_saturate", lambda: saturates)
    options = session_options()
    if saturates:
        assert options.get_session_config_entry(PRECISION_OPTION) == "1"
    else:
        with pytest.raises(RuntimeError, match="does not have configuration"):
            options.get_session_config_entry(PRECISION_OPTION)


@pytest.mark.parametrize("scheme", [DYNAMIC, STATIC])
def test_unsigned_weights_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, scheme: ActivationScheme) -> None:
    use_thread_pool(None)
    content = ir.to_proto(lowered(quantized(scheme))).SerializeToString()
    found = []
    for saturates in (False, True):
        monkeypatch.setattr(segment_runner, "products_saturate", lambda value=saturates: value)
        session = onnxruntime.InferenceSession(content, session_options())
        found.append(session.run(None, {"x": rows()})[0])
    np.testing.assert_array_equal(*found)
