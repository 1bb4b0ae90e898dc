"""The KV pool in device memory: [blocks, block_bytes], a block with all its layers and scales in one piece."""

import numpy as np

from ingot.artifact import KVGeometry
from ingot.errors import EngineError
from ingot.runtime.cuda.device import Device, Stream, mebibytes


class DevicePool:
    """Memory for `num_blocks` blocks, zeroed. What is done to blocks is queued on the compute stream."""

    def __init__(self, device: Device, stream: Stream, geometry: KVGeometry, num_blocks: int) -> None:
        self.geometry, self.num_blocks = geometry, num_blocks
        self._device, self._stream = device, stream
        what = f"a KV pool of {num_blocks} blocks ({num_blocks * geometry.block_tokens} tokens)"
        self.address = device.allocate(self.num_bytes, what)
        device.clear(self.address, self.num_bytes, stream)
        self._passage = device.allocate_pinned(geometry.block_bytes, "a block on its way")

    @property
    def num_bytes(self) -> int:
        """Size of the pool."""
        return self.num_blocks * self.geometry.block_bytes

    def block(self, block: int) -> int:
        """Address of a block."""
        if not 0 <= block < self.num_blocks:
            raise EngineError(f"there is no block {block}: the pool has {self.num_blocks}")
        return self.address + block * self.geometry.block_bytes

    def copy_block(self, source: int, target: int) -> None:
        """Copy all of block `source` over block `target`."""
        self._device.copy(self.block(target), self.block(source), self.geometry.block_bytes, self._stream)

    def read_block(self, block: int) -> bytes:
        """A block's content. Waits for what is queued."""
        self._device.copy_out(self._passage, self.block(block), self._stream)
        self._device.synchronize(f"reading block {block}")
        return self._passage.tobytes()

    def write_block(self, block: int, content: bytes) -> None:
        """Set a block's content. Waits for what is queued."""
        if len(content) != self.geometry.block_bytes:
            raise EngineError(
                f"block {block} takes {self.geometry.block_bytes} bytes, not {len(content)}: the content is of another "
                "model or KV precision"
            )
        self._passage[:] = np.frombuffer(content, np.uint8)
        self._device.copy_in(self.block(block), self._passage, self._stream)
        self._device.synchronize(f"writing block {block}")

    def __str__(self) -> str:
        return f"{self.num_blocks} blocks of {self.geometry.block_tokens} tokens, {mebibytes(self.num_bytes)}"
