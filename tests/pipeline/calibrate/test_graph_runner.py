"""Sessions over some nodes: which operands are inputs, which are constants, and what is computed inside."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.pipeline.calibrate.graph_runner import GraphRunner
from ingot.pipeline.calibrate.steps import shared_nodes
from tests.passes.snippets import Snippet, random
from tests.passes.tiny_decoder import TinyDecoder, array


def runner(graph: ir.Graph, *names: str, fed: Sequence[ir.Value] = ()) -> GraphRunner:
    """A session over the nodes with these names, for sequences of 4 tokens; its output is that of the last one."""
    nodes = [node for node in graph if node.name in names]
    return GraphRunner(nodes, [nodes[-1].outputs[0]], shared_nodes(graph), 4, fed=frozenset(fed))


def test_a_matrix_is_an_input_and_a_norm_weight_is_a_constant_unless_it_is_fed() -> None:
    model = TinyDecoder().model
    norm = model.graph.node("layers.0.input_layernorm")
    weight = norm.inputs[1]
    assert weight is not None
    names = ("layers.0.input_layernorm", "layers.0.k_proj")
    matrix = model.graph.node("layers.0.k_proj").inputs[1]
    plain, fed = runner(model.graph, *names), runner(model.graph, *names, fed=[weight])
    assert (plain.weights, plain.activations) == ((matrix,), ("embed_tokens.out",))
    assert set(fed.weights) == {weight, matrix}
    x, k = random(4, 64), array(model, "layers.0.k_proj.weight").astype(np.float32)
    feeds = {"embed_tokens.out": x, "unused": x}
    assert matrix is not None
    (result,) = plain.run(feeds, {matrix: k})
    (same,) = fed.run(feeds, {matrix: k, weight: array(model, weight.name or "")})
    expected = x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + 1e-5) * array(model, weight.name or "") @ k.T
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(same, result, rtol=1e-6)


def test_nodes_that_do_not_depend_on_token_ids_are_computed_inside() -> None:
    graph = TinyDecoder().model.graph
    rope = runner(graph, "layers.0.q.unsqueeze", "layers.0.q.rope")
    assert rope.activations == ("layers.0.q_proj.out", "position_ids")
    assert [value.name for value in rope.weights] == ["rope.cos", "rope.sin"]


def test_nodes_that_onnxruntime_refuses_are_named() -> None:
    snippet = Snippet()
    x = snippet.input("input_ids", "T", 4)
    snippet.output(snippet.node("Relu", "first", [x], "T", 4), snippet.node("Relux", "second", [x], "T", 4))
    with pytest.raises(PassError, match=r"onnxruntime cannot run 'first' \.\.\. 'second': "):
        runner(snippet.graph, "first", "second")
