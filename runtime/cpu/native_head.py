"""The draft head of an artifact on the native CPU engine: a small program on the weights of the model's executor."""

from dataclasses import dataclass

from ingot.artifact import ModelFacts
from ingot.artifact.programs.cpu_program import CpuProgram
from ingot.artifact.programs.draft_head import HIDDEN, HIDDEN_STATES
from ingot.artifact.safetensors import MappedTensors
from ingot.errors import EngineError
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.native.program import NativeProgram
from ingot.runtime.forward_batch import FloatArray, ForwardBatch


@dataclass(frozen=True)
class HeadLimits:
    """Limits of a head's steps, and its threads; see NativeExecutor."""

    num_blocks: int
    max_batch_tokens: int
    max_sequences: int
    num_threads: int
    isa: str | None


class NativeHead:
    """Implements `executors.HeadExecutor`. EngineError for too little memory."""

    def __init__(self, program: CpuProgram, weights: MappedTensors, model: ModelFacts, limits: HeadLimits) -> None:
        self.model, self.kv_geometry = model, program.kv
        self.num_blocks, self.max_batch_tokens = limits.num_blocks, limits.max_batch_tokens
        self.max_sequences = limits.max_sequences
        self._pool: KVPool | None = KVPool(program.kv, limits.num_blocks)
        self._program: NativeProgram | None = NativeProgram(
            program,
            weights,
            self._pool,
            max_batch_tokens=limits.max_batch_tokens,
            num_threads=limits.num_threads,
            isa=limits.isa,
        )
        self._given, self._made = self._program.rows_of(HIDDEN_STATES), self._program.rows_of(HIDDEN)

    def forward(self, batch: ForwardBatch, hidden_states: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return logits [R, vocab] and the head's own hidden states [R, hidden_size], valid until the next call.

        hidden_states   [T, hidden_size]: for each token, the state before it
        """
        if self._program is None:
            raise EngineError("the draft head is closed; load the engine again")
        self._given[: len(hidden_states)] = hidden_states
        logits = self._program.step(batch)
        return logits, self._made[: len(logits)]

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block within the pool."""
        assert self._pool is not None
        self._pool.copy_block(source, target)

    def close(self) -> None:
        """Free buffers and the KV pool. Idempotent."""
        if self._program is not None:
            self._program.close()
        self._program = self._pool = None
