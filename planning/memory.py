"""Memory of a model that is served: weights, KV, arena, side state, and how many sequences and which context fit.

The KV pool's size is the engine's own choice: the functions that size it when an artifact is loaded are called with the
memory that would be free.
"""

from dataclasses import dataclass, replace
from typing import Any

from ingot.artifact import KVGeometry, ModelFacts
from ingot.errors import EngineError
from ingot.planning.model_shape import ModelShape
from ingot.runtime.cpu.limits import limits_in_memory
from ingot.runtime.cuda.kv_pool import device_pool_size
from ingot.runtime.options import EngineOptions, resolve_state_slots
from ingot.sizes import ceil_div, format_bytes

_CONTEXT_BYTES = 500 * 10**6
"""Of a CUDA context with its loaded kernels; the runtime measures what is free and needs no such figure."""


@dataclass(frozen=True)
class DevicePart:
    """Bytes of a device's part of a model that is placed on several, for one sequence of the whole context."""

    name: str
    weights: int
    arena: int
    kv: int

    @classmethod
    def of(cls, name: str, weights: int, arena: int, kv: KVGeometry, context_tokens: int) -> "DevicePart":
        """The part of a device whose layers have such blocks, and such side state."""
        blocks = ceil_div(context_tokens, kv.block_tokens)
        return cls(name, weights, arena, blocks * kv.block_bytes + kv.state_bytes)

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self.weights + self.arena + self.kv

    def as_json(self) -> dict[str, Any]:
        """Its name and figures."""
        return {"device": self.name, "weight_bytes": self.weights, "arena_bytes": self.arena, "kv_bytes": self.kv}

    def __str__(self) -> str:
        """Return the sum and its terms in words."""
        parts = f"weights {format_bytes(self.weights)}, arena {format_bytes(self.arena)}, KV {format_bytes(self.kv)}"
        return f"{self.name} needs {format_bytes(self.total)} ({parts})"


@dataclass(frozen=True)
class ProgramMemory:
    """Sizes of a program that do not depend on the machine.

    weight_bytes        bytes of the weights' file
    arena_bytes         bytes of the values of a step with the most tokens
    max_batch_tokens    those most tokens
    max_sequences       most sequences of a step
    graph_nodes         kernels in the graphs that a GPU may capture; 0 on a CPU
    draft_bytes         weights of a draft model and of adapters
    pinned_bytes        bytes of the file of weights in host memory that steps copy to the GPU
    parts               the devices that the program is placed on; none for a single one
    """

    weight_bytes: int
    arena_bytes: int
    max_batch_tokens: int
    max_sequences: int
    on_cpu: bool
    graph_nodes: int = 0
    draft_bytes: int = 0
    pinned_bytes: int = 0
    parts: tuple[DevicePart, ...] = ()


@dataclass(frozen=True)
class MemoryPlan:
    """Where the memory of one device goes. All sizes in bytes.

    total          memory of the device
    num_blocks     blocks of the KV pool, as the engine would choose them; 0 where not one fits
    reason         the engine's reason for the number, or why nothing fits
    state_slots    slots for side state
    """

    total: int
    weights: int
    arena: int
    context: int
    other: int
    num_blocks: int
    block_bytes: int
    block_tokens: int
    state_slots: int
    state_bytes: int
    reason: str

    @property
    def pool(self) -> int:
        """Bytes of the KV pool."""
        return self.num_blocks * self.block_bytes

    @property
    def states(self) -> int:
        """Bytes of all side states."""
        return self.state_slots * self.state_bytes

    @property
    def pool_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.num_blocks * self.block_tokens

    @property
    def used(self) -> int:
        """Bytes of everything, the whole pool included."""
        return self.weights + self.arena + self.context + self.other + self.pool + self.states

    @property
    def fits(self) -> bool:
        """Report if the device can serve a sequence."""
        return self.num_blocks > 0 and self.used <= self.total

    def sequences(self, tokens: int) -> int:
        """Sequences of so many tokens that fit at the same time."""
        by_blocks = self.num_blocks // -(-tokens // self.block_tokens)
        return min(by_blocks, self.state_slots) if self.state_bytes else by_blocks

    def as_json(self) -> dict[str, Any]:
        """All figures."""
        names = ("total", "weights", "arena", "context", "other", "pool", "states", "used")
        return {
            **{f"{name}_bytes": getattr(self, name) for name in names},
            "num_blocks": self.num_blocks,
            "block_bytes": self.block_bytes,
            "block_tokens": self.block_tokens,
            "pool_tokens": self.pool_tokens,
            "state_slots": self.state_slots,
            "fits": self.fits,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class _FreeMemory:
    """A device's memory as its engine would see it."""

    name: str
    total_bytes: int
    free: int

    def free_bytes(self) -> int:
        return self.free


def plan_memory(
    program: ProgramMemory,
    model: ModelFacts,
    shape: ModelShape,
    memory_bytes: int,
    name: str,
    options: EngineOptions | None = None,
) -> MemoryPlan:
    """Divide a device's memory as the engine does when it loads the program; the GPU's, where the host has a part."""
    kv = shape.kv
    if program.parts and not program.on_cpu:
        of_gpu = program.parts[0]
        program = replace(program, weight_bytes=of_gpu.weights, arena_bytes=of_gpu.arena)
    context = 0 if program.on_cpu else _CONTEXT_BYTES
    free = max(0, memory_bytes - program.weight_bytes - program.arena_bytes - program.draft_bytes - context)
    place = _FreeMemory(name, memory_bytes, free)
    size = _on_cpu if program.on_cpu else _on_gpu
    blocks, slots, reason = size(program, model, kv, place, options or EngineOptions())
    return MemoryPlan(
        total=memory_bytes,
        weights=program.weight_bytes,
        arena=program.arena_bytes,
        context=context,
        other=program.draft_bytes,
        num_blocks=blocks,
        block_bytes=kv.block_bytes,
        block_tokens=kv.block_tokens,
        state_slots=slots,
        state_bytes=kv.state_bytes,
        reason=reason,
    )


_Sizes = tuple[int, int, str]


def _on_cpu(
    program: ProgramMemory, model: ModelFacts, kv: KVGeometry, place: _FreeMemory, given: EngineOptions
) -> _Sizes:
    """The engine sizes its pool by the memory that is free before weights are mapped."""
    if place.free < kv.block_bytes:
        return 0, 0, f"weights and arena leave {place.free:,} bytes of {place.name}, and a block has {kv.block_bytes:,}"
    limits = limits_in_memory(model, kv, program.max_batch_tokens, given, place.total_bytes)
    return limits["num_blocks"], limits["num_states"], "at most a quarter of the memory, or half for one whole context"


def _on_gpu(
    program: ProgramMemory, model: ModelFacts, kv: KVGeometry, place: _FreeMemory, given: EngineOptions
) -> _Sizes:
    """The pool comes last and takes what is free."""
    slots, most = 0, program.max_sequences
    if kv.state_bytes:
        blocks = place.free // kv.block_bytes
        slots = resolve_state_slots(kv, given, num_blocks=blocks, max_sequences=most, free_bytes=place.free)
    left = replace(place, free=max(0, place.free - slots * kv.state_bytes))
    try:
        size = device_pool_size(
            model,
            kv,
            left,
            kv_blocks=given.kv_blocks,
            kv_bytes=given.kv_bytes,
            max_sequences=most,
            graph_nodes=program.graph_nodes,
        )
    except EngineError as error:
        return 0, slots, str(error)
    return size.num_blocks, slots, size.reason


def fitting_sequences(shape: ModelShape, memory_bytes: float, tokens: int, devices: int = 1) -> float:
    """Sequences of so many tokens whose KV fits next to the weights on devices that share every layer.

    A KV head is on as many devices as there are more of them than heads.
    """
    kv_heads = max(layer.num_kv_heads for layer in shape.kv.layers)
    copies = max(1.0, devices / kv_heads)
    free = memory_bytes * devices - shape.matmul_bytes - shape.embedding_bytes
    return max(0.0, free) / (sequence_bytes(shape, tokens) * copies)


def sequence_bytes(shape: ModelShape, tokens: int) -> int:
    """Bytes that a sequence of so many tokens holds: whole blocks, and its side state."""
    return shape.kv_bytes(tokens) + shape.kv.state_bytes
