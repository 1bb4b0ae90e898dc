"""Helpers of rewrites: constants, refusals, replacing nodes."""

import logging

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.rewriting import (
    Refusal,
    add_constant,
    make_node,
    replace_nodes,
    row_columns,
    settle,
    small_constant,
    sole_consumer,
)
from tests.passes.snippets import FLOAT, INT64, Snippet, op_types


def test_an_equal_constant_is_shared_and_a_different_one_is_refused() -> None:
    s = Snippet()
    first = add_constant(s.graph, "sizes", np.array([4, 2], np.int64))
    assert add_constant(s.graph, "sizes", np.array([4, 2], np.int64)) is first
    with pytest.raises(PassError, match="the initializer 'sizes' already has other values"):
        add_constant(s.graph, "sizes", np.array([4, 3], np.int64))


def test_a_refusal_is_logged_and_an_error_with_strict(caplog: pytest.LogCaptureFixture) -> None:
    refusals = [Refusal("a", "is odd"), Refusal("b", "is even")]
    caplog.set_level(logging.INFO, "ingot.passes")
    settle("my-pass", refusals, strict=False, is_present=False)
    assert caplog.messages == ["my-pass: left alone: node 'a' is odd", "my-pass: left alone: node 'b' is even"]
    message = r"my-pass: strict, and a fusion did not happen: node 'a' is odd \(and 1 more\)"
    with pytest.raises(PassError, match=message):
        settle("my-pass", refusals, strict=True, is_present=True)


def test_a_replacement_takes_the_name_and_readers_of_the_output() -> None:
    s = Snippet()
    old = s.node("Neg", "middle", [s.input("x", "T", 4)], "T", 4)
    s.output(s.node("Neg", "y", [old], "T", 4))
    producer = old.producer()
    assert producer is not None
    new = make_node("Abs", "middle", [s.graph.inputs[0]], [old])
    replace_nodes(s.graph, producer, [producer], [new], {old: new.outputs[0]})
    assert op_types(s.model) == ["Abs", "Neg"]
    assert new.outputs[0].name == "middle"
    assert s.graph.outputs[0].producer() in new.outputs[0].consumers()


def test_a_new_node_shares_no_type_with_its_model() -> None:
    s = Snippet()
    x = s.input("x", "T", 4)
    made = make_node("Abs", "abs", [x], [x, None]).outputs
    made[0].dtype = INT64
    assert x.dtype == FLOAT
    assert made[1].name == ""


def test_small_constants_are_read_and_large_ones_are_not() -> None:
    s = Snippet()
    assert small_constant(s.weight("axes", np.array([[0, 2]], np.int64))) == [0, 2]
    assert small_constant(s.weight("large", np.zeros(17, np.float32))) is None
    assert small_constant(s.input("x", 1)) is None
    assert small_constant(None) is None


def test_a_graph_output_has_no_sole_consumer() -> None:
    s = Snippet()
    y = s.node("Neg", "y", [s.input("x", "T", 4)], "T", 4)
    reader = s.node("Abs", "z", [y], "T", 4).producer()
    assert sole_consumer(y) is reader
    s.output(y)
    assert sole_consumer(y) is None


def shaped(*shape: int | str) -> ir.Value:
    return ir.Value(name="x", shape=ir.Shape(shape))


def test_columns_of_a_row_are_those_of_all_its_heads() -> None:
    assert row_columns(shaped("T", 6, 16)) == 96
    assert row_columns(shaped("T", 16)) == 16
