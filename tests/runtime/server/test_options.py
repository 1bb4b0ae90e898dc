"""Limits and times of a server, and what is refused."""

from typing import Any

import pytest

from ingot.errors import UsageError
from ingot.runtime.server.options import ServerOptions
from tests.each_case import each_case


@each_case(
    ("given", "message"),
    [
        ({"max_requests": 0}, "max_requests is 0; it must be a whole number from 1 to"),
        ({"max_requests": True}, "max_requests is True"),
        ({"max_waiting_tokens": 1.5}, "max_waiting_tokens is 1.5"),
        ({"max_prompt_tokens": -1}, "max_prompt_tokens is -1"),
        ({"max_body_bytes": 2**60}, "max_body_bytes is 1152921504606846976"),
        ({"request_seconds": 0}, "request_seconds is 0; it must be a finite number above 0"),
        ({"send_seconds": float("nan")}, "send_seconds is nan"),
        ({"engine_nice": -1}, "engine_nice is -1; it must be a whole number from 0 to 19"),
        ({"json_whitespace": "none"}, "json_whitespace is 'none'; it must be one of compact, flexible"),
        ({"stream_seconds": -0.1}, "stream_seconds is -0.1; it must be a finite number, 0 or above"),
        ({"drain_seconds": float("inf")}, "drain_seconds is inf"),
    ],
)
def test_a_value_out_of_range_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ServerOptions(**given)


def test_zero_seconds_to_drain_and_between_events_are_allowed() -> None:
    assert ServerOptions(drain_seconds=0, stream_seconds=0).drain_seconds == 0
