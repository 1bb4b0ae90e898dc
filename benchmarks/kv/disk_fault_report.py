"""Counts of a run of `disk_faults`, and for each case that must not occur, all that is needed to explain it."""

import logging
import os
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np

from benchmarks.kv.numbered_blocks import TOKENS
from ingot.runtime.kv.disk.folder import StoreFolder
from ingot.runtime.kv.disk.store import DiskStore
from ingot.runtime.kv.keys import BlockContent

_HASH_OFFSET = 88  # of a block's key in its slot
_MOST_MESSAGES = 10


@dataclass
class Outcome:
    """Attempts, and their outcomes. `wrong` and `unusable` must be 0; `problems` describes each of them.

    wrong      a block was served that must not be, or with other bytes
    unusable   a sound block was not served, or one was not stored
    """

    seed: int
    tried: int = 0
    served: int = 0
    wrong: int = 0
    refused: int = 0
    unusable: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    problems: list[dict[str, object]] = field(default_factory=list)
    _what: str = ""
    _stores: dict[str, DiskStore] = field(default_factory=dict)
    _before: dict[str, dict[str, float]] = field(default_factory=dict)
    _log: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_MESSAGES))

    def begin(self, what: str) -> None:
        """Begin the next attempt: a fault of this kind, or a kill."""
        self.tried += 1
        self._what = what
        self._log.clear()
        self._stores, self._before = {}, {}

    def watch(self, **stores: DiskStore) -> None:
        """Note what stores have counted until now, so that a problem shows what they did since."""
        for name, store in stores.items():
            self._stores[name] = store
            self._before[name] = asdict(store.stats)

    def note(
        self,
        count: Literal["wrong", "unusable"],
        expected: str,
        found: str,
        *,
        store: DiskStore | None = None,
        content: BlockContent | None = None,
    ) -> None:
        """Count a case that must not be, and describe it."""
        setattr(self, count, getattr(self, count) + 1)
        problem: dict[str, object] = {
            "count": count,
            "seed": self.seed,
            "attempt": self.tried,
            "of": self._what,
            "expected": expected,
            "found": found,
            "counted_since": {name: self._counted_since(name) for name in self._stores},
            "log": list(self._log),
        }
        if store:
            problem |= {"failure": store.failure, "segments": len(store._index.segments), "stats": asdict(store.stats)}
        if store and content:
            problem |= {"block": number_of(content), **_places(store, content)}
        self.problems.append(problem)

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Keep the last messages of the stores, for the report."""
        handler = _Keep(self._log)
        logger = logging.getLogger("ingot.runtime.kv.disk")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    def as_json(self) -> dict[str, object]:
        """All counts and problems."""
        names = ("seed", "tried", "served", "wrong", "refused", "unusable")
        counts: dict[str, object] = {name: getattr(self, name) for name in names}
        return {**counts, "kinds": dict(sorted(self.kinds.items())), "problems": self.problems}

    def _counted_since(self, name: str) -> dict[str, float]:
        """The store's counters since it was watched: evictions, damages, errors ..."""
        now, before = asdict(self._stores[name].stats), self._before[name]
        return {key: value - before[key] for key, value in now.items() if value != before[key]}


class _Keep(logging.Handler):
    def __init__(self, messages: deque[str]) -> None:
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


def number_of(content: BlockContent) -> int:
    """Number of a block of `numbered_blocks`."""
    return int(np.frombuffer(content.tokens, np.int64)[0]) // TOKENS


def _places(store: DiskStore, content: BlockContent) -> dict[str, list[str]]:
    """Where a block is: by the store's index, by the segments' tables, and by what is in the slots."""
    by_table: list[str] = []
    by_slot: list[str] = []
    folder = StoreFolder(store._folder.path)
    for file in folder.listing():
        segment = folder.segment(file.name)
        for slot, entry in enumerate(segment.table()):
            place = f"{segment.name} slot {slot}"
            if entry.key == content.hash:
                by_table.append(f"{place}, used at {entry.used_ns}")
            if os.pread(segment.file, 32, segment.offset(slot) + _HASH_OFFSET) == content.hash:
                by_slot.append(place)
    folder.close()
    by_index = [f"{segment.name} slot {slot}" for segment, slot in store._index.places(content.hash)]
    return {"in_index": by_index, "in_tables": by_table, "in_slots": by_slot}
