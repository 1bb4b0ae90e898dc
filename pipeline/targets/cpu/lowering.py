"""Lowers the IR to a CPU launch program: an operation per node, then as few operations and buffers as possible.

    lower the nodes         every value in a buffer of its own (lower_nodes.py; fusions.py for what spans several nodes)
    gather early            rows of logits alone after the last attention
    fuse_operations.py      norms into linear layers, gate and up projections, sums and norms in place
    plan the arena          buffers whose lifetimes do not overlap share a place

A node without an operation is a PassError with its name.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ingot.artifact import KVGeometry, ModelFacts
from ingot.artifact.programs.cpu_program import (
    Arithmetic,
    Attend,
    Buffer,
    CpuProgram,
    Experts,
    Linear,
    Operation,
    Recurrent,
)
from ingot.artifact.programs.projections import Projection
from ingot.errors import PassError
from ingot.passes.model_facts import KV, MODEL
from ingot.passes.quantization.schemes import require_used_schemes
from ingot.passes.weights import is_stored
from ingot.pipeline.targets.arena import arena_bytes, lifetimes, plan_arena
from ingot.pipeline.targets.cpu.fuse_operations import fuse_operations
from ingot.pipeline.targets.cpu.lower_nodes import lower_node
from ingot.pipeline.targets.cpu.lowering_context import LOGITS, Draft, DraftBuffer, LoweringContext, Vector
from ingot.pipeline.targets.cpu.matrices import StoredMatrix
from ingot.pipeline.targets.fusions import Curve, Epilogue, Gate, NormedBranch, Rounding, find_fusions
from ingot.sizes import round_up

_FLOAT_BYTES = 4
_ROW_FLOATS = 16  # rows of a buffer begin at multiples of it


@dataclass(frozen=True)
class Lowered:
    """A program, and what makes its weights."""

    program: CpuProgram
    stored: Mapping[str, StoredMatrix]
    vectors: Mapping[str, Vector]


def lower_to_operations(model: ir.Model, attention: Arithmetic = "float32", *, experts_apart: bool = False) -> Lowered:
    """Lower the model, to attend in that arithmetic.

    experts_apart    what experts read and make are values of the IR: they norm no input and add to no output

    PassError names a node, or a weight, that the CPU's kernels do not compute.
    """
    require_used_schemes(model)
    draft = draft_of(model.graph, attention)
    if experts_apart:
        experts = [operation for operation in draft.operations if isinstance(operation, Experts)]
        draft.apart = {view.buffer for operation in experts for view in operation.views}
    return finish(draft, model)


def finish(draft: Draft, model: ir.Model) -> Lowered:
    """Make a program of a model's operations: as few of them and of buffers as possible."""
    gather_early(draft)
    fuse_operations(draft)
    return Lowered(_program(draft, MODEL.of(model), KV.of(model)), draft.stored, draft.vectors)


def draft_of(graph: ir.Graph, attention: Arithmetic) -> Draft:
    """Lower every node, each value in a buffer of its own."""
    context = LoweringContext(find_fusions(graph, (Gate, Curve, Epilogue, NormedBranch, Rounding)), attention)
    for value in graph.inputs:
        if value.dtype == ir.DataType.FLOAT:
            context.take(value)
    for node in graph:
        if node not in context.fusions.absorbed and not all(is_stored(value) for value in node.outputs):
            lower_node(context, node)
    return context.draft


def gather_early(draft: Draft) -> None:
    """Compute rows of logits alone where neither attention nor a state needs the others: from the last such layer on.

        x = residual + attended @ O^T             x = residual[logits_indices] + attended[logits_indices] @ O^T
        x = x + ffn(norm(x))              ->      x = x + ffn(norm(x))
        logits = head(norm(x[logits_indices]))    logits = head(norm(x))

    The model gathers in front of its head. Every operation but attention and recurrent ones computes a row from the
    same row of its inputs, so the gather moves up, and a row's bits stay the same. A prompt's step saves most of a
    layer's matmuls. A decode step, which gathers all rows, gains one sum that is not in place.

    Rewrites the draft in place; every buffer is written once.
    """
    # `attended`: buffers that attention and recurrent operations read, or that these are made of.
    matrices = draft.matrices
    attended = {name for name in draft.kept | draft.apart if draft.buffers[name].rows == "tokens"}
    for place in reversed(range(len(draft.operations))):
        operation = draft.operations[place]
        output = operation.span_written(matrices).buffer
        if isinstance(operation, Attend | Recurrent) or output in attended:
            attended.update(span.buffer for span in operation.spans_read(matrices))
        elif "rows" in type(operation).model_fields:
            draft.operations[place] = operation.model_copy(update={"rows": "logits"})
            draft.buffers[output] = DraftBuffer(draft.buffers[output].columns, "logits")


def _program(draft: Draft, model: ModelFacts, kv: KVGeometry) -> CpuProgram:
    matrices = draft.matrices
    buffers, arena_floats = _plan(draft)
    writes = [operation.span_written(matrices).buffer for operation in draft.operations]
    if LOGITS not in writes:
        raise PassError("no operation makes the logits: the graph's output is a view of another value")
    # Steps without logits run up to here: attention, side state, and hidden states of all tokens.
    kept = {name for name in draft.kept if draft.buffers[name].rows == "tokens"}
    mixing = [
        place
        for place, operation in enumerate(draft.operations)
        if isinstance(operation, Attend | Recurrent) or operation.output.buffer in kept
    ]
    return CpuProgram(
        kv=kv,
        vocab_size=model.vocab_size,
        context_tokens=model.context_tokens,
        arena_floats=arena_floats,
        buffers=buffers,
        matrices=matrices,
        operations=tuple(draft.operations),
        head_start=mixing[-1] + 1 if mixing else 0,
        projections=tuple(_projections(draft)),
    )


def _projections(draft: Draft) -> Iterator[Projection]:
    """The modules that are rows of linear layers; those of experts, which choose rows of a step, are not."""
    for operation in draft.operations:
        if isinstance(operation, Linear):
            row, columns = 0, draft.stored[operation.matrix].matrix.k
            for module, rows in draft.projections[operation.node]:
                yield Projection(module=module, node=operation.node, first_row=row, rows=rows, columns=columns)
                row += rows


def _plan(draft: Draft) -> tuple[dict[str, Buffer], int]:
    """Places of the buffers, and the floats of the arena for each token."""
    uses = [sorted(_buffers_of(operation, draft)) for operation in draft.operations]
    uses = [sorted(draft.given), *uses, sorted(draft.kept)]
    used = {name: draft.buffers[name] for names in uses for name in names}
    sizes = {name: _row_floats(buffer) * _FLOAT_BYTES for name, buffer in used.items() if name != LOGITS}
    alive = lifetimes(uses, sizes)
    offsets = plan_arena(alive)
    buffers = {
        name: Buffer(
            rows=buffer.rows,
            columns=buffer.columns,
            offset=-1 if name == LOGITS else offsets[name] // _FLOAT_BYTES,
        )
        for name, buffer in used.items()
    }
    return buffers, arena_bytes(alive, offsets) // _FLOAT_BYTES


def _buffers_of(operation: Operation, draft: Draft) -> set[str]:
    matrices = draft.matrices
    spans = (*operation.spans_read(matrices), operation.span_written(matrices))
    return {span.buffer for span in spans}


def _row_floats(buffer: DraftBuffer) -> int:
    return round_up(buffer.columns, _ROW_FLOATS)


def weight_bytes(stored: Sequence[StoredMatrix]) -> dict[str, int]:
    """Name of each weight's codes or floats -> bytes of its tiles, a tied weight once."""
    found: dict[str, int] = {}
    for matrix in stored:
        for name, size in matrix.bytes_by_weight().items():
            found.setdefault(name, size)
    return found
