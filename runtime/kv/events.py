"""Events of cached blocks and side states, recorded in order for those that react to them later.

    recorded by     an event log of      read by
    BlockManager    blocks               the tiers, once the copies of a step are made, or while it computes
    StateManager    side states          the tiers, before they move anything
    HostTier        host memory          what saves to it, before it looks for more

A reader has a list of its own, which it empties at one place. Without a reader nothing is recorded.
"""

from collections import deque
from typing import NamedTuple


class Cached(NamedTuple):
    """A full block entered the prefix index. `block` is its place, `parent` the key of the block before it."""

    key: bytes
    parent: bytes
    num_tokens: int
    block: int
    private: bool


class Unused(NamedTuple):
    """The last sequence that used a cached block has ended, so the block may be evicted."""

    key: bytes
    block: int


class Moved(NamedTuple):
    """A cached block has another place in the pool, `block`."""

    key: bytes
    block: int


class Evicted(NamedTuple):
    """A block left the prefix index, because its place is used for other tokens."""

    key: bytes


class Forgotten(NamedTuple):
    """The tree of blocks that starts with the key `first` must not be found any more, in any tier.

    keys   of the blocks that led to this; empty for a private tree
    """

    first: bytes
    keys: tuple[bytes, ...]


class StateShared(NamedTuple):
    """The side state after the cached block `key` can be shared. `block` is the block's place."""

    key: bytes
    block: int


class StateCached(NamedTuple):
    """The side state after the block `key` has a slot on the device."""

    key: bytes


class StateEvicted(NamedTuple):
    """The side state after the block `key` has none any more."""

    key: bytes


class HostEvicted(NamedTuple):
    """The block or side state `key` left host memory."""

    key: bytes


KVEvent = Cached | Unused | Moved | Evicted | Forgotten | StateShared | StateCached | StateEvicted | HostEvicted


class EventLog:
    """Events in order, for each reader. A reader may put notes of its own between them."""

    __slots__ = ("readers",)

    def __init__(self) -> None:
        self.readers: list[deque[object]] = []

    def reader(self) -> deque[object]:
        """Return a new list that receives every event from now on; the caller empties it."""
        events: deque[object] = deque()
        self.readers.append(events)
        return events

    def record(self, event: KVEvent) -> None:
        """Append an event to the list of each reader."""
        for events in self.readers:
            events.append(event)
