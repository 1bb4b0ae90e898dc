"""The multiple-choice knapsack, solved exactly: one option of every item, with the least loss within a cost limit.

    minimize  sum_i loss[i, c_i]     subject to  sum_i cost[i, c_i] <= limit

Dynamic programming over the items: a state is a pair of sums, cost and loss, of some choice for the items so far. Of
two states, the one that costs no less and loses no less is dropped (dominance), which leaves at most one state per sum
of costs. That alone can be too many, so states that cannot improve on a known solution are dropped too: the linear
relaxation of the remaining items, with shares of options between 0 and 1, bounds their loss from below (Sinha and
Zoltners, The Multiple-Choice Knapsack Problem, Operations Research 27(3), 1979; dynamic programming with such bounds:
Pisinger, EJOR 83(2), 1995). The known solution comes from the same search with at most BEAM states per item.

The states of an item are at most its distinct sums of costs, and in practice those whose relaxed loss is between the
optimum and the relaxation of the whole problem, a gap smaller than one option of one item. 300 items of 10 options take
seconds.

Sums are float64, over the items in order: integer costs or losses up to 2^53 are summed exactly, and two searches of
one problem agree to the last bit. Rounding is monotone, so dominance stays exact. Bounds are compared with a margin
wider than their rounding errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Option = tuple[float, float]  # cost, loss
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

BEAM = 512
_MARGIN = 1e-11  # share of the largest sums: more than float64's rounding of a few thousand terms


def cheapest(items: Sequence[Sequence[Option]]) -> float:
    """The least sum of costs of any choice."""
    total = 0.0
    for options in items:
        total += min(cost for cost, _ in options)
    return total


def best_choice(items: Sequence[Sequence[Option]], limit: float) -> tuple[int, ...] | None:
    """The index of each item's chosen option; None when no choice is within the limit.

    Of choices with equal losses the cheapest wins. Every item needs an option; costs and losses must be finite.
    """
    if not items or cheapest(items) > limit:
        return None if items else ()
    problem = _Problem.of([np.array(options, np.float64).reshape(-1, 2) for options in items], limit)
    rough = _search(problem, np.inf, BEAM)
    exact = _search(problem, np.inf if rough is None else rough.loss, None)
    assert exact is not None, "the cheapest choice is within the limit"
    return exact.options


@dataclass(frozen=True)
class _Solution:
    options: tuple[int, ...]
    loss: float


@dataclass(frozen=True)
class _Relaxation:
    """Lower bound of the loss of some items by their cost: falling, convex, linear between the points."""

    costs: Floats
    losses: Floats

    def bound(self, costs: Floats) -> Floats:
        """The relaxed loss at these costs; constant after the last point."""
        return np.interp(costs, self.costs, self.losses)


@dataclass(frozen=True)
class _Problem:
    """Options of every item [options, 2], the limit, and for each i the relaxation of the items from i on."""

    tables: Sequence[Floats]
    limit: float
    rest: Sequence[_Relaxation]
    cost_margin: float
    loss_margin: float

    @classmethod
    def of(cls, tables: Sequence[Floats], limit: float) -> "_Problem":
        assert all(len(table) and np.isfinite(table).all() for table in tables), "items have finite options"
        largest = np.sum([np.abs(table).max(axis=0) for table in tables], axis=0)
        cost_margin, loss_margin = (_MARGIN * largest).tolist()
        return cls(tables, limit, _relaxations(tables), cost_margin, loss_margin)


@dataclass(frozen=True)
class _States:
    """Sums of choices, by rising cost and falling loss, with the state and option that led to each."""

    cost: Floats
    loss: Floats
    parent: Integers
    option: Integers

    def pick(self, which: NDArray[np.bool_] | Integers) -> "_States":
        return _States(self.cost[which], self.loss[which], self.parent[which], self.option[which])


def _search(problem: _Problem, known_loss: float, beam: int | None) -> _Solution | None:
    """The best choice that loses no more than `known_loss`; with a beam a good one, or None."""
    zero = np.zeros(1)
    states, history = _States(zero, zero, np.zeros(1, np.int64), np.zeros(1, np.int64)), []
    for at in range(len(problem.tables)):
        states = _next(problem, at, states, known_loss, beam)
        history.append(states)
    inside = np.flatnonzero(states.cost <= problem.limit)
    if not len(inside):
        return None
    return _traced(history, int(inside[-1]))  # losses fall with rising costs


def _next(problem: _Problem, at: int, states: _States, known_loss: float, beam: int | None) -> _States:
    """States after the item `at` that no other dominates and that may improve on `known_loss`."""
    table, rest, options = problem.tables[at], problem.rest[at + 1], len(problem.tables[at])
    grown = _States(
        (states.cost[:, None] + table[:, 0]).reshape(-1),
        (states.loss[:, None] + table[:, 1]).reshape(-1),
        np.repeat(np.arange(len(states.cost)), options),
        np.tile(np.arange(options), len(states.cost)),
    )
    fits = grown.cost + rest.costs[0] <= problem.limit + problem.cost_margin
    promising = grown.loss + rest.bound(problem.limit - grown.cost) <= known_loss + problem.loss_margin
    grown = _undominated(grown.pick(fits & promising))
    if beam is None or len(grown.cost) <= beam:
        return grown
    bounds = grown.loss + rest.bound(problem.limit - grown.cost)
    return grown.pick(np.sort(np.argsort(bounds, kind="stable")[:beam]))


def _undominated(states: _States) -> _States:
    ordered = states.pick(np.lexsort((states.loss, states.cost)))
    least_before = np.minimum.accumulate(np.concatenate([[np.inf], ordered.loss[:-1]]))
    return ordered.pick(ordered.loss < least_before)


def _traced(history: Sequence[_States], at: int) -> _Solution:
    """The options that led to a state of the last item."""
    loss, options = float(history[-1].loss[at]), []
    for states in reversed(history):
        options.append(int(states.option[at]))
        at = int(states.parent[at])
    return _Solution(tuple(reversed(options)), loss)


def _relaxations(tables: Sequence[Floats]) -> list[_Relaxation]:
    """Return for each i up to the number of items the relaxation of items from i on: steepest steps of hulls first."""
    hulls = [_hull(table) for table in tables]
    steps = [np.column_stack([np.full(len(hull) - 1, at), np.diff(hull, axis=0)]) for at, hull in enumerate(hulls)]
    merged = np.concatenate(steps)  # [steps, (item, cost, loss)]
    with np.errstate(over="ignore"):  # a step of almost no cost is infinitely steep
        merged = merged[np.argsort(merged[:, 2] / merged[:, 1], kind="stable")]
    found = []
    for first in range(len(tables) + 1):
        start = np.sum([hull[0] for hull in hulls[first:]], axis=0) if first < len(tables) else np.zeros(2)
        points = start + np.cumsum(np.vstack([np.zeros(2), merged[merged[:, 0] >= first, 1:]]), axis=0)
        found.append(_Relaxation(points[:, 0], points[:, 1]))
    return found


def _hull(table: Floats) -> Floats:
    """The lower convex hull of an item's options, from the cheapest to the one of least loss."""
    hull: list[Floats] = []
    for point in table[np.lexsort((table[:, 1], table[:, 0]))]:
        if hull and (point[1] >= hull[-1][1] or point[0] == hull[-1][0]):
            continue
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], point):
            hull.pop()
        hull.append(point)
    return np.array(hull)


def _is_above(middle: Floats, first: Floats, last: Floats) -> bool:
    """Whether the middle point is on or above the line between the others."""
    return bool((middle[1] - first[1]) * (last[0] - first[0]) >= (last[1] - first[1]) * (middle[0] - first[0]))
