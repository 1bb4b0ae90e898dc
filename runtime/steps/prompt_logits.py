"""Logits at every position of given sequences, for perplexity and KL divergence.

The sequences run through the same scheduler, blocks and executor as requests, but do not reuse cached prefixes: so
every token of theirs gets logits (`ScheduledBatch.add`). Several short ones share a step, and a long one takes several.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ingot.errors import EngineError
from ingot.runtime.executors import Executor
from ingot.runtime.forward_batch import FloatArray, Int64Array
from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.scheduling.batch_builder import BatchBuilder
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.scheduling.sequence import ScheduledBatch, Sequence


class PromptLogits(NamedTuple):
    """Logits [tokens, vocab] of sequence `prompt_index` from position `start` on. Valid until the iterator advances."""

    prompt_index: int
    start: int
    logits: FloatArray


def iterate_prompt_logits(
    executor: Executor,
    scheduler: Scheduler,
    builder: BatchBuilder,
    prompts: Iterable[tuple[int, Int64Array]],
    drain: Callable[[], object],
) -> Iterator[PromptLogits]:
    """Yield the logits of (sequence id, tokens) in chunks: sequences in order, each one's chunks in order.

    `scheduler` must be for this use alone; it may share its blocks. Prompts are read when they are needed. Blocks are
    freed when the iterator ends or is closed. `drain` finishes other steps in flight, before each step.
    EngineError when running requests hold the blocks that the next sequence needs, or when another batch was built
    while logits of this one were still unread.
    """
    queue = enumerate(prompts)
    index_of: dict[int, int] = {}
    try:
        while _refill(scheduler, queue, index_of):
            drain()
            batch = _schedule(scheduler)
            _move_blocks(executor, scheduler.blocks, batch)
            logits = executor.forward(builder.build(batch))  # [T, vocab]
            scheduler.complete(batch)
            yield from _parts(batch, logits, index_of, builder)
            for entry in batch.entries:
                if entry.samples:
                    scheduler.remove(entry.sequence)
    finally:
        for sequence in [*scheduler.running.values(), *scheduler.waiting]:
            scheduler.remove(sequence)


def _refill(
    scheduler: Scheduler, queue: Iterator[tuple[int, tuple[int, Int64Array]]], index_of: dict[int, int]
) -> bool:
    """Keep the tokens of one step waiting; returns whether any sequence is left."""
    while scheduler.waiting.num_prompt_tokens < scheduler.max_batch_tokens:
        following = next(queue, None)
        if following is None:
            break
        index, (sequence_id, tokens) = following
        index_of[sequence_id] = index
        scheduler.add(Sequence.of(sequence_id, tokens, 1, reuse_prefix=False))
    return scheduler.has_sequences


def _move_blocks(executor: Executor, blocks: BlockManager, batch: ScheduledBatch) -> None:
    """Make the copies of a step. Its sequences share no block, and their side state is their own: they are moves."""
    try:
        for copy in batch.copies:
            executor.copy_block(copy.source, copy.target)
    except BaseException:
        for copy in batch.copies:
            blocks.discard_content(copy.target)
        raise


def _schedule(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    first = scheduler.waiting.first()
    if not batch.entries and first:
        raise EngineError(
            f"no block is free for a sequence of {len(first.tokens)} tokens: running requests"
            f" hold {scheduler.blocks.num_in_use} of {scheduler.blocks.num_blocks}; finish them first"
        )
    return batch


def _parts(
    batch: ScheduledBatch, logits: FloatArray, index_of: dict[int, int], builder: BatchBuilder
) -> Iterator[PromptLogits]:
    """Logits of each sequence of the step; EngineError when another step has overwritten them."""
    num_built, row = builder.num_built, 0
    for sequence, start, num_tokens, *_ in batch.entries:
        index = index_of[sequence.id]
        if builder.num_built != num_built:
            raise EngineError(
                f"the logits of prompt {index} were overwritten: the engine ran another step while they were still"
                " unread; read all of them before other calls, or give one prompt at a time"
            )
        yield PromptLogits(index, start, logits[row : row + num_tokens])
        row += num_tokens
