"""A CPU program in stages: each device's part is a launch program of its own, and values are copied between them.

The operations are those of the whole program, in its order, so logits have the same bits however it is divided.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ingot.artifact.kv_geometry import KVGeometry
from ingot.artifact.programs.stages import LOGITS, CutProgram, DeviceProgram, StageRun
from ingot.artifact.safetensors import MappedTensors
from ingot.runtime.adapters import Adapter
from ingot.runtime.cpu.host_blocks import DividedPool, PoolPart
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.native.program import NativeProgram
from ingot.runtime.cpu.state_pool import StatePool, make_states
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.slow_part import NO_SLOW_PART, SlowPart


@dataclass(frozen=True)
class _Copy:
    """A value that crosses: rows of its buffer in both arenas, [max_batch_tokens, columns]."""

    source: FloatArray
    target: FloatArray
    of_logits: bool


class StagedProgram:
    """The stages of a program over one pool of KV blocks and one of side states, both divided among the devices.

    pool, states   the divided pools; None without side state

    Its methods are those of NativeProgram that an executor calls, with the same errors.
    """

    def __init__(
        self,
        cut: CutProgram,
        weights: MappedTensors,
        kv: KVGeometry,
        *,
        num_blocks: int,
        slow: SlowPart = NO_SLOW_PART,
        num_states: int,
        max_batch_tokens: int,
        num_threads: int,
        isa: str | None = None,
    ) -> None:
        self._cut = cut
        pools = [_pool_of(device, num_blocks, slow) for device in cut.devices]
        states = [make_states(device.program.kv, num_states) for device in cut.devices]
        self._parts = [
            NativeProgram(
                device.program,
                weights,
                pool,
                state,
                max_batch_tokens=max_batch_tokens,
                num_threads=num_threads,
                isa=isa,
                last_mixing=device.last_mixing,
            )
            for device, pool, state in zip(cut.devices, pools, states, strict=True)
        ]
        self.pool, self.states = divided_pools(cut, kv, pools, states)
        self._copies = [self._copies_of(run) for run in cut.runs]
        self._is_computing = False

    def step(self, batch: ForwardBatch) -> FloatArray:
        """Run a step, stage after stage; return logits [R, vocabulary], valid until the next one."""
        self._is_computing = True
        try:
            return self._step(batch)
        finally:
            self._is_computing = False

    def _step(self, batch: ForwardBatch) -> FloatArray:
        tokens, rows = batch.num_tokens, len(batch.logits_indices)
        logits = np.empty((0, self._cut.whole.vocab_size), np.float32)
        for part in self._parts:
            part.load_batch(batch)
        for run, copies in zip(self._cut.runs, self._copies, strict=True):
            program = self._cut.devices[run.device].program
            if not rows and run.operations.start >= program.head_start:
                continue
            for copy in copies:
                count = rows if copy.of_logits else tokens
                copy.target[:count] = copy.source[:count]
            made = self._parts[run.device].run(run.operations)
            logits = made if rows and LOGITS in program.buffers else logits
        return logits

    def _copies_of(self, run: StageRun) -> list[_Copy]:
        buffers = self._cut.devices[run.device].program.buffers
        return [
            _Copy(
                self._parts[one.source].rows_of(one.buffer),
                self._parts[run.device].rows_of(one.buffer),
                buffers[one.buffer].rows == "logits",
            )
            for one in run.crossings
        ]

    def load_adapter(self, slot: int, adapter: Adapter, slots: int) -> None:
        """Let sequences have an adapter, each device its layers; see NativeProgram. The slot is free after an error."""
        try:
            for part, of_part in zip(self._parts, divided_adapter(self._cut, adapter), strict=True):
                part.load_adapter(slot, of_part, slots)
        except BaseException:
            self.unload_adapter(slot)
            raise

    def unload_adapter(self, slot: int) -> None:
        """Free a slot's memory; no later step may name the slot. Nothing for a free one."""
        for part in self._parts:
            part.unload_adapter(slot)

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the matrices of the adapters in slots."""
        return sum(part.adapter_bytes for part in self._parts)

    @property
    def isa(self) -> str:
        """Instruction set of the kernels."""
        return self._parts[0].isa

    @property
    def is_computing(self) -> bool:
        """Report whether a step is being computed. For any thread."""
        return self._is_computing

    def close(self) -> None:
        """Free the memory that steps use. Idempotent; logits stay valid."""
        for part in self._parts:
            part.close()


def _pool_of(device: DeviceProgram, num_blocks: int, slow: SlowPart) -> KVPool | None:
    return KVPool(device.program.kv, num_blocks, slow) if device.layers else None


def divided_pools(
    cut: CutProgram, kv: KVGeometry, pools: Sequence[KVPool | None], states: Sequence[StatePool | None]
) -> tuple[DividedPool, DividedPool | None]:
    """Join the pools of the devices, None for a device without: that of KV blocks, and that of side states if any."""
    blocks = [
        PoolPart(pool.blocks, device.block_runs(kv), pool.memory_bytes, pool.slow_bytes_per_second)
        for device, pool in zip(cut.devices, pools, strict=True)
        if pool is not None
    ]
    found = [PoolPart(one.blocks, kv.state_runs(one.geometry), one.memory_bytes) for one in states if one is not None]
    of_states = DividedPool("side states", found, kv.state_bytes) if found else None
    return DividedPool("KV blocks", blocks, kv.block_bytes), of_states


def divided_adapter(cut: CutProgram, adapter: Adapter) -> list[Adapter]:
    """An adapter's changes by device. Layers that no device has go to the first program, which refuses them by name."""
    changes = dict(adapter.changes)
    own = [
        {one.node: changes.pop(one.node) for one in device.program.operations if one.node in changes}
        for device in cut.devices
    ]
    own[0] |= changes
    return [replace(adapter, changes=each) for each in own]
