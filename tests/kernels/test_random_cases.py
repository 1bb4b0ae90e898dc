"""Random problems of the kernels over rows, matmuls, rotations and fixed splits."""

import pytest

from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from tests.kernels import packed_cases
from tests.kernels.random_cases import RUNS, share_of_limit

# test_attention_properties, test_prefill_attention, test_sampling
ELSEWHERE = {"decode_attention", "ragged_attention", "prefill_attention", "bin_logits", "draw"}


@pytest.mark.parametrize("kernel", RUNS)
def test_random_problems_are_as_close_to_float64_as_their_precision_allows(
    kernel: str, pytestconfig: pytest.Config
) -> None:
    shares = [share_of_limit(kernel, seed) for seed in range(pytestconfig.getoption("--kernel-cases") // 4)]
    assert max(shares) <= 1, f"seed {shares.index(max(shares))}"


def test_every_kernel_has_random_problems() -> None:
    assert {*RUNS, *packed_cases.RUNS} | ELSEWHERE == set(SIGNATURES)
