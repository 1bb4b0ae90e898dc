"""The graph builder: constants and weights once each, nodes and values under one name."""

import numpy as np
import onnx_ir as ir
import pytest

from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.graph_builder import GraphBuilder, dims
from tests.parity import CHECKPOINTS

NORM = "model.norm.weight"


def builder(name: str = "llama") -> GraphBuilder:
    return GraphBuilder(Checkpoint.open(CHECKPOINTS / name), name="test")


def test_a_node_and_its_value_share_their_name_and_shape() -> None:
    b = builder()
    value = b.op("Neg", "a.b", [b.input("x", ir.DataType.FLOAT, ["T", 4])], ["T", 4])
    node = value.producer()
    assert node is not None
    assert (node.name, value.name, dims(value), value.dtype) == ("a.b", "a.b", ["T", 4], ir.DataType.FLOAT)
    assert node.attributes == {}


def test_several_outputs_have_their_own_names() -> None:
    b = builder()
    x = b.input("x", ir.DataType.FLOAT, ["T", 4])
    outputs = b.multi_op("Split", "cut", [x, b.integers(1, 3)], {"left": ["T", 1], "right": ["T", 3]}, axis=-1)
    assert [(value.name, dims(value)) for value in outputs] == [("left", ["T", 1]), ("right", ["T", 3])]


def test_equal_constants_are_one_initializer() -> None:
    b = builder()
    assert b.integers(0, 4) is b.integers(0, 4)
    assert b.scalar(0.5) is b.scalar(0.5)
    assert b.scalar(0.5) is not b.scalar(0.25)
    tensor = b.integers(0, 4).const_value
    assert tensor is not None
    np.testing.assert_array_equal(tensor.numpy(), [0, 4])


@pytest.mark.parametrize(("name", "op_type"), [("llama", None), ("llama-old-spelling", "Cast")])
def test_a_weight_is_float32_and_made_once(name: str, op_type: str | None) -> None:
    b = builder(name)
    weight = b.weight(NORM)
    producer = weight.producer()
    assert weight is b.weight(NORM)
    assert weight.dtype == ir.DataType.FLOAT
    assert (producer.op_type if producer else None) == op_type
    assert list(b.graph.initializers) == [NORM]
