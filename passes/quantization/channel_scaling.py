"""Scaling the input channels of linear layers without changing the model's function, for awq and smooth-quant.

    x -> Gemm(x, W)      as      x / s -> Gemm(x / s, W * s)

x / s costs nothing where the node that makes x absorbs 1 / s:

    x = RMSNormalization(h, w)                              w / s
    x = LayerNormalization(h, w, b?)                        w / s, b / s
    x = Mul(activation, up), up rows of Gemm(h, U, b?)      those rows of U and b / s
    x = PagedAttention(q, k, v), v rows of Gemm(h, V, b?)   those rows of V and b / s, one s for a group's heads
    x = rows of Gemm(h, U, b?), by a Split                  those rows of U and b / s
    x = Concat of results of Gemm(h_i, U_i, b_i?)           U_i and b_i / their part of s

In exact arithmetic nothing changes, unlike the result of a later quantization. Where no node can absorb the scale, a
Mul in front of the layers can apply it, which costs a pass over the activations when the model runs:

    x -> Mul(x, 1 / s) -> Gemm(.., W * s)

Scales are judged by the error of the block's output: the block reaches from the layers to where their results join the
residual stream.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.passes.calibration import (
    Arrays,
    CalibrationStage,
    LinearGroup,
    fact_arrays,
    recorded_facts,
    require_calibration,
)
from ingot.passes.numerics.arrays import Float32Array, Float64Array
from ingot.passes.numerics.linear_algebra import matmul
from ingot.passes.rewriting import Refusal, add_initializer, attention_operands, head_counts, small_constant
from ingot.passes.weights import change_stored, float32_values, is_router, is_stored, stored_value, weight_sites
from ingot.progress import report_progress

NORMS = ("RMSNormalization", "LayerNormalization")
INPUT_SCALE = ".input_scale"  # suffix of the name of a Mul's constant

FoldOption = Literal["exact", "always"]  # only where a node absorbs the scale; else by a Mul
Facts = dict[str, Any]  # metadata of a scaled group: layers, exponents, errors
Choice = tuple[Facts, Float32Array]
Weights = Mapping[ir.Node, Float32Array]  # [out, in] of a group's layers

_log = logging.getLogger("ingot.passes")


@dataclass(frozen=True)
class Fold:
    """The node that absorbs 1 / s: a norm (`rows` is None), or rows of a linear layer.

    heads    (kv heads, heads per kv head, head dim) of an attention in between; None for none
    """

    node: ir.Node
    rows: slice | None = None
    heads: tuple[int, int, int] | None = None

    def shared(self, channels: Float64Array) -> Float64Array:
        """Per channel of x [in]: the mean over the channels that must have one scale."""
        if self.heads is None:
            return channels
        kv_heads, group, dim = self.heads
        mean = channels.reshape(kv_heads, group, dim).mean(axis=1, keepdims=True)
        return np.broadcast_to(mean, (kv_heads, group, dim)).reshape(-1)

    def of_rows(self, scale: Float64Array) -> Float64Array:
        """The scale of x [in] as that of the rows of the layer that makes it."""
        if self.heads is None:
            return scale
        return scale.reshape(self.heads)[:, 0].reshape(-1)


@dataclass(frozen=True)
class JoinedFold:
    """Linear layers whose results a Concat joins, such as those of each head: every one absorbs its part of 1 / s."""

    parts: tuple[Fold, ...]

    def shared(self, channels: Float64Array) -> Float64Array:
        """Per channel of x [in]: each has its own scale."""
        return channels


@dataclass(frozen=True)
class OwnMul:
    """A Mul by 1 / s in front of the layers."""

    def shared(self, channels: Float64Array) -> Float64Array:
        """Per channel of x [in]: each has its own scale."""
        return channels


Place = Fold | JoinedFold | OwnMul


def scale_groups(
    name: str,
    model: ir.Model,
    fold: FoldOption,
    skipped: Collection[ir.Node],
    choose: Callable[[CalibrationStage, LinearGroup, Place], Choice | None],
) -> list[Facts]:
    """Choose the scales of all groups on the unchanged model, then apply them; return the facts of scaled groups.

    name       the pass, for progress and the log
    skipped    layers whose groups are left alone without a line in the log
    choose     returns a group's facts and s [in]; None when no scale is better than none
    """
    calibration = require_calibration(name)
    scalings, rows, done, total = _Scalings(), list[Facts](), 0, len(weight_sites(model))
    for stage in calibration.stages(model):
        recorded, made = stage.recorded(), dict[str, NDArray[Any]]()
        for group in stage.groups:
            place = None if any(node in skipped for node in group.linears) else _place(name, group, fold)
            if place is not None:
                choice = choose(stage, group, place) if recorded is None else _recorded(recorded, group)
                if choice is not None:
                    rows.append(choice[0])
                    scalings.add(group, place, choice[1].astype(np.float64))
                    made |= _choice_arrays(group, choice)
            done += len(group.linears)
            report_progress(name, done, total)
        if recorded is None:
            stage.record(made)
    if rows:
        scalings.apply(model.graph)
        calibration.facts.record(model)
    return rows


def find_fold(group: LinearGroup) -> Fold | JoinedFold | Refusal:
    """Return the linear layers or norm that can absorb the scale of a group's input, or the reason for a refusal."""
    name, producer = group.linears[0].name or "", group.source.producer()
    if any(map(is_router, group.linears)):
        return Refusal(name, "reads what a router reads too, whose choices would change")
    for linear in group.linears:
        if not is_own(linear.inputs[1]):
            return Refusal(linear.name or "", "has a weight that others read too, or that is quantized already")
    if producer is None or set(group.source.consumers()) != set(group.linears) or group.source.is_graph_output():
        return Refusal(name, "has an input that others read too")
    if producer.op_type in NORMS:
        own = all(is_own(operand) for operand in producer.inputs[1:] if operand is not None)
        return Fold(producer) if own else Refusal(name, "follows a norm whose weight is computed or shared")
    if producer.op_type == "Mul":
        makers = filter(None, map(_maker, producer.inputs))
        return next(makers, Refusal(name, "reads a Mul of which no linear layer makes a factor"))
    if producer.op_type == "PagedAttention":
        return _before_attention(producer) or Refusal(name, "reads an attention whose values no linear layer makes")
    if producer.op_type == "Split":
        return _maker(group.source) or Refusal(name, "reads a part of what is not the result of one linear layer alone")
    if producer.op_type == "Concat":
        return _before_concat(producer) or Refusal(name, "reads a Concat of more than the results of linear layers")
    return Refusal(name, f"reads the result of {producer.op_type}, which cannot absorb a scale")


def is_own(operand: ir.Value | None) -> bool:
    """Whether a stored operand, and the tensor that its Cast reads, has one reader."""
    stored = stored_value(operand)
    return operand is not None and stored is not None and len(operand.uses()) == len(stored.uses()) == 1


def weights_of(group: LinearGroup) -> dict[ir.Node, Float32Array]:
    """The group's weights [out, in] in float32."""
    return {node: float32_values(node.inputs[1]) for node in group.linears if node.inputs[1] is not None}


def block_of(graph: Iterable[ir.Node], group: LinearGroup) -> tuple[list[ir.Node], list[ir.Value]]:
    """Nodes from a group's layers to where their results join the residual stream, or those of other experts or heads,
    and the values that join it.

    An attention that shares the group's keys and values is of a later layer, whose queries are not computed yet.
    """
    nodes: list[ir.Node] = []
    outputs: dict[ir.Value, None] = {}
    derived: set[ir.Value] = set()
    for node in graph:
        inputs = [value for value in node.inputs if value is not None and not is_stored(value)]
        inside = [value for value in inputs if value in derived]
        is_of_later_layer = "shares" in node.attributes and node.inputs[0] not in derived
        if node not in group.linears and (not inside or is_of_later_layer):
            continue
        joins = node.op_type in ("Add", "Concat") and len(inside) < len(inputs)
        if joins or node.op_type == "CombineExperts":
            outputs.update(dict.fromkeys(inside))
            continue
        nodes.append(node)
        derived.update(node.outputs)
    return nodes, list(outputs)


def relative_error(found: Sequence[Float32Array], exact: Sequence[Float32Array]) -> float:
    """||found - exact|| / ||exact|| over all arrays of a block's output."""
    norm = sum(map(_squared, exact)) or 1.0
    return float((sum(_squared(a - b) for a, b in zip(found, exact, strict=True)) / norm) ** 0.5)


def gram_error(exact: Weights, gram: Float64Array) -> Callable[[Weights], float]:
    """relative_error of the outputs of linear layers as a function of their weights, from X^T X of their input."""

    def squared(arrays: Iterable[NDArray[Any]]) -> float:
        return float(sum(np.einsum("oi,oi->", matmul(array, gram), array) for array in arrays))

    norm = squared(exact.values()) or 1.0
    return lambda found: float((squared(exact[node] - array for node, array in found.items()) / norm) ** 0.5)


def _squared(array: Float32Array) -> float:
    return float(np.square(array, dtype=np.float64).sum())


def _place(name: str, group: LinearGroup, option: FoldOption) -> Place | None:
    """Return the place for the scale of a group's input; None, with the reason in the log, where there is no place."""
    fold = find_fold(group)
    if not isinstance(fold, Refusal):
        return fold
    if option == "always" and all(is_own(linear.inputs[1]) and not is_router(linear) for linear in group.linears):
        return OwnMul()
    _log.info("%s: left alone: %s", name, fold)
    return None


def _choice_arrays(group: LinearGroup, choice: Choice) -> dict[str, NDArray[Any]]:
    key = group.linears[0].name or ""
    return {f"{key}.scale": choice[1], **fact_arrays(key, choice[0])}


def _recorded(arrays: Arrays, group: LinearGroup) -> Choice | None:
    """The choice that _choice_arrays stored in an interrupted build; None where it was to leave the group alone."""
    key = group.linears[0].name or ""
    return (recorded_facts(arrays, key), arrays[f"{key}.scale"]) if f"{key}.scale" in arrays else None


def _before_attention(node: ir.Node) -> Fold | None:
    maker = _maker(attention_operands(node)[2])
    if maker is None:
        return None
    heads, kv_heads, dim = head_counts(node)
    return Fold(maker.node, maker.rows, (kv_heads, heads // kv_heads, dim))


def _before_concat(node: ir.Node) -> JoinedFold | None:
    """The linear layers whose results the Concat joins; None when another node makes one of its parts."""
    parts = [_maker(value) for value in node.inputs]
    makers = [part for part in parts if part is not None and part.rows is not None]
    is_last = node.attributes.get_int("axis", 0) == -1
    return JoinedFold(tuple(makers)) if is_last and len(makers) == len(parts) else None


def _maker(value: ir.Value | None) -> Fold | None:
    """The rows of the linear layer that make a value with one reader; None when something else makes it."""
    if value is None or len(value.uses()) != 1 or value.producer() is None:
        return None
    producer, start, columns = value.producer(), 0, value.shape[-1] if value.shape else None
    if producer is not None and producer.op_type == "Split":
        sizes = small_constant(producer.inputs[1])
        if sizes is None:
            return None
        start = sum(sizes[: producer.outputs.index(value)])
        source = producer.inputs[0]
        producer = source.producer() if source is not None and len(source.uses()) == 1 else None
    if producer is None or producer.op_type != "Gemm" or not isinstance(columns, int):
        return None
    own = all(is_own(operand) for operand in producer.inputs[1:] if operand is not None)
    return Fold(producer, slice(start, start + columns)) if own else None


@dataclass
class _Scalings:
    """The chosen scales, applied together: a layer may get one for its columns and one for its rows."""

    columns: dict[ir.Node, Float64Array] = field(default_factory=dict)
    rows: dict[ir.Node, Float64Array] = field(default_factory=dict)
    norms: dict[ir.Node, Float64Array] = field(default_factory=dict)
    inputs: dict[LinearGroup, Float64Array] = field(default_factory=dict)

    def add(self, group: LinearGroup, fold: Place, scale: Float64Array) -> None:
        """Record W * s for the group's layers, 1 / s for the node that makes their input."""
        self.columns.update(dict.fromkeys(group.linears, scale))
        if isinstance(fold, OwnMul):
            self.inputs[group] = scale
        elif isinstance(fold, JoinedFold):
            start = 0
            for part in fold.parts:
                assert part.rows is not None
                end = start + part.rows.stop - part.rows.start
                self._add_rows(part, scale[start:end])
                start = end
        elif fold.rows is None:
            self.norms[fold.node] = scale
        else:
            self._add_rows(fold, scale)

    def _add_rows(self, fold: Fold, scale: Float64Array) -> None:
        assert fold.rows is not None
        weight = fold.node.inputs[1]
        assert weight is not None
        assert weight.shape is not None
        rows = self.rows.setdefault(fold.node, np.ones(int(weight.shape.numpy()[0])))
        rows[fold.rows] = fold.of_rows(scale)

    def apply(self, graph: ir.Graph) -> None:
        """Let all layers read scaled tensors, under the old names, in float32; matrices are lazy."""
        for node in dict.fromkeys([*self.columns, *self.rows]):
            columns, rows = self.columns.get(node), self.rows.get(node)
            by_row = None if rows is None else (1 / rows).astype(np.float32)
            scale_stored(graph, node, 1, rows=by_row, columns=None if columns is None else columns.astype(np.float32))
            if len(node.inputs) > 2:
                scale_stored(graph, node, 2, columns=by_row)
        for group, scale in self.inputs.items():
            _multiply_input(graph, group, (1 / scale).astype(np.float32))
        for node, scale in self.norms.items():
            for index in range(1, len(node.inputs)):
                scale_stored(graph, node, index, columns=(1 / scale).astype(np.float32))


def scale_stored(
    graph: ir.Graph,
    node: ir.Node,
    index: int,
    *,
    rows: Float32Array | None = None,
    columns: Float32Array | None = None,
) -> None:
    """Multiply a stored operand [rows, columns], or a vector [columns], by a factor per row, then one per column."""
    stored = stored_value(node.inputs[index])
    assert stored is not None

    def scaled(values: Float32Array) -> Float32Array:
        values = values if rows is None else values * rows[:, None]
        return values if columns is None else values * columns

    if rows is not None or columns is not None:
        change_stored(graph, stored, scaled)


def _multiply_input(graph: ir.Graph, group: LinearGroup, factor: Float32Array) -> None:
    """Put one Mul between the group's input and its layers."""
    first = group.linears[0]
    constant = add_initializer(graph, ir.Tensor(factor, name=f"{first.name}{INPUT_SCALE}"))
    scaled = ir.Value(name=f"{first.name}.scaled_input", type=group.source.type, shape=group.source.shape)
    graph.insert_before(
        first, ir.node("Mul", [group.source, constant], outputs=[scaled], name=f"{first.name}.scale_input")
    )
    for linear in group.linears:
        linear.replace_input_with(0, scaled)
