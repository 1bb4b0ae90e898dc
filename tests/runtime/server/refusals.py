"""Refusals with the times that clients were given, and the times after which they would have been served."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

_MOST_SECONDS = 60.0  # OpenAI's clients ignore longer times, so none is given


class Refusal(NamedTuple):
    """The first refusal of a request: when, the time it was given, and the number of clients that waited then."""

    at: float
    given: float
    num_before: int


def given_and_true(refusals: Sequence[Refusal], ends: Sequence[float], since: float) -> list[tuple[float, float]]:
    """Pair the time given by each later refusal with the one until as many answers had ended as clients waited before.

    `ends` are the times at which answers ended, in order. Refusals whose turn did not come are left out.
    """
    found = []
    for each in refusals:
        place = bisect_right(ends, each.at) + each.num_before
        if each.at >= since and place < len(ends):
            found.append((each.given, min(_MOST_SECONDS, ends[place] - each.at)))
    return found
