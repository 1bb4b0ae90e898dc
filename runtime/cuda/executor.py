"""The CUDA executor: a launch program's buckets over one arena and one paged KV pool, replayed as CUDA graphs.

    batch ─► staging (pinned) ─► inputs, tables ─► graph of the bucket ─► logits ─► host     forward
                                                                     └──► tokens ─► host     submit

Everything is queued on one stream, so each step sees what those before it wrote. `submit` returns at once: its tokens
are waited for when they are asked for. Blocks move to and from host memory on a stream beside it (`HostBlocks`).
"""

import logging
from contextlib import suppress

from ingot.artifact import Artifact, KVGeometry, ModelFacts
from ingot.errors import EngineError
from ingot.runtime.batch import FloatArray, ForwardBatch, Int32Array
from ingot.runtime.cuda.cublaslt import CublasLt
from ingot.runtime.cuda.device import Device
from ingot.runtime.cuda.host_blocks import HostBlocks
from ingot.runtime.cuda.loading import load_program
from ingot.runtime.cuda.programs import BoundProgram, OpenProducts, OpenSegments, Part, choose, no_segments
from ingot.runtime.cuda.step_inputs import token_slots
from ingot.runtime.cuda.step_outputs import CudaStep
from ingot.runtime.executors import DeviceFacts
from ingot.runtime.options import EngineOptions
from ingot.runtime.sampler import SamplingArrays
from ingot.sizes import format_bytes

_LOG = logging.getLogger(__name__)


class CudaExecutor:
    """Runs an artifact on a card. Implements `PipelinedExecutor`; one thread at a time may call it.

    device          owned: closed with the executor, or when it cannot be made
    open_segments   the engine that runs the program's segments, where it has any
    open_products   the library that computes products of the program, where it has such

    Raises what `load_program` does.
    """

    def __init__(
        self,
        artifact: Artifact,
        device: Device,
        options: EngineOptions | None = None,
        open_segments: OpenSegments = no_segments,
        open_products: OpenProducts = CublasLt,
    ) -> None:
        self._free_before = device.free_bytes()
        try:
            self._loaded = load_program(artifact, device, options or EngineOptions(), open_segments, open_products)
        except BaseException:
            device.close()
            raise
        self._device: Device | None = device
        self._host_blocks: HostBlocks | None = None

    @property
    def model(self) -> ModelFacts:
        """Facts of the model that runs."""
        return self._loaded.model

    @property
    def kv_geometry(self) -> KVGeometry:
        """Shape of one KV block."""
        return self._loaded.pool.geometry

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV pool."""
        return self._loaded.pool.num_blocks

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens that one batch may hold."""
        return self._loaded.max_batch_tokens

    @property
    def max_sequences(self) -> int:
        """Most sequences that one batch may hold."""
        return self._loaded.max_sequences

    @property
    def device(self) -> DeviceFacts:
        """The card, and what was taken of it since the executor was made; graphs are captured later."""
        card = self._activate()
        used = max(0, self._free_before - card.free_bytes())
        return DeviceFacts(card.name, card.sm, card.total_bytes, used)

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """Write the batch's keys and values into the pool; return logits [R, vocab], valid until the next call.

        More rows than the program's head takes go through it in portions. With R = 0 nothing is waited for.
        """
        self._activate()
        loaded, rows = self._loaded, len(batch.logits_indices)
        bound = self._queue(batch, "logits" if rows else "body")
        logits = loaded.outputs.logits(rows)
        portion = bound.program.logits_rows
        for begin in range(0, rows, portion):
            if begin:
                loaded.inputs.send_indices(bound.layout, batch.logits_indices[begin : begin + portion])
                bound.run("head", loaded.stream)
            loaded.outputs.read_logits(logits[begin : begin + portion], f"a step of the {bound}")
        return logits

    def submit(self, batch: ForwardBatch, draws: SamplingArrays, carried: Int32Array) -> CudaStep:
        """Queue a step that also chooses its tokens; see `PipelinedExecutor`."""
        self._activate()
        rows = len(batch.logits_indices)
        part: Part = "body" if not rows else "greedy" if draws.greedy else "draw"
        bound = self._queue(batch, part, carried, draws)
        return self._loaded.outputs.queue_tokens(rows, f"a step of the {bound}")

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block within the pool (copy on write)."""
        self._activate()
        self._before_use([source], [target])
        self._loaded.pool.copy_block(source, target)

    def read_block(self, block: int) -> bytes:
        """A block's content, for a tier that the device cannot reach. Waits for what is queued."""
        self._activate()
        self._before_use([block], [])
        return self._loaded.pool.read_block(block)

    def write_block(self, block: int, content: bytes) -> None:
        """Set a block's content, as `read_block` gave it. Waits for what is queued."""
        self._activate()
        self._before_use([], [block])
        self._loaded.pool.write_block(block, content)

    def host_blocks(self, num_slots: int) -> HostBlocks:
        """Make the pinned blocks of host memory that the pool's blocks move to and from. Once."""
        self._activate()
        assert self._host_blocks is None, "the executor has its host blocks already"
        loaded = self._loaded
        self._host_blocks = HostBlocks(loaded.device, loaded.stream, loaded.pool, num_slots)
        return self._host_blocks

    def warm_up(self) -> None:
        """Capture the graphs of all buckets now, not when each first runs."""
        self._activate()
        loaded = self._loaded
        before = loaded.device.free_bytes()
        for bound in loaded.programs:
            bound.warm_up(loaded.stream)
        count, taken = sum(len(bound.graphs) for bound in loaded.programs), before - loaded.device.free_bytes()
        _LOG.info("%d CUDA graphs of %d buckets, %s", count, len(loaded.programs), format_bytes(taken))

    def close(self) -> None:
        """Wait for the device and give its memory back. Idempotent. Logits that were returned keep theirs."""
        if self._device is not None:
            self._loaded.outputs.close()
            with suppress(EngineError):  # a card that is lost has nothing left that could still run
                self._device.activate()
                self._device.synchronize("closing the executor")
            self._loaded.segments.close()
            self._loaded.products.close()
            self._device.close()
            self._device = self._host_blocks = None

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
        """Queue a part of the smallest program that holds the batch, with its inputs before it."""
        batch.check(self.max_batch_tokens, self.model.context_tokens)
        loaded = self._loaded
        bound = choose(loaded.programs, batch)
        assert draws is None or len(batch.logits_indices) <= bound.program.logits_rows
        size = loaded.pool.geometry.block_tokens
        slots = token_slots(batch, size)
        if self._host_blocks is not None and self._host_blocks.pending:
            self._before_use(batch.block_tables[batch.block_tables >= 0].tolist(), (slots // size).tolist())
        loaded.inputs.send(bound.layout, batch, slots, carried, draws)
        bound.run(part, loaded.stream)
        return bound

    def _before_use(self, read: list[int], written: list[int]) -> None:
        if self._host_blocks is not None:
            self._host_blocks.before_use(read, written)


def load(artifact: Artifact, options: EngineOptions, open_segments: OpenSegments = no_segments) -> CudaExecutor:
    """The executor of an artifact of launches, on the first card that CUDA shows, its graphs captured.

    `num_threads` means nothing here. Raises what `CudaExecutor` does.
    """
    from ingot.runtime.cuda.driver import open_device  # needs cuda-bindings

    executor = CudaExecutor(artifact, open_device(), options, open_segments)
    try:
        executor.warm_up()
    except BaseException:
        executor.close()
        raise
    return executor
