"""Adapters in the native CPU engine: near the merged weights, and rows that depend on their own adapter alone."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ingot.artifact.programs.cpu_program import CpuProgram, Rounding
from ingot.artifact.programs.operation_row import Form
from ingot.artifact.safetensors import MappedTensors
from ingot.errors import EngineError
from ingot.runtime.adapters import Adapter
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.native.low_rank import PackedAdapter, pack_changes
from ingot.runtime.cpu.native.program import NativeProgram
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from tests.each_case import each_case
from tests.runtime.cpu.native.kernel_cases import INTEGERS, SETS, LinearCase, needs_library, random_weight
from tests.runtime.cpu.native.low_rank_cases import (
    STORED,
    added_weight,
    merged_tensors,
    random_adapter,
    random_change,
)
from tests.runtime.cpu.native.test_program_invariance import in_form
from tests.runtime.cpu.native.tiny_program import (
    BLOCK_TOKENS,
    HIDDEN,
    VOCAB,
    gathered_early,
    random_tensors,
    tiny_program,
    write_weights,
)
from tests.runtime.cuda.batches import Growing, token_ids

pytestmark = needs_library

MERGED_ERROR = 2e-5  # of the largest logit: B (A x) and (B A) x in float32, after two layers
LINEAR_ERROR = 2e-6  # of the largest result: up to 330 terms in float32, and the low-rank part
SLOTS = 16
TOKENS = 48
"""Of each sequence."""
Adapters = Mapping[int, Adapter]


@contextmanager
def opened(
    program: CpuProgram, weights: Path, sequences: int, isa: str = SETS[0] if SETS else "", threads: int = 1
) -> Iterator[tuple[NativeProgram, list[list[int]]]]:
    """A program, and blocks for sequences of TOKENS tokens. Memory that was not written is NaN."""
    blocks = TOKENS // BLOCK_TOKENS
    pool = KVPool(program.kv, sequences * blocks)
    pool.blocks[:] = 0xFF
    native = NativeProgram(
        program, MappedTensors(weights), pool, max_batch_tokens=sequences * TOKENS, num_threads=threads, isa=isa
    )
    try:
        yield native, np.arange(sequences * blocks).reshape(sequences, blocks).tolist()
    finally:
        native.close()


def with_slots(batch: ForwardBatch, slots: Sequence[int]) -> ForwardBatch:
    """The batch with the adapters of its sequences."""
    return replace(batch, adapter_slots=np.array(slots, np.int32))


def alone(program: CpuProgram, weights: Path, seed: int, adapter: Adapter | None) -> FloatArray:
    """Logits [TOKENS, vocabulary] of a sequence that is decoded token by token on one thread."""
    with opened(program, weights, 1) as (native, tables):
        if adapter is not None:
            native.load_adapter(0, adapter, slots=1)
        growing = Growing([token_ids(TOKENS, seed, VOCAB)], tables)
        steps = (growing.step([1]) for _ in range(TOKENS))
        rows = [native.step(step if adapter is None else with_slots(step, [0])).copy() for step in steps]
    return np.concatenate(rows)


@each_case("form", STORED)
@each_case("make", [tiny_program, gathered_early])
def test_logits_are_near_those_of_the_merged_weights(form: Form, make: object, tmp_path: Path) -> None:
    assert callable(make)
    program, adapter = in_form(make(), "float32"), random_adapter(STORED.index(form))
    tensors = random_tensors(program)
    weights = write_weights(tmp_path / "base.safetensors", tensors)
    merged = write_weights(tmp_path / "merged.safetensors", merged_tensors(program, tensors, adapter))
    base, want = alone(program, weights, 0, None), alone(program, merged, 0, None)
    got = alone(program, weights, 0, adapter)
    largest = np.abs(want).max()
    assert np.abs(got - want).max() <= MERGED_ERROR * largest
    assert np.abs(base - want).max() > 0.05 * largest, "the adapter changes next to nothing"


BASES: tuple[tuple[Form, Rounding], ...] = (
    ("float32", "none"), ("float8", "none"), *((form, "block") for form in INTEGERS), ("int8", "token"),
)  # fmt: skip


@each_case(("form", "rounding"), BASES)
@each_case("store", ["store", "add", "gate"])
def test_a_linear_layer_adds_b_a_x_before_all_that_follows(form: Form, rounding: Rounding, store: str) -> None:
    rng = np.random.default_rng(7)
    rows, columns, k = 27, 75, 331
    n = 2 * columns if store == "gate" else columns
    bias = rng.standard_normal(n).astype(np.float32)
    norm = rng.uniform(0.5, 1.5, k).astype(np.float32)
    weight = random_weight(rng, n, k, form, pairs=store == "gate", zeros=form in INTEGERS)
    case = LinearCase(
        weight, rounding, store=store, activation="silu", norm="rms", norm_weight=norm, bias=bias, alpha=0.7, cap=9.0
    )
    changes = [random_change(rng, 5, 30, k, 3), random_change(rng, 21, 40, k, 33, "bfloat16")]
    if store == "gate":
        changes += [random_change(rng, 1, columns, k, columns)]
    x = rng.standard_normal((rows, k)).astype(np.float32)
    packed, changed = pack_changes(weight.matrix, changes), np.arange(rows) % 3 > 0
    before, found = 0.5, []
    plain = case.run(SETS[0], x, before)
    for name in SETS:
        got = case.run(name, x, before, changes=(packed.structure, changed))
        assert got[~changed].tobytes() == plain[~changed].tobytes()
        found.append(got)
    assert len({got.tobytes() for got in found}) == 1
    want = case.expected(x, before, added=changed[:, None] * (case.normed(x) @ added_weight(changes, n).T))
    assert np.abs(found[0] - want).max() <= LINEAR_ERROR * np.abs(want).max()


def test_sixteen_adapters_and_none_in_one_ragged_batch_equal_each_alone(tmp_path: Path) -> None:
    program = tiny_program()
    weights = write_weights(tmp_path / "weights.safetensors", random_tensors(program))
    adapters = [random_adapter(seed) for seed in range(SLOTS)]
    chosen: list[int] = [*range(SLOTS), -1, 3, -1, 9, -1]  # of each sequence
    want = [alone(program, weights, seed, adapters[one] if one >= 0 else None) for seed, one in enumerate(chosen)]
    assert len({logits.tobytes() for logits in want}) == len(chosen)
    for isa, threads, seed in [(name, 2, 0) for name in SETS] + [(SETS[0], threads, threads) for threads in (1, 3, 4)]:
        rng = np.random.default_rng(seed)
        order = rng.permutation(SLOTS)  # the slot of each adapter
        with opened(program, weights, len(chosen), isa, threads) as (native, tables):
            for one in rng.permutation(SLOTS):
                native.load_adapter(int(order[one]), adapters[one], slots=SLOTS)
            slots = np.array([order[one] if one >= 0 else -1 for one in chosen])
            growing = Growing([token_ids(TOKENS, index, VOCAB) for index in range(len(chosen))], tables)
            while min(growing.done) < TOKENS:
                left = TOKENS - np.array(growing.done)
                taken = np.minimum(left, rng.choice([0, 1, 1, 1, 2, 13, TOKENS], len(chosen)))
                if not taken.any():
                    continue
                before, present = list(growing.done), np.flatnonzero(taken)
                logits = native.step(with_slots(growing.step(taken.tolist()), slots[present].tolist()))
                for index, rows in zip(present, np.split(logits, np.cumsum(taken[present])[:-1]), strict=True):
                    expected = want[index][before[index] : growing.done[index]]
                    assert rows.tobytes() == expected.tobytes(), (isa, threads, index, before[index])


def test_adapters_come_and_go_while_others_run(tmp_path: Path) -> None:
    program = tiny_program()
    weights = write_weights(tmp_path / "weights.safetensors", random_tensors(program))
    kept, small, large = random_adapter(1), random_adapter(2, max_rank=3), random_adapter(3, max_rank=90)
    want = alone(program, weights, 0, kept)
    found = []
    with opened(program, weights, 1, threads=2) as (native, tables):
        native.load_adapter(0, kept, slots=2)
        growing = Growing([token_ids(TOKENS, 0, VOCAB)], tables)
        held = native.adapter_bytes
        for other in (small, large, small):
            native.load_adapter(1, other, slots=2)  # over the one before
            found.append(native.step(with_slots(growing.step([TOKENS // 4]), [0])).copy())
        assert native.adapter_bytes > held
        native.unload_adapter(1)
        native.unload_adapter(1)
        assert native.adapter_bytes == held
        found.append(native.step(with_slots(growing.step([TOKENS // 4]), [0])).copy())
    assert np.concatenate(found).tobytes() == want.tobytes()


@each_case("slot", [1, 2, -2])
def test_a_step_with_a_slot_that_has_no_adapter_is_refused(slot: int, tmp_path: Path) -> None:
    program = tiny_program()
    weights = write_weights(tmp_path / "weights.safetensors", random_tensors(program))
    with opened(program, weights, 1) as (native, tables):
        native.load_adapter(0, random_adapter(0), slots=2)
        native.load_adapter(1, random_adapter(1), slots=2)
        native.unload_adapter(1)
        growing = Growing([token_ids(TOKENS, 0, VOCAB)], tables)
        with pytest.raises(EngineError, match="sizes out of range"):
            native.step(with_slots(growing.step([3]), [slot]))


def test_a_layer_that_the_program_does_not_have_is_refused_by_name() -> None:
    change = random_change(np.random.default_rng(0), 2, HIDDEN, HIDDEN)
    with pytest.raises(EngineError, match=r"'wrong' changes 'experts\.0', which is not a linear operation"):
        PackedAdapter(tiny_program(), Adapter("wrong", {"experts.0": [change]}))


@each_case("form", STORED)
def test_numbers_are_stored_in_the_smallest_form_that_holds_them(form: Form) -> None:
    change = random_change(np.random.default_rng(0), 16, 64, 64, form=form)
    packed = pack_changes(random_weight(np.random.default_rng(1), 64, 64, "float32").matrix, [change])
    size = 4 if form == "float32" else 2
    assert (packed.a.nbytes, packed.b.nbytes) == (16 * 64 * size, 64 * 16 * size)
