"""Counts between two scrapes, with a restart in between or without."""

import pytest

from ingot.runtime.doctor import Scrape, ScrapeWindow

SERVER = """\
process_start_time_seconds {start}
ingot_slow_clients_total {slow}
vllm:num_requests_running{{model_name="m"}} 0
ingot_steps_total{{model_name="m"}} {steps}
vllm:time_to_first_token_seconds_bucket{{model_name="m",le="0.1"}} {fast}
vllm:time_to_first_token_seconds_bucket{{model_name="m",le="+Inf"}} {steps}
vllm:time_to_first_token_seconds_sum{{model_name="m"}} {seconds}
"""


def scrape(**values: float) -> Scrape:
    return Scrape.parse(SERVER.format(**values), "a server")


BEFORE = scrape(start=100, slow=5, steps=50, fast=40, seconds=9.0)


def test_what_was_counted_in_between_is_the_difference() -> None:
    window = ScrapeWindow(BEFORE, scrape(start=100, slow=6, steps=80, fast=60, seconds=14.0))
    first_tokens = window.distribution("time_to_first_token_seconds")
    assert not window.has_restarted
    assert (window.counted("steps"), window.counted("slow_clients")) == (30, 1)
    assert (first_tokens.below, first_tokens.total) == (((0.1, 20), (float("inf"), 30)), 5.0)


@pytest.mark.parametrize(
    ("start", "steps", "slow"),
    [
        (200, 7, 2),  # fewer than before
        (200, 70, 9),  # more than before: the time of the start shows it
    ],
)
def test_a_server_that_restarted_is_counted_from_its_new_start(start: int, steps: int, slow: int) -> None:
    window = ScrapeWindow(BEFORE, scrape(start=start, slow=slow, steps=steps, fast=4, seconds=3.0))
    first_tokens = window.distribution("time_to_first_token_seconds")
    assert window.has_restarted
    assert (window.counted("steps"), window.counted("slow_clients")) == (steps, slow)
    assert (first_tokens.below, first_tokens.total) == (((0.1, 4), (float("inf"), steps)), 3.0)


def test_an_engine_that_was_replaced_alone_is_counted_from_its_new_start() -> None:
    after = scrape(start=100, slow=6, steps=49, fast=45, seconds=10.0)  # one counter of the engine fell
    for window in (ScrapeWindow(BEFORE, after), ScrapeWindow(BEFORE, after).of("m")):
        assert window.has_restarted
        assert (window.counted("steps"), window.counted("slow_clients")) == (49, 1)
        assert window.distribution("time_to_first_token_seconds").below[0] == (0.1, 45)
    assert not ScrapeWindow(BEFORE, after).of("another").has_restarted


def test_values_that_are_not_finite_are_left_out() -> None:
    found = Scrape.parse("vllm:num_requests_running 1\nvllm:kv_cache_usage_perc NaN\nprocess_max_fds +Inf\n", "a file")
    assert list(found.samples) == ["num_requests_running"]
