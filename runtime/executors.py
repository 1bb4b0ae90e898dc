"""Executors: the protocols they implement, and the table that names the one of each engine.

An executor runs a model's program on a batch (`forward_batch.py`) and keeps the KV pool. To add one:

1. Implement `Executor`, and test it as tests/simulators/test_fake_executor.py does. If its device computes
   asynchronously, implement `PipelinedExecutor`; see `step_pipeline.py`.
2. Write a function `load(artifact, options) -> Executor` and add its row to `EXECUTORS`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, runtime_checkable

from ingot.artifact import Artifact, EngineKind, KVGeometry, ModelFacts
from ingot.artifact.kv_geometry import KeyOrder
from ingot.artifact.programs.projections import Projection
from ingot.errors import UsageError
from ingot.runtime.adapters import Adapter
from ingot.runtime.forward_batch import FloatArray, ForwardBatch, Int32Array, Int64Array, SamplingArrays
from ingot.runtime.kv.transfers.transfer import HostBlocks
from ingot.runtime.options import EngineOptions

EXECUTORS: Mapping[EngineKind, str] = {
    "cuda": "ingot.runtime.cuda.executor:load",
    "native": "ingot.runtime.cpu.native_executor:load",
    "onnxruntime": "ingot.runtime.cpu.executor:load",
    "onnxruntime-cuda": "ingot.runtime.cuda.ort_segments:load",
    "tensorrt": "ingot.runtime.cuda.plans:load",
}


def load_executor(artifact: Artifact, options: EngineOptions) -> "Executor":
    """Load the artifact's executor.

    Raises UsageError for a limit that the executor cannot meet, EngineError when it cannot be loaded.
    """
    if options.cpu_affinity is not None and artifact.manifest.engine != "native":
        raise UsageError(
            f"cpu_affinity pins the threads of the native CPU engine, and this artifact is run by"
            f" {artifact.manifest.engine}; leave it out, or build with cpu.engine: native"
        )
    module, _, name = EXECUTORS[artifact.manifest.engine].partition(":")
    executor: Executor = getattr(import_module(module), name)(artifact, options)
    return executor


@dataclass(frozen=True)
class DeviceFacts:
    """The GPU of an executor; `total_bytes` is its memory, `used_bytes` what the executor allocated there."""

    name: str
    sm: int
    total_bytes: int
    used_bytes: int


class Executor(Protocol):
    """Runs the model's program on a batch and keeps the KV pool.

    A row of the result depends on its sequence's tokens alone, never on the rest of the batch: bit for bit on the CPU.
    When a step or a copy raises, the engine may call again with the same tokens (`step_loop`).
    """

    @property
    def model(self) -> ModelFacts:
        """Facts about the model."""
        ...

    @property
    def kv_geometry(self) -> KVGeometry:
        """Shape of one KV block."""
        ...

    @property
    def key_order(self) -> KeyOrder:
        """How the elements of a head's keys are ordered in a block."""
        ...

    @property
    def kernel_version(self) -> str:
        """What the bits of keys and values depend on besides the artifact; part of the keys of stored blocks."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV pool."""
        ...

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens in one batch."""
        ...

    @property
    def max_sequences(self) -> int:
        """Most sequences in one batch."""
        ...

    @property
    def device(self) -> DeviceFacts | None:
        """The GPU that it computes on; None on the CPU."""
        ...

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """Write the batch's keys and values into the pool; return logits [R, vocab].

        The array is valid until the next call: copy what must live longer.
        """
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block within the pool (copy on write)."""
        ...

    def close(self) -> None:
        """Free memory and threads. Idempotent."""
        ...


@runtime_checkable
class StatefulExecutor(Executor, Protocol):
    """An executor of a model with side state (`kv_geometry.state_bytes`), which it keeps in a pool of slots.

    A step replaces the state in a sequence's slot (`ForwardBatch.state_slots`) by the state after its last token. When
    a step raises, the states of its sequences are undefined; the engine computes them again from position 0.
    """

    @property
    def num_states(self) -> int:
        """Slots of the pool."""
        ...

    def copy_state(self, source: int, target: int) -> None:
        """Copy one slot onto another, in the order of the calls and steps."""
        ...


@runtime_checkable
class TieredExecutor(Executor, Protocol):
    """An executor whose blocks can move to and from host memory while steps run; see `runtime/kv/tiers.py`."""

    def host_blocks(self, num_slots: int) -> HostBlocks:
        """Make the slots in host memory; may be called once. EngineError when there is too little of it."""
        ...


@runtime_checkable
class ObservedExecutor(Executor, Protocol):
    """An executor whose `forward` leaves the interpreter to other threads, which see when it ends.

    So they can work while it computes, and give way to its caller at once.
    """

    @property
    def leaves_a_core(self) -> bool:
        """Whether fewer threads compute than this process has cores."""
        ...

    @property
    def is_computing(self) -> bool:
        """Whether a step is being computed; False as soon as it ends, before `forward` returns. For any thread."""
        ...


@runtime_checkable
class TieredStatefulExecutor(StatefulExecutor, TieredExecutor, Protocol):
    """An executor whose side states can move too: the same copies, between its state slots and host memory."""

    def host_states(self, num_slots: int) -> HostBlocks:
        """Make the states' slots in host memory; may be called once. EngineError when there is too little of it."""
        ...


@runtime_checkable
class AdaptingExecutor(Executor, Protocol):
    """An executor that computes LoRA adapters: each sequence of a step with the one in its slot, or with none.

    A row depends on its own sequence and adapter alone: not on the slot's number, nor on the adapters of others. A
    sequence without an adapter (slot -1) gets the bits that it gets where no adapter is loaded.
    """

    @property
    def projections(self) -> Sequence[Projection]:
        """What an adapter can change. Empty: the artifact does not say."""
        ...

    @property
    def max_adapters(self) -> int:
        """Slots, 0 .. max_adapters - 1 (`EngineOptions.max_adapters`)."""
        ...

    @property
    def max_adapter_rank(self) -> int:
        """Largest rank of an adapter's matrices (`EngineOptions.max_adapter_rank`)."""
        ...

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter, which was read for `projections`, into a free slot. EngineError for too little memory."""
        ...

    def unload_adapter(self, slot: int) -> None:
        """Free a slot. No later step names it before something else is loaded into it."""
        ...


class SubmittedStep(Protocol):
    """A step that was queued on the device."""

    def tokens(self) -> Int64Array:
        """Wait for the step; return the token sampled from each row [R], -1 where a row's logits are not finite.

        Raises EngineError when the step failed. The caller owns the array. The call is optional.
        """
        ...


@runtime_checkable
class PipelinedExecutor(Executor, Protocol):
    """An executor that queues steps on a device's stream: a step is submitted before the tokens of the last are read.

    The device works in the order of the calls: a step reads what earlier steps wrote, a block copy sees their writes,
    and the new owner of a block writes to it after the former one. `forward` is only called when the tokens of every
    submitted step were read. `close` may be called with a step in flight: it waits for the device, then frees memory.
    """

    def submit(self, batch: ForwardBatch, sampling: SamplingArrays, carried: Int32Array) -> SubmittedStep:
        """Queue a step that also samples its tokens. R may be 0, as in the middle of a prompt.

        carried  [T] i32   row (of R) in the previous step whose sampled token replaces input_ids[t], which is then 0;
                           -1 to use input_ids[t]

        A row whose logits are not finite may carry any token of the vocabulary: its continuation is discarded.
        The caller may reuse the arrays once this returns. Raises EngineError when the step cannot be queued; then the
        tokens of the previous step can no longer be carried.
        """
        ...
