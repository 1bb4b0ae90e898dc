"""Makes the tiers of an engine from its options: slots in host memory, a store on disk, first measurements."""

import logging
import time
from collections.abc import Callable

from ingot.errors import UsageError
from ingot.runtime.executors import Executor, TieredExecutor
from ingot.runtime.kv.blocks import BlockManager
from ingot.runtime.kv.cost_model import CostModel
from ingot.runtime.kv.disk.store import DiskStore
from ingot.runtime.kv.tiers import TierManager
from ingot.runtime.kv.transfers import HostBlocks, Transfer
from ingot.runtime.options import EngineOptions
from ingot.sizes import format_bytes

_log = logging.getLogger(__name__)
_STAGING_BYTES = 64 * 2**20  # of host memory that a disk tier needs on its way, if it is given no more
_LEAST_SLOTS = 8
_MEASURED_COPIES = 4
_POLL_SECONDS = 0.0002

OpenTiers = Callable[[Executor, BlockManager, bytes], TierManager | None]
"""Makes the tiers of an engine from its executor, its blocks and the root of their keys."""


def open_tiers(executor: Executor, blocks: BlockManager, root: bytes, options: EngineOptions) -> TierManager | None:
    """Make the tiers that the options ask for; None for none.

    Raises UsageError for a host tier smaller than a block, a disk folder that cannot be used, or an executor without
    tiers; EngineError when the machine has too little memory.
    """
    if not options.kv_host_bytes and options.kv_disk_path is None:
        return None
    block_bytes = executor.kv_geometry.block_bytes
    if not isinstance(executor, TieredExecutor) or executor.kv_geometry.state_bytes:
        kind = "a model with side state" if executor.kv_geometry.state_bytes else "this engine"
        raise UsageError(f"{kind} has no tiers for its KV blocks yet; leave out kv_host_bytes and kv_disk_path")
    num_slots = _num_slots(options, block_bytes)
    host_blocks = executor.host_blocks(num_slots)
    costs = CostModel(blocks.block_tokens, options.kv_restore)
    try:
        _measure(host_blocks, costs)
        store = _open_store(options, block_bytes, root)
    except BaseException:
        host_blocks.close()
        raise
    _log.info(
        "KV tiers: %d blocks in host memory (%s), %.3f ms to restore one",
        num_slots,
        format_bytes(num_slots * block_bytes),
        costs.block_seconds("host") * 1e3,
    )
    return TierManager(blocks, host_blocks, costs, block_bytes=block_bytes, policy=options.kv_policy, store=store)


def _open_store(options: EngineOptions, block_bytes: int, root: bytes) -> DiskStore | None:
    if options.kv_disk_path is None:
        return None
    store = DiskStore.open(options.kv_disk_path, max_bytes=options.kv_disk_bytes, block_bytes=block_bytes, root=root)
    _log.info("KV tiers: %d blocks on disk in %s", len(store), options.kv_disk_path)
    return store


def _num_slots(options: EngineOptions, block_bytes: int) -> int:
    if not options.kv_host_bytes:
        return max(_LEAST_SLOTS, _STAGING_BYTES // block_bytes)
    if options.kv_host_bytes < block_bytes:
        raise UsageError(
            f"kv_host_bytes is {options.kv_host_bytes}; one block takes {block_bytes} bytes: give more, or 0 for none"
        )
    return options.kv_host_bytes // block_bytes


def _measure(host_blocks: HostBlocks, costs: CostModel) -> None:
    """Copy an unused block back and forth; the first copies touch new memory, and do not count."""
    for count in range(_MEASURED_COPIES):
        _wait(host_blocks.save(0, 0))
        restored = _wait(host_blocks.restore(0, 0))
        if count:
            costs.observe_block("host", restored.seconds)


def _wait(transfer: Transfer) -> Transfer:
    while not transfer.done:
        time.sleep(_POLL_SECONDS)
    if transfer.error:
        raise transfer.error
    return transfer
