"""Verification names the first broken invariant of the IR."""

import re
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.invariants import ProgramInterface, verify, verify_signature
from tests.each_case import each_case
from tests.passes.snippets import FLOAT, Snippet, random
from tests.passes.tiny_decoder import TinyDecoder

Breaks = Callable[[Snippet, ir.Value], object]


def _duplicate_value(s: Snippet, y: ir.Value) -> None:
    s.node("Neg", "second", [y], "T", 4).name = "y"


def _wrong_tensor(s: Snippet, y: ir.Value) -> None:
    s.graph.initializers["w"].const_value = ir.tensor(np.zeros(5, np.float32), name="w")


def _wrong_dtype(s: Snippet, y: ir.Value) -> None:
    s.graph.initializers["w"].dtype = ir.DataType.FLOAT16


def _no_tensor(s: Snippet, y: ir.Value) -> None:
    s.graph.initializers["w"].const_value = None


def _subgraph(s: Snippet, y: ir.Value) -> None:
    s.node("If", "if", [y], "T", 4, then_branch=ir.Graph([], [], nodes=[]), else_branch=ir.Graph([], [], nodes=[]))


def _foreign_value(s: Snippet, y: ir.Value) -> None:
    s.node("Neg", "lost", [ir.Value(name="elsewhere")], "T", 4)


CASES: list[tuple[Breaks, str]] = [
    (_duplicate_value, "value name 'y' is made twice, again by 'second'"),
    (_wrong_tensor, "initializer 'w' has shape [4], its tensor [5]"),
    (_wrong_dtype, "initializer 'w' is FLOAT16, its tensor FLOAT"),
    (_no_tensor, "initializer 'w' has no tensor"),
    (_subgraph, "node 'if' (ai.onnx::If) has a subgraph; the IR is flat"),
    (_foreign_value, "node 'lost' reads 'elsewhere', which nothing before it makes"),
    (lambda s, y: s.node("Neg", "", [y], "T", 4), "node name '' is empty or used twice"),
    (lambda s, y: s.node("Negg", "n", [y], "T", 4), "node 'n' (ai.onnx::Negg): no such op in opset 24"),
    (lambda s, y: s.node("Neg", "n", [y], "T", 4, axis=1), "node 'n' (ai.onnx::Neg): unknown attribute axis"),
    (lambda s, y: s.node("Neg", "n", [y, y], "T", 4), "node 'n' (ai.onnx::Neg): 2 inputs"),
    (lambda s, y: s.node("Op", "n", [y], domain="other"), "the model imports no opset for that domain"),
    (
        lambda s, y: s.node("Op", "n", [y], domain="ingot"),
        "no such op; ingot has CombineExperts, DispatchExperts, GatedDeltaRule, PagedAttention, ReceiveFromHost, "
        "RouteExperts, SelectiveScan, SendToHost, ShortConvolution",
    ),
    (lambda s, y: s.graph.outputs.append(ir.Value(name="free")), "'free' has no dtype or shape"),
]


def _snippet() -> tuple[Snippet, ir.Value]:
    s = Snippet()
    y = s.node("Mul", "y", [s.input("x", "T", 4), s.weight("w", random(4))], "T", 4)
    s.output(y)
    return s, y


@each_case(("breaks", "message"), CASES)
def test_a_broken_invariant_is_named(breaks: Breaks, message: str) -> None:
    s, y = _snippet()
    verify(s.model)
    breaks(s, y)
    with pytest.raises(PassError, match=re.escape(message)):
        verify(s.model)


def test_a_graph_output_that_no_node_makes_is_refused() -> None:
    s, _ = _snippet()
    s.graph.outputs.append(ir.Value(name="free", type=ir.TensorType(FLOAT), shape=ir.Shape(["T"])))
    with pytest.raises(PassError, match="graph output 'free' is made by no node of the graph"):
        verify(s.model)


def test_a_whole_decoder_is_well_formed() -> None:
    verify(TinyDecoder().model)


def test_a_lowering_may_append_inputs() -> None:
    s, _ = _snippet()
    before = ProgramInterface.of(s.model)
    s.input("cache", "T", 4)
    verify_signature(s.model, before, may_extend=True)
    with pytest.raises(PassError, match="it changed the graph's inputs"):
        verify_signature(s.model, before, may_extend=False)
