"""The sampling kernels choose the tokens that runtime/requests/sampler.py chooses."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ingot.kernels.sampling import bin_logits, draw, greedy
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.truncation_sampling import TokenChoice, choose_token
from ingot.sizes import next_power_of_two
from tests.each_case import each_case

VOCABULARY = 150
ROUNDING = 1e-6  # relative error: 1,000 numbers are summed in float32
STRANGE = {"nan": {7: torch.nan}, "infinite": {7: torch.inf}, "nothing allowed": dict.fromkeys(range(150), -torch.inf)}


def logits_of(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(VOCABULARY).astype(np.float32)) * 2


def likeliest(logits: torch.Tensor, block: int = 64) -> tuple[list[int], torch.Tensor]:
    """Tokens of rows of logits, and the facts for `draw`."""
    rows, vocabulary = logits.shape
    parts = next_power_of_two(-(-vocabulary // block))
    tokens, counters = torch.full((rows,), -7), torch.zeros(rows, dtype=torch.int32)
    facts, peaks = torch.full((rows, 2), torch.nan), torch.full((rows, parts, 3), torch.nan)
    firsts = torch.full((rows, parts), -7, dtype=torch.int32)
    greedy[(rows, parts)](
        *(logits, peaks, firsts, counters, facts, tokens, logits.stride(0)),
        VOCABULARY=vocabulary,
        BLOCK=block,
        PARTS=parts,
    )
    assert not counters.any()
    return tokens.tolist(), facts


def drawn(
    logits: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    uniforms: list[float],
    *,
    candidates: int = 32,
    bins: int = 16,
    block: int = 128,
) -> list[int]:
    """Tokens of one row of logits, drawn with each uniform."""
    rows, vocabulary = len(uniforms), len(logits)
    parts = next_power_of_two(-(-vocabulary // block))
    logits = logits.expand(rows, -1).contiguous()
    greediest, facts = likeliest(logits, block)
    tokens, counters = torch.tensor(greediest), torch.zeros(rows, dtype=torch.int32)
    temperatures, top_ks, top_ps = [torch.full((rows,), value) for value in (temperature, top_k, top_p)]
    counts = torch.full((rows, parts, bins), -7, dtype=torch.int32)
    masses, values = torch.full((rows, parts), torch.nan), torch.full((rows, candidates), torch.nan)
    ids = torch.full((rows, candidates), -7, dtype=torch.int32)
    blocks = {"VOCABULARY": vocabulary, "BLOCK": block, "BINS": bins, "PARTS": parts}
    bin_logits[(rows, parts)](logits, temperatures, facts, tokens, counts, masses, vocabulary, **blocks)
    draw[(rows, parts)](
        *(logits, temperatures, top_ks.to(torch.int32), top_ps, torch.tensor(uniforms), facts, counts, masses),
        *(values, ids, counters, tokens, vocabulary),
        **blocks,
        CANDIDATES=candidates,
    )
    assert not counters.any()
    return tokens.tolist()


def tokens_within_rounding(logits: NDArray[np.float32], params: SamplingParams, uniform: float) -> set[int]:
    """Return the host's tokens for this top_p and uniform, and for those next to them: sums of probabilities round."""
    top_ps = [params.top_p * (1 - ROUNDING), params.top_p, min(params.top_p * (1 + ROUNDING), 1.0)]
    choices = [TokenChoice.of(replace(params, top_p=top_p)) for top_p in top_ps]
    uniforms = [max(uniform - ROUNDING, 0.0), uniform, min(uniform + ROUNDING, 1 - 2.0**-53)]
    return {choose_token(logits, choice, one) for choice in choices for one in uniforms}


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.stack([logits_of(6)] * 3)
    logits[1, [50, 149]] = 9.0
    logits[2] = -3.0
    for block in (256, 128, 16):
        tokens, facts = likeliest(logits, block)
        assert tokens == [int(logits[0].argmax()), 50, 0]
        torch.testing.assert_close(facts, torch.stack([logits.max(1).values, logits.mean(1)], 1))


@each_case(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.6), (0.9, 20, 0.8), (2.0, 149, 0.05)]
)
@each_case("ties", [False, True])
def test_sampled_tokens_are_those_of_the_host(temperature: float, top_k: int, top_p: float, ties: bool) -> None:
    logits = logits_of(7)
    if ties:
        logits = (logits * 2).round() / 2
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    uniforms = [0.0, 0.35, 0.8, 0.999]
    wanted = [choose_token(logits.numpy(), TokenChoice.of(params), uniform) for uniform in uniforms]
    assert drawn(logits, temperature, top_k, top_p, uniforms) == wanted


def test_random_rows_are_sampled_as_on_the_host(kernel_case: int) -> None:
    """All sizes of vocabularies, candidates and bins; ties, both zeros, forbidden tokens; peaked and flat rows."""
    rng = np.random.default_rng(kernel_case)
    size = int(rng.choice([16, 150, 400, 1000]))
    logits = (rng.standard_normal(size) * rng.choice([0.01, 1.0, 4.0, 100.0])).astype(np.float32)
    if rng.integers(0, 2):
        logits = (logits * 2).round() / 2  # ties; and -0.0
    logits[rng.random(size) < rng.choice([0.0, 0.0, 0.9])] = -np.inf
    logits[rng.integers(size)] = np.abs(logits[np.isfinite(logits)]).max(initial=0.0)
    params = SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 3.0])),
        top_k=[0, 1, int(rng.integers(2, 40)), size - 1][rng.integers(0, 4)],
        top_p=float(rng.choice([1.0, 0.02, 0.5, 0.95])),
    )
    uniforms = rng.uniform(size=2).tolist()
    wanted = [tokens_within_rounding(logits, params, uniform) for uniform in uniforms]
    sizes = {"candidates": int(rng.choice([16, 128, 1024])), "bins": int(rng.choice([16, 64]))}
    sizes["block"] = int(rng.choice([16, 64, 128, 1024]))
    found = drawn(torch.from_numpy(logits), params.temperature, params.top_k, params.top_p, uniforms, **sizes)
    assert all(one in tokens for one, tokens in zip(found, wanted, strict=True)), (params, uniforms, sizes, kernel_case)


def test_zeros_of_both_signs_tie() -> None:
    logits = torch.full((VOCABULARY,), -1.0)
    logits[[4, 60, 99]] = torch.tensor([-0.0, 0.0, -0.0])
    assert likeliest(logits[None])[0] == [4]
    assert drawn(logits, 0.0, 0, 1.0, [0.5]) == [4]
    assert drawn(logits, 1.0, 1, 1.0, [0.0, 0.4, 0.999]) == [4, 60, 99]
    assert drawn(logits, 1.0, 0, 0.01, [0.999]) == [4]


def test_a_temperature_of_zero_is_greedy() -> None:
    logits = logits_of(8)
    logits[[3, 90]] = 30.0
    assert drawn(logits, 0.0, 5, 0.5, [0.999]) == [3]


@pytest.mark.parametrize("strange", STRANGE)
def test_logits_that_no_token_can_be_chosen_from_give_minus_one(strange: str) -> None:
    logits = logits_of(9)
    for token, value in STRANGE[strange].items():
        logits[token] = value
    assert likeliest(logits[None])[0] == [-1]
    assert drawn(logits, 1.0, 5, 0.5, [0.5]) == [-1]


def test_a_forbidden_token_is_never_sampled() -> None:
    logits = logits_of(10)
    logits[:140] = -torch.inf
    assert all(token >= 140 for token in drawn(logits, 5.0, 0, 1.0, [0.0, 0.5, 0.9999]))
