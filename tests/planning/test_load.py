"""A load's steps add up to the tokens that it computes."""

from typing import Any

import pytest

from ingot.errors import UsageError
from ingot.planning.load import Load


def test_each_output_token_pays_for_its_share_of_a_prompt() -> None:
    load = Load(8, prompt_tokens=1000, output_tokens=100)
    step = load.average_step()
    assert (step.decode_rows, step.prefill_tokens, step.context_tokens) == (8, 80, 8 * 1050)
    assert step.prefill_context_tokens == pytest.approx(8 / 100 * sum(range(1, 1001)))
    assert Load(8, 1000, 100, arrival="burst").average_step().prefill_tokens == 40


def test_cached_tokens_are_attended_to_and_not_computed() -> None:
    step = Load(1, 1000, 100, cached_tokens=900).prefill_step()
    assert step.prefill_tokens == 100
    assert step.prefill_context_tokens == pytest.approx(sum(range(901, 1001)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"concurrency": 0}, "concurrency is 0; it must be at least 1"),
        ({"output_tokens": 0}, "output_tokens is 0"),
        ({"prompt_tokens": 10, "cached_tokens": 10}, "cached_tokens is 10 of a prompt of 10"),
        ({"acceptance": 1.5}, "acceptance is 1.5; it is a probability"),
        ({"drafted_tokens": -1}, "drafted_tokens is -1"),
    ],
)
def test_a_load_that_is_none_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Load(**fields)
