"""Fewer operations and buffers: rewrites of a draft in which every buffer is written once.

y = linear(norm(x)), experts(norm(x))            the linear layer norms its input, if only such operations read it
gate(linear(x), linear'(x)), or its halves       one linear layer of pairs, with store "gate"
act(linear(x))                                   the linear layer's activation
sum = x + linear(...), + experts(...), ...       the linear layer adds to x, if x is not read after it
sum = x + norm(...)                              the norm writes to x likewise
norm or rotation of queries or keys              in place in the columns that it reads, if no other operation reads them
                                                 afterwards
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
from pydantic import BaseModel

from ingot.artifact.programs.cpu_program import (
    Combine,
    Embed,
    Experts,
    Linear,
    Normalize,
    Operation,
    Rotate,
)
from ingot.artifact.programs.operation_row import Matrix, Span, View
from ingot.pipeline.targets.cpu.lowering_context import LOGITS, Draft, Vector
from ingot.pipeline.targets.cpu.matrices import PAIRS

AnyOperation = TypeVar("AnyOperation", bound=BaseModel)


def fuse_operations(draft: Draft) -> None:
    """Rewrite the draft in place."""
    _fold_norms(draft)
    _fuse_gates(draft)
    _fold_activations(draft)
    _update_in_place(draft)


@dataclass
class _Uses:
    """Writers and readers of each buffer, by place in the list of operations, and the draft's matrices."""

    matrices: Mapping[str, Matrix]
    maker: dict[str, int] = field(default_factory=dict)
    readers: dict[str, list[tuple[int, Span]]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, draft: Draft) -> "_Uses":
        found = cls(draft.matrices)
        for place, operation in enumerate(draft.operations):
            found.maker[operation.span_written(found.matrices).buffer] = place
            for span in operation.spans_read(found.matrices):
                found.readers[span.buffer].append((place, span))
        return found

    def sole_reader(self, buffer: str) -> int | None:
        """The one operation that reads the buffer."""
        places = {place for place, _ in self.readers[buffer]}
        return places.pop() if len(places) == 1 else None

    def is_read_after(self, buffer: str, place: int, reader: int) -> bool:
        """Whether an operation other than `reader` reads the buffer at that place or later."""
        return any(other >= place and other != reader for other, _ in self.readers[buffer])


def _fold_norms(draft: Draft) -> None:
    """Let linear layers norm their input."""
    uses, dropped = _Uses.of(draft), set[int]()
    for place, norm in enumerate(draft.operations):
        if not isinstance(norm, Normalize) or norm.groups != 1 or norm.residual is not None:
            continue
        if norm.output.buffer in draft.kept | draft.apart:
            continue
        readers = {reader for reader, _ in uses.readers[norm.output.buffer]}
        layers = {reader: draft.operations[reader] for reader in readers}
        if readers and all(_can_norm(draft, layer, norm) for layer in layers.values()):
            for reader, layer in layers.items():
                draft.operations[reader] = changed(layer, input=norm.input, norm=norm.norm)
            dropped.add(place)
    _drop(draft, dropped)


def _can_norm(draft: Draft, layer: Operation, norm: Normalize) -> bool:
    return (
        isinstance(layer, Linear | Experts)
        and layer.input == norm.output
        and layer.norm is None
        and layer.rows == norm.rows
        and draft.stored[next(layer.matrix_names())].matrix.k == norm.columns
        and (isinstance(layer, Linear) or layer.logits != norm.output)
    )


def _fuse_gates(draft: Draft) -> None:
    """Make one linear layer of pairs of a gate and an up projection."""
    uses, dropped = _Uses.of(draft), set[int]()
    for place, gate in enumerate(draft.operations):
        if not isinstance(gate, Combine) or gate.function != "gate" or not isinstance(gate.b, View):
            continue
        makers = [uses.maker[view.buffer] for view in (gate.a, gate.b)]
        layers = [draft.operations[maker] for maker in makers]
        if any(uses.sole_reader(view.buffer) != place for view in (gate.a, gate.b)):
            continue
        fused = gated(draft, layers[0], layers[1], gate)
        if fused is not None:
            draft.operations[place] = fused
            dropped |= set(makers)
    _drop(draft, dropped)


def gated(draft: Draft, layer: Operation, up: Operation, gate: Combine) -> Linear | None:
    """The layer of pairs: of one layer's halves, or of two layers that differ in their weights alone."""
    if not isinstance(layer, Linear) or not isinstance(up, Linear) or layer.store != "store" or layer.cap:
        return None
    assert isinstance(gate.b, View)
    stored = draft.stored[layer.matrix]
    n = stored.matrix.n
    if layer is up:
        is_halved = (gate.a.column, gate.b.column, 2 * gate.columns) == (0, gate.columns, n)
        pairs, bias = stored.as_pairs() if is_halved else None, layer.bias
    else:
        same = {"node": up.node, "matrix": up.matrix, "output": up.output, "bias": up.bias}
        is_alike = layer.model_copy(update=same) == up and (layer.bias is None) == (up.bias is None)
        is_whole = (gate.a.column, gate.b.column, gate.columns) == (0, 0, n)
        pairs = stored.as_pairs(draft.stored[up.matrix]) if is_alike and is_whole else None
        if pairs is not None:
            _join_projections(draft, layer.node, up.node)
        bias = None if pairs is None else _joined_bias(draft, layer.bias, up.bias)
    if pairs is None:
        return None
    return changed(
        layer,
        matrix=draft.add_matrix(pairs),
        bias=bias,
        output=gate.output,
        store="gate",
        activation=gate.activation,
        numbers=gate.numbers,
    )


def _join_projections(draft: Draft, gate: str, up: str) -> None:
    """The rows of the up projection follow the gate's."""
    both = [draft.projections[gate], draft.projections[up]]
    draft.projections[gate] = both[0] + both[1] if all(both) else []


def _joined_bias(draft: Draft, gate: str | None, up: str | None) -> str | None:
    if gate is None or up is None:
        return None
    return draft.add_vector(f"{gate}{PAIRS}", partial(_concatenated, draft.vectors[gate], draft.vectors[up]))


def _concatenated(first: Vector, second: Vector) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.concatenate((first(), second()))


def _fold_activations(draft: Draft) -> None:
    """Let a linear layer apply the activation that alone reads its result."""
    uses, dropped = _Uses.of(draft), set[int]()
    for place, gate in enumerate(draft.operations):
        if not isinstance(gate, Combine) or gate.function != "gate" or gate.b != 1.0:
            continue
        maker = uses.maker[gate.a.buffer]
        layer = draft.operations[maker]
        is_plain = isinstance(layer, Linear) and layer.store == "store" and layer.activation == "none"
        if (
            is_plain
            and uses.sole_reader(gate.a.buffer) == place
            and _is_whole(layer, gate.a, gate.columns, uses.matrices)
        ):
            draft.operations[place] = changed(
                layer, output=gate.output, activation=gate.activation, numbers=gate.numbers
            )
            dropped.add(maker)
    _drop(draft, dropped)


def _is_whole(maker: Operation, view: View, columns: int, matrices: Mapping[str, Matrix]) -> bool:
    """Whether the view is all that the operation wrote."""
    return maker.span_written(matrices) == Span.of(view, columns)


def _update_in_place(draft: Draft) -> None:
    """Let sums and norms write where an operand is that no operation reads afterwards."""
    uses, dropped, renamed = _Uses.of(draft), set[int](), dict[str, View]()
    for place, operation in enumerate(draft.operations):
        if isinstance(operation, Combine) and operation.function == "add":
            maker = _adding(draft, uses, place, operation)
            if maker is not None:
                target, at = maker
                draft.operations[at] = _as_sum(draft.operations[at], target)
                renamed[operation.output.buffer] = target
                dropped.add(place)
        elif isinstance(operation, Normalize | Rotate) and operation.output.buffer not in draft.kept:
            free = _free_target(draft, uses, place, operation)
            if free is not None:
                renamed[operation.output.buffer] = free
    draft.operations = [_renamed(operation, renamed) for operation in draft.operations]
    _drop(draft, dropped)


def _adding(draft: Draft, uses: _Uses, place: int, add: Combine) -> tuple[View, int] | None:
    """The operand of a sum that can be updated in place, and the operation that makes the other one."""
    if not isinstance(add.b, View) or add.scale != 1 or add.cap or add.output.buffer == LOGITS:
        return None
    for total, term in ((add.a, add.b), (add.b, add.a)):
        at = uses.maker.get(term.buffer, -1)
        maker = draft.operations[at]
        # Experts have read their input before they add.
        after = at + isinstance(maker, Experts)
        is_free = not uses.is_read_after(total.buffer, after, place) and uses.maker[total.buffer] < at
        is_last = uses.sole_reader(term.buffer) == place and _is_whole(maker, term, add.columns, uses.matrices)
        fills = _fills(draft, total, add, add.columns)
        is_apart = isinstance(maker, Experts) and term.buffer in draft.apart
        if _can_add(maker) and is_free and is_last and fills and not is_apart:
            return total, at
    return None


def _can_add(operation: Operation) -> bool:
    match operation:
        case Linear(store="store"):
            return True
        case Embed(adds=False) | Experts(adds=False):
            return True
    return False


def _as_sum(operation: Operation, target: View) -> Operation:
    how = {"store": "add"} if isinstance(operation, Linear) else {"adds": True}
    return changed(operation, output=target, **how)


def _free_target(draft: Draft, uses: _Uses, place: int, operation: Normalize | Rotate) -> View | None:
    """Return the view that a norm or rotation can write: a norm's residual, or else the operation's input."""
    rows = operation.rows if isinstance(operation, Normalize) else "tokens"
    if isinstance(operation, Normalize) and operation.residual is not None:
        residual = operation.residual
        fills = _fills(draft, residual, operation, operation.columns * operation.groups)
        return residual if fills and not uses.is_read_after(residual.buffer, place, place) else None
    (span,) = operation.spans_read(uses.matrices)
    others = (other for other, read in uses.readers[span.buffer] if read.overlaps(span))
    is_last = all(other <= place for other in others)
    return operation.input if is_last and draft.buffers[span.buffer].rows == rows else None


def _fills(draft: Draft, view: View, operation: Combine | Normalize, columns: int) -> bool:
    """Whether the view is a whole buffer, with the rows that the operation computes."""
    buffer = draft.buffers[view.buffer]
    return (view.column, buffer.columns, buffer.rows) == (0, columns, operation.rows)


def _renamed(operation: Operation, renamed: Mapping[str, View]) -> Operation:
    """The operation with its views of renamed buffers moved to where these are now."""
    changes = {}
    for name in type(operation).model_fields:
        view = getattr(operation, name)
        if isinstance(view, View):
            moved = view
            while moved.buffer in renamed:
                base = renamed[moved.buffer]
                moved = View(buffer=base.buffer, column=base.column + moved.column)
            changes[name] = moved
    return changed(operation, **changes)


def changed(operation: AnyOperation, **changes: object) -> AnyOperation:
    return operation.model_copy(update=changes)


def _drop(draft: Draft, places: set[int]) -> None:
    """Remove operations, and matrices that no operation reads any more."""
    draft.operations = [operation for place, operation in enumerate(draft.operations) if place not in places]
    read = {name for operation in draft.operations for name in operation.matrix_names()}
    draft.stored = {name: stored for name, stored in draft.stored.items() if name in read}
