"""Sizes of an executor on the CPU: from the caller's options, the artifact's defaults and the free memory."""

import os
from pathlib import Path
from typing import TypedDict

from ingot.artifact import Artifact, KVGeometry, ModelFacts
from ingot.runtime.options import EngineOptions, free_memory_bytes, resolve_pool_size, resolve_state_slots
from ingot.runtime.slow_part import NO_SLOW_PART, SlowPart, offload_folder, resolve_slow_part

MAX_SEQUENCES = 64  # default limit of one step


class ExecutorLimits(TypedDict):
    """Arguments of the executors; None threads: the executor's own default."""

    num_blocks: int
    slow: SlowPart
    num_states: int
    max_batch_tokens: int
    max_sequences: int
    num_threads: int | None


def resolve_limits(artifact: Artifact, options: EngineOptions) -> ExecutorLimits:
    """Return the sizes; raises as `resolve_pool_size`, `resolve_slow_part` and `resolve_state_slots`."""
    manifest = artifact.manifest
    limits = limits_in_memory(manifest.model, manifest.kv, manifest.max_batch_tokens, options)
    limits["slow"] = resolve_slow_part(
        manifest.model,
        manifest.kv,
        limits["num_blocks"],
        kv_offload=options.kv_offload,
        kv_offload_to=options.kv_offload_to,
        folder=offload_folder(_path(options.kv_offload_path), _path(options.kv_disk_path)),
        free_bytes=free_memory_bytes,
        is_size_given=options.kv_blocks is not None or isinstance(options.kv_bytes, int),
    )
    return limits


def _path(path: str | os.PathLike[str] | None) -> Path | None:
    return None if path is None else Path(path)


def limits_in_memory(
    model: ModelFacts, kv: KVGeometry, max_batch_tokens: int, options: EngineOptions, free_bytes: int | None = None
) -> ExecutorLimits:
    """Return the sizes of an executor with so much free memory, without a slow part; None: this machine's."""
    max_sequences = options.max_sequences or MAX_SEQUENCES
    pool = resolve_pool_size(
        model,
        kv,
        kv_blocks=options.kv_blocks,
        kv_bytes=options.kv_bytes,
        max_sequences=max_sequences,
        free_bytes=free_bytes,
    )
    return ExecutorLimits(
        num_blocks=pool.num_blocks,
        slow=NO_SLOW_PART,
        num_states=resolve_state_slots(
            kv, options, num_blocks=pool.num_blocks, max_sequences=max_sequences, free_bytes=free_bytes
        ),
        max_batch_tokens=options.max_batch_tokens or max_batch_tokens,
        max_sequences=max_sequences,
        num_threads=options.num_threads,
    )
