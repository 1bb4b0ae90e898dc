"""The knapsack equals an exhaustive search on random problems, and solves a large model's."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.passes.numerics.knapsack import Option, best_choice, cheapest

Items = Sequence[Sequence[Option]]

SMALL = st.integers(0, 12)
ANY_LOSS = st.one_of(st.floats(0, 10, allow_nan=False), SMALL.map(float))
ITEMS = st.lists(st.lists(st.tuples(SMALL, ANY_LOSS), min_size=1, max_size=4), min_size=1, max_size=6)
MIRRORED = ITEMS.map(lambda items: [[(loss, cost) for cost, loss in options] for options in items])


def sums(items: Items, choice: Sequence[int]) -> tuple[float, float]:
    """Cost and loss, added up in the order of the items."""
    cost = loss = 0.0
    for options, at in zip(items, choice, strict=True):
        cost, loss = cost + options[at][0], loss + options[at][1]
    return cost, loss


def exhaustive_search(items: Items, limit: float) -> tuple[float, float] | None:
    """The least loss within the limit, and the least cost that has it."""
    every = (sums(items, choice) for choice in itertools.product(*(range(len(options)) for options in items)))
    within = [(loss, cost) for cost, loss in every if cost <= limit]
    return min(within) if within else None


@settings(max_examples=400, deadline=None)
@given(items=st.one_of(ITEMS, MIRRORED), limit=st.one_of(SMALL.map(float), st.floats(0, 60)))
def test_it_equals_an_exhaustive_search(items: Items, limit: float) -> None:
    choice, best = best_choice(items, limit), exhaustive_search(items, limit)
    assert (choice is None) == (best is None)
    if choice is not None:
        cost, loss = sums(items, choice)
        assert (loss, cost) == best


@given(items=ITEMS)
def test_no_choice_fits_below_the_cheapest_one(items: Items) -> None:
    least = cheapest(items)
    choice = best_choice(items, least)
    assert choice is not None
    assert sums(items, choice)[0] == least
    assert best_choice(items, np.nextafter(least, -1)) is None


def test_no_items_cost_nothing() -> None:
    assert best_choice([], 0.0) == ()


def model_sized(random: np.random.Generator, weights: int) -> list[list[Option]]:
    """Weights of four shapes with ten schemes each, as a decoder has, and losses over four orders of magnitude."""
    bytes_of = [np.sort(random.integers(10_000, 9_000_000, 10)) for _ in range(4)]
    items = []
    for at in range(weights):
        losses = np.sort(np.exp(random.normal(-6, 2)) * np.exp(-random.uniform(0, 8, 10)))[::-1]
        items.append([(float(c), float(v)) for c, v in zip(bytes_of[at % 4], losses, strict=True)])
    return items


@pytest.mark.parametrize("weights", [24, 120, 300])
def test_a_model_of_many_layers_is_solved_and_better_than_any_uniform_choice(weights: int) -> None:
    items = model_sized(np.random.default_rng(weights), weights)
    for scheme in (2, 5, 8):
        limit, loss = sums(items, [scheme] * weights)
        choice = best_choice(items, limit)
        assert choice is not None
        cost, found = sums(items, choice)
        assert cost <= limit
        assert found < loss
