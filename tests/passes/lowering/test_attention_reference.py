"""attention-reference: standard ONNX instead of paged attention, its inputs and refusals."""

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.passes.lowering.attention_reference import AttentionReference
from ingot.passes.registry import make_pass
from tests.each_case import each_case
from tests.reference_runner import ReferenceRunner

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 3
Array = NDArray[np.float32]


def paged_model(
    layers: tuple[int, ...] = (0,), softcap: float = 0.0, window: int = 0, sinks: Array | None = None
) -> ir.Model:
    """Attention over queries, keys and values gathered by token from tables [16, columns]; logits are its result."""
    widths = {"query": HEADS * HEAD_DIM, "key": KV_HEADS * HEAD_DIM, "value": KV_HEADS * HEAD_DIM}
    names = ("input_ids", "position_ids", "logits_indices")
    inputs = [ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["T"])) for name in names]
    tables = {kind: _initializer(kind, table) for kind, table in make_tables(widths).items()}
    nodes = [ir.node("Gather", [table, inputs[0]], {"axis": 0}, name=f"{kind}_rows") for kind, table in tables.items()]
    attributes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "scale": 0.7}
    rows: list[ir.Value | None] = [node.outputs[0] for node in nodes]
    if sinks is not None:
        tables["sinks"] = _initializer("sinks", sinks)
        rows += [None, None, tables["sinks"]]
    for layer in layers:
        options = {**attributes, "layer": layer, "softcap": softcap, "window": window}
        nodes.append(ir.node("PagedAttention", rows, options, domain="ingot", name=f"layers.{layer}.attention"))
    wanted = ir.node("Gather", [nodes[-1].outputs[0], inputs[2]], {"axis": 0}, name="wanted")
    wanted.outputs[0].name = "logits"
    wanted.outputs[0].type, wanted.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["R", 12])
    graph = ir.Graph(
        inputs,
        wanted.outputs,
        nodes=[*nodes, wanted],
        initializers=list(tables.values()),
        opset_imports={"": 24, "ingot": 1},
        name="paged",
    )
    return ir.Model(graph, ir_version=11)


def make_tables(widths: dict[str, int]) -> dict[str, Array]:
    rng = np.random.default_rng(7)
    return {kind: rng.normal(size=(16, width)).astype(np.float32) for kind, width in widths.items()}


def _initializer(name: str, array: Array) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    return ir.Value(name=name, const_value=tensor, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))


def expected(tokens: list[int], softcap: float, window: int, sinks: Array | None) -> Array:
    """Attention by its definition, token by token and head by head: [tokens, heads * head_dim]."""
    tables = make_tables({"query": HEADS * HEAD_DIM, "key": KV_HEADS * HEAD_DIM, "value": KV_HEADS * HEAD_DIM})
    query, key, value = (table[tokens].reshape(len(tokens), -1, HEAD_DIM) for table in tables.values())
    rows = np.zeros_like(query)
    for position in range(len(tokens)):
        first = max(0, position + 1 - window) if window else 0
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = key[first : position + 1, group] @ query[position, head] * 0.7
            scores = softcap * np.tanh(scores / softcap) if softcap else scores
            weights = np.exp(scores - scores.max())
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - scores.max()))
            rows[position, head] = weights / total @ value[first : position + 1, group]
    return rows.reshape(len(tokens), -1)


@each_case("softcap", [0.0, 0.5])
@each_case("window", [0, 1, 4])
@each_case("sinks", [None, np.array([0.5, -3, 2, 40], np.float32)], ids=["plain", "sinks"])
def test_ragged_paged_batches_equal_attention_by_the_definition(
    softcap: float, window: int, sinks: Array | None
) -> None:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 16, length).tolist() for length in (9, 30, 17)]
    runner = ReferenceRunner(paged_model(softcap=softcap, window=window, sinks=sinks))
    for prompt, rows in zip(prompts, runner.run_ragged(prompts), strict=True):
        np.testing.assert_allclose(rows, expected(prompt, softcap, window, sinks), atol=2e-6)


def test_the_caches_of_each_layer_become_inputs_and_outputs() -> None:
    model = paged_model(layers=(0, 1))
    assert AttentionReference()(model).modified
    names = [value.name for value in model.graph.inputs]
    assert names[3:8] == ["slot_mapping", "query_sequences", "kv_slots", "kv_sequences", "kv_positions"]
    assert sorted(name or "" for name in names[8:]) == ["key_cache.0", "key_cache.1", "value_cache.0", "value_cache.1"]
    outputs = {value.name for value in model.graph.outputs}
    assert outputs == {"logits", *(f"{kind}_cache_out.{layer}" for kind in ("key", "value") for layer in (0, 1))}


def test_new_nodes_carry_the_name_of_the_pass() -> None:
    model = paged_model()
    old = {node.name for node in model.graph}
    AttentionReference()(model)
    made = [node for node in model.graph if node.name not in old]
    assert made
    assert {node.metadata_props["ingot.pass"] for node in made} == {"attention-reference"}


def test_layers_of_one_window_share_their_mask() -> None:
    model = paged_model(layers=(0, 1), window=4)
    AttentionReference()(model)
    assert sum(node.op_type == "LessOrEqual" for node in model.graph) == 1


def test_a_second_run_is_refused_because_nothing_is_left_to_expand() -> None:
    model = paged_model()
    AttentionReference()(model)
    with pytest.raises(PassError, match="attention-reference: the model has no ingot::PagedAttention"):
        AttentionReference()(model)


def test_two_attentions_of_one_layer_are_refused() -> None:
    with pytest.raises(PassError, match=r"attention-reference: two PagedAttention nodes have the same layer: \[3, 3\]"):
        AttentionReference()(paged_model(layers=(3, 3)))


def test_the_registry_makes_it_by_name() -> None:
    assert str(make_pass("attention-reference")) == "attention-reference"
