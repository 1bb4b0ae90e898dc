"""Measures steps of an artifact's executor on this machine, and fits a step model to them.

The points are rows x context of decoding, and lengths x context of prompts, up to what the KV pool holds. Random tokens
attend to zeroed keys: the time of a step does not depend on values. A shuffled order and the least of several runs of
each point keep other processes' work from favouring one point.
"""

import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ingot.errors import UsageError
from ingot.planning.fitting import MeasuredStep, fit_steps
from ingot.planning.hardware import Hardware
from ingot.planning.model_shape import ModelShape
from ingot.planning.serving_rows import TERMS, expert_term
from ingot.planning.step_model import StepModel, StepShape
from ingot.runtime.executors import Executor, StatefulExecutor, num_fast_blocks
from ingot.runtime.forward_batch import ForwardBatch

_log = logging.getLogger(__name__)

SECONDS = 120.0
"""Most seconds of a measurement; it ends early, after at least one run of each point."""
_RUNS = 15
_DECODE_ROWS = (1, 4, 16, 64)
_PREFILL_TOKENS = (32, 128, 512)
_CONTEXTS = (0.02, 0.35, 0.9)
"""Shares of the context that fits."""


@dataclass(frozen=True)
class _Point:
    """So many sequences that each compute so many tokens at the end of a context."""

    sequences: int
    tokens: int
    context: int

    @property
    def step(self) -> StepShape:
        """The counts of the step."""
        rows = self.sequences * self.tokens
        if self.tokens == 1:
            return StepShape(decode_rows=rows, context_tokens=rows * self.context, num_sequences=self.sequences)
        mean = self.context - (self.tokens - 1) / 2
        return StepShape(prefill_tokens=rows, prefill_context_tokens=rows * mean, num_sequences=self.sequences)


def measure(
    executor: Executor,
    experts: tuple[int, int] = (0, 0),
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> StepModel:
    """Fit a step model to steps of an idle executor, whose KV pool is overwritten.

    UsageError for a pool that holds too few tokens for different contexts.
    """
    measured = measure_steps(executor, seconds, clock)
    terms = (*TERMS, expert_term(*experts)) if experts[0] else TERMS
    where = executor.device.name if executor.device else executor.kernel_version
    return fit_steps(terms, measured, f"{len(measured)} kinds of steps measured on this machine ({where})")


def measure_steps(
    executor: Executor, seconds: float = SECONDS, clock: Callable[[], float] = time.perf_counter
) -> list[MeasuredStep]:
    """Time each point several times within the seconds; return the least of each, as other processes only add time."""
    points = list(dict.fromkeys(_points(executor)))
    if len({point.context for point in points}) < 2:
        pool_tokens = num_fast_blocks(executor) * executor.kv_geometry.block_tokens
        raise UsageError(f"the KV pool holds {pool_tokens} tokens, too few to measure different contexts: set kv_bytes")
    shuffled = random.Random(0)
    times: dict[_Point, list[float]] = {point: [] for point in points}
    begin = clock()
    for run in range(_RUNS + 1):
        for point in shuffled.sample(points, len(points)):
            if run > 1 and clock() - begin > seconds:
                break
            started = clock()
            executor.forward(_batch(executor, point))
            # The first run of a point meets cold caches and untouched pages.
            if run:
                times[point].append(clock() - started)
    found = [MeasuredStep(point.step, min(values)) for point, values in times.items()]
    for one in found:
        _log.info("measured step: %s in %.3f ms", one.step, one.seconds * 1e3)
    return found


def _points(executor: Executor) -> Iterator[_Point]:
    kv, most = executor.kv_geometry, executor.model.context_tokens
    slots = executor.num_states if isinstance(executor, StatefulExecutor) and kv.state_bytes else executor.max_sequences
    for rows in _DECODE_ROWS:
        count = min(rows, executor.max_sequences, slots, executor.max_batch_tokens, num_fast_blocks(executor))
        longest = min(most, num_fast_blocks(executor) // count * kv.block_tokens)
        for share in _CONTEXTS:
            yield _Point(count, 1, max(1, int(longest * share)))
    longest = min(most, num_fast_blocks(executor) * kv.block_tokens)
    for tokens in _PREFILL_TOKENS:
        count = min(tokens, executor.max_batch_tokens, longest)
        for context in dict.fromkeys((count, max(count, int(longest * _CONTEXTS[-1])))):
            if count > 1:
                yield _Point(1, count, context)


def _batch(executor: Executor, point: _Point) -> ForwardBatch:
    block_tokens, rows = executor.kv_geometry.block_tokens, point.sequences * point.tokens
    blocks = -(-point.context // block_tokens)
    tables = np.arange(point.sequences * blocks, dtype=np.int32).reshape(point.sequences, blocks)
    positions = np.tile(np.arange(point.context - point.tokens, point.context, dtype=np.int64), point.sequences)
    ends = np.arange(1, point.sequences + 1) * point.tokens
    has_states = isinstance(executor, StatefulExecutor) and executor.kv_geometry.state_bytes
    return ForwardBatch(
        input_ids=np.arange(rows, dtype=np.int64) * 7919 % executor.model.vocab_size,
        position_ids=positions,
        logits_indices=ends.astype(np.int64) - 1,
        query_starts=np.concatenate(([0], ends)).astype(np.int32),
        context_lens=np.full(point.sequences, point.context, dtype=np.int32),
        block_tables=tables,
        state_slots=np.arange(point.sequences, dtype=np.int32) if has_states else None,
    )


def as_hardware(model: StepModel, shape: ModelShape, memory_bytes: float, on_cpu: bool) -> Hardware:
    """A row for this machine: the bandwidth and the flops that the measured steps reach."""
    one = model.seconds(StepShape(decode_rows=1, num_sequences=1))
    tokens = 1000
    prompt = model.seconds(StepShape(prefill_tokens=tokens, num_sequences=1)) - one
    flops = shape.flops_per_token * tokens / prompt if prompt > 0 else shape.flops_per_token / one
    bandwidth = shape.matmul_bytes / one
    return Hardware(
        words="this machine",
        kind="cpu" if on_cpu else "gpu",
        memory=memory_bytes,
        bandwidth=bandwidth,
        flops={"fp16": flops},
        host_link=bandwidth,
        network=bandwidth,
        sources=(model.source,),
    )
