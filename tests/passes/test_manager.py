"""The manager runs, verifies, counts and tags; its callbacks change nothing."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.manager import PASS_KEY, PassManager, PassRecord, print_after, save_after_each, timing_table
from ingot.passes.printing import model_to_text
from tests.passes.example_passes import AllOptions, NegToAbs
from tests.passes.snippets import Snippet, random


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


def test_the_ir_can_be_saved_after_each_pass(tmp_path: Path) -> None:
    PassManager([NegToAbs(), AllOptions()], save_after_each(tmp_path / "ir")).run(model := _negated())
    assert [file.name for file in sorted((tmp_path / "ir").iterdir())] == ["00-neg-to-abs.txt", "01-all-options.txt"]
    assert (tmp_path / "ir/01-all-options.txt").read_text(encoding="utf-8") == model_to_text(model)


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


def test_a_model_that_is_broken_from_the_start_is_blamed_on_the_import() -> None:
    model = _negated()
    model.graph.append(ir.node("NoSuchOp", [model.graph.inputs[0]], name="bad"))
    with pytest.raises(PassError, match=r"import: node 'bad' .*no such op in opset 24 .passes that ran before: none"):
        PassManager([NegToAbs()]).run(model)


def test_the_timing_table_has_a_row_per_pass_and_a_total() -> None:
    records = [
        PassRecord(NegToAbs(), 0.0125, 10, 8, 3_000_000, 1_500_000, True),
        PassRecord(AllOptions(), 0.5, 8, 8, 1, 1, False),
    ]
    assert timing_table(records) == [
        ("pass", "ms", "nodes", "weights MB", "modified"),
        ("neg-to-abs", "12.5", "10 -> 8", "3.0 -> 1.5", "yes"),
        ("all-options", "500.0", "8 -> 8", "0.0 -> 0.0", "no"),
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
