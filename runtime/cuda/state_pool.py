"""The pool of side states in device memory: [slots, state bytes], laid out as the geometry's `state` says.

Kernels read and replace the states of a step's sequences (kernels/recurrence.py, short_convolution.py). Copies are
queued on the compute stream, so that a snapshot sees the step before it, and a step the state that was copied back.
"""

from typing import ClassVar

from ingot.artifact import KVGeometry
from ingot.errors import EngineError
from ingot.runtime.cuda.driver.device import Device, Stream
from ingot.runtime.options import EngineOptions, explicit_pool_size, resolve_state_slots


class DeviceStates:
    """Memory for `num_blocks` slots, zeroed: what no kernel writes is the same in every slot.

    Raises what `Device.allocate` does.
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
    given = explicit_pool_size(geometry, options.kv_blocks, options.kv_bytes)
    blocks = given.num_blocks if given else free // geometry.block_bytes
    slots = resolve_state_slots(geometry, options, num_blocks=blocks, max_sequences=max_sequences, free_bytes=free)
    return DeviceStates(device, stream, geometry, max(1, slots)) if geometry.state_bytes else None
