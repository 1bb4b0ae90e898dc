"""split_program: steps, values and names."""

import onnx_ir as ir
import pytest

from ingot.artifact import AttentionStep, SegmentStep, ValueFacts
from ingot.errors import BuildError, PassError
from ingot.passes.lowering.attention_reference import AttentionReference
from ingot.passes.lowering.partition_at_attention import PartitionAtAttention
from ingot.passes.manager import PassManager
from ingot.pipeline.targets.segments.split import split_program
from tests.passes.tiny_decoder import TinyDecoder


def partitioned() -> ir.Model:
    model = TinyDecoder(layers=2).model
    PassManager([PartitionAtAttention()]).run(model)
    return model


def test_segments_and_attentions_alternate() -> None:
    program, segments = split_program(partitioned())
    assert [step.kind for step in program.steps] == ["segment", "attention", "segment", "attention", "segment"]
    assert [segment.graph.name for segment in segments] == ["segment-000", "segment-001", "segment-002"]
    first, attention, second, _, last = program.steps
    assert isinstance(first, SegmentStep)
    assert first.file == "program/segment-000.onnx"
    assert first.inputs == ("input_ids", "position_ids")
    assert isinstance(attention, AttentionStep)
    assert (attention.layer, attention.num_heads, attention.num_kv_heads, attention.head_dim) == (0, 4, 2, 16)
    assert (attention.scale, attention.window) == (0.25, 0)
    assert isinstance(second, SegmentStep)
    assert second.inputs == ("position_ids", "layers.0.attention.out", "embed_tokens.out")
    assert isinstance(last, SegmentStep)
    assert last.inputs[0] == "logits_indices"
    assert last.outputs == ("logits",)


def test_names_in_the_segments_are_those_of_the_program_and_each_is_made_before_it_is_read() -> None:
    program, segments = split_program(partitioned())
    known = {"input_ids", "position_ids", "logits_indices"}
    graphs = iter(segments)
    for step in program.steps:
        if isinstance(step, SegmentStep):
            graph = next(graphs).graph
            assert step.inputs == tuple(value.name for value in graph.inputs)
            assert step.outputs == tuple(value.name for value in graph.outputs)
            read, made = step.inputs, step.outputs
        else:
            read, made = step.inputs, (step.output,)
        assert known.issuperset(read)
        known.update(made)
    assert known == program.values.keys()


def test_values_carry_dtype_rows_and_columns() -> None:
    values = split_program(partitioned())[0].values
    assert values["input_ids"] == ValueFacts(dtype="int64", rows="tokens", columns=0)
    assert values["logits_indices"] == ValueFacts(dtype="int64", rows="logits", columns=0)
    assert values["layers.1.k.squeeze.out"] == ValueFacts(dtype="float32", rows="tokens", columns=32)
    assert values["logits"] == ValueFacts(dtype="float32", rows="logits", columns=96)


def test_the_model_is_left_as_it_was_and_weights_are_not_copied() -> None:
    model = partitioned()
    before = [node.name for node in model.graph]
    _, segments = split_program(model)
    assert [node.name for node in model.graph] == before
    kept = model.graph.initializers["layers.0.up_proj.weight"].const_value
    assert segments[1].graph.initializers["layers.0.up_proj.weight"].const_value is kept


def test_a_model_that_is_not_partitioned_is_refused() -> None:
    with pytest.raises(PassError, match="is in no segment; run partition-at-attention"):
        split_program(TinyDecoder().model)


def test_a_crossing_value_of_unknown_rows_is_refused() -> None:
    model = partitioned()
    value = next(node for node in model.graph if node.name == "layers.0.v_proj").outputs[0]
    value.shape = ir.Shape(["N", 32])
    with pytest.raises(BuildError, match=r"'layers.0.v_proj.out' between two steps is FLOAT"):
        split_program(model)


def test_a_model_without_attention_is_refused_with_the_pass_that_took_it() -> None:
    model = TinyDecoder().model
    PassManager([AttentionReference(), PartitionAtAttention()]).run(model)
    with pytest.raises(BuildError, match=r"no PagedAttention left.*attention-reference is for debugging"):
        split_program(model)
