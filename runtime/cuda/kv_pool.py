"""The KV pool in device memory, and how many blocks it gets: all that is free when everything else is allocated.

The pool is [blocks, block_bytes]; a block holds all layers and their scales in one run of bytes.
"""

import logging
from typing import ClassVar

import numpy as np

from ingot.artifact import KVGeometry, ModelFacts
from ingot.artifact.kv_geometry import KeyOrder
from ingot.errors import EngineError
from ingot.runtime.cuda.driver.device import Device, Stream
from ingot.runtime.options import PoolSize, explicit_pool_size
from ingot.sizes import format_bytes

_log = logging.getLogger(__name__)

_RESERVE_BYTES = 256 * 2**20  # what the driver allocates later: local memory of kernels, growing heaps
_RESERVE_SHARE = 0.01  # of the GPU's memory: fragments too small for a block, and other processes
_NODE_BYTES = 16 * 1024  # of a kernel in a captured graph, rounded up generously


class DevicePool:
    """Memory for `num_blocks` blocks, zeroed. Operations on blocks are queued on the compute stream."""

    key_order: ClassVar[KeyOrder] = "by-token"
    things: ClassVar[str] = "KV blocks"

    def __init__(self, device: Device, stream: Stream, geometry: KVGeometry, num_blocks: int) -> None:
        self.geometry, self.num_blocks = geometry, num_blocks
        self._device, self._stream = device, stream
        what = f"a KV pool of {num_blocks} blocks ({num_blocks * geometry.block_tokens} tokens)"
        self.address = device.allocate(self.num_bytes, what)
        device.clear(self.address, self.num_bytes, stream)
        self._staging = device.allocate_pinned(geometry.block_bytes, "staging of a block")

    @property
    def block_bytes(self) -> int:
        """Size of a block."""
        return self.geometry.block_bytes

    @property
    def num_bytes(self) -> int:
        """Size of the pool."""
        return self.num_blocks * self.geometry.block_bytes

    def block(self, block: int) -> int:
        """Address of a block."""
        if not 0 <= block < self.num_blocks:
            raise EngineError(f"block {block} does not exist: the pool has {self.num_blocks}")
        return self.address + block * self.geometry.block_bytes

    def copy_block(self, source: int, target: int) -> None:
        """Copy all of block `source` over block `target`."""
        self._device.copy(self.block(target), self.block(source), self.geometry.block_bytes, self._stream)

    def read_block(self, block: int) -> bytes:
        """Return a block's content. Waits for all queued work."""
        self._device.copy_out(self._staging, self.block(block), self._stream)
        self._device.synchronize(f"reading block {block}")
        return self._staging.tobytes()

    def write_block(self, block: int, content: bytes) -> None:
        """Set a block's content. Waits for all queued work."""
        if len(content) != self.geometry.block_bytes:
            raise EngineError(
                f"block {block} takes {self.geometry.block_bytes} bytes, not {len(content)}: the content is of another "
                "model or KV precision"
            )
        self._staging[:] = np.frombuffer(content, np.uint8)
        self._device.copy_in(self.block(block), self._staging, self._stream)
        self._device.synchronize(f"writing block {block}")

    def __str__(self) -> str:
        return f"{self.num_blocks} blocks of {self.geometry.block_tokens} tokens, {format_bytes(self.num_bytes)}"


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
    """Choose the number of blocks once everything else is allocated, and log the reason.

    graph_nodes    kernels in all graphs that may be captured later

    UsageError as `resolve_pool_size`; EngineError when not a single block fits.
    """
    size = explicit_pool_size(kv, kv_blocks, kv_bytes) or _fitting(model, kv, device, max_sequences, graph_nodes)
    _log.info("KV pool: %d blocks of %d tokens (%s)", size.num_blocks, kv.block_tokens, size.reason)
    return size


def _fitting(model: ModelFacts, kv: KVGeometry, device: Device, max_sequences: int, graph_nodes: int) -> PoolSize:
    free = device.free_bytes()
    reserve = _RESERVE_BYTES + int(device.total_bytes * _RESERVE_SHARE) + graph_nodes * _NODE_BYTES
    per_context = -(-model.context_tokens // kv.block_tokens)
    usable, fitting = per_context * max_sequences, max(0, free - reserve) // kv.block_bytes
    if usable <= fitting:
        reason = (
            f"{max_sequences} sequences of the model's {model.context_tokens} tokens, {format_bytes(free)} were free"
        )
        return PoolSize(usable, reason)
    total, reserved = format_bytes(device.total_bytes), format_bytes(reserve)
    kept = f"{format_bytes(free)} free of {total}, {reserved} kept for graphs and driver"
    if not fitting:
        raise EngineError(
            f"no KV block of {format_bytes(kv.block_bytes)} fits on {device.name}: {kept}; build with fewer "
            "gpu.decode_rows, a smaller max_batch_tokens or fewer bits, end other processes on the GPU, or set "
            "kv_blocks to use the reserve as well"
        )
    if fitting < per_context:
        kept += f"; less than one context of {model.context_tokens} tokens, so long requests will be refused"
    return PoolSize(fitting, kept)
