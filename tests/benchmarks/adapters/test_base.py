"""The measuring loop that every adapter runs in."""

import numpy as np
from benchmarks.adapters.base import PeerFacts, Setup, Timing, Tokens, measure, random_prompts


class Recorder:
    """An adapter that records its calls."""

    def __init__(self, setup: Setup | None = None) -> None:
        self.started: list[tuple[tuple[int, ...], int]] = []
        self.steps = 0

    def facts(self) -> PeerFacts:
        return PeerFacts({}, 0, "")

    def start(self, prompts: Tokens, new_tokens: int) -> None:
        self.started.append((prompts.shape, new_tokens))

    def step(self) -> None:
        self.steps += 1


def test_the_first_token_is_the_prefills_and_each_later_one_is_a_step() -> None:
    adapter = Recorder()
    timing = measure(adapter, random_prompts(2, 5, vocab_size=100, seed=1), new_tokens=4)
    assert isinstance(timing, Timing)
    assert adapter.started == [((2, 5), 4)]
    assert adapter.steps == 3


def test_prompts_depend_on_the_seed_alone_and_hold_no_end_of_text() -> None:
    one, two, other = (random_prompts(4, 64, vocab_size=100, seed=seed) for seed in (7, 7, 8))
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, other)
    assert one.min() >= 1
    assert one.max() < 100
