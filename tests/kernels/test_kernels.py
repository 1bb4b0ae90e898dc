"""Every kernel in the interpreter against numpy in float64, and properties that errors do not show."""

import numpy as np
import pytest
import torch

from ingot.kernels.carry_tokens import carry_tokens
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from tests.kernels.all_cases import all_cases
from tests.kernels.attention_cases import batch, decode
from tests.kernels.cases import Case, random
from tests.kernels.matmul_cases import quantized, scaled_back
from tests.kernels.pool_cases import SLOTS, heads_of
from tests.kernels.reference import FLOAT, FP8, INT8

WITH_TOKENS = {"carry_tokens", "greedy", "bin_logits", "draw"}


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_a_kernel_is_as_close_to_float64_as_its_precision_allows(case: Case) -> None:
    assert case.errors()[1] <= case.limit


def test_every_kernel_has_cases() -> None:
    assert {case.kernel for case in all_cases()} | WITH_TOKENS == set(SIGNATURES)


def test_tokens_of_the_previous_step_are_carried_to_their_rows() -> None:
    ids, tokens = torch.arange(100, 205), torch.tensor([7, -1, 9])
    carried = torch.full((105,), -1, dtype=torch.int32)
    carried[[0, 50, 104]] = torch.tensor([2, 1, 0], dtype=torch.int32)
    carry_tokens[(2,)](ids, carried, tokens, 105, BLOCK=64)
    assert ids[[0, 1, 50, 103, 104]].tolist() == [9, 101, 0, 203, 7]


def test_only_the_given_slots_of_the_pool_are_written() -> None:
    pool, _, _ = heads_of("head 32", FLOAT, torch.float32, normed=True, parts=1)
    written = {slot for slot in SLOTS if slot >= 0}
    untouched = [slot for slot in range(20) if slot not in written]
    assert not pool.vectors().transpose(0, 3, 1, 2, 4).reshape(20, -1)[untouched].any()


def test_padding_sequences_give_zeros_and_read_nothing() -> None:
    rng = np.random.default_rng(2)
    pool, tables, _ = batch(rng, FLOAT, torch.float32, (4, 2, 32), [20, 20])
    found = decode(random(rng, 2, 4, 32), pool, tables, torch.tensor([20, 0], dtype=torch.int32), 1.0)
    assert (found[1] == 0).all()
    assert np.isfinite(found[0]).all()


def test_the_bits_of_a_row_do_not_depend_on_its_batch() -> None:
    rng = np.random.default_rng(3)
    pool, tables, lengths = batch(rng, INT8, torch.float32, (4, 2, 32), [70, 3, 40])
    q = random(rng, 3, 4, 32)
    together = decode(q, pool, tables, lengths, 0.125)
    for row in (0, 2):
        alone = decode(q[row : row + 1], pool, tables[row : row + 1], lengths[row : row + 1], 0.125)
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("kind", [FP8, INT8])
def test_rows_that_are_scaled_back_are_their_codes_times_the_scale(kind: int) -> None:
    x = random(np.random.default_rng(5), 3, 70) * 4
    codes, scales = quantized(x, kind, 0.03)
    assert torch.equal(scaled_back(x, kind, 0.03), codes.to(torch.float32) * scales[:, None])
