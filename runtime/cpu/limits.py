"""Sizes of an executor on the CPU: from the caller's options, the artifact's defaults and the free memory."""

from typing import TypedDict

from ingot.artifact import Artifact
from ingot.runtime.options import EngineOptions, resolve_pool_size, resolve_state_slots

MAX_SEQUENCES = 64  # default limit of one step


class ExecutorLimits(TypedDict):
    """Arguments of the executors; None threads: the executor's own default."""

    num_blocks: int
    num_states: int
    max_batch_tokens: int
    max_sequences: int
    num_threads: int | None


def resolve_limits(artifact: Artifact, options: EngineOptions) -> ExecutorLimits:
    """Return the sizes; raises what `resolve_pool_size` and `resolve_state_slots` do."""
    manifest, max_sequences = artifact.manifest, options.max_sequences or MAX_SEQUENCES
    pool = resolve_pool_size(
        manifest.model,
        manifest.kv,
        kv_blocks=options.kv_blocks,
        kv_bytes=options.kv_bytes,
        max_sequences=max_sequences,
    )
    return ExecutorLimits(
        num_blocks=pool.num_blocks,
        num_states=resolve_state_slots(manifest.kv, options, num_blocks=pool.num_blocks, max_sequences=max_sequences),
        max_batch_tokens=options.max_batch_tokens or manifest.max_batch_tokens,
        max_sequences=max_sequences,
        num_threads=options.num_threads,
    )
