"""The CUDA executor: a launch program's buckets over one arena and one paged KV pool, replayed as CUDA graphs.

    batch ─► staging (pinned) ─► inputs, tables ─► graph of the bucket ─► logits ─► host     forward
                                                                     └──► tokens ─► host     submit

All work is queued on one stream, so each step sees what earlier steps wrote. `submit` returns at once; reading its
tokens waits for the step. `PinnedBlocks` moves blocks to and from host memory on streams of their own.
"""

import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ingot.artifact import Artifact
from ingot.artifact.programs.stages import STAGES_FILE
from ingot.errors import EngineError, shown
from ingot.runtime.adapters import Adapter
from ingot.runtime.code_version import code_version
from ingot.runtime.cuda.cublaslt import CublasLt
from ingot.runtime.cuda.driver.device import Device
from ingot.runtime.cuda.host_blocks import PinnedBlocks, SlotLayout
from ingot.runtime.cuda.loading import load_program
from ingot.runtime.cuda.programs import BoundProgram, OpenMatmuls, OpenSegments, Part, choose, no_segments
from ingot.runtime.cuda.step_inputs import HostStages, token_slots
from ingot.runtime.cuda.step_outputs import CudaStep
from ingot.runtime.cuda.weights import LoadWeights, upload_weights
from ingot.runtime.executors import DeviceFacts
from ingot.runtime.forward_batch import FloatArray, ForwardBatch, Int32Array, SamplingArrays
from ingot.runtime.options import EngineOptions
from ingot.sizes import format_bytes

if TYPE_CHECKING:
    from ingot.runtime.cuda.host_stage import HostAndGpuExecutor

_log = logging.getLogger(__name__)
_Made = TypeVar("_Made", "CudaExecutor", "HostAndGpuExecutor")


class CudaExecutor:
    """Runs an artifact on a GPU.

    Implements `PipelinedExecutor`, `TieredStatefulExecutor`, `OffloadingExecutor` and `AdaptingExecutor`.

    One thread may call it at a time.

    device           owned: closed with the executor, or when making the executor fails
    open_segments    opens the engine that runs the program's segments, if it has any
    open_matmuls     opens the library that computes matmuls of the program, if it has any
    load_weights     brings the weights to the device

    Raises the errors of `load_program`.
    """

    def __init__(
        self,
        artifact: Artifact,
        device: Device,
        options: EngineOptions | None = None,
        open_segments: OpenSegments = no_segments,
        open_matmuls: OpenMatmuls = CublasLt,
        load_weights: LoadWeights = upload_weights,
    ) -> None:
        self._free_before, given = device.free_bytes(), options or EngineOptions()
        try:
            loaded = load_program(artifact, device, given, open_segments, open_matmuls, load_weights)
        except BaseException:
            device.close()
            raise
        self.model, self.kv_geometry = loaded.model, loaded.pool.geometry
        self.key_order = loaded.pool.key_order
        versions = (loaded.segments.version, loaded.matmuls.version)  # its own kernels are files of the artifact
        code = code_version(Path(__file__).parent)
        self.kernel_version = ", ".join([f"{device.name}, sm {device.sm}", code, *filter(None, versions)])
        self.num_blocks, self.num_fast_blocks = loaded.pool.num_blocks, loaded.pool.num_fast
        self.slow_bytes_per_second = loaded.pool.slow_bytes_per_second
        self.max_batch_tokens, self.max_sequences = loaded.max_batch_tokens, loaded.max_sequences
        self.projections = loaded.projections
        self.max_adapters = given.max_adapters if loaded.adapters else 0
        self.max_adapter_rank = given.max_adapter_rank
        self._loaded = loaded
        self._device: Device | None = device
        self._host_blocks: PinnedBlocks | None = None
        self._host_states: PinnedBlocks | None = None

    @property
    def device(self) -> DeviceFacts:
        """The GPU, and the memory allocated on it since the executor was made; graphs are captured later."""
        gpu = self._activate()
        used = max(0, self._free_before - gpu.free_bytes())
        return DeviceFacts(gpu.name, gpu.sm, gpu.total_bytes, used)

    def forward(self, batch: ForwardBatch, stages: HostStages | None = None) -> FloatArray:
        """Write the batch's keys and values into the pool; return logits [R, vocab], valid until the next call.

        If R exceeds the rows of the program's head, the head runs several times. With R = 0 the call does not wait.

        stages   of the host in this step, of a program that has any
        """
        self._activate()
        loaded, rows = self._loaded, len(batch.logits_indices)
        if loaded.exchange is not None:
            assert stages is not None
            loaded.exchange.begin(stages, batch.num_tokens)
        bound = self._queue(batch, "logits" if rows else "body")
        logits = loaded.outputs.logits(rows)
        head_rows = bound.program.logits_rows
        for begin in range(0, rows, head_rows):
            if begin:
                loaded.inputs.send_rows(bound.layout, batch, slice(begin, begin + head_rows))
                bound.run("head", loaded.stream)
            loaded.outputs.read_logits(logits[begin : begin + head_rows], f"a step of the {bound}")
        return logits

    def submit(self, batch: ForwardBatch, draws: SamplingArrays, carried: Int32Array) -> CudaStep:
        """Queue a step that also chooses its tokens; see `PipelinedExecutor`.

        If R exceeds the rows of the program's head, as where drafts are verified, head and sampling run several times.
        The next step can then carry no tokens; it never does, because the engine reads drafts before it goes on.
        """
        self._activate()
        loaded, rows = self._loaded, len(batch.logits_indices)
        part: Part = "body" if not rows else "greedy" if draws.greedy else "draw"
        bound = self._queue(batch, part, carried, draws)
        tokens, head_rows = loaded.outputs.tokens(rows), bound.program.logits_rows
        for begin in range(0, rows, head_rows):
            span = slice(begin, begin + head_rows)
            if begin:
                again = None if draws.greedy else draws.rows(span)
                loaded.inputs.send_rows(bound.layout, batch, span, again)
                bound.run("head-greedy" if draws.greedy else "head-draw", loaded.stream)
            loaded.outputs.queue_tokens(tokens[span])
        return loaded.outputs.step(tokens, f"a step of the {bound}")

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block within the pool (copy on write)."""
        self._activate()
        self._loaded.pool.copy_block(source, target)
        if self._host_blocks:
            self._host_blocks.add_copy(source, target)

    def read_block(self, block: int) -> bytes:
        """Return a block's content. Waits for all queued work."""
        self._activate()
        return self._loaded.pool.read_block(block)

    def write_block(self, block: int, content: bytes) -> None:
        """Set a block's content to what `read_block` returned. Waits for all queued work."""
        self._activate()
        self._loaded.pool.write_block(block, content)

    def host_blocks(self, num_slots: int, layout: SlotLayout | None = None) -> PinnedBlocks:
        """Make the slots in pinned host memory that blocks of the pool move to and from. May be called once.

        layout   where the pool's bytes are in a slot, of a pool that has a part of each block
        """
        self._activate()
        assert self._host_blocks is None, "the executor has its host blocks already"
        loaded = self._loaded
        self._host_blocks = PinnedBlocks(loaded.device, loaded.stream, loaded.pool, num_slots, layout)
        return self._host_blocks

    @property
    def num_states(self) -> int:
        """Slots for side state; 0 for a model without any."""
        return 0 if self._loaded.states is None else self._loaded.states.num_blocks

    def copy_state(self, source: int, target: int) -> None:
        """Copy one side state onto another slot."""
        self._activate()
        assert self._loaded.states is not None
        self._loaded.states.copy(source, target)
        if self._host_states:
            self._host_states.add_copy(source, target)

    def host_states(self, num_slots: int, layout: SlotLayout | None = None) -> PinnedBlocks:
        """Make the slots in pinned host memory that side states move to and from. May be called once."""
        self._activate()
        assert self._host_states is None, "the executor has its host states already"
        loaded = self._loaded
        assert loaded.states is not None
        self._host_states = PinnedBlocks(loaded.device, loaded.stream, loaded.states, num_slots, layout)
        return self._host_states

    def adapter_share(self, adapter: Adapter) -> float:
        """Share of the memory for adapters that this one takes."""
        return self._loaded.adapters.share(adapter) if self._loaded.adapters else 0.0

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Let sequences of steps from now on have an adapter, by its slot.

        EngineError for layers that the program does not have, a rank above max_adapter_rank, and too little memory.
        """
        self._activate()
        if adapter.rank > self.max_adapter_rank:
            raise EngineError(
                f"the adapter {shown(adapter.name)} has matrices of rank {adapter.rank}, and the engine takes up to"
                f" {self.max_adapter_rank}: set max_adapter_rank"
            )
        assert self._loaded.adapters is not None
        self._loaded.adapters.load(slot, adapter)

    def unload_adapter(self, slot: int) -> None:
        """Free a slot, which no later step may name before another adapter is loaded into it."""
        assert self._loaded.adapters is not None
        self._loaded.adapters.unload(slot)

    def warm_up(self) -> None:
        """Capture the graphs of all buckets now, not when each first runs."""
        self._activate()
        loaded = self._loaded
        before = loaded.device.free_bytes()
        for bound in loaded.programs:
            bound.warm_up(loaded.stream)
        count, used = sum(len(bound.graphs) for bound in loaded.programs), before - loaded.device.free_bytes()
        _log.info("%d CUDA graphs of %d buckets, %s", count, len(loaded.programs), format_bytes(used))

    def close(self) -> None:
        """Wait for the device and free its memory. Idempotent. Logits that were returned stay valid."""
        if self._device is not None:
            self._loaded.outputs.close()
            for moved in (self._host_blocks, self._host_states):
                if moved:
                    moved.close()
            with suppress(EngineError):  # after a lost context nothing runs any more
                self._device.activate()
                self._device.synchronize("closing the executor")
            self._loaded.segments.close()
            self._loaded.matmuls.close()
            self._device.close()
            self._device = self._host_blocks = self._host_states = None

    def _activate(self) -> Device:
        if self._device is None:
            raise EngineError("the executor is closed; make another")
        self._device.activate()
        return self._device

    def _queue(
        self,
        batch: ForwardBatch,
        part: Part,
        carried: Int32Array | None = None,
        draws: SamplingArrays | None = None,
    ) -> BoundProgram:
        """Queue the inputs and a part of the smallest program that holds the batch."""
        batch.check(self.max_batch_tokens, self.model.context_tokens)
        loaded = self._loaded
        bound = choose(loaded.programs, batch)
        size = self.kv_geometry.block_tokens
        slots = token_slots(batch, size)
        loaded.inputs.send(bound.layout, batch, slots, carried, draws)
        try:
            bound.run(part, loaded.stream)
        finally:  # also of a step that was queued in part
            if self._host_blocks:
                self._host_blocks.add_step(batch.block_tables, slots // size)
            if self._host_states and batch.state_slots is not None:
                self._host_states.add_step(batch.state_slots, batch.state_slots.astype(np.int64))
        return bound


def load(artifact: Artifact, options: EngineOptions) -> "CudaExecutor | HostAndGpuExecutor":
    """Make the executor of a launch program, a part of which may be the host's; see `load_whole`."""
    if not artifact.has(STAGES_FILE):
        return load_whole(artifact, options)
    from ingot.runtime.cuda.driver.driver import open_device  # needs cuda-bindings

    # A module that imports this one.
    from ingot.runtime.cuda.host_stage import HostAndGpuExecutor

    return _warm(HostAndGpuExecutor(artifact, open_device(), options))


def load_whole(artifact: Artifact, options: EngineOptions, open_segments: OpenSegments = no_segments) -> CudaExecutor:
    """Make the executor of a whole model on the first visible GPU, and capture its graphs.

    `num_threads` has no effect here. Raises the errors of `CudaExecutor`.
    """
    from ingot.runtime.cuda.driver.driver import open_device  # needs cuda-bindings

    return _warm(CudaExecutor(artifact, open_device(), options, open_segments))


def _warm(executor: _Made) -> _Made:
    try:
        executor.warm_up()
    except BaseException:
        executor.close()
        raise
    return executor
