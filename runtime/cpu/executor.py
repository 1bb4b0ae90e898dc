"""The CPU executor: segments by onnxruntime, attention by our kernel over the paged KV pool.

    input_ids, position_ids ─► segment 0 ─► q, k, v ─► attention 0 ─► segment 1 ─► ... ─► last segment ─► logits

All buffers are made at load and bound without copies; a decode step is one call per step of the program. Rows are
padded to the multiple that `invariance` found, so that a token's logits are a function of its sequence alone, bit for
bit.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable

from ingot.artifact import Artifact, AttentionStep, KVGeometry, ModelFacts, SegmentStep
from ingot.errors import EngineError
from ingot.runtime.batch import FloatArray, ForwardBatch
from ingot.runtime.cpu.attention_operands import Rotations, attention_operands, check_attention
from ingot.runtime.cpu.batch_invariance import MULTIPLES, find_row_multiple, padded
from ingot.runtime.cpu.buffers import ValueBuffers
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.native.attention import make_attention
from ingot.runtime.cpu.segment_runner import SegmentRunner, use_thread_pool
from ingot.runtime.options import EngineOptions, resolve_pool_size

logger = logging.getLogger(__name__)

_Call = Callable[[], None]
_KEPT_PLANS = 64
_MAX_SEQUENCES = 64  # of a step, unless told otherwise


class OnnxRuntimeExecutor:
    """Runs an artifact on the CPU. Implements `ingot.runtime.executors.Executor`; one thread may call it at a time.

    num_blocks         blocks in the KV pool
    max_batch_tokens   most tokens of one `forward`
    max_sequences      most sequences of one `forward`
    num_threads        threads of the process-wide pool, this one included; None: as it is, else INGOT_THREADS, else
                       all cores

    Raises EngineError when a segment does not load, the pool does not fit, or the process computes with another number
    of threads already.
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        num_blocks: int,
        max_batch_tokens: int = 512,
        max_sequences: int = _MAX_SEQUENCES,
        num_threads: int | None = None,
    ) -> None:
        assert max_batch_tokens > 0
        manifest = artifact.manifest
        check_attention(manifest.program, manifest.kv)
        self.num_threads = use_thread_pool(num_threads)
        self._model, self._geometry = manifest.model, manifest.kv
        self._num_blocks, self._max_batch_tokens = num_blocks, max_batch_tokens
        self._max_sequences = max_sequences
        self._pool = KVPool(manifest.kv, num_blocks)
        self._buffers = ValueBuffers(manifest.program, padded(max_batch_tokens, MULTIPLES[-1]))
        self._attention = make_attention(self._pool, self.num_threads)
        self._rotations = Rotations(artifact)
        self._steps = [self._load_step(artifact, step) for step in manifest.program.steps]
        finding = find_row_multiple(self._runners, self._buffers, manifest.model)
        self.row_multiple, self.batch_invariant = finding.row_multiple, finding.batch_invariant
        self._plans: OrderedDict[tuple[int, int], list[_Call]] = OrderedDict()

    @property
    def model(self) -> ModelFacts:
        """Facts of the model that runs."""
        return self._model

    @property
    def kv_geometry(self) -> KVGeometry:
        """Shape of one KV block."""
        return self._geometry

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV pool."""
        return self._num_blocks

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens that one batch may hold."""
        return self._max_batch_tokens

    @property
    def max_sequences(self) -> int:
        """Most sequences of one batch."""
        return self._max_sequences

    @property
    def device(self) -> None:
        """No card."""
        return None

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """Write the batch's keys and values into the pool; return logits [R, vocab], valid until the next call."""
        rows = len(batch.logits_indices)
        if not self._steps:
            raise EngineError("the executor is closed; make another")
        batch.check(self._max_batch_tokens, self._model.context_tokens)
        plan = self._plan(padded(batch.num_tokens, self.row_multiple), padded(rows, self.row_multiple))
        self._fill(batch)
        self._attention.begin(batch)
        for call in plan:
            call()
        return self._buffers.floats("logits")[:rows]

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block within the pool (copy on write)."""
        self._pool.copy_block(source, target)

    def close(self) -> None:
        """Drop sessions, buffers and the KV pool, though the caller may hold on to the executor. Idempotent.

        Logits that `forward` returned keep the one buffer that they lie in.
        """
        if self._steps:
            self._plans.clear()
            self._steps.clear()
            del self._attention, self._buffers, self._pool, self._rotations

    @property
    def _runners(self) -> list[SegmentRunner]:
        return [step for step in self._steps if isinstance(step, SegmentRunner)]

    def _load_step(self, artifact: Artifact, step: SegmentStep | AttentionStep) -> SegmentRunner | _Call:
        if isinstance(step, SegmentStep):
            values = artifact.manifest.program.values
            return SegmentRunner(artifact.file(step.file), step, values, self._buffers)
        operands = attention_operands(step, self._buffers)
        rotation = self._rotations[step.rotary] if step.rotary else None
        return self._attention.bind(step, operands, self._buffers.floats(step.output), rotation)

    def _plan(self, tokens: int, rows: int) -> list[_Call]:
        """The calls of one step with these row counts, in order."""
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
        if rows == 0:  # nobody wants logits: done when the last layer has its keys and values
            last = max(i for i, step in enumerate(steps) if not isinstance(step, SegmentRunner))
            steps = steps[: last + 1]
        return [step.bind(tokens, rows) if isinstance(step, SegmentRunner) else step for step in steps]

    def _fill(self, batch: ForwardBatch) -> None:
        """Copy the batch into the program's inputs. Padding rows are token 0 at position 0, read by nobody."""
        for name, values in (
            ("input_ids", batch.input_ids),
            ("position_ids", batch.position_ids),
            ("logits_indices", batch.logits_indices),
        ):
            buffer, count = self._buffers.integers(name), len(values)
            buffer[:count] = values
            buffer[count : padded(count, self.row_multiple)] = 0


def load(artifact: Artifact, options: EngineOptions) -> OnnxRuntimeExecutor:
    """The executor of an artifact for the CPU, with a KV pool in the machine's memory."""
    manifest, max_sequences = artifact.manifest, options.max_sequences or _MAX_SEQUENCES
    size = resolve_pool_size(
        manifest.model,
        manifest.kv,
        kv_blocks=options.kv_blocks,
        kv_bytes=options.kv_bytes,
        max_sequences=max_sequences,
    )
    return OnnxRuntimeExecutor(
        artifact,
        num_blocks=size.num_blocks,
        max_batch_tokens=options.max_batch_tokens or manifest.max_batch_tokens,
        max_sequences=max_sequences,
        num_threads=options.num_threads,
    )
