"""fuse-rotary-attention: the fused attention, all families, refusals. Whole programs prove the numbers."""

import logging
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.lowering.attention_reference import AttentionReference
from ingot.passes.lowering.fuse_rotary_attention import FuseRotaryAttention
from ingot.passes.manager import PassManager
from ingot.passes.printing import model_to_text
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from tests.each_case import each_case
from tests.parity import CHECKPOINTS
from tests.passes.snippets import INT64, Snippet, op_types, random

HEADS, KV_HEADS, DIM, POSITIONS = 4, 2, 8, 32
PLAIN: dict[str, Any] = {
    "layer": 0,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "head_dim": DIM,
    "scale": 0.5,
    "window": 3,
}
WIDTHS = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}


class Layer(Snippet):
    """One layer's attention, packed and rotated; parts can be omitted or changed."""

    def __init__(self, rotated: str = "qk", rotary_dim: int = 0, **rotary: int) -> None:
        super().__init__()
        self.rotary, self.zero = {"rotary_embedding_dim": rotary_dim, **rotary}, self.weight("zero", np.array([0]))
        packed = self.input("packed", "T", sum(WIDTHS.values()))
        self.positions = self.input("position_ids", "T")
        self.positions.dtype = INT64
        self.half = (rotary_dim or DIM) // 2
        self.tables = [self.weight(name, random(POSITIONS, self.half, seed=7)) for name in ("cos", "sin")]
        parts = dict(zip(WIDTHS, self.split(packed), strict=True))
        for name in rotated:
            parts[name] = self.rotate(name, parts[name])
        attention = self.node(
            "PagedAttention", "attention", [*parts.values()], "T", WIDTHS["q"], domain="ingot", **PLAIN
        )
        self.output(attention)

    def split(self, packed: ir.Value) -> list[ir.Value]:
        sizes = self.weight("sizes", np.array([*WIDTHS.values()]))
        outputs = [ir.Value(name=name, type=packed.type, shape=ir.Shape(["T", n])) for name, n in WIDTHS.items()]
        self.graph.append(ir.node("Split", [packed, sizes], {"axis": -1}, outputs=outputs, name="split"))
        return outputs

    def rotate(self, name: str, x: ir.Value) -> ir.Value:
        width = WIDTHS[name]
        rows = self.node("Unsqueeze", f"{name}.rows", [self.positions, self.zero], 1, "T", dtype=INT64)
        batched = self.node("Unsqueeze", f"{name}.batched", [x, self.zero], 1, "T", width)
        attributes: dict[str, Any] = {"num_heads": width // DIM, **self.rotary}
        turned = self.node(
            "RotaryEmbedding", f"{name}.rope", [batched, *self.tables, rows], 1, "T", width, **attributes
        )
        return self.node("Squeeze", f"{name}.flat", [turned, self.zero], "T", width)

    def find(self, name: str) -> ir.Node:
        return next(node for node in self.graph if node.name == name)


def fused_attributes(model: ir.Model) -> dict[str, object]:
    (attention,) = (node for node in model.graph if node.op_type == "PagedAttention")
    return {name: attribute.value for name, attribute in attention.attributes.items()}


@pytest.mark.parametrize("rotary_dim", [0, 4])
def test_the_attention_absorbs_split_and_rotary_embedding(rotary_dim: int) -> None:
    model = Layer(rotary_dim=rotary_dim).model
    (record,) = PassManager([FuseRotaryAttention()]).run(model)
    assert record.modified
    assert op_types(model) == ["PagedAttention"]
    (attention,) = model.graph
    assert [value.name for value in attention.inputs if value] == ["packed", "packed", "packed", "cos", "sin"]
    columns = {"query_column": 0, "key_column": 32, "value_column": 48}
    assert fused_attributes(model) == {**PLAIN, **columns, "rotary_dim": rotary_dim or DIM}
    assert model.graph.outputs[0].name == "attention"
    assert attention.metadata_props["ingot.pass"] == "fuse-rotary-attention"


def test_sinks_stay_the_last_operand() -> None:
    layer = Layer()
    attention = layer.find("attention")
    attention.resize_inputs(6)
    attention.replace_input_with(5, layer.weight("sinks", random(HEADS)))
    FuseRotaryAttention()(layer.model)
    (attention,) = layer.model.graph
    names = [value.name for value in attention.inputs if value]
    assert names == ["packed", "packed", "packed", "cos", "sin", "sinks"]


def test_a_second_run_changes_nothing() -> None:
    model = Layer().model
    FuseRotaryAttention()(model)
    text = model_to_text(model)
    assert not FuseRotaryAttention()(model).modified
    assert model_to_text(model) == text


def test_a_layer_without_rotary_embedding_still_reads_packed() -> None:
    model = Layer(rotated="").model
    assert FuseRotaryAttention()(model).modified
    assert op_types(model) == ["PagedAttention"]
    assert "rotary_dim" not in fused_attributes(model)
    assert fused_attributes(model)["value_column"] == 48


def test_a_norm_between_split_and_rotation_leaves_the_split() -> None:
    layer = Layer()
    batched = layer.find("q.batched")
    normed = ir.node("Neg", [batched.inputs[0]], name="norm")
    layer.graph.insert_before(batched, normed)
    normed.outputs[0].name, normed.outputs[0].shape = "norm", batched.inputs[0].shape if batched.inputs[0] else None
    batched.replace_input_with(0, normed.outputs[0])
    assert FuseRotaryAttention()(layer.model).modified
    assert op_types(layer.model) == ["Split", "Neg", "PagedAttention"]
    assert [value.name for value in layer.find("attention").inputs if value] == ["norm", "k", "v", "cos", "sin"]
    assert "query_column" not in fused_attributes(layer.model)


def test_a_split_that_others_read_stays() -> None:
    layer = Layer(rotated="")
    layer.output(layer.node("Neg", "other", [layer.find("split").outputs[2]], "T", WIDTHS["v"]))
    assert not FuseRotaryAttention()(layer.model).modified


def other_tables(layer: Layer) -> None:
    layer.find("k.rope").replace_input_with(1, layer.weight("other", random(POSITIONS, layer.half)))


def computed_tables(layer: Layer) -> None:
    table = layer.node("Neg", "negated", [layer.tables[0]], POSITIONS, layer.half)
    for name in ("q.rope", "k.rope"):
        layer.find(name).replace_input_with(1, table)
    node = layer.find("negated")
    layer.graph.remove(node)
    layer.graph.insert_before(layer.find("split"), node)


def other_positions(layer: Layer) -> None:
    layer.positions.name = "places"


def more_heads(layer: Layer) -> None:
    layer.find("q.rope").attributes["num_heads"] = ir.AttrInt64("num_heads", 2 * HEADS)


REFUSALS = [
    (Layer(rotated="q"), None, "node 'attention' has only its queries or only its keys rotated"),
    (Layer(interleaved=1), None, "node 'q.rope' pairs neighbours"),
    (Layer(), other_tables, "node 'k.rope' rotates keys otherwise than 'q.rope' rotates queries"),
    (Layer(), computed_tables, "node 'q.rope' has tables other than float32 initializers"),
    (Layer(), other_positions, "node 'q.rope' takes positions that are not the graph's position_ids"),
    (Layer(), more_heads, "node 'q.rope' has another number of heads than the num_heads of 'attention'"),
]


@each_case(("layer", "spoil", "reason"), REFUSALS, ids=[reason[5:40] for _, _, reason in REFUSALS])
def test_what_the_kernel_cannot_do_stays_and_the_log_says_why(
    layer: Layer, spoil: object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    if callable(spoil):
        spoil(layer)
    text = model_to_text(layer.model)
    with caplog.at_level(logging.INFO, "ingot.passes"):
        assert not FuseRotaryAttention()(layer.model).modified
    assert model_to_text(layer.model) == text
    assert reason in caplog.text


def test_attention_reference_refuses_what_was_lowered() -> None:
    for layer in (Layer(), Layer(rotated="")):
        FuseRotaryAttention()(layer.model)
        with pytest.raises(PassError, match="'attention' was lowered by fuse-rotary-attention"):
            AttentionReference()(layer.model)


# In these families queries and keys are normed after the split, so the attention absorbs only the rotary embedding.
NORMED = ("gemma3_text", "olmo2", "qwen3")
FAMILIES = ("gemma2", *NORMED, "granite", "llama", "mistral", "phi3", "phi3-partial-rotary", "qwen2", "smollm3")


@each_case("name", FAMILIES)
def test_no_family_keeps_a_rotary_embedding_of_its_own(name: str) -> None:
    model = import_checkpoint(Checkpoint.open(CHECKPOINTS / name))
    rotated = {node.name for node in model.graph if node.op_type == "RotaryEmbedding"}
    PassManager([*map(make_pass, ("fold-constants", "pack-projections", "fuse-rotary-attention", "clean-up"))]).run(
        model
    )
    attentions = [node for node in model.graph if node.op_type == "PagedAttention"]
    assert "RotaryEmbedding" not in op_types(model)
    assert 2 * sum("rotary_dim" in node.attributes for node in attentions) == len(rotated)
    packed = sum("value_column" in node.attributes for node in attentions)
    assert packed == (0 if name in NORMED else len(attentions))
