"""What the tiers hold and have moved: totals of one pool, and the figures of an engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from ingot.runtime.metric_rows import counter, gauge


@dataclass(slots=True)
class PoolCounters:
    """Totals of one pool's content since the engine was made."""

    saved: int = 0
    dropped_saves: int = 0  # a step needed the place before it was saved
    restored: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskMetrics:
    """Contents of the folder of a disk tier, as far as this process has seen, and totals since it was opened.

    num_blocks    blocks and side states, those of other models included
    num_bytes     size of all files, their free slots included
    max_bytes     its limit
    num_damaged   blocks that were found damaged, and removed
    num_evicted   blocks that gave up their place
    num_errors    errors of the system
    refusal       why nothing is written now; None while the tier takes writes
    """

    num_blocks: Annotated[int, gauge("kv_disk_blocks_used", "blocks", "Blocks in the disk tier's folder.")]
    max_bytes: Annotated[int, gauge("kv_disk_bytes", "bytes", "Limit of the folder's files.")]
    num_bytes: Annotated[int, gauge("kv_disk_bytes_used", "bytes", "Size of the folder's files.")]
    num_damaged: Annotated[int, counter("kv_disk_blocks_damaged", "blocks", "Found damaged, and removed.")]
    num_evicted: Annotated[int, counter("kv_disk_blocks_evicted", "blocks", "Gave up their place on disk.")]
    num_errors: Annotated[int, counter("kv_disk_errors", "errors", "Errors of the disk tier's file system.")]
    refusal: Annotated[
        str | None, gauge("kv_disk_takes_writes", "1", "Whether blocks are written: 1 or 0.", source="takes_writes")
    ]

    @property
    def takes_writes(self) -> bool:
        """Whether blocks are written."""
        return self.refusal is None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMetrics:
    """What the tiers hold, and totals since the engine was made, in blocks unless named otherwise.

    A model with side state has as much again for its states; `dropped_saves` and `failed_transfers` count both.
    `disk` is None without a disk tier.
    """

    host_blocks_total: Annotated[int, gauge("kv_host_blocks", "blocks", "Blocks that host memory has room for.")]
    host_blocks: Annotated[int, gauge("kv_host_blocks_used", "blocks", "Blocks in host memory.")]
    saved_blocks: Annotated[int, counter("kv_blocks_saved", "blocks", "Copied from the pool to host memory.")]
    dropped_saves: Annotated[int, counter("kv_saves_dropped", "blocks", "Left the pool with no copy below it.")]
    restored_blocks: Annotated[int, counter("kv_blocks_restored", "blocks", "Copied back to the pool.")]
    disk_read_blocks: Annotated[int, counter("kv_disk_blocks_read", "blocks", "Read from the disk tier.")]
    disk_written_blocks: Annotated[int, counter("kv_disk_blocks_written", "blocks", "Written to the disk tier.")]
    disk: DiskMetrics | None = None
    host_states_total: Annotated[int, gauge("kv_host_states", "states", "Side states that it has room for.")] = 0
    host_states: Annotated[int, gauge("kv_host_states_used", "states", "Side states in host memory.")] = 0
    saved_states: Annotated[int, counter("kv_states_saved", "states", "Copied from the device to host memory.")] = 0
    restored_states: Annotated[int, counter("kv_states_restored", "states", "Copied back to the device.")] = 0
    disk_read_states: Annotated[int, counter("kv_disk_states_read", "states", "Read from the disk tier.")] = 0
    disk_written_states: Annotated[
        int,
        counter("kv_disk_states_written", "states", "Written to the disk tier."),
        counter("kv_bytes_moved", "bytes", "Bytes that tiers moved, by kind.", label="move", source="moved_bytes"),
    ] = 0
    failed_transfers: Annotated[int, counter("kv_failed_transfers", "blocks", "Blocks that did not arrive.")]
    restored_prefixes: Annotated[int, counter("kv_restored_prefixes", "prefixes", "Decisions to restore.")]
    recomputed_prefixes: Annotated[
        int,
        counter("kv_recomputed_prefixes", "prefixes", "Decisions to compute what is stored, because that is faster."),
    ]
    disk_block_seconds: Annotated[
        float, gauge("kv_disk_block_seconds", "seconds", "Mean time to read a block from the disk tier; 0 before any.")
    ] = 0.0
    block_bytes: int
    state_bytes: int = 0

    @property
    def moved_bytes(self) -> Mapping[str, int]:
        """Bytes by kind of move."""
        moves = {
            "save": (self.saved_blocks, self.saved_states),
            "restore": (self.restored_blocks, self.restored_states),
            "disk_read": (self.disk_read_blocks, self.disk_read_states),
            "disk_write": (self.disk_written_blocks, self.disk_written_states),
        }
        return {move: blocks * self.block_bytes + states * self.state_bytes for move, (blocks, states) in moves.items()}
