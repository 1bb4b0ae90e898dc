"""Reverse-mode differentiation of standard ONNX graphs: adds gradient nodes to the same graph, by one rule per op.

A rule takes a node and the gradients of its outputs (None for an output that the loss does not depend on), and returns
the gradients of its inputs. Only active inputs, which depend on a wanted value, need one. Shapes are read at run time.
Broadcasting is not supported: an operand that is broadcast must be constant, except for the keys and values of an
attention, whose heads are shared along axis 2 (sequences.py).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ingot.errors import PassError, one_of
from ingot.pipeline.calibrate.graph_runner import GraphCopy

Gradient = ir.Value | None


class Tape:
    """The gradients accumulated so far, and the ops with which rules are written."""

    def __init__(self, copy: GraphCopy, wanted: Iterable[ir.Value]) -> None:
        self.copy = copy
        self._active = set(wanted)
        self._gradients: dict[ir.Value, ir.Value] = {}
        self._forward = list(copy.nodes)
        for node in self._forward:
            if any(value in self._active for value in node.inputs):
                self._active.update(node.outputs)

    def add(self, op_type: str, *inputs: Gradient, **attributes: Any) -> ir.Value:
        """Add a node; return its output."""
        return self.copy.add(op_type, list(inputs), **attributes)

    def number(self, number: float) -> ir.Value:
        """A float32 scalar."""
        return self.copy.constant(np.array(number, np.float32))

    def axes(self, *axes: int) -> ir.Value:
        """A list of integers."""
        return self.copy.constant(np.array(axes, np.int64))

    def is_active(self, value: Gradient) -> bool:
        """Whether the value depends on a wanted value, so that its gradient is needed."""
        return value in self._active

    def like(self, gradient: ir.Value, value: Gradient) -> ir.Value:
        """The gradient reshaped to the shape of the value."""
        return self.add("Reshape", gradient, self.add("Shape", value))

    def accumulate(self, value: ir.Value, gradient: ir.Value) -> None:
        """Add to a value's gradient."""
        found = self._gradients.get(value)
        self._gradients[value] = gradient if found is None else self.add("Add", found, gradient)

    def backward(self) -> Mapping[ir.Value, ir.Value]:
        """Differentiate the nodes from the last to the first. PassError for an op without a rule."""
        for node in reversed(self._forward):
            gradients = [self._gradients.get(value) for value in node.outputs]
            if any(gradients) and any(map(self.is_active, node.inputs)):
                for index, gradient in _rule(node)(self, node, gradients).items():
                    value = node.inputs[index]
                    if value is not None and self.is_active(value):
                        self.accumulate(value, gradient)
        return self._gradients


Rule = Callable[[Tape, ir.Node, Sequence[Gradient]], Mapping[int, ir.Value]]


def _rule(node: ir.Node) -> Rule:
    rule = _RULES.get(node.op_type)
    if rule is None:
        raise PassError(f"{node.name!r}: no gradient rule for {node.op_type}; rules exist for {one_of(sorted(_RULES))}")
    return rule


def _gemm(tape: Tape, node: ir.Node, gradients: Sequence[Gradient]) -> Mapping[int, ir.Value]:
    """y = x W^T + b: dx = g W, dW = g^T x, db = sum of g."""
    (g,), (x, weight, *bias) = gradients, node.inputs
    found = {}
    if tape.is_active(x):
        found[0] = tape.add("MatMul", g, weight)
    if tape.is_active(weight):
        found[1] = tape.add("Gemm", g, x, transA=1)
    if bias and tape.is_active(bias[0]):
        found[2] = tape.add("ReduceSum", g, tape.axes(0), keepdims=0)
    return found


def _matmul(tape: Tape, node: ir.Node, gradients: Sequence[Gradient]) -> Mapping[int, ir.Value]:
    """y = a b in an attention, [B, KV, group, rows, columns], b shared by the group."""
    (g,), (a, b) = gradients, node.inputs
    swap = [0, 1, 2, 4, 3]
    each = tape.add("MatMul", tape.add("Transpose", a, perm=swap), g)
    return {
        0: tape.add("MatMul", g, tape.add("Transpose", b, perm=swap)),
        1: tape.add("ReduceSum", each, tape.axes(2), keepdims=1),
    }


def _norm(tape: Tape, node: ir.Node, gradients: Sequence[Gradient]) -> Mapping[int, ir.Value]:
    """y = n w with n = x r, r = 1 / rms(x): dx = r (g w - n mean(g w n)), dw = sum of g n."""
    (g,), (x, weight) = gradients, node.inputs
    last = tape.axes(-1)

    def mean(value: ir.Value) -> ir.Value:
        return tape.add("ReduceMean", value, last, keepdims=1)

    epsilon = tape.number(node.attributes.get_float("epsilon", 1e-5) or 0.0)
    rate = tape.add("Reciprocal", tape.add("Sqrt", tape.add("Add", mean(tape.add("Mul", x, x)), epsilon)))
    normed, scaled = tape.add("Mul", x, rate), tape.add("Mul", g, weight)
    along = tape.add("Mul", normed, mean(tape.add("Mul", scaled, normed)))
    per_row = tape.add("Mul", g, normed)
    width = tape.add("Concat", tape.axes(-1), tape.add("Shape", weight), axis=0)
    return {
        0: tape.add("Mul", rate, tape.add("Sub", scaled, along)),
        1: tape.add("ReduceSum", tape.add("Reshape", per_row, width), tape.axes(0), keepdims=0),
    }


def _rotary(tape: Tape, node: ir.Node, gradients: Sequence[Gradient]) -> Mapping[int, ir.Value]:
    """The transpose of a rotation is the rotation by the negative angle."""
    (g,), (_, cos, sin, *positions) = gradients, node.inputs
    assert g is not None
    turned = tape.like(g, node.outputs[0])
    return {0: _again(tape, node, [turned, cos, tape.add("Neg", sin), *positions])}


def _again(tape: Tape, node: ir.Node, inputs: Sequence[Gradient]) -> ir.Value:
    """Add the same op with the same attributes on other inputs."""
    made = tape.add(node.op_type, *inputs)
    producer = made.producer()
    assert producer is not None
    producer.attributes.update(node.attributes)
    return made


def _split(tape: Tape, node: ir.Node, gradients: Sequence[Gradient]) -> Mapping[int, ir.Value]:
    zero = tape.number(0)
    pairs = zip(gradients, node.outputs, strict=True)
    parts = [tape.add("Mul", value, zero) if g is None else g for g, value in pairs]
    return {0: tape.add("Concat", *parts, axis=node.attributes.get_int("axis", 0))}


def _gather(tape: Tape, node: ir.Node, gradients: Sequence[Gradient]) -> Mapping[int, ir.Value]:
    """y = x[i]: the gradients of the rows are added to the rows of x that they were read from."""
    (g,), (x, rows) = gradients, node.inputs
    assert g is not None
    zeros = tape.add("Mul", x, tape.number(0))
    at = tape.add("Reshape", rows, tape.axes(-1, 1))
    return {0: tape.add("ScatterND", zeros, at, g, reduction="add")}


def _softmax(tape: Tape, node: ir.Node, gradients: Sequence[Gradient]) -> Mapping[int, ir.Value]:
    """Along the last axis: dx = y (g - sum(g y))."""
    (g,), y = gradients, node.outputs[0]
    total = tape.add("ReduceSum", tape.add("Mul", g, y), tape.axes(-1), keepdims=1)
    return {0: tape.add("Mul", y, tape.add("Sub", g, total))}


def _transpose(tape: Tape, node: ir.Node, gradients: Sequence[Gradient]) -> Mapping[int, ir.Value]:
    perm = node.attributes.get_ints("perm") or ()
    return {0: tape.add("Transpose", gradients[0], perm=[int(at) for at in np.argsort(perm)])}


def _reshape(tape: Tape, node: ir.Node, gradients: Sequence[Gradient]) -> Mapping[int, ir.Value]:
    assert gradients[0] is not None
    return {0: tape.like(gradients[0], node.inputs[0])}


def _add(tape: Tape, node: ir.Node, gradients: Sequence[Gradient]) -> Mapping[int, ir.Value]:
    assert gradients[0] is not None
    return {0: gradients[0], 1: gradients[0]}


def _sub(tape: Tape, node: ir.Node, gradients: Sequence[Gradient]) -> Mapping[int, ir.Value]:
    assert gradients[0] is not None
    return {0: gradients[0], 1: tape.add("Neg", gradients[0])}


def _mul(tape: Tape, node: ir.Node, gradients: Sequence[Gradient]) -> Mapping[int, ir.Value]:
    pairs = enumerate(reversed(node.inputs))
    return {at: tape.add("Mul", gradients[0], other) for at, other in pairs if tape.is_active(node.inputs[at])}


def _div(tape: Tape, node: ir.Node, gradients: Sequence[Gradient]) -> Mapping[int, ir.Value]:
    """y = x / c with a constant c."""
    if tape.is_active(node.inputs[1]):
        raise PassError(f"{node.name!r}: no gradient rule for a divisor that is not constant")
    return {0: tape.add("Div", gradients[0], node.inputs[1])}


def _tanh(tape: Tape, node: ir.Node, gradients: Sequence[Gradient]) -> Mapping[int, ir.Value]:
    y = node.outputs[0]
    return {0: tape.add("Mul", gradients[0], tape.add("Sub", tape.number(1), tape.add("Mul", y, y)))}


def _relu(tape: Tape, node: ir.Node, gradients: Sequence[Gradient]) -> Mapping[int, ir.Value]:
    return {0: tape.add("Mul", gradients[0], tape.add("Sign", node.outputs[0]))}


def _sigmoid(tape: Tape, node: ir.Node, gradients: Sequence[Gradient]) -> Mapping[int, ir.Value]:
    y = node.outputs[0]
    return {0: tape.add("Mul", gradients[0], tape.add("Mul", y, tape.add("Sub", tape.number(1), y)))}


def _swish(tape: Tape, node: ir.Node, gradients: Sequence[Gradient]) -> Mapping[int, ir.Value]:
    """y = x s(a x): dx = g (s + a y (1 - s)). QuickGelu has a different default of a."""
    default = 1.702 if node.op_type == "QuickGelu" else 1.0
    alpha = tape.number(node.attributes.get_float("alpha", default) or 0.0)
    gate = tape.add("Sigmoid", tape.add("Mul", node.inputs[0], alpha))
    rest = tape.add("Mul", node.outputs[0], tape.add("Sub", tape.number(1), gate))
    slope = tape.add("Add", gate, tape.add("Mul", rest, alpha))
    return {0: tape.add("Mul", gradients[0], slope)}


def _gelu(tape: Tape, node: ir.Node, gradients: Sequence[Gradient]) -> Mapping[int, ir.Value]:
    """y = x P(x): dx = g (P + x P')."""
    x, one, half = node.inputs[0], tape.number(1), tape.number(0.5)
    square = tape.add("Mul", x, x)
    if node.attributes.get_string("approximate", "none") == "tanh":
        rate, cubic = math.sqrt(2 / math.pi), 0.044715
        inner = tape.add("Mul", x, tape.add("Add", one, tape.add("Mul", square, tape.number(cubic))))
        curve = tape.add("Tanh", tape.add("Mul", inner, tape.number(rate)))
        bend = tape.add("Add", tape.number(rate), tape.add("Mul", square, tape.number(3 * rate * cubic)))
        density = tape.add("Mul", half, tape.add("Mul", bend, tape.add("Sub", one, tape.add("Mul", curve, curve))))
    else:
        curve = tape.add("Erf", tape.add("Mul", x, tape.number(math.sqrt(0.5))))
        bell = tape.add("Exp", tape.add("Mul", square, tape.number(-0.5)))
        density = tape.add("Mul", bell, tape.number(1 / math.sqrt(2 * math.pi)))
    share = tape.add("Mul", half, tape.add("Add", one, curve))
    return {0: tape.add("Mul", gradients[0], tape.add("Add", share, tape.add("Mul", x, density)))}


_RULES: dict[str, Rule] = {
    "Add": _add,
    "Div": _div,
    "Gather": _gather,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Mul": _mul,
    "QuickGelu": _swish,
    "RMSNormalization": _norm,
    "Relu": _relu,
    "Reshape": _reshape,
    "RotaryEmbedding": _rotary,
    "Sigmoid": _sigmoid,
    "Softmax": _softmax,
    "Split": _split,
    "Squeeze": _reshape,
    "Sub": _sub,
    "Swish": _swish,
    "Tanh": _tanh,
    "Transpose": _transpose,
    "Unsqueeze": _reshape,
}
