"""Rotary embedding in onnxruntime, for batches longer than the context."""

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.lowering.lower_onnxruntime_cpu import LowerOnnxruntimeCpu
from ingot.passes.manager import PassManager
from tests.passes.tiny_decoder import FLOAT, INT64, POSITIONS, TinyDecoder, value
from tests.sessions import run

WIDTH, HEADS = 64, 4


def rotation() -> tuple[TinyDecoder, ir.Model]:
    """x [T, 64], position_ids [T] -> y [T, 64], with tables of POSITIONS rows."""
    parts = TinyDecoder(layers=0)
    parts._nodes = []
    parts._initializers = {}
    x, positions = value("x", FLOAT, "T", WIDTH), value("position_ids", INT64, "T")
    rows = parts.node("positions", "Unsqueeze", [positions, parts.constant("zero", [0])], (1, "T"))
    rows.dtype = INT64
    y = parts._rope("q", x, HEADS, rows)
    initializers = list(parts._initializers.values())
    graph = ir.Graph([x, positions], [y], nodes=parts._nodes, initializers=initializers, opset_imports={"": 24})
    return parts, ir.Model(graph, ir_version=11)


def test_the_result_is_the_same_bit_for_bit() -> None:
    x = np.random.default_rng(0).standard_normal((POSITIONS, WIDTH)).astype(np.float32)
    positions = np.random.default_rng(1).integers(0, POSITIONS, POSITIONS)
    before, after = rotation()[1], rotation()[1]
    (record,) = PassManager([LowerOnnxruntimeCpu()]).run(after)
    assert record.modified
    np.testing.assert_array_equal(run(after, x=x, position_ids=positions), run(before, x=x, position_ids=positions))


def test_a_batch_may_hold_more_tokens_than_the_context_has_positions() -> None:
    model = rotation()[1]
    PassManager([LowerOnnxruntimeCpu()]).run(model)
    positions = np.arange(4 * POSITIONS) % POSITIONS
    x = np.random.default_rng(0).standard_normal((POSITIONS, WIDTH)).astype(np.float32)
    rows = run(model, x=np.tile(x, (4, 1)), position_ids=positions)
    np.testing.assert_array_equal(rows, np.tile(run(model, x=x, position_ids=np.arange(POSITIONS)), (4, 1)))


def test_a_second_run_changes_nothing() -> None:
    model = rotation()[1]
    PassManager([LowerOnnxruntimeCpu()]).run(model)
    (record,) = PassManager([LowerOnnxruntimeCpu()]).run(model)
    assert not record.modified


def test_a_rotation_read_by_another_op_is_refused() -> None:
    _, model = rotation()
    squeeze = next(node for node in model.graph if node.op_type == "Squeeze")
    squeeze.op_type = "Reshape"
    with pytest.raises(PassError, match=r"'q.rope.out' at a RotaryEmbedding is not reached by Unsqueeze and Squeeze"):
        LowerOnnxruntimeCpu()(model)
