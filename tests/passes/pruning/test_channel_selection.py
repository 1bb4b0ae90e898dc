"""Columns are traced back to the linear layers that make them; a PassError leaves the graph as it was."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.fusion.fold_constants import FoldConstants
from ingot.passes.fusion.pack_projections import PackProjections
from ingot.passes.manager import PassManager
from ingot.passes.printing import model_to_text
from ingot.passes.pruning.channel_selection import ChannelSelection, select_stored
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from tests.passes.tiny_decoder import HEAD_DIM, HEADS, INNER, TinyDecoder, array

KEPT = np.array([0, 3, 5])


def decoder(*passes: ir.passes.InPlacePass) -> ir.Model:
    model = TinyDecoder().model
    PassManager([FoldConstants(), *passes]).run(model)  # type: ignore[list-item]  # passes of Ingot
    return model


def input_of(model: ir.Model, name: str) -> ir.Value:
    value = model.graph.node(name).inputs[0]
    assert value is not None
    return value


def selected(model: ir.Model, reader: str, keep: np.ndarray[tuple[int], np.dtype[np.int64]]) -> ChannelSelection:
    """Keep these columns of the input of a layer."""
    selection, node = ChannelSelection(), model.graph.node(reader)
    selection.select(input_of(model, reader), keep, [node])
    return selection


def test_channels_of_a_feed_forward_are_rows_of_gate_and_up() -> None:
    model = decoder()
    up = array(model, "layers.0.up_proj.weight").copy()
    selection = selected(model, "layers.0.down_proj", KEPT)
    rows = {node.name: keep.tolist() for node, keep in selection.rows.items()}
    assert rows == dict.fromkeys(("layers.0.gate_proj", "layers.0.up_proj"), KEPT.tolist())
    selection.apply(model.graph)
    np.testing.assert_array_equal(array(model, "layers.0.up_proj.weight"), up[KEPT])
    assert input_of(model, "layers.0.down_proj").shape == ir.Shape(["T", 3])


def test_channels_of_packed_projections_are_rows_of_both_halves_and_sizes_of_the_split() -> None:
    model = decoder(PackProjections())
    selection = selected(model, "layers.0.down_proj", KEPT)
    ((node, keep),) = selection.rows.items()
    assert (node.name, keep.tolist()) == ("layers.0.gate_up_proj", [*KEPT, *(KEPT + INNER)])
    assert [values for _, _, values in selection.constants] == [[3, 3]]


def test_heads_of_an_attention_take_whole_groups_with_their_kv_head() -> None:
    model = decoder()
    keep = np.arange(2 * HEAD_DIM, HEADS * HEAD_DIM)  # the second KV head's two query heads
    selection = selected(model, "layers.0.o_proj", keep)
    rows = {node.name: (int(kept[0]), len(kept)) for node, kept in selection.rows.items()}
    assert rows == {
        "layers.0.q_proj": (2 * HEAD_DIM, 2 * HEAD_DIM),
        "layers.0.k_proj": (HEAD_DIM, HEAD_DIM),
        "layers.0.v_proj": (HEAD_DIM, HEAD_DIM),
    }
    selection.apply(model.graph)
    attributes = model.graph.node("layers.0.attention").attributes
    assert (attributes["num_heads"].as_int(), attributes["num_kv_heads"].as_int()) == (2, 1)
    assert len(array(model, "layers.0.q_proj.bias")) == 2 * HEAD_DIM


def test_rows_columns_and_biases_are_selected_from_stored_values() -> None:
    model = decoder()
    before = array(model, "layers.0.down_proj.weight").astype(np.float32)
    select_stored(model.graph, model.graph.node("layers.0.down_proj").inputs[1], KEPT, axis=1)
    np.testing.assert_array_equal(array(model, "layers.0.down_proj.weight"), before[:, KEPT])


def another_reader(model: ir.Model) -> None:
    extra = ir.node("Relu", [input_of(model, "layers.0.down_proj")], name="extra")
    model.graph.append(extra)


def an_output(model: ir.Model) -> None:
    model.graph.outputs.append(input_of(model, "layers.0.down_proj"))


def a_shared_weight(model: ir.Model) -> None:
    up = model.graph.node("layers.1.up_proj")
    up.replace_input_with(1, model.graph.node("layers.0.up_proj").inputs[1])


def a_norm(model: ir.Model) -> None:
    down = model.graph.node("layers.0.down_proj")
    down.replace_input_with(0, input_of(model, "layers.0.q_proj"))


def no_producer(model: ir.Model) -> None:
    model.graph.node("layers.0.down_proj").replace_input_with(0, model.graph.inputs[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_reader, r"node 'extra' reads 'layers\.0\.mul\.out' too, some columns of which should go"),
        (an_output, r"the graph's output reads 'layers\.0\.mul\.out' too"),
        (a_shared_weight, "layer 'layers.0.up_proj' shares 'layers.0.up_proj.weight' with others"),
        (a_norm, r"node 'layers\.0\.input_layernorm' \(RMSNormalization\) mixes channels"),
        (no_producer, "no linear layer makes 'input_ids', so none of its columns can go"),
    ],
)
def test_columns_that_cannot_go_are_refused_and_the_graph_stays(
    change: Callable[[ir.Model], None], message: str
) -> None:
    model = decoder()
    change(model)
    before = model_to_text(model)
    with pytest.raises(PassError, match=message):
        selected(model, "layers.0.down_proj", KEPT)
    assert model_to_text(model) == before


def test_a_quantized_maker_is_refused_by_name() -> None:
    with pytest.raises(PassError, match=r"layer 'layers\.0\.gate_proj' has a weight that is computed or quantized"):
        selected(decoder(QuantizeWeights()), "layers.0.down_proj", KEPT)


def test_two_readers_that_keep_different_columns_are_refused() -> None:
    model = decoder()
    selection = selected(model, "layers.0.down_proj", KEPT)
    reader = model.graph.node("layers.0.down_proj")
    with pytest.raises(PassError, match=r"'layers\.0\.mul\.out' has two readers that would keep different columns"):
        selection.select(input_of(model, "layers.0.down_proj"), KEPT + 1, [reader])
