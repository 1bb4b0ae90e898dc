"""The pool of side states on the CPU: bytes [slots, state bytes], laid out as the geometry's `state` says.

The operating system allocates pages on their first write: slots that no sequence used take no memory.
"""

import mmap

import numpy as np
from numpy.typing import NDArray

from ingot.artifact import KVGeometry
from ingot.artifact.programs.recurrent import RecurrentFacts, kind_of
from ingot.runtime.cpu.kv_pool import map_zeros
from ingot.runtime.forward_batch import FloatArray

_FLOAT_BYTES = 4


class StatePool:
    """Memory for the side state of `num_slots` sequences and snapshots, zeroed, page-aligned.

    blocks   the slots, uint8 [slots, state bytes]; tiers move them as they do blocks of the KV pool
    shared   the memory, where processes share it

    Raises EngineError when the machine has too little memory.
    """

    def __init__(self, geometry: KVGeometry, num_slots: int, shared: mmap.mmap | None = None) -> None:
        assert geometry.state_bytes > 0
        assert num_slots > 0
        self.geometry, self.num_blocks = geometry, num_slots
        what = f"a pool of {num_slots} side states"
        memory = shared or map_zeros(self.num_bytes, what, "set fewer (state_slots)")
        self.blocks: NDArray[np.uint8] = np.frombuffer(memory, np.uint8).reshape(num_slots, geometry.state_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of address space."""
        return self.num_blocks * self.geometry.state_bytes

    @property
    def memory_bytes(self) -> int:
        """The same: all of it is memory."""
        return self.num_bytes

    @property
    def stride(self) -> int:
        """Floats from one slot to the next."""
        return self.geometry.state_bytes // _FLOAT_BYTES

    def part(self, facts: RecurrentFacts) -> FloatArray:
        """A layer's states in all slots, [slots, floats]; of no floats for a convolution of one tap."""
        own = (facts.layer, kind_of(facts))
        part = next((part for part in self.geometry.state if (part.layer, part.kind) == own), None)
        if part is None:
            return np.zeros((self.num_blocks, 0), np.float32)
        return self.blocks[:, part.offset : part.end].view(np.float32)

    def copy(self, source: int, target: int) -> None:
        """Copy one slot onto another."""
        self.blocks[target] = self.blocks[source]


def make_states(geometry: KVGeometry, num_slots: int) -> StatePool | None:
    """The pool of a model with side state, which needs a slot at least; None for other models."""
    return StatePool(geometry, max(1, num_slots)) if geometry.state_bytes else None
