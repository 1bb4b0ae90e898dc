"""Mixtures of experts in standard ONNX have the values of the reference."""

from dataclasses import asdict

import numpy as np
import onnx_ir as ir
import pytest

from ingot.passes.lowering.expand_experts import ExpandExperts, is_expert_op
from ingot.passes.manager import PassManager
from ingot.passes.numerics.experts import Routing, combine, dispatch, route
from tests.passes.snippets import FLOAT, INT64, Array, Snippet, random, run

TOKENS, HIDDEN, EXPERTS = 9, 6, 8
ROUTINGS = {
    "softmax": Routing(chosen=3),
    "normalised": Routing(chosen=1, normalise=True),
    "bias": Routing(chosen=2, normalise=True, least_sum=1e-12),
    "sparsemixer": Routing(chosen=3, score="sparsemixer", margin=0.6, scale=1.7),
    "groups": Routing(chosen=3, score="sigmoid", groups=4, chosen_groups=2, normalise=True, scale=1.7),
}


def layer(routing: Routing, bias: Array | None) -> ir.Model:
    """x [T, 6], logits [T, 8] -> y [T, 6]; expert e multiplies by row e of a table."""
    s = Snippet()
    x, logits = s.input("x", "T", HIDDEN), s.input("logits", "T", EXPERTS)
    attributes = {name: int(value) if type(value) is bool else value for name, value in asdict(routing).items()}
    ids = ir.Value(name="ids", type=ir.TensorType(INT64), shape=ir.Shape(["T", routing.chosen]))
    weights = ir.Value(name="weights", type=ir.TensorType(FLOAT), shape=ir.Shape(["T", routing.chosen]))
    inputs = [logits] if bias is None else [logits, s.weight("bias", bias)]
    s.graph.append(ir.node("RouteExperts", inputs, attributes, domain="ingot", outputs=[ids, weights], name="route"))
    rows = [
        ir.Value(name=f"rows.{e}", type=ir.TensorType(FLOAT), shape=ir.Shape([f"N{e}", HIDDEN])) for e in range(EXPERTS)
    ]
    s.graph.append(ir.node("DispatchExperts", [x, ids], domain="ingot", outputs=rows, name="dispatch"))
    table = table_of_experts()
    made = [s.node("Mul", f"y.{e}", [rows[e], s.weight(f"w.{e}", table[e])], f"N{e}", HIDDEN) for e in range(EXPERTS)]
    return s.output(s.node("CombineExperts", "y", [ids, weights, *made], "T", HIDDEN, domain="ingot"))


def table_of_experts() -> Array:
    return random(EXPERTS, HIDDEN, seed=3)


def reference(routing: Routing, bias: Array | None, x: Array, logits: Array) -> Array:
    ids, weights = route(logits, routing, bias)
    rows = zip(dispatch(x, ids, EXPERTS), table_of_experts(), strict=True)
    return combine(ids, weights, [of * factor for of, factor in rows])


@pytest.mark.parametrize("multiple", [1, 2, 4])
@pytest.mark.parametrize("name", ROUTINGS)
def test_the_values_are_those_of_the_reference(name: str, multiple: int) -> None:
    routing, bias = ROUTINGS[name], random(EXPERTS) if name in ("bias", "groups") else None
    model = layer(routing, bias)
    (record,) = PassManager([ExpandExperts(row_multiple=multiple)]).run(model)
    assert record.modified
    assert not any(is_expert_op(node) for node in model.graph)
    for tokens in (1, TOKENS):
        x, logits = random(tokens, HIDDEN, seed=1), random(tokens, EXPERTS, seed=2)
        logits[:, 5] = -50  # no token reaches it, unless a bias or a group chooses it
        (found,) = run(model, x=x, logits=logits)
        np.testing.assert_allclose(found, reference(routing, bias, x, logits), rtol=2e-6, atol=1e-7)


def test_a_tokens_result_has_the_same_bits_in_every_batch() -> None:
    routing = ROUTINGS["softmax"]
    model = layer(routing, None)
    ExpandExperts()(model)
    x, logits = random(TOKENS, HIDDEN, seed=1), random(TOKENS, EXPERTS, seed=2)
    (together,) = run(model, x=x, logits=logits)
    alone = [run(model, x=x[i : i + 1], logits=logits[i : i + 1])[0] for i in range(TOKENS)]
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_equal_scores_go_to_the_lower_number() -> None:
    model = layer(Routing(chosen=2), None)
    ExpandExperts()(model)
    x = random(1, HIDDEN)
    (found,) = run(model, x=x, logits=np.zeros((1, EXPERTS), np.float32))
    np.testing.assert_allclose(found, x * table_of_experts()[:2].sum(axis=0) / EXPERTS, atol=1e-6)


def test_a_second_run_changes_nothing() -> None:
    model = layer(ROUTINGS["softmax"], None)
    PassManager([ExpandExperts()]).run(model)
    (record,) = PassManager([ExpandExperts()]).run(model)
    assert not record.modified
