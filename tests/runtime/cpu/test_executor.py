"""The CPU executor: logits depend on the sequence alone, buffers are reused, and errors name what failed."""

import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ingot.artifact import Artifact, AttentionStep, Program, RotaryTables, SegmentStep, ValueFacts
from ingot.errors import EngineError
from ingot.runtime.cpu.executor import OnnxRuntimeExecutor
from ingot.runtime.cpu.native import attention
from ingot.runtime.cpu.segment_runner import use_thread_pool
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from tests.each_case import each_case
from tests.runtime.programs import PROGRAM, VALUES, VOCAB, Weights, make_artifact

LENGTHS = (1, 5, 8, 70, 33)
BLOCK = 8
BLOCKS = 40


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return make_artifact(tmp_path_factory.mktemp("small") / "artifact")


def make_executor(artifact: Artifact, max_batch_tokens: int = 96) -> OnnxRuntimeExecutor:
    return OnnxRuntimeExecutor(artifact, num_blocks=BLOCKS, max_batch_tokens=max_batch_tokens)


class Sequences:
    """Random sequences on shuffled blocks, advanced by chunks; keeps every row of logits."""

    def __init__(self, executor: OnnxRuntimeExecutor, seed: int) -> None:
        self.executor = executor
        self.tokens = [np.random.default_rng(n).integers(0, VOCAB, n) for n in LENGTHS]
        order = np.random.default_rng(seed).permutation(BLOCKS).astype(np.int32)
        counts = [-(-n // BLOCK) for n in LENGTHS]
        self.tables = [order[sum(counts[:s]) :][:count] for s, count in enumerate(counts)]
        self.done = [0] * len(LENGTHS)
        self.logits = [np.zeros((n, VOCAB), np.float32) for n in LENGTHS]

    def advance(self, chunks: list[tuple[int, int]]) -> None:
        """Run (sequence, tokens) chunks as one batch."""
        parts = [(s, slice(self.done[s], self.done[s] + n)) for s, n in chunks]
        logits = self.executor.forward(self._batch(parts))
        row = 0
        for s, part in parts:
            count = part.stop - part.start
            self.logits[s][part] = logits[row : row + count]
            self.done[s], row = part.stop, row + count

    def _batch(self, parts: list[tuple[int, slice]]) -> ForwardBatch:
        table: NDArray[np.int32] = np.full((len(parts), max(map(len, self.tables))), -1, np.int32)
        for i, (s, _) in enumerate(parts):
            table[i, : len(self.tables[s])] = self.tables[s]
        counts = [part.stop - part.start for _, part in parts]
        return ForwardBatch(
            input_ids=np.concatenate([self.tokens[s][part] for s, part in parts]),
            position_ids=np.concatenate([np.arange(part.start, part.stop) for _, part in parts]),
            logits_indices=np.arange(sum(counts)),
            query_starts=np.cumsum([0, *counts]).astype(np.int32),
            context_lens=np.array([part.stop for _, part in parts], np.int32),
            block_tables=table,
        )


def alone(executor: OnnxRuntimeExecutor) -> list[FloatArray]:
    sequences = Sequences(executor, 0)
    for s, n in enumerate(LENGTHS):
        sequences.advance([(s, n)])
    return sequences.logits


def mixed(executor: OnnxRuntimeExecutor, seed: int) -> list[FloatArray]:
    """Random chunks in random batches on shuffled blocks."""
    rng, sequences = np.random.default_rng(seed), Sequences(executor, seed)
    while any(done < n for done, n in zip(sequences.done, LENGTHS, strict=True)):
        chunks = []
        for s in rng.permutation(len(LENGTHS)):
            left = LENGTHS[s] - sequences.done[s]
            if left and rng.random() < 0.7:
                chunks.append((int(s), min(left, int(rng.choice([1, 2, 3, 15])))))
        if chunks:
            sequences.advance(chunks)
    return sequences.logits


def same_bits(a: list[FloatArray], b: list[FloatArray]) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@each_case(
    "weights", [Weights(), Weights(4, 16), Weights(4, 32), Weights(4, 64), Weights(8, 32), Weights(8, 64)], ids=str
)
def test_batches_chunks_and_blocks_do_not_change_a_bit_of_the_logits(weights: Weights, tmp_path: Path) -> None:
    executor = make_executor(make_artifact(tmp_path / "artifact", weights))
    assert executor.batch_invariant
    expected = alone(executor)
    for seed in (1, 2, 3):
        assert same_bits(mixed(executor, seed), expected)


def test_numpy_attention_gives_the_same_logits_and_is_batch_invariant(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(make_executor(artifact))
    monkeypatch.setattr(attention, "attention_backend", lambda: "numpy")
    executor = make_executor(artifact)
    ours = alone(executor)
    assert same_bits(mixed(executor, 5), ours)
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_logits_are_those_of_the_wanted_rows(artifact: Artifact) -> None:
    executor = make_executor(artifact)
    sequences = Sequences(executor, 0)
    batch = sequences._batch([(3, slice(0, 70))])
    everything = executor.forward(batch).copy()
    wanted = np.array([0, 7, 69])
    assert executor.forward(_with_indices(batch, wanted)).tobytes() == everything[wanted].tobytes()


def test_a_chunk_without_wanted_logits_still_fills_the_pool(artifact: Artifact) -> None:
    executor = make_executor(artifact)
    expected = alone(executor)
    sequences = Sequences(executor, 4)
    batch = sequences._batch([(3, slice(0, 69))])
    assert executor.forward(_with_indices(batch, np.zeros(0, np.int64))).shape == (0, VOCAB)
    sequences.done[3] = 69
    sequences.advance([(3, 1)])
    assert sequences.logits[3][69].tobytes() == expected[3][69].tobytes()


def test_a_copied_block_serves_in_place_of_its_source(artifact: Artifact) -> None:
    executor = make_executor(artifact)
    expected = alone(executor)
    sequences = Sequences(executor, 1)
    sequences.advance([(4, 20)])
    spare = int(next(b for b in range(BLOCKS) if all(b not in table for table in sequences.tables)))
    executor.copy_block(int(sequences.tables[4][0]), spare)
    executor._pool.blocks[sequences.tables[4][0]] = 0xFF  # NaN
    sequences.tables[4] = np.array([spare, *sequences.tables[4][1:]], np.int32)
    sequences.advance([(4, 13)])
    assert sequences.logits[4].tobytes() == expected[4].tobytes()


def test_more_wanted_rows_than_the_first_buffer_holds_make_it_grow(artifact: Artifact) -> None:
    executor = make_executor(artifact)
    expected = alone(executor)[3]
    assert executor._buffers.logits_rows >= 70
    assert alone(executor)[3].tobytes() == expected.tobytes()


def test_the_executor_has_the_artifacts_facts(artifact: Artifact) -> None:
    executor = make_executor(artifact)
    assert executor.model == artifact.manifest.model
    assert executor.kv_geometry == artifact.manifest.kv
    assert (executor.num_blocks, executor.max_batch_tokens) == (BLOCKS, 96)


def test_a_batch_of_too_many_tokens_is_a_bug_of_the_caller(artifact: Artifact) -> None:
    executor = make_executor(artifact, max_batch_tokens=16)
    with pytest.raises(AssertionError):
        Sequences(executor, 0).advance([(3, 17)])


def test_a_closed_executor_does_not_run_and_closes_again(artifact: Artifact) -> None:
    executor = make_executor(artifact)
    executor.close()
    executor.close()
    with pytest.raises(EngineError, match="closed"):
        Sequences(executor, 0).advance([(0, 1)])


def test_a_closed_executor_frees_the_pool_while_references_remain(artifact: Artifact) -> None:
    executor = make_executor(artifact)
    Sequences(executor, 0).advance([(0, 1)])
    pool = weakref.ref(executor._pool)
    executor.close()
    assert pool() is None
    assert executor.num_blocks == BLOCKS
    assert executor.kv_geometry == artifact.manifest.kv


@each_case(
    ("change", "message"),
    [
        (
            {"layer": 2},
            "attention of layer 2: 4 heads over 2 of 16 dimensions do not fit the KV pool, which has no such layer",
        ),
        ({"num_kv_heads": 4}, "4 heads over 4 of 16 dimensions do not fit"),
        ({"head_dim": 32}, "4 heads over 2 of 32 dimensions do not fit"),
        ({"num_heads": 3}, "3 heads over 2 of 16 dimensions do not fit"),
        ({"num_heads": 8}, "'q.1' has 64 columns, but its heads take 128"),
        ({"key": "q.0"}, "'q.0' has 64 columns, but its heads take 32"),
        ({"key_column": 1}, "'k.1' has 32 columns, but its heads take 32 from 1 on"),
        ({"key": "q.1", "value": "q.1"}, "'q.1' has 64 columns, but its heads take 128 from 0, 0, 0 on"),
        ({"rotary": RotaryTables(file="f", cos="c", sin="s", rotary_dim=18)}, "rotates 18 of a head's 16 dimensions"),
    ],
)
def test_attention_that_would_leave_its_memory_is_refused(
    artifact: Artifact, change: dict[str, object], message: str
) -> None:
    manifest = artifact.manifest
    *steps, attention_1, last = manifest.program.steps
    assert isinstance(attention_1, AttentionStep)
    changed = (*steps, attention_1.model_copy(update=change), last)
    program = manifest.program.model_copy(update={"steps": changed})
    with pytest.raises(EngineError, match=message):
        make_executor(replace(artifact, manifest=manifest.model_copy(update={"program": program})))


def test_another_number_of_threads_is_refused_once_the_pool_exists(artifact: Artifact) -> None:
    threads = make_executor(artifact).num_threads
    assert use_thread_pool(threads) == use_thread_pool(None) == threads
    with pytest.raises(EngineError, match=f"already computes with {threads} threads.*INGOT_THREADS"):
        use_thread_pool(threads + 1)
    with pytest.raises(EngineError, match="num_threads is 0; it must be from 1 to 256"):
        use_thread_pool(0)


def test_a_broken_segment_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken = make_artifact(tmp_path / "artifact")
    (broken.path / "program" / "segment-001.onnx").write_bytes(b"no model at all")
    broken = replace(broken, stamps={})
    with pytest.raises(EngineError, match=r"segment-001\.onnx: onnxruntime cannot load this segment"):
        make_executor(broken)
    assert capfd.readouterr() == ("", "")


def test_a_segment_with_other_names_than_the_manifests_is_refused(tmp_path: Path) -> None:
    first = PROGRAM.steps[0]
    assert isinstance(first, SegmentStep)
    renamed = first.model_copy(update={"inputs": ("position_ids",)})
    program = PROGRAM.model_copy(update={"steps": (renamed, *PROGRAM.steps[1:])})
    with pytest.raises(EngineError, match=r"segment-000\.onnx: reads .*build the artifact again"):
        make_executor(make_artifact(tmp_path / "artifact", program=program))


def test_attention_in_another_precision_is_refused(tmp_path: Path) -> None:
    half = ValueFacts(dtype="float16", rows="tokens", columns=64)
    program = PROGRAM.model_copy(update={"values": {**VALUES, "q.1": half}})
    with pytest.raises(EngineError, match=r"attention of layer 1: 'q\.1' is float16"):
        make_executor(make_artifact(tmp_path / "artifact", program=program))


def _with_indices(batch: ForwardBatch, indices: NDArray[np.int64]) -> ForwardBatch:
    return ForwardBatch(
        batch.input_ids, batch.position_ids, indices, batch.query_starts, batch.context_lens, batch.block_tables
    )


def test_the_small_program_is_a_valid_one() -> None:
    program = Program.model_validate_json(PROGRAM.model_dump_json())
    assert sum(isinstance(step, AttentionStep) for step in program.steps) == 2
