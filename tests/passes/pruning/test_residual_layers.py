"""Layers of a graph: found along the residual stream, measured by their influence, removed and renumbered."""

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.fusion.fold_constants import FoldConstants
from ingot.passes.manager import PassManager
from ingot.passes.pruning.residual_layers import block_influence, drop_layers, residual_layers
from tests.passes.calibration_data import calibration
from tests.passes.tiny_decoder import TinyDecoder, array


def decoder(layers: int = 3) -> ir.Model:
    model = TinyDecoder(layers=layers).model
    PassManager([FoldConstants()]).run(model)
    return model


def logits(model: ir.Model) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.concatenate(list(calibration().logits(model)))


def test_a_layer_has_the_nodes_between_the_values_that_two_attentions_read() -> None:
    model = decoder()
    layers = residual_layers(model.graph)
    assert [layer.attention.name for layer in layers] == [f"layers.{number}.attention" for number in range(3)]
    assert [layer.start.name for layer in layers] == [
        "embed_tokens.out",
        "layers.0.add_mlp.out",
        "layers.1.add_mlp.out",
    ]
    assert [layer.end for layer in layers[:-1]] == [layer.start for layer in layers[1:]]
    for number, layer in enumerate(layers):
        assert [value.name for value in layer.branches] == [f"layers.{number}.{x}_proj.out" for x in ("o", "down")]
        assert all((node.name or "").startswith(f"layers.{number}.") for node in layer.nodes)
        assert sum(node.op_type == "Gemm" for node in layer.nodes) == 7


def test_the_influence_of_a_layer_is_one_minus_the_cosine_of_its_input_and_output() -> None:
    model = decoder()
    for name in ("layers.1.o_proj.weight", "layers.1.down_proj.weight"):
        value = model.graph.initializers[name]
        value.const_value = ir.tensor(np.zeros_like(array(model, name)), name=name)
    layers, reported = residual_layers(model.graph), list[int]()
    influence = block_influence(model, layers, calibration(), 256, reported.append)
    assert reported == [1, 2, 3]
    assert influence[1] == pytest.approx(0, abs=1e-6)
    assert all(0.01 < influence[number] < 1 for number in (0, 2))


def test_dropping_a_layer_that_adds_nothing_keeps_the_logits_and_renumbers_the_rest() -> None:
    model = decoder()
    for name in ("layers.1.o_proj.weight", "layers.1.down_proj.weight"):
        value = model.graph.initializers[name]
        value.const_value = ir.tensor(np.zeros_like(array(model, name)), name=name)
    exact, last = logits(model), array(model, "layers.2.q_proj.weight").copy()
    drop_layers(model.graph, residual_layers(model.graph), [0, 2])
    np.testing.assert_allclose(logits(model), exact, atol=1e-5)
    layers = residual_layers(model.graph)
    assert [layer.attention.attributes["layer"].as_int() for layer in layers] == [0, 1]
    assert [layer.attention.name for layer in layers] == ["layers.0.attention", "layers.1.attention"]
    np.testing.assert_array_equal(array(model, "layers.1.q_proj.weight"), last)
    assert not [name for name in model.graph.initializers if name.startswith("layers.2.")]


def test_a_stream_that_branches_is_refused_by_name() -> None:
    model = decoder()
    add = model.graph.node("layers.1.add_mlp")
    other = ir.node("Add", [add.inputs[0], add.inputs[1]], name="other")
    model.graph.insert_after(add, other)
    with pytest.raises(PassError, match=r"node 'other' adds to a value that 'layers\.1\.add_mlp' adds to as well"):
        residual_layers(model.graph)


def test_an_attention_that_reads_two_values_of_the_stream_is_refused_by_name() -> None:
    model = decoder()
    norm = model.graph.node("layers.1.input_layernorm")
    model.graph.node("layers.2.v_proj").replace_input_with(0, norm.outputs[0])
    with pytest.raises(PassError, match=r"attention 'layers\.2\.attention' reads 2 values of the residual stream"):
        residual_layers(model.graph)


def test_a_graph_without_an_embedding_is_refused() -> None:
    model = decoder()
    model.graph.node("embed_tokens").op_type = "Identity"
    with pytest.raises(PassError, match="no Gather reads input_ids, so there is no residual stream"):
        residual_layers(model.graph)
