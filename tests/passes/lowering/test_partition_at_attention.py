"""partition-at-attention: segment numbers, copies of shared ops, and the values that may cross."""

import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.lowering.partition_at_attention import PartitionAtAttention, crossing_values, segment_of
from ingot.passes.manager import PassManager
from ingot.passes.printing import model_to_text
from tests.passes.tiny_decoder import TinyDecoder


def partitioned(layers: int = 3) -> ir.Model:
    model = TinyDecoder(layers=layers).model
    PassManager([PartitionAtAttention()]).run(model)
    return model


def test_a_node_is_in_the_segment_of_the_attentions_before_it() -> None:
    segments = {node.name: segment_of(node) for node in partitioned().graph}
    assert segments["embed_tokens"] == 0
    assert segments["layers.0.q_proj"] == 0
    assert segments["layers.0.attention"] == 0
    assert segments["layers.0.o_proj"] == 1
    assert segments["layers.1.v_proj"] == 1
    assert segments["layers.1.attention"] == 1
    assert segments["layers.2.down_proj"] == 3
    assert segments["lm_head"] == 3


def test_only_the_residual_stream_and_attentions_operands_cross() -> None:
    crossing = [value.name for value in crossing_values(partitioned(layers=2).graph)]
    assert crossing == [
        "embed_tokens.out",
        *(f"layers.0.{made}" for made in ("q.squeeze.out", "k.squeeze.out", "v_proj.out", "attention.out")),
        "layers.0.add_mlp.out",
        *(f"layers.1.{made}" for made in ("q.squeeze.out", "k.squeeze.out", "v_proj.out", "attention.out")),
    ]


def test_each_segment_that_reads_the_row_of_positions_computes_its_own() -> None:
    model = partitioned()
    copies = [node for node in model.graph if node.op_type == "Unsqueeze" and (node.name or "").startswith("positions")]
    assert {node.name: segment_of(node) for node in copies} == {
        "positions": 0,
        "positions.segment-1": 1,
        "positions.segment-2": 2,
    }
    for copy in copies:
        assert {segment_of(reader) for reader in copy.outputs[0].consumers()} == {segment_of(copy)}


def test_a_chain_of_constants_is_copied_whole() -> None:
    decoder = TinyDecoder(layers=2)
    graph = decoder.model.graph
    first = next(iter(graph))
    one = decoder.constant("one", [[1.0]])
    graph.register_initializer(one)
    links = [ir.node("Neg", [one], name="a"), ir.node("Neg", [one], name="b")]
    links[1].replace_input_with(0, links[0].outputs[0])
    for link in links:
        link.outputs[0].name, link.outputs[0].dtype = f"{link.name}.out", ir.DataType.DOUBLE
    graph.insert_before(first, links)
    for name in ("layers.0.add", "layers.1.add"):
        reader = next(node for node in graph if node.name == name)
        reader.resize_inputs(3)
        reader.replace_input_with(2, links[1].outputs[0])
    PartitionAtAttention()(decoder.model)
    found = {node.name: segment_of(node) for node in graph if node.op_type == "Neg"}
    assert found == {"a": 1, "a.segment-2": 2, "b": 1, "b.segment-2": 2}
    copy = next(node for node in graph if node.name == "b.segment-2")
    assert copy.inputs[0] is not None
    assert copy.inputs[0].name == "a.out.segment-2"


def test_second_run_changes_nothing() -> None:
    model = partitioned()
    text = model_to_text(model)
    (record,) = PassManager([PartitionAtAttention()]).run(model)
    assert not record.modified
    assert model_to_text(model) == text


def test_a_value_of_rank_three_must_not_cross() -> None:
    decoder = TinyDecoder(layers=1)
    attention = next(node for node in decoder.model.graph if node.op_type == "PagedAttention")
    squeeze = attention.inputs[0]
    assert squeeze is not None
    producer = squeeze.producer()
    assert producer is not None
    attention.replace_input_with(0, producer.inputs[0])
    with pytest.raises(PassError, match=r"'layers.0.q.rope.out' crosses a cut as \[1, .*only \[rows\]"):
        PassManager([PartitionAtAttention()]).run(decoder.model)


def test_a_half_precision_value_must_not_cross() -> None:
    decoder = TinyDecoder(layers=1)
    node = next(node for node in decoder.model.graph if node.name == "layers.0.v_proj")
    node.outputs[0].dtype = ir.DataType.FLOAT16
    with pytest.raises(PassError, match=r"'layers.0.v_proj.out' crosses a cut as FLOAT16"):
        PassManager([PartitionAtAttention()]).run(decoder.model)
