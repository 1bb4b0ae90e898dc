"""Lowers a model and its draft head to programs that share weights: the model's, with hidden states, and the head's.

The head takes the operations of embedding and head of the vocabulary from the model as it lowers them, whatever passes
made of their weights. Its other weights are its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.artifact.programs.cpu_program import Arithmetic, Combine, Embed, Linear, Normalize
from ingot.artifact.programs.draft_head import HIDDEN, DraftHead
from ingot.artifact.programs.operation_row import RowsOf, View
from ingot.errors import PassError
from ingot.passes.model_facts import MODEL
from ingot.pipeline.targets.cpu.fuse_operations import changed
from ingot.pipeline.targets.cpu.lowering import Lowered, draft_of, finish
from ingot.pipeline.targets.cpu.lowering_context import Draft, DraftBuffer

HiddenState = Literal["raw", "normed"]


@dataclass(frozen=True)
class HeadModel:
    """A draft head before it is lowered.

    hidden_state   the model's hidden state that it reads: before or after the model's last norm
    last_norm      makes the last norm's weight in the checkpoint, [hidden_size]
    """

    model: ir.Model
    hidden_state: HiddenState
    last_norm: Callable[[], NDArray[np.float32]]


@dataclass(frozen=True)
class LoweredHead:
    """The programs of program/draft_head.json, and the weights of both."""

    programs: DraftHead
    weights: Lowered


def lower_head(model: ir.Model, head: HeadModel, attention: Arithmetic) -> LoweredHead:
    """Lower the model, with hidden states, and the head.

    PassError names a node that the CPU's kernels do not compute, and says why the head does not fit the model: passes
    that scale the last norm for the head of the vocabulary leave a head that the draft head cannot share.
    """
    target, own = draft_of(model.graph, attention), draft_of(head.model.graph, attention)
    _require_own_norm(target, head)
    _share(target, own)
    _keep_hidden(target, head.hidden_state, "tokens")
    _keep_hidden(own, "normed", "logits")
    with_hidden, lowered = finish(target, model), finish(own, head.model)
    programs = DraftHead(hidden_size=MODEL.of(model).hidden_size, model=with_hidden.program, head=lowered.program)
    weights = Lowered(
        with_hidden.program,
        {**lowered.stored, **with_hidden.stored},
        {**lowered.vectors, **with_hidden.vectors},
    )
    return LoweredHead(programs, weights)


def _require_own_norm(target: Draft, head: HeadModel) -> None:
    _, norm = _last(target)
    now, before = target.vectors[norm.norm.weight](), head.last_norm()
    if not np.array_equal(now, before):
        raise PassError("the passes changed the last norm's weight, which the model shares with its MTP layer")


def _share(target: Draft, own: Draft) -> None:
    """Let the head compute the model's embedding and logits by the model's own operations."""
    theirs = next(operation for operation in target.operations if isinstance(operation, Embed))
    place = next(at for at, operation in enumerate(own.operations) if isinstance(operation, Embed))
    own.operations[place] = changed(theirs, output=own.operations[place].output)
    own.stored[theirs.table] = target.stored[theirs.table]
    (at, _), (last, _) = _last(target), _last(own)
    logits, mine = target.operations[at], own.operations[last]
    assert isinstance(logits, Linear)
    assert isinstance(mine, Linear)
    own.operations[last] = changed(logits, input=mine.input, output=mine.output, rows=mine.rows)
    own.stored[logits.matrix] = target.stored[logits.matrix]
    own.projections[logits.node] = []
    if logits.bias is not None:
        own.vectors[logits.bias] = target.vectors[logits.bias]


def _keep_hidden(draft: Draft, kind: HiddenState, rows: RowsOf) -> None:
    """Keep what the last norm reads, or what it makes, in the buffer HIDDEN."""
    at, norm = _last(draft)
    logits, before = draft.operations[at], draft.operations.index(norm)
    draft.buffers[HIDDEN], draft.kept = DraftBuffer(norm.columns, rows), draft.kept | {HIDDEN}
    view = View(buffer=HIDDEN)
    if kind == "normed":
        draft.operations[before] = changed(norm, output=view, rows=rows)
        draft.operations[at] = changed(logits, input=view)
    else:
        sizes = {"a": norm.input, "output": view, "columns": norm.columns, "rows": rows}
        copy = Combine.model_validate({"node": "hidden", "function": "copy", **sizes})
        draft.operations.insert(before, copy)


def _last(draft: Draft) -> tuple[int, Normalize]:
    """The place of the linear layer that makes the logits, and the norm that it reads. PassError without one."""
    at = max(place for place, operation in enumerate(draft.operations) if isinstance(operation, Linear))
    logits = draft.operations[at]
    assert isinstance(logits, Linear)
    for operation in draft.operations[:at]:
        if isinstance(operation, Normalize) and operation.output == logits.input:
            return at, operation
    raise PassError(f"{logits.node!r} makes the logits of something other than a norm's result")
