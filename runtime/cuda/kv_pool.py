"""The KV pool in device memory, and how many blocks it gets: all that is free when everything else is allocated.

The pool is [blocks, block_bytes]; a block holds all layers and their scales in one run of bytes. Models with side state
have a pool of it too, [slots, state bytes], laid out as the geometry's `state` says: kernels read and replace the
states of a step's sequences (kernels/recurrence.py, short_convolution.py). Copies are queued on the compute stream, so
that a snapshot sees the step before it, and a step the state that was copied back.
"""

import logging
import math
from typing import ClassVar, Protocol

import numpy as np

from ingot.artifact import KVGeometry, ModelFacts
from ingot.artifact.kv_geometry import KeyOrder
from ingot.errors import EngineError
from ingot.runtime.cuda.driver.device import Device, Stream
from ingot.runtime.options import EngineOptions, PoolSize, explicit_pool_size, resolve_state_slots
from ingot.runtime.slow_part import NO_SLOW_PART, SlowPart
from ingot.sizes import format_bytes

_log = logging.getLogger(__name__)

_RESERVE_BYTES = 256 * 2**20  # what the driver allocates later: local memory of kernels, growing heaps
_RESERVE_SHARE = 0.01  # of the GPU's memory: fragments too small for a block, and other processes
_SAMPLE_BYTES = 64 * 2**20
"""Bytes of the slow part that are read to measure its speed."""
_NODE_BYTES = 16 * 1024  # of a kernel in a captured graph, rounded up generously


class DevicePool:
    """Memory for `num_fast` blocks, zeroed, and for those of a slow part: host memory at the addresses after them.

    Operations on blocks are queued on the compute stream. Kernels read the slow part in place, over the link.
    """

    key_order: ClassVar[KeyOrder] = "by-token"
    things: ClassVar[str] = "KV blocks"

    def __init__(
        self, device: Device, stream: Stream, geometry: KVGeometry, num_fast: int, slow: SlowPart = NO_SLOW_PART
    ) -> None:
        self.geometry, self.num_fast, self.num_blocks = geometry, num_fast, num_fast + slow.num_blocks
        self._device, self._stream = device, stream
        self.slow_bytes_per_second = math.inf
        what = f"a KV pool of {self.num_blocks} blocks ({self.num_blocks * geometry.block_tokens} tokens)"
        fast_bytes, slow_bytes = (count * geometry.block_bytes for count in (num_fast, slow.num_blocks))
        if slow_bytes:
            self.address = device.allocate_range(fast_bytes, slow_bytes, what)
            self.slow_bytes_per_second = self._read_speed(min(fast_bytes, slow_bytes, _SAMPLE_BYTES))
        else:
            self.address = device.allocate(fast_bytes, what)
        device.clear(self.address, self.num_bytes, stream)
        self._staging = device.allocate_pinned(geometry.block_bytes, "staging of a block")

    def _read_speed(self, size: int) -> float:
        """Bytes a second that the device reads from the end of the slow part, the second time of two."""
        first, last = (self._device.make_event(timed=True) for _ in range(2))
        source = self.address + self.num_bytes - size
        self._device.copy(self.address, source, size, self._stream)
        self._device.record(first, self._stream)
        self._device.copy(self.address, source, size, self._stream)
        self._device.record(last, self._stream)
        self._device.synchronize("measuring the slow part of the KV pool")
        return size / max(self._device.seconds_between(first, last), 1e-9)

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


class DeviceMemory(Protocol):
    """The memory of a GPU, or of one that is planned for."""

    @property
    def name(self) -> str: ...

    @property
    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int: ...


def device_pool_size(
    model: ModelFacts,
    kv: KVGeometry,
    device: DeviceMemory,
    *,
    kv_blocks: int | None,
    kv_bytes: int | str | None,
    max_sequences: int,
    graph_nodes: int,
) -> PoolSize:
    """Choose the number of blocks once everything else is allocated, and log the reason.

    graph_nodes    kernels in all graphs that may be captured later

    UsageError as `resolve_pool_size`; EngineError when not a single block fits.
    """
    given = explicit_pool_size(kv, kv_blocks, kv_bytes, device.free_bytes)
    size = given or _fitting(model, kv, device, max_sequences, graph_nodes)
    _log.info("KV pool: %d blocks of %d tokens (%s)", size.num_blocks, kv.block_tokens, size.reason)
    return size


def _fitting(model: ModelFacts, kv: KVGeometry, device: DeviceMemory, max_sequences: int, graph_nodes: int) -> PoolSize:
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


class DeviceStates:
    """Memory for `num_blocks` slots, zeroed: what no kernel writes is the same in every slot.

    Raises the errors of `Device.allocate`.
    """

    things: ClassVar[str] = "side states"

    def __init__(self, device: Device, stream: Stream, geometry: KVGeometry, num_slots: int) -> None:
        assert geometry.state_bytes > 0
        assert num_slots > 0
        self.num_blocks, self.block_bytes = num_slots, geometry.state_bytes
        self._device, self._stream = device, stream
        size = num_slots * geometry.state_bytes
        self.address = device.allocate(size, f"{num_slots} side states (state_slots)")
        device.clear(self.address, size, stream)

    def block(self, block: int) -> int:
        """Address of a slot."""
        if not 0 <= block < self.num_blocks:
            raise EngineError(f"state slot {block} does not exist: the pool has {self.num_blocks}")
        return self.address + block * self.block_bytes

    def copy(self, source: int, target: int) -> None:
        """Copy one slot onto another."""
        self._device.copy(self.block(target), self.block(source), self.block_bytes, self._stream)


def make_states(
    geometry: KVGeometry, device: Device, stream: Stream, options: EngineOptions, max_sequences: int
) -> DeviceStates | None:
    """The pool of a model with side state, made before the KV pool takes the rest of the memory; None for others."""
    free = device.free_bytes()
    given = explicit_pool_size(geometry, options.kv_blocks, options.kv_bytes, lambda: free)
    blocks = given.num_blocks if given else free // geometry.block_bytes
    slots = resolve_state_slots(geometry, options, num_blocks=blocks, max_sequences=max_sequences, free_bytes=free)
    return DeviceStates(device, stream, geometry, max(1, slots)) if geometry.state_bytes else None
