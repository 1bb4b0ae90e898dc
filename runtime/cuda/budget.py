"""How many KV blocks a card gets: all that is free once weights, arena and logits lie there, but for a reserve."""

import logging

from ingot.artifact import KVGeometry, ModelFacts
from ingot.errors import EngineError
from ingot.runtime.cuda.device import Device, mebibytes
from ingot.runtime.pool_size import PoolSize, explicit_pool_size

_LOG = logging.getLogger(__name__)
_RESERVE_BYTES = 256 * 2**20  # what the driver takes as it goes: local memory of kernels, growing heaps
_RESERVE_SHARE = 0.01  # of the card: pieces that no block fits in, and others on the card
_NODE_BYTES = 16 * 1024  # of a kernel in a captured graph, generously


def device_pool_size(
    model: ModelFacts,
    kv: KVGeometry,
    device: Device,
    *,
    kv_blocks: int | None,
    kv_bytes: int | None,
    max_sequences: int,
    graph_nodes: int,
) -> PoolSize:
    """Decide once, when everything else is allocated, and log why.

    graph_nodes    kernels in all graphs that may be captured later

    UsageError as `resolve_pool_size`; EngineError where not one block fits.
    """
    size = explicit_pool_size(kv, kv_blocks, kv_bytes) or _fitting(model, kv, device, max_sequences, graph_nodes)
    _LOG.info("KV pool: %d blocks of %d tokens (%s)", size.num_blocks, kv.block_tokens, size.reason)
    return size


def _fitting(model: ModelFacts, kv: KVGeometry, device: Device, max_sequences: int, graph_nodes: int) -> PoolSize:
    free = device.free_bytes()
    reserve = _RESERVE_BYTES + int(device.total_bytes * _RESERVE_SHARE) + graph_nodes * _NODE_BYTES
    per_context = -(-model.context_tokens // kv.block_tokens)
    usable, fitting = per_context * max_sequences, max(0, free - reserve) // kv.block_bytes
    if usable <= fitting:
        reason = f"{max_sequences} sequences of the model's {model.context_tokens} tokens, {mebibytes(free)} were free"
        return PoolSize(usable, reason)
    kept = f"{mebibytes(free)} free of {mebibytes(device.total_bytes)}, {mebibytes(reserve)} kept for graphs and driver"
    if not fitting:
        raise EngineError(
            f"no KV block of {mebibytes(kv.block_bytes)} fits on {device.name}: {kept}; build with fewer "
            "gpu.decode_rows, a smaller max_batch_tokens or fewer bits, end what else runs on the card, or give "
            "kv_blocks to go below the reserve"
        )
    if fitting < per_context:
        kept += f"; less than one context of {model.context_tokens} tokens, so long requests will be refused"
    return PoolSize(fitting, kept)
