"""Computes rows of logits alone where neither attention nor a state needs the others: from the last such layer on.

    x = residual + attended @ O^T             x = residual[logits_indices] + attended[logits_indices] @ O^T
    x = x + ffn(norm(x))              ->      x = x + ffn(norm(x))
    logits = head(norm(x[logits_indices]))    logits = head(norm(x))

The model gathers in front of its head. Every operation but attention and recurrent ones computes a row from the same
row of its inputs, so the gather moves up, and a row's bits stay as they are. A prompt's step saves most of a layer's
matmuls. A decode step, which gathers all rows, gains one sum that is not in place.
"""

from ingot.artifact.programs.cpu_program import Attend, Embed, Recurrent, Rotate
from ingot.artifact.programs.cpu_spans import span_written, spans_read
from ingot.pipeline.targets.cpu.lowering_context import Draft, DraftBuffer


def gather_early(draft: Draft) -> None:
    """Rewrite the draft in place; every buffer is written once."""
    matrices, attended = draft.matrices, set[str]()  # buffers that they read, or that they are made of
    for place in reversed(range(len(draft.operations))):
        operation = draft.operations[place]
        output = span_written(operation, matrices).buffer
        if isinstance(operation, Attend | Recurrent) or output in attended:
            attended.update(span.buffer for span in spans_read(operation, matrices))
        elif not isinstance(operation, Embed | Rotate):
            draft.operations[place] = operation.model_copy(update={"rows": "logits"})
            draft.buffers[output] = DraftBuffer(draft.buffers[output].columns, "logits")
