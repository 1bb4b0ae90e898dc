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
from ingot.artifact.programs.draft_head import DRAFT_HEAD_FILE
from ingot.artifact.programs.projections import Projection
from ingot.artifact.programs.stages import STAGES_FILE
from ingot.errors import UsageError
from ingot.runtime.adapters import Adapter
from ingot.runtime.forward_batch import FloatArray, ForwardBatch, Int32Array, Int64Array, SamplingArrays
from ingot.runtime.kv.transfers.transfer import HostBlocks
from ingot.runtime.options import EngineOptions
from ingot.runtime.speculation_options import speculation_options

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
    for name in ("stages", "tensor_parallel"):
        if (getattr(options, name) or 1) > 1 and artifact.manifest.engine != "native":
            raise UsageError(
                f"{name} is {getattr(options, name)}, and only the native CPU engine computes in several processes;"
                f" this artifact is run by {artifact.manifest.engine}: leave it out, or build with cpu.engine: native"
            )
    if options.kv_offload not in ("auto", "off") and artifact.manifest.engine == "cuda" and artifact.has(STAGES_FILE):
        raise UsageError(
            f"kv_offload is {options.kv_offload}, and the pools of a model on a GPU and the host have no slow part;"
            " leave it out, or keep blocks in host memory (kv_host_bytes)"
        )
    speculation = speculation_options(options.speculation)
    if speculation and speculation.uses_head(artifact) and not artifact.has(DRAFT_HEAD_FILE):
        raise UsageError(
            f"{artifact.path} has no MTP layer to draft by (speculation: mtp). Artifacts of the native CPU engine keep"
            " the one of their checkpoint, unless they are built with cpu.mtp: false (docs/speculation.md)"
        )
    module, _, name = EXECUTORS[artifact.manifest.engine].partition(":")
    executor: Executor = getattr(import_module(module), name)(artifact, options)
    return executor


def num_fast_blocks(executor: "Executor") -> int:
    """Blocks of the fast part of an executor's pool: all, where it has no slow one."""
    return executor.num_fast_blocks if isinstance(executor, OffloadingExecutor) else executor.num_blocks


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
class OffloadingExecutor(Executor, Protocol):
    """An executor whose KV pool may have a slow part; see `runtime/slow_part.py`.

    A row has the same bits wherever its sequence's blocks are, and `copy_block` moves one from part to part.
    """

    @property
    def num_fast_blocks(self) -> int:
        """Blocks in the fast part, of `num_blocks`; the others have the higher numbers."""
        ...

    @property
    def slow_bytes_per_second(self) -> float:
        """Measured speed at which a step reads the slow part; infinite for memory, and without a slow part."""
        ...


@dataclass(frozen=True)
class StageFacts:
    """Processes of stages: how many run, how often they were started again, and why they are about to be; "" else."""

    num_running: int = 0
    num_restarts: int = 0
    problem: str = ""


class BegunStep(Protocol):
    """A step that an OverlappingExecutor computes."""

    def logits(self) -> FloatArray:
        """Wait for the step; return logits [R, vocab], valid until `num_at_once` more steps began.

        Raises EngineError when it failed.
        """
        ...


@runtime_checkable
class OverlappingExecutor(Executor, Protocol):
    """An executor whose stages compute different steps at once; no two steps in flight sample for one sequence.

    Stages compute steps in the order of the calls. `copy_block` and `copy_state` wait for those in flight, and
    `forward` is a step of its own.
    """

    @property
    def num_at_once(self) -> int:
        """Most steps in flight; 1 for an executor that does not overlap any, of which nothing else here is called."""
        ...

    @property
    def stages(self) -> StageFacts:
        """Facts about its stages. For any thread."""
        ...

    def begin(self, batch: ForwardBatch) -> BegunStep:
        """Begin a step. The caller may reuse the arrays once this returns. EngineError when it cannot begin."""
        ...

    def settle(self) -> None:
        """Wait until no step in flight is being computed; they can still be read."""
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

    def adapter_share(self, adapter: Adapter) -> float:
        """Share of the memory for adapters in slots that this one takes; 0 where memory is not set apart for them."""
        ...

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter, which was read for `projections`, into a free slot. EngineError for too little memory."""
        ...

    def unload_adapter(self, slot: int) -> None:
        """Free a slot. No later step names it before something else is loaded into it."""
        ...


class HeadExecutor(Protocol):
    """The draft head of an artifact, with a KV pool of its own; see `speculation/draft_head.py`."""

    @property
    def model(self) -> ModelFacts:
        """Facts about the model that it drafts for."""
        ...

    @property
    def kv_geometry(self) -> KVGeometry:
        """Shape of one KV block of its own."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks in its KV pool."""
        ...

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens in one batch."""
        ...

    @property
    def max_sequences(self) -> int:
        """Most sequences in one batch."""
        ...

    def forward(self, batch: ForwardBatch, hidden_states: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return logits [R, vocab] and the head's hidden states [R, hidden_size], valid until the next call.

        hidden_states   [T, hidden_size]: for each token, the model's state before it, or the head's own
        """
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block within the pool."""
        ...

    def close(self) -> None:
        """Free memory. Idempotent."""
        ...


@runtime_checkable
class DraftingExecutor(Executor, Protocol):
    """An executor that keeps the hidden states of a step, which its artifact's draft head reads."""

    @property
    def hidden_states(self) -> FloatArray:
        """Hidden states [max_batch_tokens, hidden_size]; the last step's T rows are first."""
        ...

    @property
    def head_geometry(self) -> KVGeometry:
        """Geometry of the head's KV pool."""
        ...

    def draft_head(self, num_blocks: int) -> HeadExecutor:
        """Make the head. EngineError for too little memory."""
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
