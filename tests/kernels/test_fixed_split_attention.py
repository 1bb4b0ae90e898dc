"""A query's bits do not depend on its batch, on the chunk of its prompt, or on the programs that share its splits."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from ingot.kernels.fixed_split_attention import power_of_two
from tests.kernels.attention_cases import batch, decode, ragged
from tests.kernels.cases import random
from tests.kernels.fixed_split_cases import attention
from tests.kernels.reference import FLOAT, INT8, Float64Array, Pool
from tests.simulators.triton_interpreter import use_ordered_dots

LENGTHS = [90, 70, 33, 5]
SHAPE = (4, 2, 32)  # heads, kv heads, dim
LONG = LENGTHS[0]
ALONE = (0, 1, 15, 16, 31, 32, 33, 62, 63, 64, 65, 77, 88, 89)  # around the borders of blocks, tiles and splits


@triton.jit
def _store_powers(exponents, out):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 8)
    tl.store(out + at, power_of_two(tl.load(exponents + at, mask=at < 6, other=0.0)), mask=at < 6)


def one_by_one(q: torch.Tensor, pool: Pool, table: torch.Tensor, **options: Any) -> Float64Array:
    """Queries of the first sequence alone, as decode steps compute them."""
    alone = [
        attention(q[at : at + 1], pool, table, torch.tensor([at + 1], dtype=torch.int32), [1], 0.2, **options)
        for at in ALONE
    ]
    return np.concatenate(alone)


@pytest.fixture(autouse=True)
def _ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    use_ordered_dots(monkeypatch)


@pytest.fixture
def problem() -> tuple[torch.Tensor, Pool, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(7)
    pool, tables, lengths = batch(rng, INT8, torch.float32, SHAPE, LENGTHS)
    return random(rng, sum(LENGTHS), SHAPE[0], SHAPE[2]) * 4, pool, tables, lengths


SINKS = torch.tensor([3.0, -0.7, 40.0, -40.0])


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 3.0, "sinks": SINKS}], ids=str)
def test_a_prompt_at_once_in_chunks_and_token_by_token_has_the_same_bits(
    problem: tuple[torch.Tensor, Pool, torch.Tensor, torch.Tensor], options: dict[str, Any]
) -> None:
    q, pool, tables, lengths = problem
    whole = attention(q, pool, tables, lengths, LENGTHS, 0.2, **options)[:LONG]
    tokens = one_by_one(q, pool, tables[:1], **options)
    np.testing.assert_array_equal(whole[list(ALONE)], tokens)
    for bounds, numbers_of_programs in (((0, 1, 64, LONG), (1, 2, 3)), ((0, 37, 38, LONG), (2,))):
        for begin, end in pairwise(bounds):
            length = torch.tensor([end], dtype=torch.int32)
            for programs in numbers_of_programs:
                given = (q[begin:end], pool, tables[:1], length, [end - begin], 0.2)
                chunk = attention(*given, programs=programs, **options)
                np.testing.assert_array_equal(chunk, whole[begin:end])


def test_the_usual_kernels_do_not_have_this_property() -> None:
    rng = np.random.default_rng(7)
    pool, tables, lengths = batch(rng, FLOAT, torch.float32, SHAPE, LENGTHS)
    q = random(rng, sum(LENGTHS), SHAPE[0], SHAPE[2]) * 4
    prompt = ragged(q, pool, tables, lengths, LENGTHS, 0.2)[LONG - 1]
    step = decode(q[LONG - 1 : LONG], pool, tables[:1], lengths[:1], 0.2)[0]
    assert (prompt != step).any()
    np.testing.assert_allclose(prompt, step, rtol=0, atol=1e-4)


def test_powers_of_two_are_exact() -> None:
    exponents = torch.tensor([0.0, -1.0, -23.0, -126.0, -127.0, -1e30])
    out = torch.empty(6)
    _store_powers[(1,)](exponents, out)
    assert out.tolist() == [1.0, 0.5, 2.0**-23, 2.0**-126, 0.0, 0.0]
