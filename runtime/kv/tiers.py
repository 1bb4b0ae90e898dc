"""Tiers below the device: host memory, then disk. Blocks move down before they are evicted, and up for a prompt.

    device ──save──► host ──write──► disk        in the background, as soon as a block is cached
    device ◄restore─ host ◄──read─── disk        for a sequence that is LOADING, or ahead for one that waits

The engine's thread calls `poll` before a step is scheduled and `start` once its copies are made; neither waits. What a
transfer uses is pinned until it has ended. One that fails moves nothing: its block is computed, leaves the tier, and
the failure is counted, and logged once. One lock guards all state, because a background thread passes on what is
complete while the engine has no steps.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ingot.errors import EngineError
from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.kv.cost_model import CostModel, TierName
from ingot.runtime.kv.disk.tier import BlockStore, DiskTier
from ingot.runtime.kv.host_tier import HostBlock, HostTier, SlotState
from ingot.runtime.kv.keys import BlockContent, Tree
from ingot.runtime.kv.loads import Load, LoadingBlock
from ingot.runtime.kv.policies import DEFAULT_POLICY, make_policy
from ingot.runtime.kv.transfers import Cancelled, HostBlocks, TaskQueue, Transfer, Workers

MakeThreads = Callable[[str, int], TaskQueue]
"""Makes threads from their name and number."""

_log = logging.getLogger(__name__)
_IN_FLIGHT_BYTES = 128 * 2**20  # that are saved, that are written to disk, and that are read from it at a time
_READERS = 2
_POLL_SECONDS = 0.002  # of the background thread, while something moves
_WAIT_SECONDS = 0.0002  # of who has nothing else to do: copies, which take less, do not report their end
_FLUSH_SECONDS = 30.0  # that closing waits for blocks on their way to disk


@dataclass(slots=True)
class TierCounters:
    """Totals since the engine was made."""

    saved_blocks: int = 0
    dropped_saves: int = 0  # a step needed the block before it was saved
    restored_blocks: int = 0
    failed_transfers: int = 0
    restored_prefixes: int = 0
    recomputed_prefixes: int = 0  # stored, but faster to compute


@dataclass(frozen=True, slots=True)
class TierMetrics:
    """What the tiers hold, and totals since the engine was made, in blocks unless named otherwise."""

    host_blocks: int
    host_blocks_total: int
    saved_blocks: int
    dropped_saves: int
    restored_blocks: int
    disk_read_blocks: int
    disk_written_blocks: int
    failed_transfers: int
    restored_prefixes: int
    recomputed_prefixes: int
    block_bytes: int

    @property
    def moved_bytes(self) -> Mapping[str, int]:
        """Bytes by kind of move."""
        blocks = {
            "save": self.saved_blocks,
            "restore": self.restored_blocks,
            "disk_read": self.disk_read_blocks,
            "disk_write": self.disk_written_blocks,
        }
        return {move: count * self.block_bytes for move, count in blocks.items()}


class _Save(NamedTuple):
    transfer: Transfer
    block: int
    target: HostBlock


class TierManager:
    """Moves blocks between a pool, host memory and, with a `store`, disk. Owns and closes both.

    block_bytes   size of a block, which bounds how many move at a time
    policy        which blocks host memory gives up, by its name in `policies`
    threads       where disk transfers run; tests have their own, and poll themselves
    """

    def __init__(
        self,
        blocks: BlockManager,
        host_blocks: HostBlocks,
        costs: CostModel,
        *,
        block_bytes: int,
        policy: str = DEFAULT_POLICY,
        store: BlockStore | None = None,
        threads: MakeThreads | None = None,
    ) -> None:
        self.costs = costs
        self.host = HostTier(host_blocks.num_slots, make_policy(policy, host_blocks.num_slots))
        self._blocks, self._host_blocks, self._block_bytes = blocks, host_blocks, block_bytes
        self._most = max(1, min(_IN_FLIGHT_BYTES // block_bytes, host_blocks.num_slots // 2))
        self._lock = threading.RLock()
        self._changed = threading.Event()
        self._counters = TierCounters()
        make = threads or partial(Workers, when_done=self._changed.set)
        self._disk = self._make_disk(store, make) if store is not None else None
        self._to_save: dict[int, None] = {}  # blocks of the pool, oldest first
        self._saves: list[_Save] = []
        self._unpinned: list[int] = []  # by transfers that have ended, until the engine's thread unpins them
        self._loads: list[Load] = []
        self._was_failure_logged = False
        self._closed = False
        self._background = None if threads else _Background(self)
        blocks.on_cached = self._offer
        blocks.on_shortage = self._relieve
        blocks.on_forgotten = self._forget

    def _make_disk(self, store: BlockStore, make: MakeThreads) -> DiskTier:
        return DiskTier(
            store,
            self.host,
            self._host_blocks.view,
            self.costs,
            most_in_flight=self._most,
            readers=make("ingot-kv-read", _READERS),
            writer=make("ingot-kv-write", 1),
        )

    def wrap(self, host_blocks: Callable[[HostBlocks], HostBlocks], store: Callable[[BlockStore], BlockStore]) -> None:
        """Put something around copies and store before the first step, to make them fail: that is not logged."""
        self._was_failure_logged = True
        self._host_blocks = host_blocks(self._host_blocks)
        if self._disk:
            self._disk.wrap(store)

    def poll(self) -> None:
        """Take note of what has ended. EngineError if a thread that moves blocks has died."""
        self._check_threads()
        with self._lock:
            self._pass_on()
            self._advance_loads(may_start=False)
            self._unpin()

    def start(self) -> None:
        """Begin what is queued; not before the step's copies are made, because a restored block may be their source."""
        with self._lock:
            self._start_saves()
            self._advance_loads(may_start=True)
        if self._background and self.is_moving:
            self._background.wake()

    @property
    def is_loading(self) -> bool:
        """Whether blocks are on their way to the pool."""
        return bool(self._loads)

    @property
    def is_moving(self) -> bool:
        """Whether any transfer is in flight."""
        disk = self._disk
        return bool(self._saves or self._loads or (disk and (disk.is_reading or disk.is_writing)))

    def wait(self) -> None:
        """Wait for a transfer to end, but not for long."""
        self._changed.clear()
        self._changed.wait(_WAIT_SECONDS)

    def settle(self) -> None:
        """Wait for the blocks that are being saved, which are pinned."""
        self._relieve()
        while self._saves:
            self.wait()
            self._relieve()

    def flush(self, seconds: float) -> bool:
        """Save what is cached, and wait until it is stored, also on disk; returns whether all of it was, in time.

        It is no faster than the disk, so that host memory gives up no block that is not written yet. False also when
        slots are short because blocks are being restored. EngineError if a thread that moves blocks has died.
        """
        deadline = time.monotonic() + seconds
        while True:
            with self._lock:
                self._pass_on()
                self._unpin()
                if self._disk is None or self._disk.has_room_to_write:
                    self._start_saves(most=1 if self._disk else None)
                if not (self._saves or (self._disk and self._disk.is_writing)):
                    return not self._to_save
            if time.monotonic() >= deadline:
                return False
            self._check_threads()
            self.wait()

    def plan(self, following: Iterable[BlockContent], num_cached_tokens: int) -> list[BlockContent]:
        """Choose the blocks to restore of those that follow a prefix on the device; logs the reason."""
        with self._lock:
            found = list(self._find(following))
        if not found:
            return []
        decision = self.costs.decide([tier for _, tier in found], num_cached_tokens)
        if decision.num_blocks:
            self._counters.restored_prefixes += 1
        else:
            self._counters.recomputed_prefixes += 1
        _log.debug(
            "%d of %d stored blocks are restored after %d tokens on the device: %s",
            decision.num_blocks,
            len(found),
            num_cached_tokens,
            decision.reason,
        )
        return [content for content, _ in found[: decision.num_blocks]]

    def load(self, contents: Iterable[BlockContent], targets: Iterable[int], tree: Tree) -> Load:
        """Restore blocks to blocks of the pool, which are pinned until they have arrived. `start` begins it."""
        load = Load([LoadingBlock(content, tree, target) for content, target in zip(contents, targets, strict=True)])
        with self._lock:
            for block in load.blocks:
                self._blocks.pin(block.target)
                self._take_source(block, self.host.find(block.content))
            self._loads.append(load)
        return load

    def cancel(self, load: Load) -> None:
        """Restore no more of these blocks; what is being copied stays pinned until it has arrived."""
        with self._lock:
            load.cancelled = True
            for block in load.blocks:
                if block.transfer:
                    block.transfer.cancel()
            self._advance_loads(may_start=False)
            self._unpin()

    def read_ahead(self, contents: Iterable[BlockContent]) -> None:
        """Begin to read what a waiting sequence will need from disk, as far as room is left."""
        if not self._disk:
            return
        with self._lock:
            contents = list(contents)
            on_device = next((i for i, each in enumerate(contents) if not self._blocks.has(each)), len(contents))
            tree = Tree(contents[0].hash, private=False) if contents else None
            for content in self.plan(contents[on_device:], on_device * self._blocks.block_tokens):
                if not self._disk.has_room:
                    return
                if tree and self.host.find(content) is None:
                    self._disk.read(content, tree)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Record that blocks on the device were used again: they are worth more in host memory too."""
        with self._lock:
            for key in keys:
                self.host.touch(key)

    def metrics(self) -> TierMetrics:
        """What the tiers hold and have moved."""
        disk, counters = self._disk, self._counters
        return TierMetrics(
            host_blocks=len(self.host),
            host_blocks_total=self.host.num_slots,
            saved_blocks=counters.saved_blocks,
            dropped_saves=counters.dropped_saves,
            restored_blocks=counters.restored_blocks,
            disk_read_blocks=disk.num_read if disk else 0,
            disk_written_blocks=disk.num_written if disk else 0,
            failed_transfers=counters.failed_transfers + (disk.num_failed if disk else 0),
            restored_prefixes=counters.restored_prefixes,
            recomputed_prefixes=counters.recomputed_prefixes,
            block_bytes=self._block_bytes,
        )

    def close(self) -> None:
        """Cancel loads, let what is on its way to disk arrive, and end all threads. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for load in self._loads[:]:
            self.cancel(load)
        if self._disk:
            self._flush_before_close()
        if self._background:
            self._background.close()
        self._host_blocks.close()
        if self._disk:
            self._disk.close()
        self._pass_on()
        self._advance_loads(may_start=False)
        self._unpin()

    def check(self) -> None:
        """Assert that slots and pins are those of the transfers in flight."""
        with self._lock:
            self.host.check()
            targets = [block.target for load in self._loads for block in load.blocks if block.arrived is None]
            pinned = len({*targets, *(save.block for save in self._saves), *self._unpinned})
            assert self._blocks.num_pinned == pinned, "a block is pinned without a transfer"

    def _check_threads(self) -> None:
        self._host_blocks.check()
        if self._disk:
            self._disk.check()
        if self._background:
            self._background.check()

    # Moving down.

    def _offer(self, block: int) -> None:
        self._to_save[block] = None

    def _start_saves(self, most: int | None = None) -> None:
        while self._to_save and len(self._saves) < (most or self._most):
            block = next(iter(self._to_save))
            cached = self._blocks.cached(block)
            if cached and self.host.find(cached[0]) is None:
                target = self.host.reserve(*cached, "host")
                if target is None:
                    return  # every slot is pinned
                self._blocks.pin(block)
                self._saves.append(_Save(self._host_blocks.save(block, target.slot), block, target))
            del self._to_save[block]

    def pass_on(self) -> None:
        """Take note of saves and disk transfers that have ended, and pass saved blocks on to the disk. Any thread."""
        with self._lock:
            self._pass_on()

    def _pass_on(self) -> None:
        saves, self._saves = self._saves, []
        for save in saves:
            if not save.transfer.done:
                self._saves.append(save)
                continue
            self._unpinned.append(save.block)
            if save.transfer.error:
                self._note_failure(save.transfer.error)
                self.host.lose(save.target)
                self.host.unpin(save.target)
                continue
            self._counters.saved_blocks += 1
            self.host.fill(save.target)
            if self._disk:
                self._disk.offer(save.target)
        if self._disk:
            self._disk.advance()

    def _relieve(self) -> None:
        """Unpin blocks whose save has not begun: a step needs them."""
        with self._lock:
            for save in self._saves:
                self._counters.dropped_saves += save.transfer.cancel()
            self._pass_on()
            self._unpin()

    def _unpin(self) -> None:
        unpinned, self._unpinned = self._unpinned, []
        for block in unpinned:
            self._blocks.unpin(block)

    def _forget(self, first: bytes, contents: Iterable[BlockContent]) -> None:
        """Remove a tree from host memory, and its blocks that are named from disk."""
        with self._lock:
            lost = self.host.lose_tree(first)
            if self._disk:
                for content in {*lost, *contents}:
                    self._disk.remove(content)

    def _flush_before_close(self) -> None:
        try:
            is_stored = self.flush(_FLUSH_SECONDS)
        except EngineError:
            is_stored = False  # `poll` reports it too
        if not is_stored:
            _log.warning("blocks were still on their way to disk after %d seconds, and are lost", _FLUSH_SECONDS)

    # Moving up.

    def _find(self, following: Iterable[BlockContent]) -> Iterator[tuple[BlockContent, TierName]]:
        """The leading blocks that are in a tier."""
        for content in following:
            held = self.host.find(content)
            if held:
                yield content, held.origin
            elif self._disk and self._disk.contains(content):
                yield content, "disk"
            else:
                return

    def _take_source(self, block: LoadingBlock, source: HostBlock | None) -> None:
        if source:
            self.host.pin(source)
            self.host.touch(block.content.hash)
            block.source, block.tier = source, source.origin
            source.origin = "host"

    def _advance_loads(self, *, may_start: bool) -> None:
        loads, self._loads = self._loads, []
        for load in loads:
            is_whole = not load.cancelled
            for block in load.blocks:
                if block.arrived is None:
                    block.arrived = self._advance(block, is_wanted=is_whole, may_start=may_start)
                    if block.arrived is not None:
                        self._unpinned.append(block.target)
                is_whole = is_whole and block.arrived is not False
            if not load.done:
                self._loads.append(load)

    def _advance(self, block: LoadingBlock, *, is_wanted: bool, may_start: bool) -> bool | None:
        """Bring a block one move nearer; returns whether it arrived, None while it is on its way."""
        if block.transfer:
            return self._end_restore(block, block.transfer) if block.transfer.done else None
        if is_wanted and block.source is None:
            self._take_source(block, self.host.find(block.content) or self._read(block))
        source = block.source
        if source is None:
            is_coming = is_wanted and self._disk is not None and self._disk.contains(block.content)
            return None if is_coming else False  # no slot is free yet
        if not is_wanted or source.state is SlotState.LOST:
            self.host.unpin(source)
            return False
        if may_start and source.state is SlotState.READY:
            block.transfer = self._host_blocks.restore(source.slot, block.target)
        return None

    def _read(self, block: LoadingBlock) -> HostBlock | None:
        if self._disk and self._disk.has_room and self._disk.contains(block.content):
            return self._disk.read(block.content, block.tree)
        return None

    def _end_restore(self, block: LoadingBlock, transfer: Transfer) -> bool:
        assert block.source is not None
        if transfer.error:
            self._note_failure(transfer.error)
            if not isinstance(transfer.error, Cancelled):
                self.host.lose(block.source)
        else:
            self._counters.restored_blocks += 1
            self.costs.observe_block("host", transfer.seconds)
        self.host.unpin(block.source)
        return transfer.error is None

    def _note_failure(self, error: Exception) -> None:
        if isinstance(error, Cancelled):
            return
        self._counters.failed_transfers += 1
        if not self._was_failure_logged:
            self._was_failure_logged = True
            _log.warning("a KV block was not copied, and is computed instead (%s); more of these are counted", error)


class _Background:
    """Passes on what is complete while the engine has no steps. Sleeps while nothing moves."""

    def __init__(self, tiers: TierManager) -> None:
        self._tiers = tiers
        self._wake = threading.Event()
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ingot-kv-tiers", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look at the transfers until none is in flight."""
        self._wake.set()

    def check(self) -> None:
        """Raise EngineError if the thread has died."""
        if self._failure or not (self._closed or self._thread.is_alive()):
            raise EngineError(f"the thread that passes KV blocks on has died ({self._failure}); load the engine again")

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                self._wake.wait()
                self._wake.clear()
                while not self._closed and self._tiers.is_moving:
                    self._tiers.pass_on()
                    time.sleep(_POLL_SECONDS)
                if self._closed:
                    return
        except BaseException as error:  # noqa: BLE001 (`check` raises it in the engine's thread)
            self._failure = error
