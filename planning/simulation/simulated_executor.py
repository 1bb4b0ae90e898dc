"""An executor that computes nothing: a step takes the virtual time that a step model predicts for what is in it.

Its logits choose token 0 in each row. Drafts are tokens 0 too; the row of a draft that is rejected, at random by the
acceptance curve, chooses token 1. So the lengths of a request decide its steps.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ingot.artifact import KVGeometry, ModelFacts
from ingot.artifact.kv_geometry import KeyOrder
from ingot.planning.simulation.simulated_tiers import PCIE, CopyLink, SimulatedHostBlocks
from ingot.planning.step_model import StepShape
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.scheduling.slow_blocks import ReadCost

ACCEPTED, REJECTED = 0, 1


class StepPredictor(Protocol):
    """Predicts seconds of steps: `StepModel`, or measured ones."""

    def seconds(self, step: StepShape) -> float:
        """Return the seconds of a step."""
        ...


class VirtualClock:
    """Seconds that steps and waiting advance. Implements `Clock`."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Return the seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance."""
        self.now += seconds


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """Sizes of a simulated engine.

    num_blocks    KV blocks of the pool's fast part
    slow_blocks   of its slow part
    slow_link     the way by which steps read the slow part
    host_link     the way between device and host memory
    num_states    slots for the side state of a recurrent model
    vocab_size    of the tokens of prompts
    acceptance    chance of acceptance of the draft at each place, after accepted ones; () drafts nothing
    """

    kv: KVGeometry
    num_blocks: int
    max_batch_tokens: int
    max_sequences: int
    context_tokens: int
    slow_blocks: int = 0
    slow_link: CopyLink = PCIE
    host_link: CopyLink = PCIE
    num_states: int = 0
    acceptance: tuple[float, ...] = ()
    vocab_size: int = 2**19

    def __post_init__(self) -> None:
        assert min(self.num_blocks, self.slow_blocks, self.num_states) >= 0
        assert min(self.max_batch_tokens, self.max_sequences, self.context_tokens) > 0


class StepRecord(NamedTuple):
    """What one step computes: for each sequence, in order, its context after it, how many tokens, and its KV blocks."""

    contexts: tuple[int, ...]
    num_tokens: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> StepShape:
        """Return the counts that its time follows from."""
        return step_shape(self.num_tokens, self.contexts)

    @classmethod
    def of(cls, batch: ForwardBatch) -> "StepRecord":
        """Return the record of a batch."""
        tables = tuple(tuple(block for block in row if block >= 0) for row in batch.block_tables.tolist())
        return cls(tuple(batch.context_lens.tolist()), tuple(np.diff(batch.query_starts).tolist()), tables)


class SimulatedExecutor:
    """Takes virtual time for steps. Implements `TieredExecutor`, `OffloadingExecutor` and `StatefulExecutor`.

    What a step reads from the pool's slow part comes over its link, while nothing is computed.

    observe   called with each batch before it is computed
    """

    kernel_version = "simulated"
    key_order: KeyOrder = "by-token"
    device = None

    def __init__(
        self,
        shape: EngineShape,
        times: StepPredictor,
        clock: VirtualClock,
        *,
        seed: int = 0,
        observe: Callable[[ForwardBatch], object] | None = None,
    ) -> None:
        self.model = ModelFacts(
            family="simulated",
            num_layers=shape.kv.num_layers,
            hidden_size=1,
            vocab_size=shape.vocab_size,
            context_tokens=shape.context_tokens,
            num_parameters=1,
        )
        self.kv_geometry = shape.kv
        self.num_blocks = shape.num_blocks + shape.slow_blocks
        self.num_fast_blocks = shape.num_blocks
        self.num_states = shape.num_states
        self.slow_bytes_per_second = shape.slow_link.bytes_per_second
        self.max_batch_tokens = shape.max_batch_tokens
        self.max_sequences = shape.max_sequences
        self.times = times
        self.busy_seconds = 0.0
        self.last: StepShape = StepShape()
        self._shape = shape
        self._read_cost = ReadCost(shape.kv)
        self._clock = clock
        self._rng = random.Random(seed)
        self._observe = observe
        self._logits: FloatArray = np.zeros((shape.max_batch_tokens, 2), np.float32)  # [rows, 2 tokens]
        self._logits[:, ACCEPTED] = 1

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """Advance the clock by the step's time; return logits [R, 2]."""
        if self._observe:
            self._observe(batch)
        num_tokens, contexts = np.diff(batch.query_starts).tolist(), batch.context_lens.tolist()
        drafts = self._num_drafts(batch, num_tokens)
        self.last = step_shape(num_tokens, contexts, drafts)
        slow_bytes = self._slow_bytes(batch) if self._shape.slow_blocks else 0
        self.take(self.times.seconds(self.last) + slow_bytes / self.slow_bytes_per_second)
        return self._verified(len(batch.logits_indices), drafts)

    def take(self, seconds: float) -> None:
        """Compute for so long."""
        self.busy_seconds += seconds
        self._clock.now += seconds

    def _num_drafts(self, batch: ForwardBatch, num_tokens: Sequence[int]) -> list[int]:
        """Drafts of each sequence: those with logits for each of their tokens, but one, which is the newest."""
        if not self._shape.acceptance or len(batch.logits_indices) <= len(num_tokens):
            return []
        ends = np.searchsorted(batch.logits_indices, batch.query_starts)  # [sequences + 1]
        return [max(0, rows - 1) for rows in np.diff(ends).tolist()]

    def _verified(self, num_rows: int, drafts: Sequence[int]) -> FloatArray:
        if not any(drafts):
            return self._logits[:num_rows]
        logits = self._logits[:num_rows].copy()
        row = 0
        for count in drafts:
            for place in range(count):
                if self._rng.random() >= self._shape.acceptance[min(place, len(self._shape.acceptance) - 1)]:
                    logits[row + place] = (0, 1)
            row += count + 1
        return logits

    def _slow_bytes(self, batch: ForwardBatch) -> int:
        """Bytes that a step reads from blocks of the slow part."""
        used = np.arange(batch.block_tables.shape[1]) < -(-batch.context_lens // self.kv_geometry.block_tokens)[:, None]
        rows, places = np.nonzero(used & (batch.block_tables >= self.num_fast_blocks))
        if not self._read_cost.varies:
            return len(rows) * self._read_cost.bytes_read(0, 0)
        ends = batch.context_lens[rows].tolist()
        return sum(map(self._read_cost.bytes_read, places.tolist(), ends))

    def copy_block(self, source: int, target: int) -> None:
        """Take the time of a copy between the pool's parts; within one, copies on write are rare, and short."""
        if (source < self.num_fast_blocks) != (target < self.num_fast_blocks):
            self.take(self._shape.slow_link.seconds(self.kv_geometry.block_bytes))

    def copy_state(self, source: int, target: int) -> None:
        """Copy nothing: a snapshot is one state, of which a step reads and writes one for every sequence."""

    def host_blocks(self, num_slots: int) -> SimulatedHostBlocks:
        """Make slots in host memory."""
        return SimulatedHostBlocks(num_slots, self.kv_geometry.block_bytes, self._shape.host_link, self._clock)

    def close(self) -> None:
        """Hold nothing."""


def step_shape(num_tokens: Sequence[int], contexts: Sequence[int], drafts: Sequence[int] = ()) -> StepShape:
    """Return the counts of a step from the tokens of each sequence, its context after the step, and its drafts."""
    prefill = attended = decoding = context_tokens = longest = 0
    for index, (count, context) in enumerate(zip(num_tokens, contexts, strict=True)):
        if count == 1 or (drafts and drafts[index]):
            decoding += 1
            context_tokens += context
            longest = max(longest, context)
        else:
            prefill += count
            attended += count * (context - count) + count * (count + 1) // 2
    return StepShape(
        prefill_tokens=prefill,
        prefill_context_tokens=attended,
        decode_rows=decoding,
        context_tokens=context_tokens,
        longest_context=longest,
        draft_rows=sum(drafts),
        num_sequences=len(num_tokens),
    )
