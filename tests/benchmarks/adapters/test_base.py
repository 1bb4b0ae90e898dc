"""The measuring loop that every adapter runs in."""

import numpy as np
from benchmarks.adapters.base import random_prompts, timed


def test_actions_are_repeated_and_counted() -> None:
    calls: list[int] = []
    assert timed(lambda: calls.append(1), most=3).steps == 3
    assert len(calls) == 3


def test_no_repetition_begins_after_the_time_but_one_is_always_made() -> None:
    assert timed(lambda: None, most=5, max_seconds=0.0).steps == 1


def test_processor_time_is_that_of_the_action() -> None:
    timing = timed(lambda: sum(range(300_000)))
    assert timing.cpu_seconds > 0
    assert timing.seconds > 0


def test_prompts_depend_on_the_seed_alone_and_hold_no_end_of_text() -> None:
    one, two, other = (random_prompts(4, 64, vocab_size=100, seed=seed) for seed in (7, 7, 8))
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, other)
    assert one.min() >= 1
    assert one.max() < 100
