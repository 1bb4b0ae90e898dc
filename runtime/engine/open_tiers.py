"""Makes the tiers of an engine from its options: slots in host memory, a store on disk, first measurements."""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Protocol

from ingot.errors import UsageError, shown_path
from ingot.runtime.clock import SYSTEM_CLOCK, Clock
from ingot.runtime.executors import Executor, TieredExecutor, TieredStatefulExecutor
from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.kv.cost_model import CostModel
from ingot.runtime.kv.disk.read_speed import ReadSpeed
from ingot.runtime.kv.disk.store import DiskStore
from ingot.runtime.kv.tiers import TierManager
from ingot.runtime.kv.transfers.transfer import Bytes, HostBlocks, Transfer, TransferGate
from ingot.runtime.options import EngineOptions
from ingot.sizes import format_bytes

_log = logging.getLogger(__name__)
_OPEN_SECONDS = 30.0  # that the file system of a disk tier has to answer when an engine is loaded
_STAGING_BYTES = 64 * 2**20  # of host memory that a disk tier needs on its way, if it is given no more
_LEAST_SLOTS = 8
_BLOCKS_PER_STATE = 8  # in host memory; twice as many snapshots as long prompts make, since short ones make more
_MEASURED_COPIES = 4
_POLL_SECONDS = 0.0002


class OpenTiers(Protocol):
    """Makes the tiers of an engine from its executor, its blocks, the root of their keys, and its clock."""

    def __call__(self, executor: Executor, blocks: BlockManager, root: bytes, *, clock: Clock) -> TierManager | None:
        """Return the tiers; None for none."""
        ...


def open_tiers(
    executor: Executor, blocks: BlockManager, root: bytes, options: EngineOptions, *, clock: Clock = SYSTEM_CLOCK
) -> TierManager | None:
    """Make the tiers that the options ask for; None for none.

    Raises UsageError for a host tier smaller than a block and its share of side state, a disk folder that cannot be
    used or does not answer, or an executor without tiers; EngineError when the machine has too little memory.
    """
    if not options.kv_host_bytes and options.kv_disk_path is None:
        return None
    tiered = _require_tiers(executor)
    kv = executor.kv_geometry
    num_blocks, num_states = _num_slots(options, kv.block_bytes, kv.state_bytes)
    costs = CostModel(blocks.block_tokens, options.kv_restore, state_blocks=kv.state_bytes / kv.block_bytes)
    with ExitStack() as opened:
        host_blocks = tiered.host_blocks(num_blocks)
        opened.callback(host_blocks.close)
        host_states = None
        if isinstance(tiered, TieredStatefulExecutor) and num_states:
            host_states = tiered.host_states(num_states)
            opened.callback(host_states.close)
        _measure(host_blocks, costs)
        store, gate = None, TransferGate()
        if options.kv_disk_path is not None:
            sizes = kv.block_bytes, blocks.block_tokens
            opening = partial(_open_store, options, sizes, root, host_blocks.view(0), gate)
            store, speed = _await_disk(opening, options.kv_disk_path)
            _observe_disk(costs, speed)
            opened.callback(store.close)
        tiers = TierManager(
            blocks,
            host_blocks,
            costs,
            block_bytes=kv.block_bytes,
            host_states=host_states,
            state_bytes=kv.state_bytes,
            policy=options.kv_policy,
            store=store,
            gate=gate,
            clock=clock,
        )
        opened.pop_all()
    size = format_bytes(num_blocks * kv.block_bytes + num_states * kv.state_bytes)
    states = f" and {num_states} side states" if num_states else ""
    _log.info(
        "KV tiers: %d blocks%s in host memory (%s), %.3f ms to restore one",
        num_blocks,
        states,
        size,
        costs.block_seconds("host") * 1e3,
    )
    return tiers


def _require_tiers(executor: Executor) -> TieredExecutor:
    has_state = executor.kv_geometry.state_bytes > 0
    if isinstance(executor, TieredStatefulExecutor if has_state else TieredExecutor):
        return executor
    kind = "this engine, of a model with side state," if has_state else "this engine"
    raise UsageError(f"{kind} has no tiers for its KV blocks yet; leave out kv_host_bytes and kv_disk_path")


_Opened = tuple[DiskStore, ReadSpeed]


def _open_store(
    options: EngineOptions, sizes: tuple[int, int], root: bytes, buffer: Bytes, gate: TransferGate
) -> _Opened:
    """Open the store and measure its reads, with a buffer of a block's size."""
    assert options.kv_disk_path is not None
    block_bytes, block_tokens = sizes
    store = DiskStore.open(
        options.kv_disk_path,
        max_bytes=options.kv_disk_bytes,
        block_bytes=block_bytes,
        root=root,
        give_way=gate.pass_through,
    )
    _log.info("KV tiers: %d blocks on disk in %s", len(store), options.kv_disk_path)
    return store, store.measure(buffer, block_tokens)


def _await_disk(opening: Callable[[], _Opened], path: str | os.PathLike[str]) -> _Opened:
    """Open a store in a thread, for its file system may hang: UsageError then. What is opened later is closed."""
    outcome: Future[_Opened] = Future()

    def run() -> None:
        try:
            outcome.set_result(opening())
        except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
            outcome.set_exception(error)

    threading.Thread(target=run, name="ingot-kv-open", daemon=True).start()
    has_answered = False
    try:
        has_answered = bool(wait((outcome,), _OPEN_SECONDS).done)
    finally:  # also when the caller is interrupted, as by Ctrl-C
        if not has_answered:
            outcome.add_done_callback(_close_unused)
    if not has_answered:
        raise UsageError(
            f"the file system of the KV folder {shown_path(Path(path))} has not answered for {_OPEN_SECONDS:g} seconds;"
            " check its mount, choose another kv_disk_path, or leave it out to keep no blocks on disk"
        )
    return outcome.result()


def _close_unused(outcome: "Future[_Opened]") -> None:
    if outcome.exception() is None:
        outcome.result()[0].close()


def _num_slots(options: EngineOptions, block_bytes: int, state_bytes: int) -> tuple[int, int]:
    """Slots for blocks, and for side states: one for every few blocks."""
    with_share = block_bytes + -(-state_bytes // _BLOCKS_PER_STATE)
    if not options.kv_host_bytes:
        num_blocks = max(_LEAST_SLOTS, _STAGING_BYTES // with_share)
    elif options.kv_host_bytes < block_bytes + state_bytes:
        with_state = f", and its side state {state_bytes}" if state_bytes else ""
        raise UsageError(
            f"kv_host_bytes is {options.kv_host_bytes}; one block takes {block_bytes} bytes{with_state}: give more, or"
            " 0 for none"
        )
    else:
        num_blocks = max(1, (options.kv_host_bytes - state_bytes) // with_share)
    return num_blocks, 1 + num_blocks // _BLOCKS_PER_STATE if state_bytes else 0


def _measure(host_blocks: HostBlocks, costs: CostModel) -> None:
    """Copy an unused block back and forth; the first copies touch new memory, and do not count."""
    for count in range(_MEASURED_COPIES):
        _wait(host_blocks.save(0, 0))
        restored = _wait(host_blocks.restore(0, 0))
        if count:
            costs.observe_block("host", restored.seconds)


def _observe_disk(costs: CostModel, measured: ReadSpeed) -> None:
    for seconds in measured.seconds:
        costs.observe_block("disk", seconds)
    if measured.seconds:
        _log.info(
            "KV tiers: %.3f ms to read a block from disk (%s)", costs.block_seconds("disk") * 1e3, measured.source
        )


def _wait(transfer: Transfer) -> Transfer:
    while not transfer.done:
        time.sleep(_POLL_SECONDS)
    if transfer.error:
        raise transfer.error
    return transfer
