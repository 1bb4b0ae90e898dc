"""Large requests of the fuzz and the soak: valid JSON within the server's limit, each kind as it says."""

import json
import random

import pytest
from benchmarks.serve.large import KINDS, Limits, hostile_constraints

LIMITS = Limits(1024)
MOST_BODY_BYTES = 8 << 20
MOST_SOURCE_CHARS = 1 << 18


@pytest.mark.parametrize("kind", KINDS)
def test_bodies_are_within_the_limit_of_a_server(kind: str) -> None:
    sizes = [len(json.dumps(KINDS[kind](random.Random(seed), LIMITS).body)) for seed in range(4)]
    assert 500 < max(sizes) <= MOST_BODY_BYTES


def test_the_same_seed_gives_the_same_request() -> None:
    assert KINDS["long message"](random.Random(3), LIMITS) == KINDS["long message"](random.Random(3), LIMITS)


def test_hostile_constraints_are_no_longer_than_constraints_may_be() -> None:
    requests = hostile_constraints()
    assert len(requests) > 15
    assert all(len(json.dumps(request.body)) < MOST_SOURCE_CHARS + 1000 for request in requests.values())


def test_a_refusal_because_of_overload_is_right_for_every_request() -> None:
    request = KINDS["whole context"](random.Random(0), LIMITS)
    assert request.is_right("200")
    assert request.is_right("429")
    assert not request.is_right("503")
