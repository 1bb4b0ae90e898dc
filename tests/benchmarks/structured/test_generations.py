"""The benchmark of structured output in small: no text is invalid or changed, no mask wrong."""

import pytest

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

from benchmarks.structured.brute_force import compare
from benchmarks.structured.generations import generate


def test_random_texts_are_valid_and_those_of_plain_decoding() -> None:
    outcome, problems = generate(num_schemas=2, per_schema=3, seed=4)
    assert problems == []
    assert outcome.complete > 0


def test_masks_are_those_of_brute_force() -> None:
    compared = compare(num_schemas=1, seed=2)
    assert compared.tokens > 0
    assert (compared.wrongly_forbidden, compared.wrongly_allowed) == (0, 0)
