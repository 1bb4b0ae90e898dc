"""The manager runs, verifies, counts and tags; it observes without changing anything.

The verifier names the first broken invariant.
"""

import re
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.manager import PASS_KEY, PassManager, PassRecord, Signature, timing_table, verify, verify_signature
from ingot.passes.printing import model_to_text, print_after
from tests.passes.example_passes import AllOptions, NegToAbs
from tests.passes.snippets import FLOAT, Snippet, random
from tests.passes.tiny_decoder import TinyDecoder


def _negated() -> ir.Model:
    """-x * w with a weight of 16 bytes."""
    s = Snippet()
    negative = s.node("Neg", "negative", [s.input("x", "T", 4)], "T", 4)
    return s.output(s.node("Mul", "y", [negative, s.weight("w", random(4))], "T", 4))


def test_a_record_says_what_each_pass_did() -> None:
    records = PassManager([NegToAbs(), AllOptions(count=3)]).run(_negated())
    assert [(record.name, record.options, record.modified) for record in records] == [
        ("neg-to-abs", "neg-to-abs", True),
        ("all-options", "all-options: {count: 3}", False),
    ]
    first = records[0]
    assert (first.nodes_before, first.nodes_after) == (2, 2)
    assert (first.weight_bytes_before, first.weight_bytes_after) == (16, 16)
    assert first.seconds >= 0


def test_new_nodes_carry_the_name_of_their_maker_and_old_ones_do_not() -> None:
    model = _negated()
    PassManager([NegToAbs()]).run(model)
    assert [node.metadata_props.get(PASS_KEY) for node in model.graph] == ["neg-to-abs", None]


def test_observing_does_not_change_the_program() -> None:
    observed, alone, written = _negated(), _negated(), list[str]()
    PassManager([NegToAbs(), AllOptions()], print_after({"all"}, written.append)).run(observed)
    PassManager([NegToAbs(), AllOptions()]).run(alone)
    assert model_to_text(observed) == model_to_text(alone)
    assert [text.splitlines()[0] for text in written] == ["== IR after neg-to-abs ==", "== IR after all-options =="]


def test_the_ir_is_printed_after_the_chosen_pass_only() -> None:
    written: list[str] = []
    PassManager([NegToAbs(), AllOptions()], print_after({"neg-to-abs"}, written.append)).run(_negated())
    assert len(written) == 1
    assert "%negative = Abs(%x)" in written[0]


def test_a_crash_names_the_pass_and_what_ran_before() -> None:
    with pytest.raises(PassError) as caught:
        PassManager([AllOptions(), NegToAbs(mistake="crashes")]).run(_negated())
    message = "neg-to-abs: ZeroDivisionError: division by zero (passes that ran before: all-options)"
    assert str(caught.value) == message
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_pass_that_breaks_the_ir_is_caught_at_once() -> None:
    with pytest.raises(PassError, match="neg-to-abs: node 'too-early' reads 'y', which nothing before it makes"):
        PassManager([NegToAbs(mistake="breaks"), AllOptions()]).run(_negated())


def test_a_pass_that_hides_its_change_is_caught() -> None:
    with pytest.raises(PassError, match="neg-to-abs: it changed the model and reports modified=False"):
        PassManager([NegToAbs(mistake="lies")]).run(_negated())


def test_a_pass_that_renames_an_output_is_caught() -> None:
    with pytest.raises(
        PassError, match=r"it changed the graph's outputs from y \(FLOAT, rank 2\) to other \(FLOAT, rank"
    ):
        PassManager([NegToAbs(mistake="renames")]).run(_negated())


def test_a_model_that_is_broken_from_the_start_is_no_pass_s_fault() -> None:
    model = _negated()
    model.graph.append(ir.node("NoSuchOp", [model.graph.inputs[0]], name="bad"))
    with pytest.raises(PassError, match=r"import: node 'bad' .*no such op in opset 24 .passes that ran before: none"):
        PassManager([NegToAbs()]).run(model)


def test_the_timing_table_has_a_row_per_pass_and_a_total() -> None:
    records = [
        PassRecord("a", "a", 0.0125, 10, 8, 3_000_000, 1_500_000, True),
        PassRecord("b", "b", 0.5, 8, 8, 1, 1, False),
    ]
    assert timing_table(records) == [
        ("pass", "ms", "nodes", "weights MB", "modified"),
        ("a", "12.5", "10 -> 8", "3.0 -> 1.5", "yes"),
        ("b", "500.0", "8 -> 8", "0.0 -> 0.0", "no"),
        ("total", "512.5", "", "", ""),
    ]


def test_counting_weights_does_not_read_them() -> None:
    s = Snippet()
    tensor = ir.LazyTensor(lambda: pytest.fail("read"), ir.DataType.FLOAT, ir.Shape([1000]), name="lazy")
    value = s.weight("lazy", np.zeros(1000, np.float32))
    value.const_value = tensor
    model = s.output(s.node("Mul", "y", [s.input("x", "T", 1000), value], "T", 1000))
    (record,) = PassManager([AllOptions()]).run(model)
    assert record.weight_bytes_after == 4000


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
    (lambda s, y: s.node("Op", "n", [y], domain="ingot"), "no such op; ingot has PagedAttention"),
    (lambda s, y: s.graph.outputs.append(ir.Value(name="free")), "'free' has no dtype or shape"),
]


def _snippet() -> tuple[Snippet, ir.Value]:
    s = Snippet()
    y = s.node("Mul", "y", [s.input("x", "T", 4), s.weight("w", random(4))], "T", 4)
    s.output(y)
    return s, y


@pytest.mark.parametrize(("breaks", "message"), CASES)
def test_a_broken_invariant_is_named(breaks: Breaks, message: str) -> None:
    s, y = _snippet()
    verify(s.model)
    breaks(s, y)
    with pytest.raises(PassError, match=re.escape(message)):
        verify(s.model)


def test_a_graph_output_nobody_makes_is_refused() -> None:
    s, _ = _snippet()
    s.graph.outputs.append(ir.Value(name="free", type=ir.TensorType(FLOAT), shape=ir.Shape(["T"])))
    with pytest.raises(PassError, match="graph output 'free' is made by no node of the graph"):
        verify(s.model)


def test_a_whole_decoder_is_well_formed() -> None:
    verify(TinyDecoder().model)


def test_a_lowering_may_add_inputs_behind_those_that_are_there() -> None:
    s, _ = _snippet()
    before = Signature.of(s.model)
    s.input("cache", "T", 4)
    verify_signature(s.model, before, may_extend=True)
    with pytest.raises(PassError, match="it changed the graph's inputs"):
        verify_signature(s.model, before, may_extend=False)
