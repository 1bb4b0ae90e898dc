"""Tiers below the device: host memory, then disk. Blocks move down before they are evicted, and up for a prompt.

    device ──save──► host ──write──► disk        in the background, before the tier above evicts a block (`saves`)
    device ◄restore─ host ◄──read─── disk        for a sequence that is LOADING, or ahead for one that waits

So the tiers together hold nearly as many blocks as there is room for: what the device uses is the first that host
memory gives up (`host_tier`), and a block reaches the disk when host memory is about to give it up, or at a flush.

The snapshots of side state (`states`) move in the same way, under the keys of their blocks, through slots and files of
their own. A prefix is restored as far as all its blocks and the state after the last of them are to be had.

The engine's thread calls `poll` before a step is scheduled and `start` once its copies are made; neither waits. One
lock guards all state, because a background thread passes on what is complete while the engine has no steps.

Blocks and side states record what happens to them (`events`). `_read_events` applies it: to blocks once the copies of a
step are made, so that scheduling does not pay for it, and where a block is forgotten; to side states before anything
else moves.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

from ingot.errors import EngineError
from ingot.runtime.clock import SYSTEM_CLOCK, Clock
from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.kv.cost_model import CostModel
from ingot.runtime.kv.disk.threads import DiskThreads, MakeThreads
from ingot.runtime.kv.disk.tier import BlockStore, DiskTier
from ingot.runtime.kv.events import Cached, Evicted, Forgotten, Moved, StateCached, StateEvicted, StateShared, Unused
from ingot.runtime.kv.eviction import DEFAULT_POLICY, make_policy
from ingot.runtime.kv.host_tier import HostTier
from ingot.runtime.kv.keys import BlockContent, Tree, state_content
from ingot.runtime.kv.pool_tiers import PoolTiers
from ingot.runtime.kv.tier_metrics import TierMetrics
from ingot.runtime.kv.transfers.background import Background, GoesOn, always
from ingot.runtime.kv.transfers.restored_prefix import RestoredPrefix
from ingot.runtime.kv.transfers.restores import PrefixChoice, Restores, StateTarget
from ingot.runtime.kv.transfers.saves import EvictableBlocks, EvictableStates, Flush, Saves
from ingot.runtime.kv.transfers.transfer import HostBlocks, TransferGate, Workers
from ingot.runtime.thread_scheduling import ThreadsElsewhere, current_core

_log = logging.getLogger(__name__)
_WAIT_SECONDS = 0.0002  # of who has nothing else to do: copies, which take less, do not report their end


class _Begin(NamedTuple):
    """A load of which some blocks may begin."""

    load: RestoredPrefix


class _Touched(NamedTuple):
    """A block on the device that is used again."""

    key: bytes


class _Awaited(NamedTuple):
    """The blocks of a sequence that waits, to be read from disk ahead."""

    contents: Iterable[BlockContent]


class TierManager:
    """Moves blocks and side states between their pools, host memory and, with a `store`, disk. Owns and closes all.

    block_bytes   size of a block, which bounds how many move at a time; `state_bytes`, that of a side state
    host_states   slots for the states of `blocks.states`; None for a model without
    policy        which blocks host memory gives up, by its name in `eviction`
    threads       where disk transfers run; tests have their own, and poll themselves
    gate          of the threads that read and write, if the store passes it too
    clock         of what a step may begin to read, and of how long a flush takes
    """

    def __init__(
        self,
        blocks: BlockManager,
        host_blocks: HostBlocks,
        costs: CostModel,
        *,
        block_bytes: int,
        host_states: HostBlocks | None = None,
        state_bytes: int = 0,
        policy: str = DEFAULT_POLICY,
        store: BlockStore | None = None,
        threads: MakeThreads | None = None,
        gate: TransferGate | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.costs = costs
        self._clock = clock
        self._blocks, self._states = blocks, blocks.states
        host = HostTier(host_blocks.num_slots, make_policy(policy, host_blocks.num_slots))
        self._block_tiers = PoolTiers(blocks, host_blocks, host, num_bytes=block_bytes, observe=costs.observe_block)
        self._state_tiers: PoolTiers | None = None
        if self._states:
            assert host_states is not None
            host = HostTier(host_states.num_slots, make_policy(policy, host_states.num_slots))
            self._state_tiers = PoolTiers(
                self._states, host_states, host, num_bytes=state_bytes, observe=costs.observe_state
            )
        self._pools = [each for each in (self._block_tiers, self._state_tiers) if each]
        self._restores = Restores(self._block_tiers, self._state_tiers, clock)
        self._choice = PrefixChoice(self._block_tiers, self._state_tiers, costs)
        self._saves = [Saves(EvictableBlocks(blocks), self._block_tiers)]
        if self._states and self._state_tiers:
            self._saves.append(Saves(EvictableStates(blocks, self._states), self._state_tiers))
        self._lock = threading.RLock()
        self._gate = gate or TransferGate()
        self._duties: deque[Callable[[GoesOn], object]] = deque((self._pass_on, self._save, self._restore))
        self._changed = threading.Event()
        self._closed = False
        self._process = os.getpid()
        self._logs_losses = True
        self._store = store
        self._disk_threads: DiskThreads | None = None
        self._background: Background | None = None
        with ExitStack() as begun:
            if store is not None:
                make = threads or partial(Workers, when_done=self._changed.set, admit=self._gate.pass_through)
                self._disk_threads = DiskThreads(make, None if threads else store.look, self._gate.pass_in_long_step)
                begun.callback(self._disk_threads.close)
                self._open_disk(store, self._disk_threads)
            if not threads:
                self._background = Background(self._move, self.pass_on, lambda: self.is_moving, self._gate)
                self._other_threads = ThreadsElsewhere([self._background.thread, *self._moving_threads()])
            begun.pop_all()
        # Events of blocks, and between them what this puts off until `start`.
        self._events = blocks.events.reader()
        self._state_events: deque[object] = self._states.events.reader() if self._states else deque()

    def _open_disk(self, store: BlockStore, threads: DiskThreads) -> None:
        for pool in self._pools:
            pool.disk = DiskTier(
                store,
                pool.host,
                pool.copies.view,
                pool.observe,
                most_in_flight=pool.most_in_flight,
                threads=threads,
            )

    def _moving_threads(self) -> list[threading.Thread]:
        of_disk = self._disk_threads.threads if self._disk_threads else []
        return [*of_disk, *(thread for pool in self._pools for thread in pool.copies.threads)]

    @property
    def host(self) -> HostTier:
        """The blocks in host memory."""
        return self._block_tiers.host

    def wrap(self, host_blocks: Callable[[HostBlocks], HostBlocks], store: Callable[[BlockStore], BlockStore]) -> None:
        """Put something around copies and store before the first step, to make them fail: that is not logged."""
        self._logs_losses = False
        for pool in self._pools:
            pool.wrap(host_blocks, store)

    def give_way(self) -> None:
        """Let the threads that move blocks run where nothing else wants a core: the engine computes on all of them."""
        if self._background:
            self._other_threads.give_way()

    def poll(self) -> None:
        """Take note of what has ended. EngineError if a thread that moves blocks has died."""
        self._check_threads()
        with self._lock:
            if not (self._background and self._background.has_charge):
                self._pass_on()
                self._restores.advance(may_start=False)
            self._unpin()

    def start(self) -> None:
        """Begin what is queued; not before the step's copies are made, because a restored block may be their source."""
        self._gate.open()
        with self._lock:
            if self._background and self._background.has_charge:
                self._pass_on()  # `poll` left that to it
            self._start()
        if self._background:
            self._other_threads.leave(current_core())
            self._background.note_done()
            if self.is_moving:
                self._background.wake()

    @contextmanager
    def during(self, is_computing: Callable[[], bool]) -> Iterator[None]:
        """While a step is computed, which `is_computing` says, let another thread do what `poll` and `start` would.

        The step's copies are made. What the last step left no time for is done before this one.
        """
        background = self._background
        if background is None or background.is_behind:
            self.start()
        if background is None or not self._has_due:
            yield
            return
        self._other_threads.leave(current_core())
        with background.during(is_computing):
            yield

    @property
    def _has_due(self) -> bool:
        return bool(self._events or self._state_events) or self.is_moving or any(saves.has_due for saves in self._saves)

    def _start(self) -> None:
        self._read_events()
        self._save()
        self._restore()

    def _move(self, goes_on: GoesOn) -> bool:
        """Do what `poll` and `start` do, as long as it may go on; what is left is where the next call begins."""
        with self._lock:
            self._read_events(goes_on)
            for _ in range(len(self._duties)):
                if not goes_on():
                    return False
                self._duties[0](goes_on)
                if goes_on():
                    self._duties.rotate(-1)
        return goes_on()

    def _save(self, goes_on: GoesOn = always) -> None:
        for saves in self._saves:
            saves.start(goes_on)

    def _restore(self, goes_on: GoesOn = always) -> None:
        self._restores.advance(may_start=True, goes_on=goes_on)

    def _read_events(self, goes_on: GoesOn = always) -> None:
        """Apply what was recorded, in order. Before that, no slot in host memory may be taken."""
        self._read_state_events()
        while self._events and goes_on():
            self._apply(self._events.popleft())

    def _apply(self, event: object) -> None:
        match event:
            case Cached():
                self._block_tiers.host.spare(event.key)
                if not event.private:
                    self._offer(event.block)
            case Unused() | StateShared() | Moved():
                self._offer(event.block)
            case Evicted():
                self._block_tiers.note_gone(event.key)
            case _Touched():
                self._block_tiers.host.spare(event.key)
            case _Begin():
                self._restores.begin(event.load)
            case _Awaited():
                self._read_ahead(event.contents)
            case Forgotten():
                self._block_tiers.forget(event.first, event.keys)
                if self._state_tiers:
                    self._state_tiers.forget(event.first, (state_content(key).hash for key in event.keys))

    def _offer(self, block: int) -> None:
        for saves in self._saves:
            saves.offer(block)

    def _read_state_events(self) -> None:
        while self._state_events:
            assert self._state_tiers
            match self._state_events.popleft():
                case StateCached(key):
                    self._state_tiers.host.spare(state_content(key).hash)
                case StateEvicted(key):
                    self._state_tiers.note_gone(state_content(key).hash)

    def forget(self) -> None:
        """Remove from host memory and disk the trees that the blocks have forgotten, before anything finds them."""
        with self._lock:
            self._read_events()

    @property
    def is_loading(self) -> bool:
        """Whether blocks are on their way to the pool."""
        return bool(self._restores)

    @property
    def is_moving(self) -> bool:
        """Whether any transfer is in flight."""
        return self.is_loading or any(pool.is_moving for pool in self._pools)

    @property
    def will_change(self) -> bool:
        """Whether a transfer is in flight, or one has ended whose places the next `poll` unpins."""
        with self._lock:
            return self.is_moving or any(pool.has_ended for pool in self._pools)

    def wait(self) -> None:
        """Wait for a transfer to end, but not for long."""
        if self._background is None:
            self._clock.sleep(_WAIT_SECONDS)
            return
        self._changed.clear()
        self._changed.wait(_WAIT_SECONDS)

    def settle(self) -> None:
        """Wait for what is being saved, which is pinned. EngineError if a thread that moves blocks has died."""
        self.relieve()
        while any(pool.is_saving for pool in self._pools):
            self._check_threads()
            self.wait()
            self.relieve()

    def flush(self, seconds: float | None) -> bool:
        """Store what is cached in the lowest tier, and wait for it; returns whether nothing is left to store.

        It ends early after `seconds`, and when nothing moves for long, such as when slots are short because blocks are
        being restored. EngineError if a thread that moves blocks has died.
        """
        with self._lock:
            self._read_events()
            flush = Flush([*zip(self._saves, self._pools, strict=True)], seconds, self._clock)
        self._run(flush)
        return flush.is_done

    def _run(self, flush: Flush) -> None:
        while True:
            with self._lock:
                self._pass_on()
                self._restores.advance(may_start=False)
                self._unpin()
                if not flush.advance():
                    return
            self._check_threads()
            self.wait()

    def plan(self, following: Iterable[BlockContent], num_cached_tokens: int) -> list[BlockContent]:
        """Choose the blocks to restore of those that follow a computed prefix; logs the reason."""
        with self._lock:
            return self._choice.to_restore(following, num_cached_tokens)

    def load(
        self, contents: Sequence[BlockContent], targets: Iterable[int], tree: Tree, state: int | None
    ) -> RestoredPrefix:
        """Restore blocks to blocks of the pool, which are pinned from `start` on until they have arrived.

        state   where to restore the side state after the last of them to; None for a model without
        """
        target = None if state is None else StateTarget(state_content(contents[-1].hash), state)
        with self._lock:
            return self._queue_load(contents, list(targets), tree, target)

    def load_state(self, block: bytes, tree: Tree, slot: int) -> RestoredPrefix:
        """Restore only the side state after a block, given its key, to a slot."""
        with self._lock:
            return self._queue_load([], [], tree, StateTarget(state_content(block), slot))

    def _queue_load(
        self, contents: Sequence[BlockContent], targets: Sequence[int], tree: Tree, state: StateTarget | None
    ) -> RestoredPrefix:
        load, num_begins = self._restores.queue(contents, targets, tree, state)
        self._events.extend([_Begin(load)] * num_begins)
        return load

    def cancel(self, load: RestoredPrefix) -> None:
        """Restore no more of what this load alone needs; what is being copied stays pinned until it has arrived."""
        with self._lock:
            self._restores.cancel(load)
            self._restores.advance(may_start=False)
            self._unpin()

    def read_ahead(self, contents: Iterable[BlockContent]) -> None:
        """Let `start` begin to read what a waiting sequence will need from disk, as far as room is left."""
        if self._store is not None:
            self._events.append(_Awaited(contents))

    def _read_ahead(self, contents: Iterable[BlockContent]) -> None:
        with self._lock:
            contents = list(contents)
            on_device = next((i for i, each in enumerate(contents) if not self._blocks.has(each)), len(contents))
            planned = self.plan(contents[on_device:], on_device * self._blocks.block_tokens)
            if not planned:
                return
            tree = Tree(contents[0].hash, private=False)
            for content in planned:
                self._block_tiers.read_ahead(content, tree)
            if self._state_tiers:
                self._state_tiers.read_ahead(state_content(planned[-1].hash), tree)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Record that blocks on the device are used again, and so are not evicted soon.

        Of no use while host memory has room for all: it gives up none.
        """
        if all(saves.has_all for saves in self._saves):
            return
        for key in keys:
            self._events.append(_Touched(key))
            if self._states and self._states.find(key) is not None:
                self._state_events.append(StateCached(key))

    def metrics(self) -> TierMetrics:
        """What the tiers hold and have moved."""
        blocks, states, of_states = self._block_tiers, self._state_tiers, {}
        if states:
            of_states = {
                "host_states": len(states.host),
                "host_states_total": states.host.num_slots,
                "saved_states": states.counters.saved,
                "restored_states": states.counters.restored,
                "disk_read_states": states.disk.num_read if states.disk else 0,
                "disk_written_states": states.disk.num_written if states.disk else 0,
                "state_bytes": states.num_bytes,
            }
        return TierMetrics(
            host_blocks=len(blocks.host),
            host_blocks_total=blocks.host.num_slots,
            saved_blocks=blocks.counters.saved,
            dropped_saves=sum(pool.counters.dropped_saves for pool in self._pools),
            restored_blocks=blocks.counters.restored,
            disk_read_blocks=blocks.disk.num_read if blocks.disk else 0,
            disk_written_blocks=blocks.disk.num_written if blocks.disk else 0,
            failed_transfers=sum(pool.num_failed for pool in self._pools),
            restored_prefixes=self._choice.num_restored,
            recomputed_prefixes=self._choice.num_recomputed,
            disk_block_seconds=self.costs.disk_seconds,
            block_bytes=blocks.num_bytes,
            disk=blocks.disk.metrics if blocks.disk else None,
            **of_states,
        )

    def close(self, flush_seconds: float | None = None) -> None:
        """Cancel loads, write what is cached to disk, and end all threads. Idempotent.

        flush_seconds   most that writing takes; None: as long as it advances

        What was not written is logged once. A thread that hangs in a read or write is left, with the folder open.
        """
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._process:
            return  # a fork, which has none of the threads: folder and transfers are its parent's
        with self._lock:
            self._restores.cancel_all()
        losses = None
        try:
            if self._store is not None:
                losses = self._flush_before_close(flush_seconds)
        finally:  # also when the caller is interrupted, as by Ctrl-C
            self._end_threads(losses)
        self._restores.advance(may_start=False)
        self._unpin()

    def _flush_before_close(self, seconds: float | None) -> tuple[list[set[bytes]], str]:
        """Store what is cached; returns, for each pool, keys that are not stored yet, and why."""
        with self._lock:
            self._read_events()
            flush = Flush([*zip(self._saves, self._pools, strict=True)], seconds, self._clock)
        reason = ""
        try:
            self._run(flush)
        except EngineError as error:
            reason = str(error)
        return flush.lost(), reason or flush.reason or "the disk did not take them"

    def _log_losses(self, lost: list[set[bytes]], reason: str) -> None:
        """Log how many of these keys are not on the disk, and why."""
        blocks, *states = (
            sum(not (pool.disk and pool.disk.contains(key)) for key in keys)
            for pool, keys in zip(self._pools, lost, strict=True)
        )
        if self._logs_losses and (blocks or any(states)):
            what = f"{blocks} KV blocks" + (f" and {states[0]} side states" if states else "")
            _log.warning(
                "%s were not written to disk when the engine was closed (%s); they are computed again when they are"
                " needed",
                what,
                reason,
            )

    def _end_threads(self, losses: tuple[list[set[bytes]], str] | None) -> None:
        with self._lock:
            for pool in self._pools:
                pool.cancel()
        if self._background:
            self._background.close()
        for pool in self._pools:
            pool.copies.close()
        have_ended = self._disk_threads is None or self._disk_threads.close()
        self._pass_on()
        if losses:
            self._log_losses(*losses)
        if self._store is not None and have_ended:
            self._store.close()

    def check(self) -> None:
        """Assert that slots and pins are those of the transfers in flight."""
        with self._lock:
            pinned = [self._blocks.num_pinned, self._states.num_pinned if self._states else 0]
            for pool, targets, num_pinned in zip(self._pools, self._restores.targets, pinned, strict=False):
                pool.host.check()
                assert num_pinned == len(pool.pinned | targets), "a place is pinned without a transfer"

    def pass_on(self) -> None:
        """Take note of saves and disk transfers that have ended, and pass what was saved on to the disk. Any thread."""
        with self._lock:
            self._pass_on()

    def _pass_on(self, goes_on: GoesOn = always) -> None:
        self._read_state_events()
        for pool in self._pools:
            pool.pass_on(goes_on)

    def _unpin(self) -> None:
        for pool in self._pools:
            pool.unpin()

    def _check_threads(self) -> None:
        for pool in self._pools:
            pool.check_threads()
        if self._background:
            self._background.check()

    def relieve(self) -> None:
        """Unpin what is queued to be saved: a step needs its place."""
        with self._lock:
            self._read_state_events()
            for pool in self._pools:
                pool.drop_saves()

    def find_arriving(self, content: BlockContent) -> int | None:
        """Return the block of the pool that this content is being restored to."""
        if self._restores.has_queued:
            with self._lock:
                self._read_events()
        return self._restores.find(content)

    def find_state(self, hashes: list[bytes], count: int) -> int:
        """Return how many blocks that are computed to share, where `count` of them have their state on the device."""
        with self._lock:
            return self._choice.to_share(hashes, count, count * self._blocks.block_tokens)
