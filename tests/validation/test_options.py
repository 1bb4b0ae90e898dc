"""Options of the measurements: their bounds, and those that a context shortens."""

import pytest

from ingot.errors import UsageError
from ingot.validation.options import AccuracyOptions, GenerationOptions, LatencyLoad, MemoryOptions, ServiceLevel
from tests.each_case import each_case


@each_case(
    ("options", "message"),
    [
        ({"concurrency": ()}, r"concurrency is \(\); it must be a list of 1 to 16 values"),
        ({"concurrency": (0,)}, "it must be a list of 1 to 16 values, each a whole number from 1 to 4096"),
        ({"concurrency": (2, 2)}, "repeats a level"),
        ({"output_tokens": 1}, "output_tokens is 1; it must be from 2 to 16777216"),
        ({"rounds": 1}, "rounds is 1; it must be from 2 to 10000"),
        ({"requests": 0}, "latency requests is 0"),
        ({"max_seconds": 0}, "max_seconds is 0; it must be above 0, up to 86400"),
        ({"max_seconds": float("nan")}, "max_seconds is nan"),
    ],
)
def test_an_invalid_load_is_refused(options: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LatencyLoad(**options)  # type: ignore[arg-type]


def test_an_objective_of_zero_seconds_is_refused() -> None:
    with pytest.raises(UsageError, match="latency slo tpot_seconds is 0"):
        ServiceLevel(ttft_seconds=1.0, tpot_seconds=0)


def test_an_objective_without_a_limit_is_refused() -> None:
    with pytest.raises(UsageError, match="latency slo has no limit; give ttft_seconds, tpot_seconds or e2e_seconds"):
        ServiceLevel()
    assert ServiceLevel(e2e_seconds=2).limits == {"e2e": 2.0}


def test_one_probe_is_refused_because_it_has_no_interval() -> None:
    with pytest.raises(UsageError, match="memory probes is 1; it must be from 2 to 100"):
        MemoryOptions(probes=1)


def test_tokens_that_make_less_than_two_windows_are_refused() -> None:
    with pytest.raises(UsageError, match="less than 2 windows of 512"):
        AccuracyOptions(tokens=1000, window_tokens=512)
    with pytest.raises(UsageError, match="window_tokens is 0"):
        AccuracyOptions(window_tokens=0)


def test_a_short_context_shortens_prompts_and_outputs() -> None:
    assert GenerationOptions().fitted(256) == GenerationOptions(16, 64, 192)
    assert GenerationOptions().fitted(100) == GenerationOptions(16, 25, 75)
    assert GenerationOptions().fitted(4096) == GenerationOptions()


def test_one_prompt_is_refused_because_it_has_no_interval() -> None:
    with pytest.raises(UsageError, match=r"generation has 1 prompts .* at least 2 prompts"):
        GenerationOptions(prompts=1)
