"""Recurrent layers in the IR: their states and KV geometry as facts, weights that are rows of stored ones."""

import numpy as np
import pytest

from ingot.passes.invariants import verify
from ingot.passes.model_facts import KV, MODEL
from ingot.passes.recurrent_ops import STATES, RecurrentState
from ingot.passes.rewriting import attentions
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.model.recurrent_layers import rows_of_gated_queries
from tests.each_case import each_case
from tests.oracle.cases import Case
from tests.oracle.hybrid_cases import HYBRID_CASES
from tests.parity import CHECKPOINTS, LOGITS, compare, load_logits
from tests.simulators.float64_ir import Float64Runner

VISIBLE = 1e-3


@each_case("case", HYBRID_CASES, ids=lambda case: case.name)
def test_every_hybrid_is_a_valid_model_with_a_cache_for_attention_alone(case: Case) -> None:
    model = import_checkpoint(Checkpoint.open(CHECKPOINTS / case.name))
    verify(model)
    assert KV.of(model).num_layers == len(attentions(model.graph)) <= MODEL.of(model).num_layers
    assert [node.attributes["layer"].as_int() for node in attentions(model.graph)] == [*range(KV.of(model).num_layers)]
    assert STATES.of(model)


def test_the_states_of_a_delta_net_are_facts_of_its_layers() -> None:
    model = import_checkpoint(Checkpoint.open(CHECKPOINTS / "qwen3_5_text"))
    expected = []
    for layer in (0, 1, 2):
        expected.append(RecurrentState(layer, "ShortConvolution", (3, 80)))
        expected.append(RecurrentState(layer, "GatedDeltaRule", (4, 8, 12)))
    assert STATES.of(model) == tuple(expected)


def test_queries_and_their_gates_are_rows_of_q_proj() -> None:
    checkpoint = Checkpoint.open(CHECKPOINTS / "qwen3_next")
    graph = import_checkpoint(checkpoint).graph
    stored = checkpoint.external("model.layers.1.self_attn.q_proj.weight").numpy().reshape(4, 2, 16, 32)
    for place, name in enumerate(("q_proj", "q_gate")):
        tensor = graph.initializers[f"model.layers.1.self_attn.{name}.weight"].const_value
        assert tensor is not None
        np.testing.assert_array_equal(tensor.numpy(), stored[:, place].reshape(64, 32))
    queries, gates = rows_of_gated_queries(heads=2, head_dim=3)
    np.testing.assert_array_equal(queries, [0, 1, 2, 6, 7, 8])
    np.testing.assert_array_equal(gates, [3, 4, 5, 9, 10, 11])


@pytest.mark.parametrize(
    ("name", "op_type", "attribute", "value"),
    [
        ("qwen3_5_text", "ShortConvolution", "activation", ""),
        ("qwen3_5_text", "GatedDeltaRule", "normalize", 0),
        ("qwen3_5_text", "GatedDeltaRule", "scale", 1.0),
        ("lfm2", "ShortConvolution", "activation", "silu"),
    ],
)
def test_the_fixtures_show_a_wrong_attribute(name: str, op_type: str, attribute: str, value: float | str) -> None:
    model = import_checkpoint(Checkpoint.open(CHECKPOINTS / name))
    for node in model.graph:
        if node.op_type == op_type:
            type_ = node.attributes[attribute].type
            node.attributes[attribute] = type(node.attributes[attribute])(attribute, type_, value)
    tokens, expected = load_logits(CHECKPOINTS / name / LOGITS)
    assert compare(Float64Runner(model).run_ragged(tokens), expected).worst > VISIBLE
