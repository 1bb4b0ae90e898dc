"""The executor of a model of which the host computes first layers or experts, and a GPU computes the rest.

    batch ─► first layers (NativeProgram) ─► hidden states ─► GPU's stage (CudaExecutor) ─► ... ─► logits
                                  experts (NativeProgram) ◄─┘└─► what does not need them

Each device has its layers' part of every KV block and of side state. A block in host memory has the layout of a whole
one: both parts are copied to it, by the host's thread and by the GPU.
"""

from collections.abc import Sequence
from dataclasses import replace
from threading import Thread

from ingot.artifact import Artifact
from ingot.artifact.kv_geometry import BlockRun
from ingot.artifact.programs.cpu_program import WEIGHTS_FILE
from ingot.artifact.programs.stage_checks import read_stages
from ingot.artifact.programs.stages import CutProgram, DeviceProgram
from ingot.artifact.safetensors import MappedTensors
from ingot.runtime.cpu.host_blocks import ArenaBlocks, DividedPool, HostBlockCopy, PoolPart
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.limits import limits_in_memory
from ingot.runtime.cpu.native.program import NativeProgram
from ingot.runtime.cpu.native_executor import choose_threads, kernel_version
from ingot.runtime.cpu.state_pool import make_states
from ingot.runtime.cuda.cublaslt import CublasLt
from ingot.runtime.cuda.driver.device import Bytes, Device
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.cuda.host_blocks import BlockTransfer, PinnedBlocks, SlotLayout
from ingot.runtime.cuda.programs import OpenMatmuls
from ingot.runtime.executors import DeviceFacts
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.options import EngineOptions


class HostAndGpuExecutor:
    """Runs an artifact on the host and a GPU. Implements `TieredStatefulExecutor`; one thread may call it at a time.

    device           owned: closed with the executor, or when making the executor fails
    open_matmuls     opens the library that computes matmuls of the GPU's program, if it has any

    `kv_blocks` is the number of blocks on both devices, and `kv_bytes` the bytes on each; without them, the device that
    has room for fewer decides. Raises the errors of `NativeProgram` and `CudaExecutor`.
    """

    key_order = KVPool.key_order

    def __init__(
        self,
        artifact: Artifact,
        device: Device,
        options: EngineOptions | None = None,
        open_matmuls: OpenMatmuls = CublasLt,
    ) -> None:
        options = options or EngineOptions()
        try:
            cut = read_stages(artifact)
        except BaseException:
            device.close()
            raise
        assert cut.on_gpu is not None
        own = _without_slots(options, artifact, cut.on_gpu)
        self._gpu = CudaExecutor(artifact, device, own, open_matmuls=open_matmuls)
        try:
            self._load_host(artifact, cut, cut.on_gpu, options)
        except BaseException:
            self._gpu.close()
            raise

    def _load_host(self, artifact: Artifact, cut: CutProgram, on_gpu: DeviceProgram, options: EngineOptions) -> None:
        manifest, gpu, host = artifact.manifest, self._gpu, cut.on_host
        options = _without_slots(options, artifact, host)
        self.model, self.kv_geometry = manifest.model, manifest.kv
        self.max_batch_tokens, self.max_sequences = gpu.max_batch_tokens, gpu.max_sequences
        # Without layers of its own the host has room for any number of blocks.
        own = limits_in_memory(manifest.model, host.program.kv if host.layers else manifest.kv, 1, options)
        self.num_blocks = min(own["num_blocks"], gpu.num_blocks) if host.layers else gpu.num_blocks
        pool = KVPool(host.program.kv, self.num_blocks) if host.layers else None
        states = make_states(host.program.kv, gpu.num_states or own["num_states"])
        self.num_states = gpu.num_states or (0 if states is None else states.num_blocks)
        self._program = NativeProgram(
            host.program,
            MappedTensors(artifact.file(WEIGHTS_FILE)),
            pool,
            states,
            max_batch_tokens=self.max_batch_tokens,
            num_threads=choose_threads(options.num_threads),
            last_mixing=host.last_mixing,
        )
        self.kernel_version = f"{gpu.kernel_version}, {kernel_version(self._program.isa)}"
        self._stages = _Stages(self._program, cut)
        kv = manifest.kv
        of_pool = None if pool is None else PoolPart(pool.blocks, host.block_runs(kv), pool.memory_bytes)
        of_states = (
            None if states is None else PoolPart(states.blocks, kv.state_runs(states.geometry), states.num_bytes)
        )
        self._blocks = _Parts("KV blocks", of_pool, on_gpu.block_runs(kv), kv.block_bytes)
        self._states = _Parts("side states", of_states, kv.state_runs(on_gpu.program.kv), kv.state_bytes)

    @property
    def device(self) -> DeviceFacts:
        """The GPU, and the memory allocated on it."""
        return self._gpu.device

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """Write the batch's keys and values into the pools; return logits [R, vocab], valid until the next call.

        With R = 0 the call does not wait for what the GPU computes after the host's last stage.
        """
        batch.check(self.max_batch_tokens, self.model.context_tokens)
        self._program.load_batch(batch)
        return self._gpu.forward(batch, self._stages)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block within the pools (copy on write)."""
        self._blocks.copy(source, target)
        self._gpu.copy_block(source, target)

    def host_blocks(self, num_slots: int) -> "JoinedBlocks":
        """Make the slots in pinned host memory that blocks move to and from. May be called once."""
        return JoinedBlocks(self._gpu.host_blocks(num_slots, self._blocks.layout), self._blocks.of_host)

    def copy_state(self, source: int, target: int) -> None:
        """Copy one side state onto another slot."""
        self._states.copy(source, target)
        if self._gpu.num_states:
            self._gpu.copy_state(source, target)

    def host_states(self, num_slots: int) -> "JoinedBlocks | ArenaBlocks":
        """Make the slots in host memory that side states move to and from. May be called once."""
        if not self._gpu.num_states:
            assert self._states.of_host is not None
            return ArenaBlocks(self._states.of_host, num_slots)
        return JoinedBlocks(self._gpu.host_states(num_slots, self._states.layout), self._states.of_host)

    def warm_up(self) -> None:
        """Capture the graphs of all buckets now."""
        self._gpu.warm_up()

    def close(self) -> None:
        """Wait for the GPU and free the memory of both. Idempotent. Logits that were returned stay valid."""
        self._gpu.close()
        self._program.close()


class _Stages:
    """The host's stages. Implements `HostStages`."""

    def __init__(self, program: NativeProgram, cut: CutProgram) -> None:
        self._program, self._operations = program, [run.operations for run in cut.runs]
        buffers = {one.buffer for run in cut.runs for one in run.crossings}
        self._rows = {name: program.rows_of(name) for name in buffers}

    def rows_of(self, name: str) -> FloatArray:
        return self._rows[name]

    def run(self, stage: int) -> None:
        self._program.run(self._operations[stage])


def _without_slots(options: EngineOptions, artifact: Artifact, device: DeviceProgram) -> EngineOptions:
    """The options for a device; slots for side state of the model are not of one that keeps none of it."""
    keeps_none = artifact.manifest.kv.state_bytes > 0 and not device.program.kv.state_bytes
    return replace(options, state_slots=None) if keeps_none else options


class _Parts:
    """The two parts of the blocks of a pool: the host's, None where it has none, and where the GPU's are in a slot."""

    def __init__(self, things: str, of_host: PoolPart | None, on_gpu: tuple[BlockRun, ...], block_bytes: int) -> None:
        self.of_host = DividedPool(things, [of_host], block_bytes) if of_host else None
        self.layout = SlotLayout(block_bytes, on_gpu)

    def copy(self, source: int, target: int) -> None:
        if self.of_host is not None:
            self.of_host.copy(source, target)


class JoinedTransfer:
    """The copies of both parts of a block. Implements `ingot.runtime.kv.transfers.transfer.Transfer`."""

    __slots__ = ("_gpu", "_host")

    def __init__(self, gpu: BlockTransfer, host: HostBlockCopy | None) -> None:
        self._gpu, self._host = gpu, host

    @property
    def done(self) -> bool:
        """Report if both have ended."""
        return self._gpu.done and (self._host is None or self._host.done)

    @property
    def error(self) -> Exception | None:
        """The first error of the two."""
        return self._gpu.error or (None if self._host is None else self._host.error)

    @property
    def seconds(self) -> float:
        """The time of the longer one: they run at once."""
        return max(self._gpu.seconds, 0.0 if self._host is None else self._host.seconds)

    def cancel(self) -> bool:
        """Drop both if the GPU's has not begun. The host's ends by itself if it has begun; `done` waits for it."""
        if not self._gpu.cancel():
            return False
        return self._host is None or self._host.cancel()


class JoinedBlocks:
    """Slots of whole blocks in pinned memory, filled by both devices. Implements `kv.transfers.transfer.HostBlocks`."""

    def __init__(self, gpu: PinnedBlocks, of_host: DividedPool | None) -> None:
        self.num_slots = gpu.num_slots
        self._gpu = gpu
        self._host = None if of_host is None else ArenaBlocks(of_host, gpu.num_slots, gpu.slots)

    def save(self, block: int, slot: int) -> JoinedTransfer:
        """Queue the copies of a block's parts to a slot."""
        return JoinedTransfer(self._gpu.save(block, slot), None if self._host is None else self._host.save(block, slot))

    def restore(self, slot: int, block: int) -> JoinedTransfer:
        """Queue the copies of a slot to the parts of a block."""
        host = None if self._host is None else self._host.restore(slot, block)
        return JoinedTransfer(self._gpu.restore(slot, block), host)

    def view(self, slot: int) -> Bytes:
        """The slot's bytes [block_bytes], writable."""
        return self._gpu.view(slot)

    @property
    def threads(self) -> Sequence[Thread]:
        """The host's thread; the GPU needs none."""
        return () if self._host is None else self._host.threads

    def check(self) -> None:
        """Raise EngineError if either can copy no more."""
        self._gpu.check()
        if self._host is not None:
            self._host.check()

    def close(self) -> None:
        """Copy what is queued and free the memory. Idempotent."""
        if self._host is not None:
            self._host.close()
        self._gpu.close()
