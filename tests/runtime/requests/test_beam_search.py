"""The rules of beam search against the dense form of those of transformers; parameters that are refused."""

import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from ingot.errors import RequestError
from ingot.runtime.forward_batch import FloatArray
from ingot.runtime.requests.beam_search import BeamParams, BeamSearch, candidates_of
from ingot.runtime.requests.sampler import NonFiniteLogits
from tests.each_case import each_case

VOCAB = 12
_OUT = -1e9


@cache
def logits_after(tokens: tuple[int, ...], seed: int) -> FloatArray:
    """Logits [vocab] of a random model."""
    return np.random.default_rng([seed, *tokens]).standard_normal(VOCAB).astype(np.float32) * 3


def log_softmax(logits: FloatArray) -> Any:
    wide = logits.astype(np.float64)
    return wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())


def dense_search(params: BeamParams, ends: frozenset[int], seed: int) -> list[tuple[float, tuple[int, ...]]]:
    """`GenerationMixin._beam_search` of transformers 5.23, for one prompt, with lists for tensors."""
    width, most = params.width, params.max_tokens
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ()), *[(_OUT, ())] * (width - 1)]
    kept: list[tuple[float, tuple[int, ...], bool]] = [(_OUT, (), False)] * width
    keep, length, goes_on = max(2, 1 + len(ends)) * width, 0, True
    while goes_on:
        every = [
            (score + logprob, (*tokens, token))
            for score, tokens in running
            for token, logprob in enumerate(log_softmax(logits_after(tokens, seed)))
        ]
        top = sorted(every, key=lambda one: -one[0])[:keep]
        hits = [tokens[-1] in ends or length + 1 == most for _, tokens in top]
        running = sorted(
            [(score + _OUT * hit, tokens) for (score, tokens), hit in zip(top, hits, strict=True)],
            key=lambda one: -one[0],
        )[:width]
        is_full = all(finished for _, _, finished in kept) and params.early_stopping is True
        merged = list(kept)
        for place, ((score, tokens), hit) in enumerate(zip(top, hits, strict=True)):
            finishes = hit and place < width
            penalized = score / (length + 1) ** params.length_penalty
            merged.append((penalized + _OUT * (is_full + (not finishes)), tokens, finishes))
        kept = sorted(merged, key=lambda one: -one[0])[:width]
        length += 1
        at_most = params.early_stopping == "never" and params.length_penalty > 0
        best = running[0][0] / (most if at_most else length) ** params.length_penalty
        worst = min(score for score, _, _ in kept)
        improves = any(best > (worst if finished else _OUT) for _, _, finished in kept)
        stops = all(finished for _, _, finished in kept) and params.early_stopping is True
        goes_on = improves and not stops and not all(hits)
    return [(score, tokens) for score, tokens, _ in kept[: params.num_return]]


def search(params: BeamParams, ends: frozenset[int], seed: int) -> list[tuple[float, tuple[int, ...]]]:
    under_test = BeamSearch(params, ends)
    while not under_test.is_done:
        rows = [logits_after(beam.tokens, seed) for beam in under_test.beams]
        under_test.advance([candidates_of(row, under_test.num_candidates) for row in rows])
    return [(one.score, one.tokens) for one in under_test.ranked()[: params.num_return]]


@each_case("early_stopping", [True, False, "never"])
@each_case("length_penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
def test_beams_finish_and_rank_as_in_transformers(early_stopping: Any, length_penalty: float) -> None:
    rng = random.Random(int(length_penalty * 10))
    for seed in range(40):
        width = rng.randrange(1, 6)
        params = BeamParams(width, rng.randrange(1, 9), length_penalty, early_stopping, rng.randrange(1, width + 1))
        ends = frozenset(rng.sample(range(VOCAB), rng.randrange(4)))
        found, expected = search(params, ends, seed), dense_search(params, ends, seed)
        assert [tokens for _, tokens in found] == [tokens for _, tokens in expected]
        assert [score for score, _ in found] == pytest.approx([score for score, _ in expected])


def test_one_beam_is_greedy() -> None:
    tokens: tuple[int, ...] = ()
    while len(tokens) < 6:
        tokens = (*tokens, int(logits_after(tokens, 3).argmax()))
    assert search(BeamParams(width=1, max_tokens=6), frozenset(), 3)[0][1] == tokens


def test_candidates_are_the_most_likely_tokens_and_ties_go_to_the_lowest_id() -> None:
    logits = np.array([1, 5, -np.inf, 5, 2, 1], np.float32)
    found = candidates_of(logits, 4)
    assert [token for token, _ in found] == [1, 3, 4, 0]
    assert [token for token, _ in candidates_of(logits, 10)] == [1, 3, 4, 0, 5]
    assert sum(np.exp([logprob for _, logprob in candidates_of(logits, 6)])) == pytest.approx(1)
    with pytest.raises(NonFiniteLogits):
        candidates_of(np.array([1, np.nan], np.float32), 1)


@each_case(
    ("fields", "message"),
    [
        ({"width": 0}, "width is 0; it must be a whole number from 1 to 64"),
        ({"width": 65}, "width is 65"),
        ({"width": True}, "width is True"),
        ({"width": 2, "num_return": 3}, "num_return is 3; it must be a whole number from 1 to 2"),
        ({"early_stopping": "always"}, 'it must be True, False or "never"'),
        ({"length_penalty": float("nan")}, "length_penalty is nan; it must be from -16 to 16"),
        ({"length_penalty": "1"}, "it must be a number"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_invalid_parameters_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as error:
        BeamParams(**fields)
    assert message in str(error.value)
