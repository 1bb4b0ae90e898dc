"""The builder of a segment's model: names that make layers alike, inputs, constants, and refusals."""

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.pipeline.targets.segments.segment_builder import (
    SegmentBuilder,
    dims,
    folded,
    is_constant,
    renumber_layers,
)

FLOAT, FLOAT16, INT64 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.INT64


def value(name: str, *shape: int | str, dtype: ir.DataType = FLOAT) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def stored(name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.Tensor(array, name=name)
    made = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
    ir.Graph([], [], nodes=[], initializers=[made])
    return made


def builder(*names: str) -> SegmentBuilder:
    return SegmentBuilder.of([ir.node("Relu", [value("x", "T", 4)], name=name) for name in names], "fp16")


def test_layers_are_numbered_from_the_segments_first() -> None:
    b = builder("embed_tokens", "layers.8.mlp.up_proj", "layers.7.self_attn.o_proj")
    assert b.first_layer == 7
    assert b.name("model.layers.8.mlp.up_proj.weight") == "model.layers.1.mlp.up_proj.weight"
    assert builder("lm_head").name("layers.3.norm") == "layers.3.norm"


def test_only_layer_numbers_change_in_a_message() -> None:
    text = "'layers.0.mlp' and 'model.layers.11.mlp', not 'players.3.x', 'layers.4' or 0.5"
    assert renumber_layers(text, 2) == "'layers.2.mlp' and 'model.layers.13.mlp', not 'players.3.x', 'layers.4' or 0.5"


def test_values_of_other_stages_are_numbered_and_inputs_of_the_runtime_keep_their_names() -> None:
    b, positions, hidden = builder("norm"), value("position_ids", "T", dtype=INT64), value("hidden", "T", 4)
    ir.Graph([positions], [], nodes=[])
    made = [b.cross(positions), b.cross(hidden)]
    assert [(one.name, one.dtype, dims(one)) for one in made] == [
        ("position_ids", INT64, ["T"]),
        ("x1", FLOAT16, ["T", 4]),
    ]
    assert b.crossing == {"position_ids": positions, "x1": hidden}


def test_a_weight_is_one_input_however_often_it_is_read() -> None:
    b = builder("layers.2.o_proj")
    first, second = (b.weight("layers.2.o_proj.weight", FLOAT16, (4, 4), lambda: np.ones((4, 4))) for _ in range(2))
    assert first is second
    assert [one.name for one in b.graph.inputs] == ["layers.0.o_proj.weight"]
    assert b.weights["layers.0.o_proj.weight"].name == "layers.2.o_proj.weight"


def test_numbers_are_shared_by_value_type_and_shape() -> None:
    b = builder("norm")
    assert b.number(0.5) is b.number(0.5)
    assert len({b.number(0.5).name, b.number(0.5, FLOAT).name, b.number(0.5, shape=(1, 1)).name}) == 3
    assert b.number(0.5).dtype == FLOAT16
    assert b.integers(1, -1) is b.integers(1, -1)


def test_arithmetic_on_stored_values_is_folded() -> None:
    weight, one = stored("norm.weight", np.array([0.5, -2], np.float16)), stored("one", np.array(1, np.float32))
    total = ir.node("Add", [weight, one]).outputs[0]
    assert is_constant(total)
    np.testing.assert_array_equal(folded(total), np.array([1.5, -1], np.float32))
    assert not is_constant(ir.node("Add", [weight, value("x", 2)]).outputs[0])


def test_a_linear_layer_has_its_bias_as_a_row() -> None:
    b, x = builder("layers.0.q_proj"), value("x0", "T", 4, dtype=FLOAT16)
    weight, bias = stored("q.weight", np.ones((2, 4), np.float32)), stored("q.bias", np.ones(2, np.float32))
    node = ir.node("Gemm", [x, weight, bias], {"transB": 1}, name="layers.0.q_proj", outputs=[value("y", "T", 2)])
    b.finish([b.linear(node, x)])
    assert {name: one.shape for name, one in b.weights.items()} == {"q.weight": (2, 4), "q.bias.row": (1, 2)}
    assert b.weights["q.bias.row"].make().shape == (1, 2)
    assert [(one.name, dims(one)) for one in b.graph.outputs] == [("y0", ["T", 2])]


def test_a_computed_weight_is_refused() -> None:
    x = value("x0", "T", 4)
    node = ir.node("Gemm", [x, value("made", 2, 4)], name="layers.0.q_proj", outputs=[value("y", "T", 2)])
    with pytest.raises(PassError, match=r"'layers.0.q_proj' multiplies by 'made', which is computed; segments"):
        builder("layers.0.q_proj").linear(node, x)
