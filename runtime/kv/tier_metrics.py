"""What the tiers hold and have moved: totals of one pool, and the figures of an engine."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class PoolCounters:
    """Totals of one pool's content since the engine was made."""

    saved: int = 0
    dropped_saves: int = 0  # a step needed the place before it was saved
    restored: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
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

    num_blocks: int
    num_bytes: int
    max_bytes: int
    num_damaged: int
    num_evicted: int
    num_errors: int
    refusal: str | None

    @property
    def takes_writes(self) -> bool:
        """Whether blocks are written."""
        return self.refusal is None


@dataclass(frozen=True, slots=True)
class TierMetrics:
    """What the tiers hold, and totals since the engine was made, in blocks unless named otherwise.

    A model with side state has as much again for its states; `dropped_saves` and `failed_transfers` count both.
    `disk` is None without a disk tier.
    """

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
    host_states: int = 0
    host_states_total: int = 0
    saved_states: int = 0
    restored_states: int = 0
    disk_read_states: int = 0
    disk_written_states: int = 0
    state_bytes: int = 0
    disk: DiskMetrics | None = None

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
