"""Finds the nodes that one launch or operation computes together, before anything is lowered.

    Mul(act(gate), up)                                             one gated activation; act: Mul(x, Sigmoid(x)),
                                                                   QuickGelu with alpha 1, Swish, Gelu, Relu
    the nodes of xIELU, of a clamped SwiGLU                        one activation with numbers of its own
    Mul(Relu(x), Relu(x))                                          relu2, where a target computes it
    Gemm, Split in halves, Mul(act(gate), up) of the halves        a matmul and its gated activation
    Gemm or Gather, then Mul or Div by scalars, Tanh               the matmul's epilogue: alpha * y, then a softcap
    SkipSimplifiedLayerNormalization or Add with a branch          one norm kernel, which norms the branch, adds, and
    that is RMSNormalization(x, w)                                 norms the sum
    Gather(Add(x, residual), logits_indices), then a norm          one norm kernel, which adds and norms the rows whose
                                                                   logits are wanted alone
    Reshape(RMSNormalization(Reshape(q))), and the same of k       norms per head, in the kernel that writes the KV pool
    QuantizeLinear, DequantizeLinear, nodes of their scale         rows of codes with scales: "ingot.activations"

A fusion is lowered at one node (`at`); its other nodes (`absorbed`) are not lowered on their own. A target names the
kinds of fusion that it lowers.
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import onnx_ir as ir

from ingot.artifact.programs.cpu_program import Activation
from ingot.passes.numerics.activation_rounding import Kind
from ingot.passes.quantization.activation_nodes import ACTIVATIONS_KEY
from ingot.passes.rewriting import sole_consumer, static_columns
from ingot.passes.weights import float32_values, is_stored


@dataclass(frozen=True)
class Gate:
    """Mul(act(gate), up); numbers: of the activation (cpu_program.NUMBERS)."""

    gate: ir.Value
    up: ir.Value
    activation: Activation
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True)
class Curve:
    """An activation of several nodes that gates nothing, with its numbers, if it has any."""

    source: ir.Value
    activation: Activation
    numbers: tuple[float, ...]


@dataclass(frozen=True)
class GatedMatmul:
    """A matmul whose result is only the halves of a gate, computed by the node `last`.

    gate_first    whether the gate is the first half of the columns
    """

    gate: Gate
    last: ir.Node
    gate_first: bool


@dataclass(frozen=True)
class Epilogue:
    """softcap(alpha * y), uncapped if softcap is 0; `result` is the value that it computes."""

    result: ir.Value
    alpha: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True)
class RmsNorm:
    """RMSNormalization(source, weight)."""

    source: ir.Value
    weight: ir.Value
    epsilon: float


@dataclass(frozen=True)
class NormedBranch:
    """RMSNormalization(branch) + residual."""

    norm: RmsNorm
    residual: ir.Value


@dataclass(frozen=True)
class GatheredNorm:
    """norm(norm(source) + residual) of the rows whose logits are wanted, leaving out what is None."""

    source: ir.Value
    residual: ir.Value | None
    inner: RmsNorm | None
    indices: ir.Value


@dataclass(frozen=True)
class HeadNorms:
    """Norms per head of queries and keys; the sources are [T, heads * dim]. key: None if the layer has none."""

    query: RmsNorm
    key: RmsNorm | None


@dataclass(frozen=True)
class Rounding:
    """Activations rounded to 8 bits, int8 or e4m3fn.

    scale    of all rows; None if each row has its own
    nodes    between the source and its dequantized codes
    """

    source: ir.Value
    kind: Kind
    scale: float | None
    nodes: frozenset[ir.Node] = frozenset()


Fusion = Gate | Curve | GatedMatmul | Epilogue | NormedBranch | GatheredNorm | HeadNorms | Rounding


@dataclass
class Fusions:
    """Fusions by the node that they are lowered at, and the other nodes that they compute."""

    at: dict[ir.Node, Fusion] = field(default_factory=dict)
    absorbed: set[ir.Node] = field(default_factory=set)


def find_fusions(
    graph: ir.Graph,
    kinds: tuple[type[Fusion], ...] = get_args(Fusion),
    activations: Collection[Activation] = get_args(Activation),
) -> Fusions:
    """Return all fusions of these kinds, with these activations. Each node belongs to at most one."""
    found = Fusions()
    for candidates in (_larger_candidates, _candidates):  # the former have parts that look like the latter
        for node in graph:
            for fusion, absorbed in candidates(node):
                is_free = not any(one in found.at or one in found.absorbed for one in (node, *absorbed))
                is_computed = not isinstance(fusion, Curve) or fusion.activation in activations
                if isinstance(fusion, kinds) and is_computed and is_free:
                    found.at[node] = fusion
                    found.absorbed |= absorbed
    return found


def activation(value: ir.Value | None) -> tuple[ir.Value, Activation, set[ir.Node]] | None:
    """Match a value that is act(x): returns x, the name of act, and the nodes between."""
    node = None if value is None else value.producer()
    x = node.inputs[0] if node is not None and node.inputs else None
    if node is None or x is None:
        return None
    if node.op_type == "Mul":
        for x, sigmoid in _either(node):
            made = sigmoid.producer()
            if made is not None and made.op_type == "Sigmoid" and made.inputs[0] is x and _is_between(made, node):
                return x, "silu", {made, node}
        return None
    name = _activation_name(node)
    return None if name is None else (x, name, {node})


def scalar(value: ir.Value | None) -> float | None:
    """Return a stored value of one element; None for any other value."""
    if value is None or not is_stored(value) or value.shape is None or any(size != 1 for size in value.shape):
        return None
    return float(float32_values(value).reshape(()))


def clip_bounds(node: ir.Node) -> tuple[float, float] | None:
    """Return the stored numbers between which a Clip keeps values, float32's own where it has none; None for computed
    ones."""
    limits = np.finfo(np.float32)
    least, most = (
        float(default) if value is None else scalar(value)
        for value, default in zip((*node.inputs[1:], None, None), (limits.min, limits.max), strict=False)
    )
    return None if least is None or most is None else (least, most)


def _larger_candidates(node: ir.Node) -> Iterator[tuple[Fusion, set[ir.Node]]]:
    match node.op_type:
        case "Mul":
            yield from _clamped_gates(node)
        case "Add":
            yield from _xielus(node)
        case "RMSNormalization" | "LayerNormalization":
            yield from _gathered_norms(node)


def _candidates(node: ir.Node) -> Iterator[tuple[Fusion, set[ir.Node]]]:
    match node.op_type:
        case "Mul":
            yield from _gates(node)
            yield from squares(node)
        case "Gemm" | "Gather" | "MatMul":
            yield from _gated_matmuls(node)
            yield from _epilogues(node)
        case "Add" | "SkipSimplifiedLayerNormalization":
            yield from _branches(node)
        case "PagedAttention":
            yield from _head_norms(node)
        case "DequantizeLinear" if ACTIVATIONS_KEY in node.metadata_props:
            yield from _roundings(node)


def _gates(node: ir.Node) -> Iterator[tuple[Gate, set[ir.Node]]]:
    for active, up in _either(node):
        found = activation(active)
        if found is None or is_stored(up) or up in (found[0], active):
            continue
        if static_columns(active) != static_columns(up):
            continue  # a gate of one column
        last = active.producer()
        if last is not None and _is_between(last, node):
            yield Gate(found[0], up, found[1]), found[2]


def squares(node: ir.Node) -> Iterator[tuple[Curve, set[ir.Node]]]:
    """The squared Relu that a Mul is, and the nodes that it absorbs; none for another Mul."""
    positive = node.inputs[0]
    relu = _made(positive, "Relu")
    if relu is not None and relu.inputs[0] is not None and node.inputs[1] is positive and _are_between({relu}, node):
        yield Curve(relu.inputs[0], "relu2", ()), {relu}


def _gated_matmuls(node: ir.Node) -> Iterator[tuple[Fusion, set[ir.Node]]]:
    split = sole_consumer(node.outputs[0])
    if split is None or split.op_type != "Split" or len(split.outputs) != 2 or split.inputs[0] is not node.outputs[0]:
        return
    halves = tuple(split.outputs)
    for up in halves:
        last = sole_consumer(up)
        if last is None or last.op_type != "Mul":
            continue
        for gate, absorbed in _gates(last):
            nodes = {*absorbed, split, last}
            is_whole = {gate.gate, gate.up} == set(halves) and gate.up is up
            if is_whole and all(reader in nodes for reader in gate.gate.consumers()):
                yield GatedMatmul(gate, last, gate_first=gate.gate is halves[0]), nodes


def _clamped_gates(node: ir.Node) -> Iterator[tuple[Fusion, set[ir.Node]]]:
    """Mul(Mul(g, Sigmoid(alpha * g)), Add(Clip(up, -limit, limit), 1)), g = Min(gate, limit)."""
    for active, raised in _either(node):
        swish, plus, by_one = _made(active, "Mul"), _made(raised, "Add"), _with_scalar(raised, "Add")
        clip = None if by_one is None else _made(by_one[0], "Clip")
        if swish is None or plus is None or by_one is None or by_one[1] != 1.0 or clip is None:
            continue
        for clamped, sigmoid in _either(swish):
            curve, least = _made(sigmoid, "Sigmoid"), _with_scalar(clamped, "Min")
            scaled = None if curve is None else _with_scalar(curve.inputs[0], "Mul")
            bounds = [scalar(bound) for bound in clip.inputs[1:3]]
            if curve is None or least is None or scaled is None or scaled[0] is not clamped:
                continue
            nodes = {swish, plus, clip, curve, *_makers(clamped, curve.inputs[0])}
            if bounds == [-least[1], least[1]] and clip.inputs[0] is not None and _are_between(nodes, node):
                yield Gate(least[0], clip.inputs[0], "clamped-swiglu", (scaled[1], least[1])), nodes


def _xielus(node: ir.Node) -> Iterator[tuple[Fusion, set[ir.Node]]]:
    """The nodes of pipeline/model/activations.py's xIELU, whose weights are stored numbers."""
    for bent, line in _either(node):
        where, sloped = _made(bent, "Where"), _with_scalar(line, "Mul")
        if where is None or sloped is None or None in where.inputs:
            continue
        x, beta = sloped
        condition, above, below = where.inputs
        rising, falling = _with_scalar(above, "Mul"), _with_scalar(below, "Mul")
        square = None if rising is None else _made(rising[0], "Mul")
        curve = None if falling is None else _made(falling[0], "Sub")
        elu = None if curve is None else _made(curve.inputs[0], "Elu")
        capped = None if elu is None else _with_scalar(elu.inputs[0], "Min")
        zero = _with_scalar(condition, "Greater")
        if rising is None or falling is None or square is None or curve is None or elu is None or capped is None:
            continue
        reads_x = list(square.inputs) == [x, x] and curve.inputs[1] is x and capped[0] is x and zero == (x, 0.0)
        makers = _makers(condition, above, below, elu.inputs[0], line, bent)
        nodes = {square, curve, elu, *makers}
        if reads_x and elu.attributes.get_float("alpha", 1.0) == 1.0 and _are_between(nodes, node):
            yield Curve(x, "xielu", (rising[1], falling[1], beta, capped[1])), nodes


def _made(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node of this type that makes the value."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type else None


def _with_scalar(value: ir.Value | None, op_type: str) -> tuple[ir.Value, float] | None:
    """The operand and the stored number of a node of this type that makes the value."""
    node = _made(value, op_type)
    for one, other in _either(node) if node is not None else ():
        number = scalar(other)
        if number is not None:
            return one, number
    return None


def _makers(*values: ir.Value | None) -> set[ir.Node]:
    made = (value.producer() for value in values if value is not None)
    return {node for node in made if node is not None}


def _are_between(nodes: set[ir.Node], last: ir.Node) -> bool:
    """Whether only these nodes and the last read their results."""
    results = [result for node in nodes for result in node.outputs]
    readers = {reader for result in results for reader in result.consumers()}
    return readers <= nodes | {last} and not any(result.is_graph_output() for result in results)


def _activation_name(node: ir.Node) -> Activation | None:
    alpha = node.attributes.get_float("alpha", 1.702 if node.op_type == "QuickGelu" else 1.0)
    match node.op_type:
        case "QuickGelu" | "Swish" if alpha == 1.0:
            return "silu"
        case "Gelu":
            return "gelu-tanh" if node.attributes.get_string("approximate", "none") == "tanh" else "gelu-erf"
        case "Relu":
            return "relu"
        case "Sigmoid":
            return "sigmoid"
    return None


def _epilogues(node: ir.Node) -> Iterator[tuple[Fusion, set[ir.Node]]]:
    """Scalings, and a tanh with its own: c * tanh(a * y) is the softcap c of c * a * y."""
    result, alpha, absorbed = _scalings(node.outputs[0])
    tanh = sole_consumer(result)
    cap = 0.0
    if tanh is not None and tanh.op_type == "Tanh":
        capped, factor, more = _scalings(tanh.outputs[0])
        if factor > 0:
            result, alpha, cap, absorbed = capped, alpha * factor, factor, absorbed | {tanh} | more
    if absorbed:
        yield Epilogue(result, alpha, cap), absorbed


def _scalings(value: ir.Value) -> tuple[ir.Value, float, set[ir.Node]]:
    """Follow multiplications by scalars that alone read a value: the last result, the factor of all, and the nodes."""
    alpha, absorbed = 1.0, set[ir.Node]()
    while (reader := sole_consumer(value)) is not None and (factor := _factor(reader, value)) is not None:
        value, alpha = reader.outputs[0], alpha * factor
        absorbed.add(reader)
    return value, alpha, absorbed


def _factor(node: ir.Node, x: ir.Value) -> float | None:
    """Return the scalar by which the node multiplies x; None if it does not multiply x by one."""
    if node.op_type == "Div" and node.inputs[0] is x:
        divisor = scalar(node.inputs[1])
        return 1.0 / divisor if divisor else None
    if node.op_type == "Mul":
        return next((scalar(other) for one, other in _either(node) if one is x), None)
    return None


def norm(value: ir.Value | None) -> tuple[RmsNorm, ir.Node] | None:
    """Match a value that is an RMS norm over the last axis: returns the norm and its node."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "RMSNormalization" or node.inputs[0] is None or node.inputs[1] is None:
        return None
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    assert epsilon is not None
    return RmsNorm(node.inputs[0], node.inputs[1], float(epsilon)), node


def _branches(node: ir.Node) -> Iterator[tuple[NormedBranch, set[ir.Node]]]:
    for branch, residual in _either(node):
        found = norm(branch)
        if found is not None and _is_between(found[1], node) and not is_stored(residual):
            yield NormedBranch(found[0], residual), {found[1]}


def _gathered_norms(node: ir.Node) -> Iterator[tuple[Fusion, set[ir.Node]]]:
    gather = _made(node.inputs[0], "Gather")
    if gather is None or gather.attributes.get_int("axis", 0) != 0 or not _is_between(gather, node):
        return
    rows, indices = gather.inputs[0], gather.inputs[1]
    if rows is None or indices is None or indices.name != "logits_indices" or is_stored(rows):
        return
    total = _made(rows, "Add")
    if total is None or not _is_between(total, gather) or any(is_stored(one) for one in total.inputs if one):
        yield GatheredNorm(rows, None, None, indices), {gather}
        return
    branch = next(_branches(total), None)
    if branch is not None:
        yield (
            GatheredNorm(branch[0].norm.source, branch[0].residual, branch[0].norm, indices),
            {
                gather,
                total,
                *branch[1],
            },
        )
        return
    left, right = total.inputs
    assert left is not None
    assert right is not None
    yield GatheredNorm(left, right, None, indices), {gather, total}


def _head_norms(node: ir.Node) -> Iterator[tuple[Fusion, set[ir.Node]]]:
    query, key = (_head_norm(operand) for operand in node.inputs[:2])
    if query is not None and node.inputs[1] is None:
        yield HeadNorms(query[0], None), query[1]
    elif query is not None and key is not None and query[0].epsilon == key[0].epsilon:
        yield HeadNorms(query[0], key[0]), query[1] | key[1]


def _head_norm(value: ir.Value | None) -> tuple[RmsNorm, set[ir.Node]] | None:
    flat = None if value is None else value.producer()
    found = norm(flat.inputs[0]) if flat is not None and flat.op_type == "Reshape" else None
    split = None if found is None else found[0].source.producer()
    if flat is None or found is None or split is None or split.op_type != "Reshape" or split.inputs[0] is None:
        return None
    if any(sole_consumer(each.outputs[0]) is None for each in (flat, found[1], split)):
        return None
    return RmsNorm(split.inputs[0], found[0].weight, found[0].epsilon), {flat, found[1], split}


def _roundings(node: ir.Node) -> Iterator[tuple[Fusion, set[ir.Node]]]:
    """The nodes between x and its dequantized codes."""
    facts = json.loads(node.metadata_props[ACTIVATIONS_KEY])
    codes = node.inputs[0]
    quantize = None if codes is None else codes.producer()
    if quantize is None or quantize.op_type != "QuantizeLinear" or quantize.inputs[0] is None:
        return
    source, absorbed, waiting = quantize.inputs[0], {quantize}, [quantize.inputs[1]]
    while waiting:
        value = waiting.pop()
        made = None if value is None else value.producer()
        if made is not None and value is not source and made not in absorbed:
            absorbed.add(made)
            waiting += made.inputs
    yield Rounding(source, facts["kind"], facts.get("scale"), frozenset(absorbed)), absorbed


def _either(node: ir.Node) -> list[tuple[ir.Value, ir.Value]]:
    """Both orders of the first two operands."""
    one, other = node.inputs[0], node.inputs[1]
    return [] if one is None or other is None else [(one, other), (other, one)]


def _is_between(node: ir.Node, reader: ir.Node) -> bool:
    """Report whether the reader is the only consumer of the node."""
    return sole_consumer(node.outputs[0]) is reader
