"""How many KV blocks the engine gets: what the caller says, or what the free memory and the model's context suggest."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from ingot.artifact import KVGeometry, ModelFacts
from ingot.errors import UsageError
from ingot.sizes import format_bytes

_LOG = logging.getLogger(__name__)
_MEMORY_SHARE = 0.25  # of the free memory, for an engine that was told nothing
_MOST_MEMORY_SHARE = 0.5  # what one whole context may take where a quarter does not hold it
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class PoolSize:
    """Blocks of the KV pool, and why so many."""

    num_blocks: int
    reason: str


def resolve_pool_size(
    model: ModelFacts,
    kv: KVGeometry,
    *,
    kv_blocks: int | None = None,
    kv_bytes: int | None = None,
    max_sequences: int,
    free_bytes: int | None = None,
) -> PoolSize:
    """Decide once, and log why. By default a quarter of the free memory, but never more than could be used.

    Raises UsageError when both sizes are given, or one that holds no block.
    """
    size = explicit_pool_size(kv, kv_blocks, kv_bytes) or _automatic(
        model, kv, max_sequences, free_memory_bytes() if free_bytes is None else free_bytes
    )
    _LOG.info("KV pool: %d blocks of %d tokens (%s)", size.num_blocks, kv.block_tokens, size.reason)
    return size


def free_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory that may still be taken: what the system has available, or less where a control group (v2) limits it."""
    free = _available_bytes()
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:  # no control groups here
        return free
    cache = int(stat.get("file", 0))  # counted as used, but given up when memory is asked for: mapped weights are here
    return free if limit == "max" else max(0, min(free, int(limit) - used + cache))


def _available_bytes() -> int:
    if _MEMINFO.is_file():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def explicit_pool_size(kv: KVGeometry, kv_blocks: int | None, kv_bytes: int | None) -> PoolSize | None:
    """What the caller asked for; None where that is nothing. UsageError as `resolve_pool_size`."""
    if kv_blocks is not None and kv_bytes is not None:
        raise UsageError(f"kv_blocks is {kv_blocks} and kv_bytes is {kv_bytes}; give one of them, or none")
    if kv_blocks is not None:
        if kv_blocks < 1:
            raise UsageError(f"kv_blocks is {kv_blocks}; the pool needs at least 1 block of {kv.block_tokens} tokens")
        return PoolSize(kv_blocks, "kv_blocks was given")
    if kv_bytes is None:
        return None
    if kv_bytes < kv.block_bytes:
        raise UsageError(f"kv_bytes is {kv_bytes}; one block takes {kv.block_bytes} bytes, and at least one is needed")
    return PoolSize(kv_bytes // kv.block_bytes, f"kv_bytes={kv_bytes} at {kv.block_bytes} bytes each")


def _automatic(model: ModelFacts, kv: KVGeometry, max_sequences: int, free_bytes: int) -> PoolSize:
    per_context = -(-model.context_tokens // kv.block_tokens)
    usable = per_context * max_sequences
    fitting = int(free_bytes * _MEMORY_SHARE) // kv.block_bytes
    if usable <= fitting:
        return PoolSize(usable, f"{max_sequences} sequences of the model's {model.context_tokens} tokens")
    share = _MEMORY_SHARE
    if fitting < per_context:
        share = _MOST_MEMORY_SHARE
        fitting = min(per_context, int(free_bytes * share) // kv.block_bytes)
    reason = f"up to {share:.0%} of {format_bytes(free_bytes)} free memory"
    if fitting < per_context:
        reason += f"; less than one context of {model.context_tokens} tokens, so long requests will be refused"
    return PoolSize(max(1, fitting), reason)
