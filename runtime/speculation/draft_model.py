"""A draft model: a smaller artifact with the same tokenizer proposes tokens, several sequences in each of its steps.

It keeps keys and values of its own, for the tokens of the target and then for its drafts. A call of `propose` first
catches up: it drops the drafts that the target did not take and computes the tokens that it took instead, those of all
sequences in one ragged step. The logits after them give the first draft, and each further small step gives one more.

A draft is sampled with the request's parameters and the random number of its place in the output, as the target's token
will be. Where the two distributions are close, so are the tokens.

Its pool may be small. A sequence without room gets no drafts, after the one that was used least recently made way.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Protocol

import numpy as np

from ingot.artifact import KVGeometry, ModelFacts
from ingot.runtime.executors import Executor
from ingot.runtime.forward_batch import FloatArray
from ingot.runtime.kv.blocks import BlockManager, TokenArray
from ingot.runtime.scheduling import sequence as steps
from ingot.runtime.scheduling.batch_builder import BatchBuilder
from ingot.runtime.scheduling.sequence import ScheduledBatch, ScheduledSequence
from ingot.runtime.speculation.drafter import NUM_GRADES, DraftRequest, Proposal
from ingot.runtime.speculation_options import DRAFT

_UNBOUNDED = 1 << 40  # tokens


class DraftSequence:
    """One sequence of the draft model, and the drafts of this call. It copies the target's tokens."""

    __slots__ = ("generated", "grades", "request", "sequence", "wanted")

    def __init__(self, target: steps.Sequence, tokens: TokenArray) -> None:
        self.sequence = steps.Sequence.of(target.id, tokens, _UNBOUNDED, scope=target.scope)
        self.generated: list[int] = []
        self.grades: list[int] = []
        self.wanted = 0

    @property
    def num_drafts(self) -> int:
        """Drafts of this call."""
        return len(self.grades)

    def begin(self, request: DraftRequest) -> None:
        """Start a call: take over the target's tokens, and forget drafts that it did not take."""
        tokens, known = self.sequence.tokens, request.sequence.tokens
        agreed = _num_equal(tokens, known, max(0, len(tokens) - len(self.grades)))
        del tokens[agreed:]
        tokens.extend(known[agreed:])
        self.sequence.num_computed = min(self.sequence.num_computed, agreed, len(tokens) - 1)
        self.start(request)

    def start(self, request: DraftRequest) -> None:
        """Start to draft for a request, after its tokens."""
        self.request, self.wanted = request, request.num_tokens
        self.generated = request.sequence.generated.tolist()
        self.grades = []

    def add(self, logits: FloatArray) -> None:
        """Sample the next draft from the draft model's logits [vocab]."""
        token = self.request.sampler.choose(logits, self.generated)
        self.grades.append(min(int(_probability(logits, token) * NUM_GRADES), NUM_GRADES - 1))
        self.generated.append(token)
        self.sequence.tokens.append(token)

    @property
    def goes_on(self) -> bool:
        """Whether to draft another token in this call."""
        return self.num_drafts < self.wanted and self.request.is_worth_more(self.grades)

    def proposal(self) -> Proposal:
        """The drafts of this call."""
        count = self.num_drafts
        return Proposal(tuple(self.generated[len(self.generated) - count :]), tuple(self.grades))


class DraftingPool(Protocol):
    """An executor of drafts, as far as its pool goes."""

    @property
    def model(self) -> ModelFacts: ...
    @property
    def kv_geometry(self) -> KVGeometry: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def max_batch_tokens(self) -> int: ...
    @property
    def max_sequences(self) -> int: ...
    def copy_block(self, source: int, target: int) -> None: ...
    def close(self) -> None: ...


class PooledDrafter(ABC):
    """A drafter with an executor that keeps keys and values; it owns and closes it.

    Grades are eighths of the probability that the executor's model gives a draft.
    """

    kind: str
    is_free = False

    def __init__(self, executor: DraftingPool) -> None:
        self._pool = executor
        self._budget = executor.max_batch_tokens
        self._max_sequences = min(executor.max_sequences, self._budget)
        self._blocks = BlockManager(executor.num_blocks, executor.kv_geometry.block_tokens)
        self._builder = BatchBuilder(self._blocks, max_batch_tokens=self._budget, max_sequences=self._max_sequences)
        self._drafts: OrderedDict[int, DraftSequence] = OrderedDict()  # the least recently used first

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Drafts for each request; none for one without room, or that needs more than one step to catch up."""
        try:
            active = [draft for request in requests if (draft := self._begin(request, requests))]
            self._catch_up(active)
            active = [draft for draft in active if draft.num_drafts]
            drafting = active
            while drafting := [draft for draft in drafting if draft.goes_on]:
                self._step(drafting)
        except BaseException:
            self._forget_all()  # what the pool holds is unknown
            raise
        found = {draft.sequence.id: draft.proposal() for draft in active}
        return [found.get(request.sequence.id, Proposal()) for request in requests]

    def forget(self, sequence: steps.Sequence) -> None:
        """Free the blocks of a sequence."""
        self._drop(sequence.id)

    def close(self) -> None:
        """Free the pool and close the executor. Idempotent."""
        self._forget_all()
        self._pool.close()

    def check(self) -> None:
        """Assert that no block leaks."""
        self._blocks.check()
        assert self._blocks.num_in_use == 0 or self._drafts

    def _begin(self, request: DraftRequest, all_requests: Sequence[DraftRequest]) -> DraftSequence | None:
        """The draft of a request, with blocks for all that this call may compute; None when it cannot have any."""
        target = request.sequence
        longest = len(target.tokens) + request.num_tokens - 1
        if longest > self._pool.model.context_tokens or not self._knows(target):
            return None
        draft = self._drafts.get(target.id)
        busy = {each.sequence.id for each in all_requests}
        while draft is None:
            draft = self._admit(target)
            if draft is None and not self._evict(busy):
                return None
        draft.begin(request)
        sequence = draft.sequence
        most = len(sequence.tokens) + request.num_tokens - 1
        while (copies := self._blocks.reserve(sequence.id, sequence.num_computed, most)) is None:
            if not self._evict(busy):
                self._drop(sequence.id)
                return None
        for copy in copies:
            self._pool.copy_block(copy.source, copy.target)
        self._drafts.move_to_end(sequence.id)
        return draft

    def _evict(self, busy: set[int]) -> bool:
        """Free the blocks of the sequence that was used least recently; False when all are in use by this call."""
        oldest = next((number for number in self._drafts if number not in busy), None)
        if oldest is None:
            return False
        self._drop(oldest)
        return True

    def _catch_up(self, drafts: Sequence[DraftSequence]) -> None:
        """Compute what the pool lacks, at most one step; those that are complete then get their first draft.

        Those that lack least come first, so that a long prompt does not keep others from drafting.
        """
        batch = ScheduledBatch()
        for draft in sorted(drafts, key=lambda each: each.sequence.num_pending)[: self._max_sequences]:
            count = min(draft.sequence.num_pending, self._budget - batch.num_tokens)
            if count:
                batch.add(draft.sequence, count)
        by_id = {draft.sequence.id: draft for draft in drafts}
        for entry, logits in self._computed(batch):
            draft = by_id[entry.sequence.id]
            draft.add(logits)  # raises if they are not finite; then no block is shared
            self._share(draft, entry.start + entry.num_tokens)

    def _step(self, drafts: Sequence[DraftSequence]) -> None:
        """One more draft for each."""
        batch = ScheduledBatch()
        for draft in drafts:
            batch.add(draft.sequence, 1)
        for draft, (_, logits) in zip(drafts, self._computed(batch), strict=True):
            draft.add(logits)

    def _drop(self, sequence_id: int) -> None:
        if self._drafts.pop(sequence_id, None):
            self._blocks.release(sequence_id)

    def _forget_all(self) -> None:
        for number in list(self._drafts):
            self._drop(number)

    @abstractmethod
    def catch_up_tokens(self, sequence: steps.Sequence) -> int:
        """Tokens that it must compute before its first draft for a sequence."""

    @abstractmethod
    def _knows(self, target: steps.Sequence) -> bool:
        """Return whether it can compute all tokens of a sequence."""

    @abstractmethod
    def _admit(self, target: steps.Sequence) -> DraftSequence | None:
        """Give a sequence blocks; None where too few are free."""

    @abstractmethod
    def _share(self, draft: DraftSequence, num_computed: int) -> None:
        """Let other sequences use the full blocks of the first tokens."""

    @abstractmethod
    def _computed(self, batch: ScheduledBatch) -> Iterator[tuple[ScheduledSequence, FloatArray]]:
        """Compute a step; the entries that sample, each with logits [target's vocabulary]."""


class DraftModel(PooledDrafter):
    """A drafter with another model.

    target_vocab_size   of the model that it drafts for: padded vocabularies of one tokenizer may differ in size
    """

    kind = DRAFT

    def __init__(self, executor: Executor, *, target_vocab_size: int) -> None:
        super().__init__(executor)
        self._executor = executor
        self._target_vocab_size = target_vocab_size

    def catch_up_tokens(self, sequence: steps.Sequence) -> int:
        """Tokens of the target that are not in the pool, those of cached blocks left out."""
        draft = self._drafts.get(sequence.id)
        if draft:
            return len(sequence.tokens) - draft.sequence.num_computed
        contents = self._blocks.contents(sequence.tokens, sequence.scope)
        num_cached = sum(1 for _ in takewhile(self._blocks.has, contents)) * self._blocks.block_tokens
        return len(sequence.tokens) - min(num_cached, len(sequence.tokens) - 1)

    def _knows(self, target: steps.Sequence) -> bool:
        """Whether all tokens are in this model's vocabulary, which may be smaller than the target's."""
        size = self._executor.model.vocab_size
        return size >= self._target_vocab_size or max(target.tokens) < size

    def _admit(self, target: steps.Sequence) -> DraftSequence | None:
        admission = self._blocks.admit(target.id, target.tokens, scope=target.scope)
        if admission is None:
            return None
        for copy in admission.copies:
            self._executor.copy_block(copy.source, copy.target)
        draft = self._drafts[target.id] = DraftSequence(target, target.tokens)
        draft.sequence.num_computed = admission.cached_tokens
        return draft

    def _share(self, draft: DraftSequence, num_computed: int) -> None:
        """Let other sequences use the full blocks."""
        self._blocks.commit(draft.sequence.id, draft.sequence.tokens, num_computed)

    def _computed(self, batch: ScheduledBatch) -> Iterator[tuple[ScheduledSequence, FloatArray]]:
        """Compute a step; the entries that sample, each with logits [target's vocabulary]."""
        if not batch.entries:
            return
        rows = self._executor.forward(self._builder.build(batch))
        for entry in batch.entries:
            entry.sequence.num_computed = entry.start + entry.num_tokens
        sampling = [entry for entry in batch.entries if entry.samples]
        yield from zip(sampling, self._fitted(rows), strict=True)

    def _fitted(self, rows: FloatArray) -> FloatArray:
        """Logits for the tokens of the target's vocabulary: cut, or minus infinity where this model has none."""
        missing = self._target_vocab_size - rows.shape[1]
        if missing <= 0:
            return rows[:, : self._target_vocab_size]
        return np.pad(rows, ((0, 0), (0, missing)), constant_values=-np.inf)


def _num_equal(tokens: TokenArray, known: TokenArray, start: int) -> int:
    """Length of the common beginning, which has at least `start` tokens."""
    end = min(len(tokens), len(known))
    return next((place for place in range(start, end) if tokens[place] != known[place]), end)


def _probability(logits: FloatArray, token: int) -> float:
    """Probability of a token in the model's own distribution."""
    return float(1 / np.exp(logits - logits[token]).sum())
