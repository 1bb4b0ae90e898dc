"""Makes an engine's transfers late, and some of them fail: what its tiers must survive without another answer.

A copy begins only after it was polled a few times, each after another number of times, so that copies end in another
order and next to steps that would overwrite a block which is not pinned. Every third restore and disk read, and every
fifth save and disk write, or fewer (`rarity`), fails and moves nothing: its target keeps what another request left
there, so that an engine which counts it as complete computes with wrong keys and values.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from threading import Thread
from typing import Literal

from ingot.errors import EngineError
from ingot.runtime.engine import Engine
from ingot.runtime.kv.disk.tier import BlockStore
from ingot.runtime.kv.keys import BlockContent
from ingot.runtime.kv.tier_metrics import DiskMetrics
from ingot.runtime.kv.transfers import Bytes, Cancelled, HostBlocks, Transfer

Move = Literal["save", "restore", "disk read", "disk write"]
_FAILS: Mapping[Move, int] = {"save": 5, "restore": 3, "disk read": 3, "disk write": 5}  # every so many
# Polls until a copy begins, in turn; a save comes long before its block is evicted.
_SAVE_POLLS = (0, 120, 30, 300, 12)
_RESTORE_POLLS = (0, 30, 6, 60, 2, 12)


class TransferFailures:
    """Chooses the transfers that fail, and counts them: `made` and `failed`, by kind of move.

    rarity   how many times fewer fail. A prefix of a model with side state is restored as a whole or not at all, and of
             several blocks and a state one fails nearly always where every third does
    """

    def __init__(self, rarity: int = 1) -> None:
        self.rarity = rarity
        self.made: Counter[Move] = Counter()
        self.failed: Counter[Move] = Counter()

    def next_fails(self, move: Move) -> bool:
        """Whether the next transfer of this kind fails."""
        self.made[move] += 1
        fails = self.made[move] % (_FAILS[move] * self.rarity) == 0
        self.failed[move] += fails
        return fails


def make_transfers_fail(engine: Engine, failures: TransferFailures) -> None:
    """Let transfers of this engine, which has made no step, come late, and some of them fail. It must have tiers."""
    assert engine.tiers is not None
    engine.tiers.wrap(
        lambda host_blocks: _FailingHostBlocks(host_blocks, failures), lambda store: _FailingStore(store, failures)
    )


class _LateTransfer:
    """A copy that begins once `done` was read so many times; or fails then. Implements `Transfer`."""

    def __init__(self, begin: Callable[[], Transfer], num_polls: int, fails: bool) -> None:
        self._begin, self._polls_left, self._fails = begin, num_polls, fails
        self._begun: Transfer | None = None
        self._error: Exception | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it has neither begun nor failed."""
        return self._error is None and self._begun is None

    @property
    def done(self) -> bool:
        """Whether it has ended; a poll."""
        if self.is_waiting:
            if self._polls_left:
                self._polls_left -= 1
            elif self._fails:
                self._error = EngineError("the verification made this copy fail")
            else:
                self._begun = self._begin()
        return self._error is not None or (self._begun is not None and self._begun.done)

    @property
    def error(self) -> Exception | None:
        """The reason why it moved nothing."""
        return self._begun.error if self._begun else self._error

    @property
    def seconds(self) -> float:
        """Duration of the copy."""
        return self._begun.seconds if self._begun else 0.0

    def cancel(self) -> bool:
        """Drop it if it has not begun."""
        if self._begun:
            return self._begun.cancel()
        if self._error:
            return False
        self._error = Cancelled("the transfer was cancelled before it began")
        return True


class _FailingHostBlocks:
    """The host blocks of an engine with late and failing copies. Implements `HostBlocks`."""

    def __init__(self, inner: HostBlocks, failures: TransferFailures) -> None:
        self._inner, self._failures = inner, failures
        self._polls = {"save": cycle(_SAVE_POLLS), "restore": cycle(_RESTORE_POLLS)}
        self._queued: list[_LateTransfer] = []

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return self._inner.num_slots

    def save(self, block: int, slot: int) -> Transfer:
        """Queue a copy of a block to a slot."""
        return self._queue(lambda: self._inner.save(block, slot), "save")

    def restore(self, slot: int, block: int) -> Transfer:
        """Queue a copy of a slot to a block."""
        return self._queue(lambda: self._inner.restore(slot, block), "restore")

    def view(self, slot: int) -> Bytes:
        """The slot's bytes."""
        return self._inner.view(slot)

    @property
    def threads(self) -> Sequence[Thread]:
        """The threads that copy."""
        return self._inner.threads

    def check(self) -> None:
        """Raise EngineError if a thread that copies has died."""
        self._inner.check()

    def close(self) -> None:
        """Drop what has not begun, and close the host blocks."""
        for transfer in self._queued:
            transfer.cancel()
        self._inner.close()

    def _queue(self, begin: Callable[[], Transfer], move: Literal["save", "restore"]) -> Transfer:
        transfer = _LateTransfer(begin, next(self._polls[move]), self._failures.next_fails(move))
        self._queued = [*(each for each in self._queued if each.is_waiting), transfer]
        return transfer


class _FailingStore:
    """The blocks on disk of an engine; some are neither read nor written. Implements `BlockStore`."""

    def __init__(self, inner: BlockStore, failures: TransferFailures) -> None:
        self._inner, self._failures = inner, failures

    def contains(self, key: bytes) -> bool:
        """Whether the store has a block."""
        return self._inner.contains(key)

    @property
    def refusal(self) -> str | None:
        """The reason why the store takes no writes."""
        return self._inner.refusal

    @property
    def metrics(self) -> DiskMetrics:
        """Counters of the store's content."""
        return self._inner.metrics

    def look(self) -> None:
        """Take note of what other processes stored."""
        self._inner.look()

    def read_into(self, content: BlockContent, buffer: Bytes) -> None:
        """Read a block, or fail and leave the buffer unchanged."""
        if self._failures.next_fails("disk read"):
            raise EngineError("the verification made this read fail")
        self._inner.read_into(content, buffer)

    def write(self, content: BlockContent, buffer: Bytes) -> bool:
        """Store a block; False when it is not stored."""
        return not self._failures.next_fails("disk write") and self._inner.write(content, buffer)

    def remove(self, key: bytes) -> None:
        """Remove a block."""
        self._inner.remove(key)

    def close(self) -> None:
        """Release the folder."""
        self._inner.close()
