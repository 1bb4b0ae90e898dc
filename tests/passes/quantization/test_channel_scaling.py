"""Scaling of input channels: which node absorbs the scale, what a block's output is, and how its error is measured."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.passes.calibration import LinearGroup
from ingot.passes.fusion.fold_constants import FoldConstants
from ingot.passes.fusion.pack_projections import PackProjections
from ingot.passes.manager import PassManager
from ingot.passes.numerics.arrays import Float32Array
from ingot.passes.quantization.channel_scaling import (
    Fold,
    block_of,
    find_fold,
    gram_error,
    is_own,
    relative_error,
    scale_stored,
    weights_of,
)
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from ingot.passes.rewriting import Refusal
from tests.passes.snippets import random
from tests.passes.tiny_decoder import HEAD_DIM, HEADS, INNER, KV_HEADS, TinyDecoder, array


def decoder(*passes: Any) -> ir.Model:
    model = TinyDecoder().model
    PassManager([FoldConstants(), *passes]).run(model)
    return model


def group(model: ir.Model, *names: str) -> LinearGroup:
    """The linear layers with these names, which read one value."""
    linears = tuple(model.graph.node(f"layers.0.{name}_proj") for name in names)
    source = linears[0].inputs[0]
    assert source is not None
    return LinearGroup(source, linears)


def fold(model: ir.Model, *names: str) -> Fold:
    found = find_fold(group(model, *names))
    assert isinstance(found, Fold), found
    return found


def test_a_norm_a_factor_of_a_mul_or_the_values_of_an_attention_absorb_the_scale() -> None:
    model = decoder()
    norm, up, values = fold(model, "q", "k", "v"), fold(model, "down"), fold(model, "o")
    assert (norm.node.name, norm.rows, norm.heads) == ("layers.0.input_layernorm", None, None)
    assert (up.node.name, up.rows) == ("layers.0.up_proj", slice(0, INNER))
    assert (values.node.name, values.heads) == ("layers.0.v_proj", (KV_HEADS, HEADS // KV_HEADS, HEAD_DIM))


def test_rows_of_a_packed_layer_absorb_the_scale() -> None:
    up = fold(decoder(PackProjections()), "down")
    assert (up.node.name, up.rows) == ("layers.0.gate_up_proj", slice(INNER, 2 * INNER))


def test_query_heads_of_a_group_share_the_scale_of_their_kv_head() -> None:
    made = Fold(TinyDecoder().model.graph.node("layers.0.v_proj"), slice(0, 4), (2, 3, 2))
    channels = np.arange(12.0)
    shared = made.shared(channels)
    assert shared.tolist() == [2, 3, 2, 3, 2, 3, 8, 9, 8, 9, 8, 9]
    assert made.of_rows(shared).tolist() == [2, 3, 8, 9]


def reader_of_the_norm(model: ir.Model) -> None:
    norm = model.graph.node("layers.0.input_layernorm")
    model.graph.insert_after(norm, ir.node("Relu", norm.outputs, name="reader"))


def quantized(model: ir.Model) -> None:
    PassManager([QuantizeWeights()]).run(model)


def another_op(model: ir.Model) -> None:
    model.graph.node("layers.0.input_layernorm").op_type = "LpNormalization"


def shared_norm_weight(model: ir.Model) -> None:
    other = model.graph.node("layers.1.input_layernorm")
    other.replace_input_with(1, model.graph.node("layers.0.input_layernorm").inputs[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (reader_of_the_norm, "node 'layers.0.q_proj' has an input that others read too"),
        (quantized, "has a weight that others read too, or that is quantized already"),
        (another_op, "reads the result of LpNormalization, which cannot absorb a scale"),
        (shared_norm_weight, "follows a norm whose weight is computed or shared"),
    ],
)
def test_layers_whose_scale_no_node_absorbs_are_refused_with_the_reason(change: Any, message: str) -> None:
    model = decoder()
    change(model)
    found = find_fold(group(model, "q", "k", "v"))
    assert isinstance(found, Refusal)
    assert message in str(found)


def test_a_block_reaches_to_where_its_results_join_the_residual_stream() -> None:
    model = decoder()
    nodes, outputs = block_of(model.graph, group(model, "gate", "up"))
    assert [node.name for node in nodes] == [
        f"layers.0.{x}" for x in ("gate_proj", "up_proj", "silu", "mul", "down_proj")
    ]
    assert [value.name for value in outputs] == ["layers.0.down_proj.out"]


def test_the_error_of_a_gram_matrix_is_that_of_the_outputs() -> None:
    model = decoder()
    exact = weights_of(group(model, "q", "k", "v"))
    found: dict[ir.Node, Float32Array] = {
        node: (weight + 0.1 * random(*weight.shape, seed=1)).astype(np.float32) for node, weight in exact.items()
    }
    rows: Float32Array = random(200, 64, seed=2)
    by_outputs = relative_error([rows @ one.T for one in found.values()], [rows @ one.T for one in exact.values()])
    gram = (rows.T @ rows).astype(np.float64)
    assert gram_error(exact, gram)(found) == pytest.approx(by_outputs, rel=1e-4)
    assert gram_error(exact, gram)(exact) == 0


def test_a_stored_weight_is_scaled_by_row_and_by_column() -> None:
    model = decoder()
    name, node = "layers.0.q_proj.weight", model.graph.node("layers.0.q_proj")
    before = array(model, name).astype(np.float32)
    rows, columns = np.abs(random(64)) + 1, np.abs(random(64, seed=1)) + 1
    assert is_own(node.inputs[1])
    scale_stored(model.graph, node, 1, rows=rows, columns=columns)
    np.testing.assert_allclose(array(model, name), before * rows[:, None] * columns, rtol=1e-6)
    scale_stored(model.graph, node, 2, columns=rows)
    np.testing.assert_allclose(
        array(model, "layers.0.q_proj.bias"), array(decoder(), "layers.0.q_proj.bias") * rows, rtol=1e-6
    )
