"""The sampling kernels choose the tokens that runtime/sampler.py chooses."""

import numpy as np
import pytest
import torch

from ingot.kernels.sampling import draw, greedy
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.token_choice import Choice, choose_token

VOCABULARY = 150
STRANGE = {"nan": {7: torch.nan}, "infinite": {7: torch.inf}, "nothing allowed": dict.fromkeys(range(150), -torch.inf)}


def logits_of(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(VOCABULARY).astype(np.float32)) * 2


def drawn(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, uniforms: list[float]) -> list[int]:
    rows = len(uniforms)
    tokens = torch.zeros(rows, dtype=torch.int64)
    options = [torch.full((rows,), value) for value in (temperature, top_k, top_p)]
    draw[(rows,)](
        *(logits.expand(rows, -1).contiguous(), options[0], options[1].to(torch.int32), options[2]),
        *(torch.tensor(uniforms), tokens, VOCABULARY),
        VOCABULARY=VOCABULARY,
        BLOCK=128,
    )
    return tokens.tolist()


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.stack([logits_of(6)] * 3)
    logits[1, [50, 149]] = 9.0
    logits[2] = -3.0
    tokens = torch.zeros(3, dtype=torch.int64)
    greedy[(3,)](logits, tokens, VOCABULARY, VOCABULARY=VOCABULARY, BLOCK=64)
    assert tokens.tolist() == [int(logits[0].argmax()), 50, 0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.6), (0.9, 20, 0.8), (2.0, 149, 0.05)]
)
@pytest.mark.parametrize("ties", [False, True])
def test_sampled_tokens_are_those_of_the_host(temperature: float, top_k: int, top_p: float, ties: bool) -> None:
    logits = logits_of(7)
    if ties:
        logits = (logits * 2).round() / 2
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    uniforms = [0.0, 0.35, 0.8, 0.999]
    wanted = [choose_token(logits.numpy(), Choice.of(params), uniform) for uniform in uniforms]
    assert drawn(logits, temperature, top_k, top_p, uniforms) == wanted


def test_a_temperature_of_zero_is_greedy() -> None:
    logits = logits_of(8)
    logits[[3, 90]] = 30.0
    assert drawn(logits, 0.0, 5, 0.5, [0.999]) == [3]


@pytest.mark.parametrize("strange", STRANGE)
def test_logits_that_no_token_can_be_chosen_from_give_minus_one(strange: str) -> None:
    logits = logits_of(9)
    for token, value in STRANGE[strange].items():
        logits[token] = value
    tokens = torch.zeros(1, dtype=torch.int64)
    greedy[(1,)](logits, tokens, VOCABULARY, VOCABULARY=VOCABULARY, BLOCK=64)
    assert tokens.tolist() == [-1]
    assert drawn(logits, 1.0, 5, 0.5, [0.5]) == [-1]


def test_a_forbidden_token_is_never_sampled() -> None:
    logits = logits_of(10)
    logits[:140] = -torch.inf
    assert all(token >= 140 for token in drawn(logits, 5.0, 0, 1.0, [0.0, 0.5, 0.9999]))
