"""The imported IR keeps its contract: inputs, outputs, readable names, weights left in place, facts in the metadata."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.artifact import KVGeometry, ModelFacts
from ingot.errors import CheckpointError, UsageError
from ingot.passes.model_facts import CHECKPOINT, KV, MODEL
from ingot.passes.rewriting import attentions
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.progress import NOTES
from tests.each_case import each_case
from tests.oracle.all_cases import ALL_CASES
from tests.oracle.cases import CASES
from tests.parity import CHECKPOINTS
from tests.pipeline.checkpoint.formats.tiny_model import edit_quantization, exported
from tests.pipeline.tiny_checkpoint import copy_fixture, edit_tensors, ones


def imported(name: str = "llama", **options: Any) -> ir.Model:
    return import_checkpoint(Checkpoint.open(CHECKPOINTS / name), **options)


def nodes(model: ir.Model) -> dict[str, ir.Node]:
    return {node.name or "": node for node in model.graph}


def signature(values: Any) -> list[tuple[str, str, str]]:
    return [(value.name, str(value.dtype), str(value.shape)) for value in values]


@each_case("case", ALL_CASES, ids=lambda case: case.name)
def test_every_family_has_the_same_inputs_and_output(case: Any) -> None:
    model = imported(case.name)
    assert signature(model.graph.inputs) == [
        ("input_ids", "INT64", "[T]"),
        ("position_ids", "INT64", "[T]"),
        ("logits_indices", "INT64", "[R]"),
    ]
    assert signature(model.graph.outputs) == [("logits", "FLOAT", "[R,128]")]
    assert dict(model.graph.opset_imports) == {"": 24, "com.microsoft": 1, "ingot": 1}


@each_case("case", ALL_CASES, ids=lambda case: case.name)
def test_names_are_unique_and_every_value_has_type_and_shape(case: Any) -> None:
    graph = imported(case.name).graph
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    assert len({value.name for value in values}) == len(values)
    assert len({node.name for node in graph}) == len(graph)
    assert all(value.dtype is not None and value.shape is not None for value in values)
    assert {node.metadata_props["ingot.pass"] for node in graph} == {"import"}


@each_case("case", CASES, ids=lambda case: case.name)
def test_every_weight_stays_in_the_checkpoint(case: Any) -> None:
    checkpoint = Checkpoint.open(CHECKPOINTS / case.name)
    graph = import_checkpoint(checkpoint).graph
    external = {name for name, value in graph.initializers.items() if isinstance(value.const_value, ir.ExternalTensor)}
    assert external == set(checkpoint.tensors)


def test_linear_layers_take_the_checkpoints_own_matrix() -> None:
    node = nodes(imported())["layers.1.mlp.down_proj"]
    assert node.op_type == "Gemm"
    assert node.attributes["transB"].as_int() == 1
    assert [value.name for value in node.inputs if value] == [
        "layers.1.mlp.gated",
        "model.layers.1.mlp.down_proj.weight",
    ]


def test_sixteen_bit_weights_are_widened_by_one_cast_each() -> None:
    model = imported("llama-tied-biases")
    casts = [node for node in model.graph if node.op_type == "Cast"]
    names = [value.name or "" for node in casts for value in node.inputs if value]
    assert len(set(names)) == len(names) == len(Checkpoint.open(CHECKPOINTS / "llama-tied-biases").tensors)
    head = nodes(model)["lm_head"].inputs[1]
    assert head is nodes(model)["embed_tokens"].inputs[0]
    assert head is not None
    assert head.name == "model.embed_tokens.weight.float32"


def test_attention_carries_the_layers_facts() -> None:
    node = nodes(imported("gemma2"))["layers.2.self_attn.attention"]
    assert (node.domain, node.op_type) == ("ingot", "PagedAttention")
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    assert attributes == {
        "layer": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "scale": 0.25,
        "softcap": 50.0,
        "window": 8,
    }
    assert [str(value.shape) for value in node.inputs if value] == ["[T,64]", "[T,32]", "[T,32]"]


def test_a_window_as_wide_as_the_context_is_none() -> None:
    window = nodes(imported("mistral", context_tokens=8))["layers.0.self_attn.attention"].attributes["window"]
    assert window.as_int() == 0
    assert KV.of(imported("mistral", context_tokens=8)).window == 0


def test_the_kv_geometry_has_each_layers_window() -> None:
    model = imported("gemma2")
    windows = tuple(node.attributes["window"].as_int() for node in attentions(model.graph))
    assert set(windows) == {0, 8}
    assert tuple(layer.window for layer in KV.of(model).layers) == windows


def test_only_the_wanted_rows_reach_the_head() -> None:
    by_name = nodes(imported())
    assert by_name["wanted"].inputs[1].name == "logits_indices"  # type: ignore[union-attr]
    assert by_name["norm"].inputs[0] is by_name["wanted"].outputs[0]
    assert str(by_name["lm_head"].outputs[0].shape) == "[R,128]"


def test_fused_projections_stay_fused() -> None:
    by_name = nodes(imported("phi3"))
    assert by_name["layers.0.self_attn.qkv_proj"].op_type == "Gemm"
    assert [value.name for value in by_name["layers.0.self_attn.qkv_split"].outputs] == [
        f"layers.0.self_attn.{name}_proj" for name in "qkv"
    ]


def test_equal_rope_parameters_share_one_table() -> None:
    assert {"rope.0.cos", "rope.0.sin"} <= set(imported().graph.initializers)
    assert "rope.1.cos" not in imported().graph.initializers
    assert "rope.1.cos" in imported("gemma3_text").graph.initializers


def test_facts_and_kv_geometry_are_recorded() -> None:
    model = imported("llama-tied-biases", context_tokens=48)
    facts = MODEL.of(model)
    checkpoint = Checkpoint.open(CHECKPOINTS / "llama-tied-biases")
    assert facts == ModelFacts(
        family="llama",
        num_layers=3,
        hidden_size=32,
        vocab_size=128,
        context_tokens=48,
        num_parameters=sum(int(np.prod(tensor.shape)) for tensor in checkpoint.tensors.values()),
        eos_token_ids=(2, 3),
        bos_token_id=1,
    )
    assert KV.of(model) == KVGeometry(num_layers=3, num_kv_heads=2, head_dim=8)
    assert CHECKPOINT.of(model) == "llama-tied-biases"


def test_rope_tables_are_as_long_as_the_context() -> None:
    assert str(imported(context_tokens=20).graph.initializers["rope.0.cos"].shape) == "[20,4]"
    assert str(imported("phi3-longrope-short").graph.initializers["rope.0.cos"].shape) == "[32,4]"


@pytest.mark.parametrize("tokens", [0, -1, 65])
def test_a_context_that_the_model_does_not_have_is_refused(tokens: int) -> None:
    with pytest.raises(UsageError, match=rf"context_tokens is {tokens}; it must be from 1 to .* 64"):
        imported(context_tokens=tokens)


def test_importing_twice_gives_the_same_graph() -> None:
    assert str(imported("gemma3_text").graph) == str(imported("gemma3_text").graph)


def test_weights_that_are_not_finite_are_refused_unless_the_check_is_off(tmp_path: Path) -> None:
    folder = copy_fixture(tmp_path)
    bad = ones(32)
    bad[0] = np.nan
    edit_tensors(folder, {"model.norm.weight": bad})
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' in model.safetensors has 1 NaN and 0 Inf"):
        import_checkpoint(Checkpoint.open(folder))
    assert import_checkpoint(Checkpoint.open(folder), check_weights=False)


def test_a_note_says_that_quantized_inputs_stay_floats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = exported(tmp_path, "compressed-tensors", bits=8, symmetric=True, block_size="channel")
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    inputs = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "group", "group_size": 128}
    groups["group_0"]["input_activations"] = inputs
    edit_quantization(folder, {"config_groups": groups})
    with caplog.at_level(logging.INFO, NOTES):
        import_checkpoint(Checkpoint.open(folder))
    (note,) = (record.getMessage() for record in caplog.records if record.name == NOTES)
    assert note.startswith("the checkpoint quantizes the inputs of 14 layers (fp8 dynamic per group of 128)")
    assert "inputs stay floats" in note
