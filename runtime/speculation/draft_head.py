"""A draft head: a layer of the artifact's own that predicts from the model's hidden states (multi-token prediction).

A pair is a token and the model's hidden state before it. The head computes keys and values for every pair, in a pool of
its own, and the logits after the newest pair give the first draft. That draft and the head's own hidden state are the
next pair. Pairs of drafts are computed again once the model has verified them, from its hidden states.

The hidden states of every step are kept until the head computes their pairs, up to MOST_BYTES: of a sequence with more
the oldest are dropped, and the head's context then begins after them. It also begins where a prefix was reused, whose
hidden states no step computed. A shorter context costs acceptance, and never a token.
"""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from ingot.runtime.executors import DraftingExecutor
from ingot.runtime.forward_batch import FloatArray
from ingot.runtime.kv.keys import PrefixScope
from ingot.runtime.scheduling import sequence as steps
from ingot.runtime.scheduling.sequence import ScheduledBatch, ScheduledSequence
from ingot.runtime.speculation.draft_model import DraftSequence, PooledDrafter
from ingot.runtime.speculation.drafter import DraftRequest
from ingot.runtime.speculation_options import MTP

MOST_BYTES = 64 << 20
_FEWEST_ROWS = 64
_PRIVATE = PrefixScope(b"", private=True)


class HiddenRows:
    """Hidden states of a sequence's positions `first` to `end`, in memory that grows; at most `most` of them."""

    __slots__ = ("_most", "_rows", "end", "first")

    def __init__(self, width: int, most: int) -> None:
        self._rows: FloatArray = np.empty((min(_FEWEST_ROWS, most), width), np.float32)
        self._most, self.first, self.end = most, 0, 0

    def __len__(self) -> int:
        return self.end - self.first

    def put(self, start: int, rows: FloatArray) -> None:
        """Store the rows of positions from `start` on, in place of these and later ones; a gap drops those before."""
        end, rows = start + len(rows), rows[-self._most :]
        start = end - len(rows)
        kept = start - self.first
        if not 0 <= kept <= len(self):
            self.first, kept = start, 0
        if kept + len(rows) > len(self._rows):
            kept = self._make_room(kept, len(rows))
        self._rows[kept : kept + len(rows)] = rows
        self.end = end

    def take(self, start: int, count: int) -> FloatArray:
        """The rows of positions start .. start + count - 1, as a view; those before are dropped by the next `put`."""
        at = start - self.first
        return self._rows[at : at + count]

    def drop_before(self, position: int) -> None:
        """Drop the rows of earlier positions."""
        dropped = position - self.first
        if dropped > 0:
            kept = len(self) - dropped
            self._rows[:kept] = self._rows[dropped : dropped + kept].copy()
            self.first = position

    def _make_room(self, kept: int, count: int) -> int:
        """Grow, or drop the oldest rows where there may be no more; return how many of the first `kept` are left."""
        left = min(kept, self._most - count)
        size = min(self._most, max(2 * len(self._rows), left + count))
        rows = np.empty((size, self._rows.shape[1]), np.float32)
        rows[:left] = self._rows[kept - left : kept]
        self.first += kept - left
        self._rows = rows
        return left


class _PairSequence(DraftSequence):
    """Pairs of one sequence from position `first` on: pair j is token first + j + 1 and hidden state first + j."""

    __slots__ = ("first", "hidden", "num_verified")

    def __init__(self, target: steps.Sequence, first: int) -> None:
        super().__init__(target, target.tokens[first + 1 :])
        self.first, self.num_verified = first, 0
        self.hidden: FloatArray | None = None  # the head's own, for the next draft

    def begin(self, request: DraftRequest) -> None:
        """Start a call: take over the target's tokens; pairs of drafts are computed again."""
        known = request.sequence.tokens
        del self.sequence.tokens[self.num_verified :]
        self.sequence.tokens.extend(known[self.first + 1 + len(self.sequence.tokens) :])
        self.sequence.num_computed = min(self.num_verified, len(self.sequence.tokens) - 1)
        self.start(request)


class HeadDrafter(PooledDrafter):
    """A drafter with the head of `executor`, which it owns and closes. Grades are eighths of the head's probability."""

    kind = MTP

    def __init__(self, executor: DraftingExecutor, num_blocks: int) -> None:
        self._head = executor.draft_head(num_blocks)
        super().__init__(self._head)
        self._hidden_states = executor.hidden_states
        width = self._hidden_states.shape[1]
        self._most_rows = max(1, MOST_BYTES // (width * self._hidden_states.itemsize))
        self._rows: OrderedDict[int, HiddenRows] = OrderedDict()  # the least recently computed first
        self._num_rows = 0

    def observe(self, batch: ScheduledBatch) -> None:
        """Keep the hidden states of a step."""
        at = 0
        for entry in batch.entries:
            number, count = entry.sequence.id, entry.num_rows
            rows = self._rows.get(number)
            if rows is None:
                rows = self._rows[number] = HiddenRows(self._hidden_states.shape[1], self._most_rows // 2 or 1)
            self._num_rows -= len(rows)
            rows.put(entry.start, self._hidden_states[at : at + count])
            self._num_rows += len(rows)
            self._rows.move_to_end(number)
            at += count
        while self._num_rows > self._most_rows and len(self._rows) > 1:
            _, dropped = self._rows.popitem(last=False)
            self._num_rows -= len(dropped)

    def catch_up_tokens(self, sequence: steps.Sequence) -> int:
        """Pairs of the target that are not in the pool."""
        rows, draft = self._rows.get(sequence.id), self._of(sequence)
        if rows is None:
            return len(sequence.tokens)
        if draft and rows.first <= draft.first + draft.num_verified:
            return len(sequence.tokens) - 1 - draft.first - draft.num_verified
        return len(rows)

    def forget(self, sequence: steps.Sequence) -> None:
        """Free the blocks and the hidden states of a sequence."""
        super().forget(sequence)
        if rows := self._rows.pop(sequence.id, None):
            self._num_rows -= len(rows)

    def _knows(self, target: steps.Sequence) -> bool:
        """Return whether the state before the newest token was kept; drop a context that rows no longer follow."""
        rows = self._rows.get(target.id)
        if rows is None or rows.end < len(target.tokens) - 1 or not len(rows):
            return False
        draft = self._of(target)
        if draft and draft.first + draft.num_verified < rows.first:
            self._drop(target.id)
        return True

    def _admit(self, target: steps.Sequence) -> DraftSequence | None:
        draft = _PairSequence(target, self._rows[target.id].first)
        if self._blocks.admit(target.id, draft.sequence.tokens, scope=_PRIVATE) is None:
            return None
        self._drafts[target.id] = draft
        return draft

    def _computed(self, batch: ScheduledBatch) -> Iterator[tuple[ScheduledSequence, FloatArray]]:
        """Compute pairs: verified ones from the model's hidden states, drafts from the head's own."""
        if not batch.entries:
            return
        drafts = [self._of(entry.sequence) for entry in batch.entries]
        given = [self._given(draft, entry) for draft, entry in zip(drafts, batch.entries, strict=True) if draft]
        logits, hidden = self._head.forward(self._builder.build(batch), np.concatenate(given))
        row = 0
        for draft, entry in zip(drafts, batch.entries, strict=True):
            assert draft
            sequence = entry.sequence
            sequence.num_computed = entry.start + entry.num_tokens
            if not draft.num_drafts:
                draft.num_verified = sequence.num_computed
                # The newest stays: it is computed again when no token was added.
                self._rows[sequence.id].drop_before(draft.first + draft.num_verified - 1)
            if entry.samples:
                draft.hidden = hidden[row : row + 1].copy()
                yield entry, logits[row]
                row += 1

    def _given(self, draft: _PairSequence, entry: ScheduledSequence) -> FloatArray:
        if draft.num_drafts:
            assert draft.hidden is not None
            return draft.hidden
        return self._rows[entry.sequence.id].take(draft.first + entry.start, entry.num_tokens)

    def _share(self, draft: DraftSequence, num_computed: int) -> None:
        """Nothing: blocks of pairs are one sequence's."""

    def _of(self, sequence: steps.Sequence) -> _PairSequence | None:
        draft = self._drafts.get(sequence.id)
        assert draft is None or isinstance(draft, _PairSequence)
        return draft
