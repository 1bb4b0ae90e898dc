"""The residual stream: found without names in graphs of any form, and refused by node where it cannot be rotated."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.fusion.fold_constants import FoldConstants
from ingot.passes.manager import PassManager
from ingot.passes.rewriting import Refusal
from ingot.passes.rotation.residual_stream import ResidualStream, find_residual_stream, is_uniform, plan_turns
from ingot.passes.rotation.rotate import RotateWeights
from tests.passes.rotation.expert_graph import branches
from tests.passes.snippets import run
from tests.passes.tiny_decoder import HIDDEN, TinyDecoder, array


def rotated(model: ir.Model, **options: Any) -> ir.Model:
    PassManager([RotateWeights(**options)]).run(model)
    return model


def relative(measured: Any, exact: Any) -> float:
    return float(np.linalg.norm(measured - exact) / np.linalg.norm(exact))


def test_readers_and_writers_are_found_in_a_graph_with_experts() -> None:
    ids = np.array([1, 5, 2, 8])
    (exact,) = run(branches(24), input_ids=ids)
    model = rotated(branches(24), residual=True)
    assert relative(run(model, input_ids=ids)[0], exact) < 1e-5
    assert not np.allclose(array(model, "b.r"), array(branches(24), "b.r"))


def test_a_post_norm_of_equal_elements_commutes_with_a_rotation() -> None:
    ids = np.array([1, 5, 2, 8])
    (exact,) = run(branches(24, post_norm=1.5), input_ids=ids)
    model = rotated(branches(24, post_norm=1.5), residual=True)
    assert relative(run(model, input_ids=ids)[0], exact) < 1e-5
    assert np.all(array(model, "a.post.weight") == np.float32(1.5))
    assert not np.allclose(array(model, "a.d"), array(branches(24), "a.d"))


def test_any_other_post_norm_is_refused_by_name() -> None:
    with pytest.raises(PassError, match=r"node 'a\.post' writes to the residual stream through a norm weight"):
        rotated(branches(24, post_norm=np.arange(24)), residual=True)


def stream_of(model: ir.Model) -> ResidualStream:
    found = find_residual_stream(model.graph)
    assert isinstance(found, ResidualStream), found
    return found


def decoder() -> ir.Model:
    model = TinyDecoder().model
    PassManager([FoldConstants()]).run(model)
    return model


def test_the_stream_of_a_decoder_has_all_its_writers_and_readers() -> None:
    stream = stream_of(decoder())
    assert stream.width == HIDDEN
    assert [node.name for node in stream.embeddings] == ["embed_tokens"]
    assert {node.name for node in stream.writers} == {f"layers.{n}.{x}_proj" for n in (0, 1) for x in ("o", "down")}
    readers = {node.name: norm.name for node, norm in stream.readers.items() if norm is not None}
    inputs = {f"layers.{n}.{x}_proj": f"layers.{n}.input_layernorm" for n in (0, 1) for x in "qkv"}
    inner = {f"layers.{n}.{x}_proj": f"layers.{n}.post_attention_layernorm" for n in (0, 1) for x in ("gate", "up")}
    assert readers == {**inputs, **inner, "lm_head": "norm"}
    assert {norm.name for norm in stream.norms} == set(readers.values())
    assert not any(is_uniform(norm) for norm in stream.norms)


def test_a_norm_whose_weight_is_shared_with_another_reader_is_refused() -> None:
    model = decoder()
    add = model.graph.node("layers.0.add")
    weight = model.graph.node("norm").inputs[1]
    other = ir.node("Mul", [weight, weight], name="other")
    model.graph.insert_before(add, other)
    refusal = plan_turns(stream_of(model))
    assert isinstance(refusal, Refusal)
    assert str(refusal).startswith("node 'norm' shares its weight with a node that is not a norm of the residual")


def scaled_by_channel(model: ir.Model) -> None:
    """Multiply the stream by one number per channel."""
    add, last = model.graph.node("layers.1.add_mlp"), model.graph.node("last")
    factor = ir.Value(
        name="factor", shape=ir.Shape([HIDDEN]), const_value=ir.tensor(np.arange(HIDDEN, dtype=np.float32))
    )
    model.graph.initializers.add(factor)
    mul = ir.node("Mul", [add.outputs[0], factor], name="by_channel")
    model.graph.insert_before(last, mul)
    last.replace_input_with(0, mul.outputs[0])


def subtracted_mean(model: ir.Model) -> None:
    """Make a norm of the stream a LayerNorm."""
    model.graph.node("layers.1.input_layernorm").op_type = "LayerNormalization"


def without_table(model: ir.Model) -> None:
    """Read no embedding."""
    model.graph.node("embed_tokens").op_type = "Identity"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (scaled_by_channel, "node 'by_channel' multiplies the residual stream channel by channel"),
        (subtracted_mean, "'layers.1.input_layernorm' does not commute with a rotation of the residual stream"),
        (without_table, "'input_ids' is not read by a Gather, so there is no residual stream"),
    ],
)
def test_a_stream_that_cannot_be_rotated_is_refused_by_node(change: Any, message: str) -> None:
    model = decoder()
    change(model)
    refusal = find_residual_stream(model.graph)
    assert isinstance(refusal, Refusal)
    assert message in str(refusal)
