"""Options of a request: what is refused, and which requests share cached blocks."""

from typing import Any

import pytest

from ingot.errors import RequestError
from ingot.runtime.asking.request_options import RequestOptions
from tests.each_case import each_case
from tests.runtime.engines import token_engine


@each_case(
    ("values", "message"),
    [
        ({"cache_salt": 5}, "cache_salt is 5; it must be a text of at most 1024 characters"),
        ({"cache_salt": "a" * 1025}, r"1,025 characters\); it must be a text of at most"),
        ({"prefix_cache": 1}, "prefix_cache is 1; it must be True or False"),
        ({"priority": 0.5}, "priority is 0.5; it must be a whole number from -2147483647 to 2147483647"),
        ({"priority": True}, "priority is True; it must be a whole number"),
        ({"priority": 2**31}, "priority is 2147483648; it must be"),
        ({"group": 3}, "group is 3; it must be a text of at most 256 characters"),
        ({"group": "a" * 257}, "it must be a text of at most 256 characters"),
        ({"timeout_seconds": 0}, "timeout_seconds is 0; it must be a finite number above 0, or None for no limit"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds is nan; it must be a finite number above 0"),
        ({"timeout_seconds": "1"}, "timeout_seconds is '1'; it must be"),
        ({"speculate": None}, "speculate is None; it must be True or False"),
    ],
)
def test_invalid_options_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as refusal:
        RequestOptions(**values)
    assert [refusal.value.field] == [*values]


def test_only_requests_of_one_salt_share_blocks_and_one_that_opts_out_shares_none() -> None:
    prompt = list(range(40))
    salts = [RequestOptions(cache_salt=salt) for salt in ("", "", "a", "a", "b")]
    out = [RequestOptions(prefix_cache=False), RequestOptions(cache_salt="a", prefix_cache=False)]
    with token_engine(block_tokens=4) as engine:
        completions = [engine.generate(prompt, options=options) for options in (*salts, *out)]
        assert [completion.cached_tokens for completion in completions] == [0, 39, 0, 39, 0, 0, 0]
        assert len({completion.token_ids for completion in completions}) == 1
        num_cached = engine.metrics().blocks_cached
        engine.generate([7] * 60, options=RequestOptions(prefix_cache=False))
        assert engine.metrics().blocks_cached <= num_cached, "a request that opts out left blocks"
        engine.check()
