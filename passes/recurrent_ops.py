"""The recurrent ops of the IR: their operands, attributes and states.

    y = ingot::ShortConvolution(x [T, C], weight [C, K], bias? [C]) -> [T, C]
        layer, activation ("" or "silu")                            state [K - 1, C]: the last inputs, the oldest first

    o = ingot::GatedDeltaRule(q [T, Hk * Dk], k [T, Hk * Dk], v [T, Hv * Dv], decay [T, Hv], beta [T, Hv])
        -> [T, Hv * Dv]
        layer, num_key_heads, num_value_heads, key_dim, value_dim,
        scale, normalize (0 or 1)                                   state [Hv, Dk, Dv]

    y = ingot::SelectiveScan(x [T, H * P], dt [T, H], B [T, G * N], C [T, G * N], A [H], D [H]) -> [T, H * P]
        layer, num_heads, head_dim, state_dim, num_groups           state [H, P, N]

Rows are tokens of several sequences, and each op runs over every sequence by itself: its first token starts from a
state of zeros. The state is not a tensor of the IR: as the KV cache belongs to PagedAttention, it belongs to the op and
so to the runtime. It is float32 and of fixed size per sequence.

`layer` is the number of the model's layer. A layer has at most one state of each kind: a convolution before a scan, or
one of them. (PagedAttention's `layer` numbers the layers that have keys and values.) What the ops compute is defined in
passes/numerics/recurrences.py. decay is a logarithm and at most 0; dt is positive, past softplus and clamp.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.model_facts import Fact
from ingot.passes.numerics.recurrences import DeltaRule, ScanAttributes

CONVOLUTION, DELTA_RULE, SCAN = "ShortConvolution", "GatedDeltaRule", "SelectiveScan"
RECURRENT_OPS = (CONVOLUTION, DELTA_RULE, SCAN)
_INT, _FLOAT, _STRING = ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.STRING
_ATTRIBUTES: Mapping[str, Mapping[str, ir.AttributeType]] = {
    CONVOLUTION: {"layer": _INT, "activation": _STRING},
    DELTA_RULE: {
        **dict.fromkeys(("layer", "num_key_heads", "num_value_heads", "key_dim", "value_dim", "normalize"), _INT),
        "scale": _FLOAT,
    },
    SCAN: dict.fromkeys(("layer", "num_heads", "head_dim", "state_dim", "num_groups"), _INT),
}
Widths = list[int | None]  # size of each operand's last axis; None where it is not fixed


@dataclass(frozen=True)
class RecurrentState:
    """The state of one op of one layer, of each sequence: float32 [*shape]."""

    layer: int
    op: Literal["ShortConvolution", "GatedDeltaRule", "SelectiveScan"]
    shape: tuple[int, ...]


STATES = Fact("ingot.states", tuple[RecurrentState, ...], lambda states: [vars(state) for state in states])


def is_recurrent(node: ir.Node) -> bool:
    """Whether the node is one of the recurrent ops."""
    return node.domain == "ingot" and node.op_type in RECURRENT_OPS


def recurrent_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Every recurrent op of the graph, in order."""
    return [node for node in graph if is_recurrent(node)]


def recurrent_states(graph: ir.Graph) -> tuple[RecurrentState, ...]:
    """The states of a sequence, in the order of the nodes; the fact STATES of a model that has any."""
    return tuple(
        RecurrentState(node.attributes["layer"].as_int(), node.op_type, state_shape(node))  # type: ignore[arg-type]
        for node in recurrent_nodes(graph)
    )


def delta_rule_of(node: ir.Node) -> DeltaRule:
    """The attributes of a GatedDeltaRule."""
    key_heads, value_heads, key_dim, value_dim = _integers(
        node, "num_key_heads", "num_value_heads", "key_dim", "value_dim"
    )
    normalize = bool(node.attributes["normalize"].as_int())
    return DeltaRule(key_heads, value_heads, key_dim, value_dim, node.attributes["scale"].as_float(), normalize)


def scan_of(node: ir.Node) -> ScanAttributes:
    """The attributes of a SelectiveScan."""
    return ScanAttributes(*_integers(node, "num_heads", "head_dim", "state_dim", "num_groups"))


def state_shape(node: ir.Node) -> tuple[int, ...]:
    """Shape of one sequence's state."""
    if node.op_type == CONVOLUTION:
        channels, width = _shape(node.inputs[1])
        assert isinstance(channels, int)
        assert isinstance(width, int)
        return width - 1, channels
    return delta_rule_of(node).state_shape if node.op_type == DELTA_RULE else scan_of(node).state_shape


def verify_recurrent(graph: ir.Graph) -> None:
    """Raise PassError for a recurrent op with wrong attributes or operands, or a second state of a kind in a layer."""
    seen: set[tuple[int, bool]] = set()
    for node in recurrent_nodes(graph):
        where = f"node {node.name!r} (ingot::{node.op_type})"
        _verify_attributes(node, where)
        _require(len(node.outputs) == 1, f"{where}: {len(node.outputs)} outputs; it has one")
        _VERIFY[node.op_type](node, where)
        state = node.attributes["layer"].as_int(), node.op_type == CONVOLUTION
        kind = "convolution" if state[1] else "scan or delta rule"
        _require(state not in seen, f"{where}: layer {state[0]} has a {kind} already")
        seen.add(state)


def _verify_attributes(node: ir.Node, where: str) -> None:
    wanted = _ATTRIBUTES[node.op_type]
    given = {name: attribute.type for name, attribute in node.attributes.items()}
    _require(given == wanted, f"{where}: its attributes are {_list(given)}; they must be {_list(wanted)}")
    least = {"layer": 0, "normalize": 0}
    for name, attribute in node.attributes.items():
        if attribute.type == _INT:
            value = attribute.as_int()
            _require(
                value >= least.get(name, 1), f"{where}: {name} is {value}; it must be {least.get(name, 1)} or more"
            )


def _verify_convolution(node: ir.Node, where: str) -> None:
    shapes = _operand_shapes(node, where, 2, 3)
    _require(len(shapes[1]) == 2, f"{where}: its weight is {shapes[1]}; it must be [channels, width]")
    channels, width = shapes[1]
    _require(isinstance(width, int) and width >= 2, f"{where}: its weight is {shapes[1]}; the width must be 2 or more")
    _verify_widths(where, shapes, [channels, width, *([channels] if len(shapes) == 3 else [])])
    activation = node.attributes["activation"].as_string()
    _require(activation in ("", "silu"), f"{where}: activation is {activation!r}; it must be '' or 'silu'")
    _verify_result(node, where, channels)


def _verify_delta_rule(node: ir.Node, where: str) -> None:
    rule = delta_rule_of(node)
    heads, key_heads = rule.num_value_heads, rule.num_key_heads
    _require(heads % key_heads == 0, f"{where}: {heads} value heads are not a multiple of {key_heads} key heads")
    keys, values = key_heads * rule.key_dim, heads * rule.value_dim
    _verify_widths(where, _operand_shapes(node, where, 5, 5), [keys, keys, values, heads, heads])
    _verify_result(node, where, values)


def _verify_scan(node: ir.Node, where: str) -> None:
    scan = scan_of(node)
    heads, groups = scan.num_heads, scan.num_groups
    _require(heads % groups == 0, f"{where}: {heads} heads are not a multiple of {groups} groups")
    inner, shared = heads * scan.head_dim, groups * scan.state_dim
    _verify_widths(where, _operand_shapes(node, where, 6, 6), [inner, heads, shared, shared, heads, heads])
    _verify_result(node, where, inner)


_VERIFY: Mapping[str, Callable[[ir.Node, str], None]] = {
    CONVOLUTION: _verify_convolution,
    DELTA_RULE: _verify_delta_rule,
    SCAN: _verify_scan,
}


def _operand_shapes(node: ir.Node, where: str, least: int, most: int) -> list[list[int | str]]:
    count = f"{least}" if least == most else f"{least} or {most}"
    _require(least <= len(node.inputs) <= most, f"{where}: {len(node.inputs)} inputs; it has {count}")
    return [_shape(value) for value in node.inputs if value is not None]


def _verify_widths(where: str, shapes: list[list[int | str]], widths: list[int | str]) -> None:
    found = [shape[-1] if shape else 1 for shape in shapes]
    _require(found == widths, f"{where}: its operands have {found} columns; its attributes and weights need {widths}")


def _verify_result(node: ir.Node, where: str, columns: int | str) -> None:
    wanted, found = [_shape(node.inputs[0])[0], columns], _shape(node.outputs[0])
    _require(found == wanted, f"{where}: its result is {found}; it must be {wanted}")


def _shape(value: ir.Value | None) -> list[int | str]:
    assert value is not None
    dims = value.shape or ()
    return [dim if isinstance(dim, int) else str(dim.value) for dim in dims]


def _integers(node: ir.Node, *names: str) -> tuple[int, ...]:
    return tuple(node.attributes[name].as_int() for name in names)


def _list(types: Mapping[str, ir.AttributeType]) -> str:
    return ", ".join(f"{name} ({type_.name.lower()})" for name, type_ in sorted(types.items())) or "none"


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise PassError(message)
