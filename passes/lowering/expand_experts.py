"""The pass expand-experts: mixtures of experts in standard ONNX.

    Matched                                     Replacement
    ids, weights = RouteExperts(logits, b?)     scores = Softmax(logits) or Sigmoid(logits); ids = TopK(scores + b);
                                                weights = GatherElements(scores, ids), normalised and scaled;
                                                SparseMixer: a Softmax for each of the ids, over logits near its own
    x_0, x_1, ... = DispatchExperts(x, ids)     Split(Gather(x, sources), counts): rows by expert, then by token
    y = CombineExperts(ids, weights, y_0, ...)  Gather(Concat(y_0, ...), places) * weight, added in the order of ids

`counts` [experts] are the rows of each expert, `places` [tokens * chosen] the row of the concatenation that holds each
token's result of each of its experts. An expert without tokens computes nothing.

Numerics: those of passes/numerics/experts.py, up to the rounding of Softmax and Sigmoid. Sums have a fixed order, so
that a token's result does not depend on the others, if the matmuls of the experts do not depend on their rows' number:
see `row_multiple`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, get_args

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.options import Range
from ingot.passes.base import Pass, PassKind
from ingot.passes.numerics.experts import Routing, ScoreFunction
from ingot.passes.rewriting import add_constant, replace_nodes, static_columns

ROUTE, DISPATCH, COMBINE = "RouteExperts", "DispatchExperts", "CombineExperts"
EXPERT_OPS = (ROUTE, DISPATCH, COMBINE)
_SCORES: tuple[ScoreFunction, ...] = get_args(ScoreFunction)


@dataclass(frozen=True)
class ExpandExperts(Pass):
    """Options:

    row_multiple    each expert's rows are padded to a multiple: some of onnxruntime's kernels compute the last row of
                    an odd number in another way
    """

    name: ClassVar[str] = "expand-experts"
    kind: ClassVar[PassKind] = "lowering"
    summary: ClassVar[str] = "Expands mixtures of experts into standard ONNX."

    row_multiple: Annotated[int, Range(ge=1, le=16)] = 2

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Expand every op of a mixture of experts."""
        return ir.passes.PassResult(model, expand_experts(model.graph, self.row_multiple))


def expand_experts(graph: ir.Graph, row_multiple: int = 1) -> bool:
    """Expand the graph's mixtures of experts in place; return whether it has any."""
    new: list[ir.Node] = []
    expansion = ExpertExpansion(new.append, partial(_shared_constant, graph), row_multiple)
    nodes = [node for node in graph if is_expert_op(node)]
    for node in nodes:
        made = expansion.expand(node, node.inputs)
        replace_nodes(graph, node, [node], list(new), dict(zip(node.outputs, made, strict=True)))
        new.clear()
    return bool(nodes)


def _shared_constant(graph: ir.Graph, array: NDArray[Any]) -> ir.Value:
    """An initializer of its own for every small constant, named by its values."""
    name = f"experts.{array.dtype}.{'x'.join(map(str, array.shape))}.{'.'.join(map(str, array.reshape(-1)[:8]))}"
    return add_constant(graph, name, array)


def is_expert_op(node: ir.Node) -> bool:
    """Whether the node routes, dispatches or combines experts."""
    return node.domain == "ingot" and node.op_type in EXPERT_OPS


def routing_of(node: ir.Node) -> Routing:
    """The attributes of a RouteExperts."""
    attributes = node.attributes
    score = attributes["score"].as_string()
    (known,) = (name for name in _SCORES if name == score)
    return Routing(
        chosen=attributes["chosen"].as_int(),
        score=known,
        groups=attributes["groups"].as_int(),
        chosen_groups=attributes["chosen_groups"].as_int(),
        group_best=attributes["group_best"].as_int(),
        normalise=bool(attributes["normalise"].as_int()),
        least_sum=attributes["least_sum"].as_float(),
        scale=attributes["scale"].as_float(),
        margin=attributes["margin"].as_float(),
    )


@dataclass(frozen=True)
class Places:
    """Places of the rows of a layer's experts, one after another.

    places    [tokens * chosen] row of each token's result of each of its experts
    counts    [experts] rows of each expert, padding included
    total     [1] their sum
    tokens    [tokens * chosen] the tokens
    """

    places: ir.Value
    counts: ir.Value
    total: ir.Value
    tokens: ir.Value


@dataclass
class ExpertExpansion:
    """Makes the standard nodes of one graph's mixtures of experts.

    emit          takes a node, in an order in which they can run
    constant      makes a constant
    row_multiple  see ExpandExperts
    """

    emit: Callable[[ir.Node], object]
    constant: Callable[[NDArray[Any]], ir.Value]
    row_multiple: int = 1
    _places: dict[ir.Value, Places] = field(default_factory=dict)
    _path: str = ""
    _count: int = 0

    def expand(self, node: ir.Node, inputs: Sequence[ir.Value | None]) -> list[ir.Value]:
        """Expand a node whose inputs are these values; return those that replace its outputs."""
        self._path, self._count = f"{node.name}.expanded", 0
        values = [value for value in inputs if value is not None]
        match node.op_type:
            case "RouteExperts":
                return self._route(routing_of(node), *values)
            case "DispatchExperts":
                return self._dispatch(values[0], values[1], len(node.outputs), _chosen(node, 1))
            case _:
                return [self._combine(values[0], values[1], values[2:], _chosen(node, 0))]

    def _route(self, routing: Routing, logits: ir.Value, bias: ir.Value | None = None) -> list[ir.Value]:
        if routing.score == "sparsemixer":
            return self._mixed_sparsely(routing, logits)
        is_softmax = routing.score == "softmax"
        scores = self._op("Softmax", [logits], axis=-1) if is_softmax else self._op("Sigmoid", [logits])
        ranked = logits if is_softmax and bias is None and routing.groups == 1 else scores
        if bias is not None:
            ranked = self._op("Add", [scores, bias])
        if routing.chosen_groups < routing.groups:
            ranked = self._in_chosen_groups(ranked, routing)
        ids = self._largest(ranked, routing.chosen)[1]
        return [ids, self._finished(self._op("GatherElements", [scores, ids], axis=1), routing)]

    def _finished(self, weights: ir.Value, routing: Routing) -> ir.Value:
        """The weights of each token, normalised and scaled."""
        if routing.normalise:
            total = self._op("ReduceSum", [weights, self._integers(1)], keepdims=1)
            weights = self._op("Div", [weights, self._op("Max", [total, self._number(routing.least_sum)])])
        return self._op("Mul", [weights, self._number(routing.scale)])

    def _mixed_sparsely(self, routing: Routing, logits: ir.Value) -> list[ir.Value]:
        """The ids and weights of SparseMixer: a softmax for each choice, over the experts left that are near it."""
        tops, ids = self._largest(logits, routing.chosen)
        count = routing.chosen
        values, numbers = (self._ops("Split", [of], count, axis=1, num_outputs=count) for of in (tops, ids))  # [T, 1]
        size, nothing, left = self._op("Abs", [logits]), self._number(-np.inf), logits
        weights = list[ir.Value]()
        for place, top in enumerate(values):
            if place:
                taken = self._op("Expand", [nothing, self._op("Shape", [top])])
                left = self._op("ScatterElements", [left, numbers[place - 1], taken], axis=1)
            limit = self._op("Mul", [self._op("Max", [size, top]), self._number(routing.margin)])
            is_far = self._op("Greater", [self._op("Sub", [top, logits]), limit])
            shares = self._op("Softmax", [self._op("Where", [is_far, nothing, left])], axis=-1)
            weights.append(self._op("ReduceMax", [shares, self._integers(1)], keepdims=1))
        return [ids, self._finished(self._op("Concat", weights, axis=1), routing)]

    def _in_chosen_groups(self, ranked: ir.Value, routing: Routing) -> ir.Value:
        """-inf for experts of the groups that are not chosen."""
        by_group = self._op("Reshape", [ranked, self._integers(0, routing.groups, -1)])  # [T, groups, E / groups]
        sums = self._op("ReduceSum", [self._largest(by_group, routing.group_best)[0], self._integers(2)], keepdims=0)
        chosen = self._op("Unsqueeze", [self._largest(sums, routing.chosen_groups)[1], self._integers(2)])
        numbers = self.constant(np.arange(routing.groups).reshape(1, 1, -1))
        found = self._op("Cast", [self._op("Equal", [chosen, numbers])], to=ir.DataType.FLOAT)
        is_chosen = self._op(
            "Cast", [self._op("ReduceMax", [found, self._integers(1)], keepdims=0)], to=ir.DataType.BOOL
        )
        shown = self._op("Unsqueeze", [is_chosen, self._integers(2)])
        kept = self._op("Where", [shown, by_group, self._number(-np.inf)])
        return self._op("Reshape", [kept, self._op("Shape", [ranked])])

    def _dispatch(self, x: ir.Value, ids: ir.Value, experts: int, chosen: int) -> list[ir.Value]:
        at = self._placed(ids, experts, chosen)
        nothing = self._op("Expand", [self._integers(0), at.total])
        sources = self._op("ScatterElements", [nothing, at.places, at.tokens], axis=0)
        rows = self._op("Gather", [x, sources], axis=0)
        return self._ops("Split", [rows, at.counts], experts, axis=0)

    def _combine(self, ids: ir.Value, weights: ir.Value, results: Sequence[ir.Value], chosen: int) -> ir.Value:
        at = self._placed(ids, len(results), chosen)
        joined = self._op("Concat", results, axis=0)
        places = self._op("Reshape", [at.places, self._integers(-1, chosen)])
        column = self._integers(1)
        by_place = self._ops("Split", [places], chosen, axis=1, num_outputs=chosen)
        factors = self._ops("Split", [weights], chosen, axis=1, num_outputs=chosen)
        total: ir.Value | None = None
        for place, factor in zip(by_place, factors, strict=True):
            rows = self._op("Gather", [joined, self._op("Squeeze", [place, column])], axis=0)
            term = self._op("Mul", [rows, factor])
            total = term if total is None else self._op("Add", [total, term])
        assert total is not None
        return total

    def _placed(self, ids: ir.Value, experts: int, chosen: int) -> Places:
        """The places of the experts' rows, made once for the dispatch and the combination of a layer."""
        if ids not in self._places:
            self._places[ids] = self._make_places(ids, experts, chosen)
        return self._places[ids]

    def _make_places(self, ids: ir.Value, experts: int, chosen: int) -> Places:
        first, last = self._integers(0), self._integers(1)
        pairs = self._op("Reshape", [ids, self._integers(-1)])
        numbers = self.constant(np.arange(experts).reshape(1, -1))
        is_expert = self._op("Equal", [self._op("Unsqueeze", [pairs, last]), numbers])
        marks = self._op("Cast", [is_expert], to=ir.DataType.INT64)  # [pairs, experts]
        before = self._op("CumSum", [marks, self.constant(np.array(0))], exclusive=1)
        own = self._op("ReduceSum", [self._op("Mul", [marks, before]), last], keepdims=0)  # [pairs]
        counts = self._op("ReduceSum", [marks, first], keepdims=0)
        if self.row_multiple > 1:
            step = self._integers(self.row_multiple)
            raised = self._op("Add", [counts, self._integers(self.row_multiple - 1)])
            counts = self._op("Mul", [self._op("Div", [raised, step]), step])
        starts = self._op("CumSum", [counts, self.constant(np.array(0))], exclusive=1)
        places = self._op("Add", [self._op("Gather", [starts, pairs], axis=0), own])
        ones = self._op("Expand", [self._integers(1), self._op("Shape", [pairs])])
        number = self._op("CumSum", [ones, self.constant(np.array(0))], exclusive=1)
        tokens = self._op("Div", [number, self._integers(chosen)])
        return Places(places, counts, self._op("ReduceSum", [counts, first], keepdims=1), tokens)

    def _largest(self, values: ir.Value, count: int) -> list[ir.Value]:
        """The largest of the last axis, and their places; of equal ones the first."""
        return self._ops("TopK", [values, self._integers(count)], 2, axis=-1, largest=1, sorted=1)

    def _op(self, op_type: str, inputs: Sequence[ir.Value], **attributes: int) -> ir.Value:
        return self._ops(op_type, inputs, 1, **attributes)[0]

    def _ops(self, op_type: str, inputs: Sequence[ir.Value], outputs: int, **attributes: int) -> list[ir.Value]:
        self._count += 1
        name = f"{self._path}.{self._count}"
        node = ir.node(op_type, inputs, attributes, num_outputs=outputs, name=name)
        for index, value in enumerate(node.outputs):
            value.name = name if outputs == 1 else f"{name}.{index}"
        self.emit(node)
        return list(node.outputs)

    def _integers(self, *numbers: int) -> ir.Value:
        return self.constant(np.array(numbers, np.int64))

    def _number(self, number: float) -> ir.Value:
        return self.constant(np.array(number, np.float32))


def _chosen(node: ir.Node, index: int) -> int:
    """The experts for each token, by the shape of the ids."""
    ids = node.inputs[index]
    assert ids is not None
    columns = static_columns(ids)
    assert columns is not None, node.name
    return columns
