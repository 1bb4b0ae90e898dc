"""Integer matmuls: the committed model is the one below, and unsigned weights give the bits of signed ones."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime  # type: ignore[import-untyped]
import pytest
from onnx import TensorProto, helper

from ingot.passes.numerics.activation_rounding import ActivationScheme
from ingot.runtime.cpu import segment_runner
from ingot.runtime.cpu.segment_runner import (
    INTEGER_MATMUL,
    PRECISION_OPTION,
    integer_matmuls_saturate,
    session_options,
    use_thread_pool,
)
from tests.passes.lowering.test_integer_matmul import DYNAMIC, STATIC, lowered, quantized, rows


def integer_matmul() -> onnx.ModelProto:
    """The model of INTEGER_MATMUL; `onnx.save(integer_matmul(), INTEGER_MATMUL)` wrote the file."""
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["a", "b"], ["y"])],
        "integer-matmul",
        [
            helper.make_tensor_value_info("a", TensorProto.UINT8, [1, 16]),
            helper.make_tensor_value_info("b", TensorProto.INT8, [16, 16]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [1, 16])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_the_committed_model_is_the_one_above() -> None:
    model = onnx.load(INTEGER_MATMUL)
    onnx.checker.check_model(model, full_check=True)
    assert model == integer_matmul()


def test_saturation_is_found_where_onnxruntime_computes_a_wrong_sum() -> None:
    use_thread_pool(None)
    session = onnxruntime.InferenceSession(str(INTEGER_MATMUL), session_options())
    codes, weights = np.full((1, 16), 255, np.uint8), np.full((16, 16), 127, np.int8)
    exact = bool((session.run(None, {"a": codes, "b": weights})[0] == 16 * 255 * 127).all())
    assert exact == (not integer_matmuls_saturate())


@pytest.mark.parametrize("saturates", [False, True])
def test_the_option_is_set_where_matmuls_saturate(monkeypatch: pytest.MonkeyPatch, saturates: bool) -> None:
    monkeypatch.setattr(segment_runner, "integer_matmuls_saturate", lambda: saturates)
    options = session_options()
    if saturates:
        assert options.get_session_config_entry(PRECISION_OPTION) == "1"
    else:
        with pytest.raises(RuntimeError, match="does not have configuration"):
            options.get_session_config_entry(PRECISION_OPTION)


@pytest.mark.parametrize("scheme", [DYNAMIC, STATIC])
def test_unsigned_weights_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, scheme: ActivationScheme) -> None:
    use_thread_pool(None)
    if integer_matmuls_saturate():
        pytest.skip("without unsigned weights sums saturate on this CPU")
    content = ir.to_proto(lowered(quantized(scheme))).SerializeToString()
    found = []
    for saturates in (False, True):
        monkeypatch.setattr(segment_runner, "integer_matmuls_saturate", lambda value=saturates: value)
        session = onnxruntime.InferenceSession(content, session_options())
        found.append(session.run(None, {"x": rows()})[0])
    np.testing.assert_array_equal(*found)
