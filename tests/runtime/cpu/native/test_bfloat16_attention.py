"""Attention in bfloat16: the bits of the reference on every instruction set, however a sequence is run."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from ingot.artifact.kv_geometry import KVType
from ingot.artifact.programs.cpu_program import Arithmetic
from ingot.runtime.cpu.native.attention import isa_in_use, use_isa
from ingot.runtime.forward_batch import FloatArray
from tests.each_case import each_case
from tests.runtime.cpu.native.attention_cases import (
    PRECISIONS,
    ROUNDED,
    SHAPES,
    Case,
    expected,
    native_attention,
    run_alone,
    run_plan,
    run_shuffled,
    tables,
)
from tests.runtime.cpu.native.bfloat16_attention import bfloat16, reference

CASES = [
    *SHAPES,
    *ROUNDED,
    Case(heads=3, kv_heads=1, dim=7),
    Case(heads=9, kv_heads=3, dim=64, dtype="float16", rotary_dim=64, packed=True, lengths=(300, 1, 65)),
]
LONG = Case(heads=6, kv_heads=2, dim=32, dtype="float16", lengths=(1, 1100, 513, 512))
ISAS = ("amx-bf16", "avx512-bf16", "avx512", "avx2", "baseline")
ARITHMETICS: tuple[Arithmetic, ...] = ("bfloat16", "bfloat16-amx")
TOLERANCE = 0.03
"""8 bits: errors of scores up to about 5 are relative errors of probabilities; values are up to 4."""


@pytest.fixture
def first_isa() -> Iterator[str]:
    native_attention(1)
    before = isa_in_use()
    yield before
    use_isa(before)


@pytest.fixture(params=ARITHMETICS)
def arithmetic(request: pytest.FixtureRequest) -> Arithmetic:
    found: Arithmetic = request.param
    return found


def _alone(case: Case, arithmetic: Arithmetic, threads: int = 1) -> list[bytes]:
    return [x.tobytes() for x in run_alone(case, native_attention(threads, arithmetic)(case.pool()))]


@each_case("case", [case for case in [*CASES, LONG] if not case.softcap], ids=str)
def test_every_instruction_set_makes_the_bits_of_the_reference(
    case: Case, first_isa: str, arithmetic: Arithmetic
) -> None:
    expected_bits = [reference(case, sequence, arithmetic).tobytes() for sequence in case.sequences]
    for isa in filter(use_isa, ISAS):
        assert _alone(case, arithmetic) == expected_bits, isa


@pytest.mark.parametrize("scale", [1e-3, 1e-17, 1e-30, 1e4])
def test_numbers_whose_scores_would_be_subnormal_make_the_bits_of_the_reference(
    scale: float, first_isa: str, arithmetic: Arithmetic
) -> None:
    case = replace(SHAPES[0])
    for sequence in case.sequences:
        for array in (sequence.query, sequence.key, sequence.value):
            array[::2] *= np.float32(scale)
    expected_bits = [reference(case, sequence, arithmetic).tobytes() for sequence in case.sequences]
    for isa in filter(use_isa, ISAS):
        assert _alone(case, arithmetic) == expected_bits, isa


@each_case("case", [case for case in CASES if case.softcap], ids=str)
def test_instruction_sets_with_fused_multiply_adds_agree_where_scores_are_capped(
    case: Case, first_isa: str, arithmetic: Arithmetic
) -> None:
    assert len({b"".join(_alone(case, arithmetic)) for isa in ISAS[:-1] if use_isa(isa)}) <= 1


@each_case("case", CASES, ids=str)
def test_the_result_is_that_of_attention_up_to_the_rounding(case: Case, arithmetic: Arithmetic) -> None:
    for sequence, output in zip(
        case.sequences, run_alone(case, native_attention(1, arithmetic)(case.pool())), strict=True
    ):
        np.testing.assert_allclose(output, expected(case, sequence), atol=TOLERANCE, rtol=0)


@each_case("case", CASES, ids=str)
@each_case("threads", [1, 2])
def test_batch_mates_chunks_blocks_and_threads_do_not_change_a_bit(
    case: Case, threads: int, arithmetic: Arithmetic
) -> None:
    mixed = run_shuffled(case, native_attention(threads, arithmetic)(case.pool()), seed=threads)
    assert [x.tobytes() for x in mixed] == _alone(case, arithmetic)


@each_case(("dtype", "int4_group"), [("float32", 0), *PRECISIONS])
def test_block_size_does_not_change_a_bit(dtype: KVType, int4_group: int, arithmetic: Arithmetic) -> None:
    cases = [Case(block_tokens=n, dtype=dtype, int4_group=int4_group) for n in (1, 5, 16, 64, 100)]
    assert len({b"".join(_alone(case, arithmetic)) for case in cases}) == 1


def test_splits_of_a_long_context_give_the_same_bits_on_any_number_of_threads(arithmetic: Arithmetic) -> None:
    plan = [[(s, n - 1) for s, n in enumerate(LONG.lengths) if n > 1], [(s, 1) for s in range(len(LONG.lengths))]]
    for threads in (1, 2, 16):  # the second step has one row per sequence: threads share its contexts
        outputs = run_plan(LONG, native_attention(threads, arithmetic)(LONG.pool()), plan, tables(LONG, threads))
        assert [x.tobytes() for x in outputs] == _alone(LONG, arithmetic)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["key", "value"])
def test_a_number_that_is_not_finite_reaches_the_tokens_that_see_it_and_no_others(
    bad: float, name: str, arithmetic: Arithmetic
) -> None:
    case = Case(lengths=(90, 90), heads=4, kv_heads=2)
    clean = _alone(case, arithmetic)
    getattr(case.sequences[0], name)[70, 3] = bad  # token 70, first KV head: query heads 0 and 1
    spoiled = run_alone(case, native_attention(1, arithmetic)(case.pool()))
    assert spoiled[1].tobytes() == clean[1]
    heads, before = (x.reshape(90, 4, case.dim) for x in (spoiled[0], np.frombuffer(clean[0], np.float32)))
    assert heads[:, 2:].tobytes() == before[:, 2:].tobytes()
    assert heads[:64].tobytes() == before[:64].tobytes()  # of earlier tiles
    if name == "value" or np.isnan(bad):
        assert (~np.isfinite(heads[70:, :2])).any(axis=-1).all()


def test_rounding_is_to_nearest_with_ties_to_even() -> None:
    ties: FloatArray = np.array([1 + 2**-8, 1 + 3 * 2**-8, 2.0**-57, -(2.0**-56)], np.float32)
    assert bfloat16(ties).tolist() == [1.0, 1 + 2**-6, 0.0, -(2.0**-56)]
