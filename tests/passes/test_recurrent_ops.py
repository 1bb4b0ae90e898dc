"""The recurrent ops' schema: states by layer, and what verification refuses."""

import re
from typing import Any

import onnx_ir as ir
import pytest

from ingot.errors import PassError
from ingot.passes.invariants import verify
from ingot.passes.recurrent_ops import STATES, RecurrentState, recurrent_states
from tests.each_case import each_case
from tests.passes.snippets import Snippet, random


def _model(
    convolution: dict[str, Any] | None = None, rule: dict[str, Any] | None = None, columns: int = 24
) -> ir.Model:
    """A convolution that makes queries, keys and values of a delta rule in layer 1, and a scan in layer 3."""
    s = Snippet()
    x, heads, group = s.input("x", "T", columns), s.input("heads", "T", 4), s.input("group", "T", 10)
    taps, per_head = s.weight("taps", random(24, 4)), s.weight("a", random(4))
    whole = {"layer": 1, "activation": "silu", **(convolution or {})}
    mixed = s.node("ShortConvolution", "mixed", [x, taps], "T", columns, domain="ingot", **whole)
    split = [s.node("Abs", name, [mixed], "T", width) for name, width in (("q", 6), ("k", 6), ("v", 12))]
    sizes = {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 3, "value_dim": 3}
    whole = {"layer": 1, **sizes, "scale": 0.5, "normalize": 1, **(rule or {})}
    o = s.node("GatedDeltaRule", "o", [*split, heads, heads], "T", 12, domain="ingot", **whole)
    of: dict[str, Any] = {"layer": 3, "num_heads": 4, "head_dim": 3, "state_dim": 5, "num_groups": 2}
    y = s.node("SelectiveScan", "y", [o, heads, group, group, per_head, per_head], "T", 12, domain="ingot", **of)
    return s.output(y)


def test_the_states_of_a_sequence_are_known_by_layer() -> None:
    model = _model()
    verify(model)
    states = recurrent_states(model.graph)
    assert states == (
        RecurrentState(1, "ShortConvolution", (3, 24)),
        RecurrentState(1, "GatedDeltaRule", (4, 3, 3)),
        RecurrentState(3, "SelectiveScan", (4, 3, 5)),
    )
    STATES.record(model, states)
    assert STATES.of(model) == states


@each_case(
    ("changes", "message"),
    [
        ({"convolution": {"layer": -1}}, "layer is -1; it must be 0 or more"),
        ({"convolution": {"activation": "gelu"}}, "activation is 'gelu'; it must be '' or 'silu'"),
        ({"convolution": {"groups": 2}}, "they must be activation (string), layer (int)"),
        ({"columns": 20}, "operands have [20, 4] columns; its attributes and weights need [24, 4]"),
        ({"rule": {"key_dim": 4}}, "operands have [6, 6, 12, 4, 4] columns; its attributes and weights need [8, 8"),
        ({"rule": {"num_key_heads": 3, "key_dim": 2}}, "4 value heads are not a multiple of 3 key heads"),
        ({"rule": {"layer": 3}}, "node 'y' (ingot::SelectiveScan): layer 3 has a scan or delta rule already"),
        ({"rule": {"normalize": 1.0}}, "its attributes are key_dim (int), layer (int), normalize (float)"),
    ],
)
def test_what_is_wrong_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PassError, match=re.escape(message)):
        verify(_model(**changes))
