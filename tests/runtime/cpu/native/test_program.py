"""Launch programs on the CPU: a row's bits depend on its sequence alone, and what cannot run is refused by name."""

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from ingot.artifact.programs.cpu_program import Arithmetic, Attend, CpuProgram
from ingot.artifact.safetensors import MappedTensors
from ingot.errors import EngineError
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.native import program as under_test
from ingot.runtime.cpu.native.attention import isa_in_use, use_isa
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.cpu.native.program import NativeProgram, instruction_sets
from ingot.runtime.forward_batch import FloatArray
from tests.each_case import each_case
from tests.runtime.cpu.native.tiny_program import (
    BLOCK_TOKENS,
    CONTEXT,
    HIDDEN,
    VOCAB,
    gathered_early,
    random_tensors,
    tiny_program,
    write_weights,
)
from tests.runtime.cuda.batches import Growing, token_ids

pytestmark = pytest.mark.skipif(native_library() is None, reason="the library was not built")

BLOCKS = 200
ROWS = 512


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("tiny") / "weights.safetensors", random_tensors(tiny_program()))


def make_program(
    weights: Path,
    threads: int = 1,
    isa: str | None = None,
    rows: int = ROWS,
    attention: Arithmetic = "float32",
    program: CpuProgram | None = None,
) -> NativeProgram:
    program = attending_in(attention, program or tiny_program())
    pool = KVPool(program.kv, BLOCKS)
    pool.blocks[:] = 0xFF  # NaN: memory that was not written must not be read
    return NativeProgram(
        program, MappedTensors(weights), pool, max_batch_tokens=rows, num_threads=threads, isa=isa
    )  # fmt: skip


def attending_in(arithmetic: Arithmetic, program: CpuProgram) -> CpuProgram:
    """The program with that arithmetic of attention."""
    operations = [
        one.model_copy(update={"arithmetic": arithmetic}) if isinstance(one, Attend) else one
        for one in program.operations
    ]
    return program.model_copy(update={"operations": tuple(operations)})


def sequences(lengths: Sequence[int], seed: int = 0) -> Growing:
    """Random sequences on shuffled blocks."""
    ids = [token_ids(n, i, VOCAB) for i, n in enumerate(lengths)]
    width = -(-max(lengths) // BLOCK_TOKENS)
    order = np.random.default_rng(seed).permutation(BLOCKS)
    return Growing(ids, order[: len(ids) * width].reshape(len(ids), width).tolist())


def run_steps(program: NativeProgram, growing: Growing, steps: Sequence[Sequence[int]]) -> list[FloatArray]:
    """Run steps of so many tokens of each sequence; return all logits of each sequence."""
    rows: list[list[FloatArray]] = [[] for _ in growing.ids]
    for counts in steps:
        logits = program.step(growing.step(counts)).copy()
        for index, part in enumerate(np.split(logits, np.cumsum(counts)[:-1])):
            rows[index].append(part)
    return [np.concatenate(parts) for parts in rows]


def whole(program: NativeProgram, lengths: Sequence[int]) -> list[FloatArray]:
    """Logits of each sequence, in one step of its own."""
    growing = sequences(lengths)
    return run_steps(program, growing, np.diag([len(ids) for ids in growing.ids]).tolist())


LENGTHS = (1, 2, 3, 5, 9, 64, 150)
ALL_STEPS = {
    "all at once": [list(LENGTHS)],
    "token by token": [[1 if done < n else 0 for n in LENGTHS] for done in range(max(LENGTHS))],
    "in chunks": [[max(0, min(37, n - done)) for n in LENGTHS] for done in range(0, max(LENGTHS), 37)],
}


@cache
def alone(weights: Path) -> list[bytes]:
    return [logits.tobytes() for logits in whole(make_program(weights), LENGTHS)]


@each_case("steps", ALL_STEPS.values(), ids=ALL_STEPS)
@each_case("threads", [1, 2, 3, 4])
def test_a_row_has_the_same_bits_in_every_batch_and_on_any_number_of_threads(
    weights: Path, threads: int, steps: list[list[int]]
) -> None:
    found = run_steps(make_program(weights, threads), sequences(LENGTHS, seed=threads), steps)
    assert [logits.tobytes() for logits in found] == alone(weights)
    assert all(np.isfinite(logits).all() and logits.std() > 0.1 for logits in found)


@each_case("steps", ALL_STEPS.values(), ids=ALL_STEPS)
@each_case("threads", [1, 2])
@each_case("arithmetic", get_args(Arithmetic)[1:])
def test_attention_in_bfloat16_keeps_its_bits_and_changes_those_of_float32(
    weights: Path, arithmetic: Arithmetic, threads: int, steps: list[list[int]]
) -> None:
    expected = whole(make_program(weights, attention=arithmetic), LENGTHS)
    program = make_program(weights, threads, attention=arithmetic)
    found = run_steps(program, sequences(LENGTHS, seed=threads), steps)
    assert [logits.tobytes() for logits in found] == [logits.tobytes() for logits in expected]
    assert expected[-1].tobytes() != alone(weights)[-1]
    difference = np.abs(expected[-1] - np.frombuffer(alone(weights)[-1], np.float32).reshape(expected[-1].shape))
    assert difference.max() < 0.1 * expected[-1].std()


@pytest.fixture
def attention_isa() -> Iterator[None]:
    before = isa_in_use()
    yield
    use_isa(before)


@pytest.mark.usefixtures("attention_isa")
def test_every_instruction_set_of_the_kernels_gives_the_same_bits(weights: Path) -> None:
    for attention in ("avx512-bf16", "avx512", "avx2", "baseline"):
        if use_isa(attention):
            found = {isa: whole(make_program(weights, isa=isa), LENGTHS) for isa in instruction_sets()}
            assert len({b"".join(x.tobytes() for x in logits) for logits in found.values()}) == 1
    assert "portable" in instruction_sets()


def test_a_step_without_logits_writes_keys_and_values_and_ends_before_the_head(weights: Path) -> None:
    program, growing = make_program(weights), sequences([40])
    expected = run_steps(make_program(weights), sequences([40]), [[39], [1]])[0][-1:]
    seconds = np.zeros(len(tiny_program().operations))
    assert program.step(growing.step([39], "none"), seconds).shape == (0, VOCAB)
    assert program.step(growing.step([1])).tobytes() == expected.tobytes()
    head = tiny_program().head_start
    assert (seconds[:head] > 0).all()
    assert (seconds[head:] == 0).all()


def test_only_the_wanted_rows_get_logits(weights: Path) -> None:
    program, growing = make_program(weights, 2), sequences([30, 20])
    expected = run_steps(make_program(weights), sequences([30, 20]), [[30, 20]])
    found = program.step(growing.step([30, 20], "last"))
    assert found.tobytes() == np.stack([logits[-1] for logits in expected]).tobytes()


@each_case("wanted", [[], [0], [289], [0, 1, 2], [30], [199, 3], [88, 289, 90], list(range(290))], ids=str)
@each_case("threads", [1, 2])
def test_tokens_without_logits_do_not_attend_in_the_last_layer_and_are_written(
    weights: Path, threads: int, wanted: list[int]
) -> None:
    lengths = [3, 88, 200]  # and one more token each, which reads what the first step wrote
    expected = run_steps(make_program(weights), sequences([n + 1 for n in lengths]), [lengths, [1, 1, 1]])
    program, growing = make_program(weights, threads, program=gathered_early()), sequences([n + 1 for n in lengths])
    batch = replace(growing.step(lengths), logits_indices=np.array(wanted, np.int64))
    first = np.concatenate([logits[:-1] for logits in expected])
    assert program.step(batch).tobytes() == first[wanted].tobytes()
    assert program.step(growing.step([1, 1, 1])).tobytes() == np.stack([logits[-1] for logits in expected]).tobytes()


def test_a_token_out_of_the_vocabulary_and_sizes_out_of_range_are_refused(weights: Path) -> None:
    program = make_program(weights)
    for bad in (-1, VOCAB):
        growing = sequences([8])
        growing.ids[0][3] = bad
        with pytest.raises(EngineError, match="the step has a token id or position out of range"):
            program.step(growing.step([8]))
    growing = sequences([8])
    batch = growing.step([8])
    batch.context_lens[0] = CONTEXT + 1
    with pytest.raises(EngineError, match="the step has sizes out of range"):
        program.step(batch)


def test_two_programs_in_two_threads_take_turns_and_keep_their_bits(weights: Path) -> None:
    found: dict[int, list[bytes]] = {}

    def work(threads: int) -> None:
        program = make_program(weights, threads)
        steps = ALL_STEPS["in chunks"]
        runs = [run_steps(program, sequences(LENGTHS, seed), steps) for seed in range(5)]
        found[threads] = [b"".join(x.tobytes() for x in logits) for logits in runs]

    workers = [threading.Thread(target=work, args=(threads,)) for threads in (2, 3, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == {threads: [b"".join(alone(weights))] * 5 for threads in (1, 2, 3)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_runs_the_program_of_its_parent(weights: Path) -> None:
    program = make_program(weights, 3)
    before = [logits.tobytes() for logits in whole(program, LENGTHS)]
    child = os.fork()
    if child == 0:
        same = [logits.tobytes() for logits in whole(program, LENGTHS)] == before
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [logits.tobytes() for logits in whole(program, LENGTHS)] == before


def test_an_unknown_instruction_set_is_refused(weights: Path) -> None:
    with pytest.raises(EngineError, match=r"no instruction set 'mmx' here; this CPU runs .*portable"):
        make_program(weights, isa="mmx")


def test_a_library_that_was_not_built_is_named(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "native_library", lambda: None)
    with pytest.raises(EngineError, match=r"was not built: install Ingot again .* or build .* cpu.engine: onnxruntime"):
        make_program(weights)


def test_logits_that_the_system_refuses_are_named(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = make_program(weights, rows=100)
    growing = sequences([100])
    batch = growing.step([100])

    def refuse(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", refuse)
        with pytest.raises(EngineError, match=r"the logits of 100 tokens take 132.4 kB, and the system refused them"):
            program.step(batch)
    assert len(program.step(batch)) == 100


def test_more_buffers_than_memory_are_refused(weights: Path) -> None:
    with pytest.raises(EngineError, match=r"the arena of a step's operations needs .* max_batch_tokens"):
        make_program(weights, rows=2**40 // HIDDEN)
