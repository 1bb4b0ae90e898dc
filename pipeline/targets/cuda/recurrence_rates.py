"""Finds the nodes that make decays, betas and time steps of recurrent ops: one launch computes them, in 32-bit floats.

    alpha * factors * limited(curve(x + bias))

    curve      Softplus, Sigmoid, or none
    limited    least + relu(y - least), then most - relu(most - y): limits of Mamba-2's time steps
    factors    a stored vector; alpha a stored scalar

Every part but the curve may be missing. A value in 16 bits would not do: a decay counts as often as there are tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ingot.passes.recurrent_ops import DELTA_RULE, SCAN, recurrent_nodes
from ingot.passes.rewriting import row_columns, sole_consumer
from ingot.passes.weights import float32_values, is_stored
from ingot.pipeline.targets.fusions import Fusions, scalar

CURVES = ("none", "Softplus", "Sigmoid")  # numbers of the curves in kernels/recurrence.py
UNLIMITED = float(np.finfo(np.float32).max)
_OPERANDS: Mapping[str, tuple[int, ...]] = {DELTA_RULE: (3, 4), SCAN: (1,)}


@dataclass
class Rate:
    """Computation of a value [rows, heads] from `source` by `nodes`."""

    source: ir.Value
    curve: str = "none"
    bias: ir.Value | None = None
    factors: ir.Value | None = None
    alpha: float = 1.0
    least: float = -UNLIMITED
    most: float = UNLIMITED
    nodes: list[ir.Node] = field(default_factory=list)


def find_rates(graph: ir.Graph, fusions: Fusions) -> dict[ir.Value, Rate]:
    """The rates of all recurrent ops, by operand. Their nodes are absorbed, except those with other readers."""
    rates = {}
    for node in recurrent_nodes(graph):
        for index in _OPERANDS.get(node.op_type, ()):
            value = node.inputs[index]
            assert value is not None
            found = _rate(value)
            if any(one in fusions.at or one in fusions.absorbed for one in found.nodes):
                found = Rate(value)
            fusions.absorbed.update(found.nodes)
            rates[value] = found
    return rates


def _rate(value: ir.Value) -> Rate:
    """Walk back from an operand; what does not fit is left to nodes of its own."""
    rate = Rate(value)
    while (step := _own(rate.source, "Mul")) is not None and _take_factor(rate, step):
        pass
    if (upper := _limit(rate.source, upper=True)) is not None:
        rate.most, rate.source = upper[0], upper[1]
        rate.nodes += upper[2]
    if (lower := _limit(rate.source, upper=False)) is not None:
        rate.least, rate.source = lower[0], lower[1]
        rate.nodes += lower[2]
    curve = _own(rate.source, "Softplus") or _own(rate.source, "Sigmoid")
    if curve is None:
        return Rate(value)
    rate.curve, rate.source = curve.op_type, _input(curve)
    rate.nodes.append(curve)
    added = _own(rate.source, "Add")
    if added is not None and (vector := _vector(added)) is not None:
        rate.bias, rate.source = vector, _other(added, vector)
        rate.nodes.append(added)
    return rate


def _take_factor(rate: Rate, node: ir.Node) -> bool:
    """Take a stored scalar or, once, a vector out of a Mul."""
    number, vector = _number(node), _vector(node)
    if number is not None:
        rate.alpha *= number[0]
        rate.source = number[1]
    elif vector is not None and rate.factors is None:
        rate.factors, rate.source = vector, _other(node, vector)
    else:
        return False
    rate.nodes.append(node)
    return True


def _limit(value: ir.Value, *, upper: bool) -> tuple[float, ir.Value, list[ir.Node]] | None:
    """The limit, the limited value and the nodes of Add(Relu(Add(y, -least)), least), or of its mirror image.

    The mirror image is Add(Mul(Relu(Add(Mul(y, -1), most)), -1), most).
    """
    kinds = ("Add", "Mul", "Relu", "Add", "Mul") if upper else ("Add", "Relu", "Add")
    nodes, numbers, source = [], [], value
    for kind in kinds:
        node = _own(source, kind)
        taken = None if node is None else (0.0, _input(node)) if kind == "Relu" else _number(node)
        if node is None or taken is None:
            return None
        nodes.append(node)
        numbers.append(taken[0])
        source = taken[1]
    limit = numbers[0]
    wanted = [limit, -1.0, 0.0, limit, -1.0] if upper else [limit, 0.0, -limit]
    return (limit, source, nodes) if numbers == wanted else None


def _own(value: ir.Value, op_type: str) -> ir.Node | None:
    """The node of a kind that makes a value for one reader alone."""
    node = value.producer()
    return node if node is not None and node.op_type == op_type and sole_consumer(value) is not None else None


def _number(node: ir.Node) -> tuple[float, ir.Value] | None:
    """The stored scalar among a node's two inputs, and the other input."""
    for index in (0, 1):
        number = scalar(node.inputs[index])
        if number is not None:
            return number, _input(node, 1 - index)
    return None


def _vector(node: ir.Node) -> ir.Value | None:
    """The stored vector of all columns among a node's two inputs."""
    columns = row_columns(node.outputs[0])
    for value in node.inputs:
        if value is not None and is_stored(value) and float32_values(value).size == columns > 1:
            return value
    return None


def _other(node: ir.Node, value: ir.Value) -> ir.Value:
    return _input(node, 1 if node.inputs[0] is value else 0)


def _input(node: ir.Node, index: int = 0) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value
