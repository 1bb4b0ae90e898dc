"""The CPU executor: segments run in onnxruntime, attention and recurrent layers in Ingot's kernels over their pools.

    input_ids, position_ids ─► segment 0 ─► q, k, v ─► attention 0 ─► segment 1 ─► ... ─► last segment ─► logits

All buffers are made at load and bound without copies; a decode step is one call per step of the program. Rows are
padded to the multiple that `batch_invariance` finds, so that a token's logits depend on its sequence alone, bit for
bit.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable

from ingot.artifact import Artifact, AttentionStep, SegmentStep
from ingot.artifact.manifest import Step
from ingot.artifact.programs.cpu_program import WEIGHTS_FILE
from ingot.artifact.serving import WeightPlacement
from ingot.errors import ArtifactError, EngineError
from ingot.runtime.cpu.attention_operands import StepTensors, attention_operands, check_attention
from ingot.runtime.cpu.batch_invariance import MULTIPLES, find_row_multiple
from ingot.runtime.cpu.buffers import ValueBuffers
from ingot.runtime.cpu.host_blocks import ArenaBlocks
from ingot.runtime.cpu.kernel_version import kernel_version
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.limits import MAX_SEQUENCES, resolve_limits
from ingot.runtime.cpu.native.attention import make_attention
from ingot.runtime.cpu.native.recurrence import make_recurrence
from ingot.runtime.cpu.recurrent_operands import RecurrentOperands, check_recurrent
from ingot.runtime.cpu.segment_runner import SegmentRunner, use_thread_pool
from ingot.runtime.cpu.state_pool import make_states
from ingot.runtime.cpu.weight_pages import collapse_copies
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.options import EngineOptions
from ingot.runtime.slow_part import NO_SLOW_PART, SlowPart
from ingot.sizes import round_up

_log = logging.getLogger(__name__)

_Call = Callable[[], None]
_KEPT_PLANS = 64


def load(artifact: Artifact, options: EngineOptions) -> "OnnxRuntimeExecutor":
    """Make the executor of an artifact for the CPU, with a KV pool in host memory."""
    return OnnxRuntimeExecutor(artifact, **resolve_limits(artifact, options), weights=options.weights)


class OnnxRuntimeExecutor:
    """Runs an artifact on the CPU. Implements `executors.TieredStatefulExecutor`; one thread may call it at a time.

    num_blocks         blocks in the fast part of the KV pool
    slow               its slow part, whose blocks follow
    num_states         slots for side state, of models that have any
    max_batch_tokens   most tokens of one `forward`
    max_sequences      most sequences of one `forward`
    num_threads        threads of the process-wide pool, the caller's included; None: the existing pool's, else
                       INGOT_THREADS, else one per core
    weights            "mapped" leaves onnxruntime's copies of the weights in the pages that they got

    Raises EngineError when a segment does not load, the pool does not fit, or the process already has a pool with
    another number of threads.
    """

    device: None = None  # it runs on the CPU
    key_order = KVPool.key_order

    def __init__(
        self,
        artifact: Artifact,
        *,
        num_blocks: int,
        slow: SlowPart = NO_SLOW_PART,
        num_states: int = 0,
        max_batch_tokens: int = 512,
        max_sequences: int = MAX_SEQUENCES,
        num_threads: int | None = None,
        weights: WeightPlacement = "auto",
    ) -> None:
        assert max_batch_tokens > 0
        manifest = artifact.manifest
        if not manifest.program.steps:
            raise ArtifactError(f"{artifact.path}: its program has no steps for onnxruntime; build the artifact again")
        check_attention(manifest.program, manifest.kv)
        check_recurrent(manifest.program, manifest.kv)
        self.num_threads = use_thread_pool(num_threads)
        self.model, self.kv_geometry = manifest.model, manifest.kv
        self.num_fast_blocks, self.num_blocks = num_blocks, num_blocks + slow.num_blocks
        self.max_batch_tokens, self.max_sequences = max_batch_tokens, max_sequences
        self._pool = KVPool(manifest.kv, num_blocks, slow)
        self.slow_bytes_per_second = self._pool.slow_bytes_per_second
        self._states = make_states(manifest.kv, num_states)
        self._buffers = ValueBuffers(manifest.program, round_up(max_batch_tokens, MULTIPLES[-1]))
        self._attention = make_attention(self._pool, self.num_threads)
        self._recurrence = None if self._states is None else make_recurrence(self._states, self.num_threads)
        self._tensors = StepTensors(artifact)
        self._steps = [self._load_step(artifact, step) for step in manifest.program.steps]
        collapse_copies(_weight_bytes(artifact), weights)
        finding = find_row_multiple(self._runners, self._buffers, manifest.model)
        self.row_multiple, self.batch_invariant = finding.row_multiple, finding.batch_invariant
        self.kernel_version = f"{kernel_version()}, rows in multiples of {finding.row_multiple}"
        self._plans: OrderedDict[tuple[int, int], list[_Call]] = OrderedDict()

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """Write the batch's keys and values into the pool; return logits [R, vocab], valid until the next call."""
        rows = len(batch.logits_indices)
        if not self._steps:
            raise EngineError("the executor is closed; make another")
        batch.check(self.max_batch_tokens, self.model.context_tokens)
        plan = self._plan(round_up(batch.num_tokens, self.row_multiple), round_up(rows, self.row_multiple))
        self._fill(batch)
        self._attention.begin(batch)
        if self._recurrence is not None:
            self._recurrence.begin(batch)
        for call in plan:
            call()
        return self._buffers.floats("logits")[:rows]

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block within the pool (copy on write)."""
        self._pool.copy_block(source, target)

    def host_blocks(self, num_slots: int) -> ArenaBlocks:
        """Make slots in host memory that blocks of the pool move to and from."""
        return ArenaBlocks(self._pool, num_slots)

    @property
    def num_states(self) -> int:
        """Slots for side state."""
        return 0 if self._states is None else self._states.num_blocks

    def copy_state(self, source: int, target: int) -> None:
        """Copy one side state onto another slot."""
        assert self._states is not None
        self._states.copy(source, target)

    def host_states(self, num_slots: int) -> ArenaBlocks:
        """Make slots in host memory that side states move to and from."""
        assert self._states is not None
        return ArenaBlocks(self._states, num_slots)

    def close(self) -> None:
        """Drop sessions, buffers and the KV pool, even if the caller keeps the executor. Idempotent.

        Logits that `forward` returned stay valid.
        """
        if self._steps:
            self._plans.clear()
            self._steps.clear()
            del self._attention, self._recurrence, self._buffers, self._pool, self._tensors
            self._states = None

    @property
    def _runners(self) -> list[SegmentRunner]:
        return [step for step in self._steps if isinstance(step, SegmentRunner)]

    def _load_step(self, artifact: Artifact, step: Step) -> SegmentRunner | _Call:
        if isinstance(step, SegmentStep):
            values = artifact.manifest.program.values
            return SegmentRunner(artifact.file(step.file), step, values, self._buffers)
        if not isinstance(step, AttentionStep):
            assert self._recurrence is not None
            return self._recurrence.bind(step, RecurrentOperands.of(step, self._buffers, self._tensors))
        operands = attention_operands(step, self._buffers)
        tensors = self._tensors.rotation(step.rotary), self._tensors.sinks(step.sinks, step.num_heads)
        return self._attention.bind(step, operands, self._buffers.floats(step.output), *tensors)

    def _plan(self, tokens: int, rows: int) -> list[_Call]:
        """The calls of one step with these row counts, in order; cached."""
        if self._buffers.grow_logits(rows):
            self._plans.clear()
            for runner in self._runners:
                runner.forget_bindings()
        plan = self._plans.get((tokens, rows))
        if plan is None:
            plan = self._plans[tokens, rows] = self._make_plan(tokens, rows)
            if len(self._plans) > _KEPT_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end((tokens, rows))
        return plan

    def _make_plan(self, tokens: int, rows: int) -> list[_Call]:
        steps = self._steps
        if rows == 0:  # no logits needed: the step ends when the last layer's keys and values are written
            last = max(i for i, step in enumerate(steps) if not isinstance(step, SegmentRunner))
            steps = steps[: last + 1]
        return [step.bind(tokens, rows) if isinstance(step, SegmentRunner) else step for step in steps]

    def _fill(self, batch: ForwardBatch) -> None:
        """Copy the batch into the program's inputs. Padding rows are token 0 at position 0."""
        for name, values in (
            ("input_ids", batch.input_ids),
            ("position_ids", batch.position_ids),
            ("logits_indices", batch.logits_indices),
        ):
            buffer, count = self._buffers.integers(name), len(values)
            buffer[:count] = values
            buffer[count : round_up(count, self.row_multiple)] = 0


def _weight_bytes(artifact: Artifact) -> int:
    return artifact.manifest.files[WEIGHTS_FILE].bytes if artifact.has(WEIGHTS_FILE) else 0
