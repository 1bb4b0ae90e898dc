"""A clock that is centuries off gives the nearest moment that can be represented."""

import time
from collections.abc import Callable

import pytest

from ingot import wall_clock


@pytest.mark.parametrize(
    ("seconds", "bounded"),
    [
        (1.75e9, 1.75e9),
        (-3.8e9, 0.0),
        (9.2e18, 9_214_646_400.0),
        (None, 9_214_646_400.0),
        (9_220_000_000.0, 9_214_646_400.0),
    ],
    ids=["now", "1850", "the sun has gone out", "not representable", "2262"],
)
def test_times_are_bounded(monkeypatch: pytest.MonkeyPatch, seconds: float | None, bounded: float) -> None:
    def read(times: int) -> Callable[[], float]:
        def raising_or_not() -> float:
            if seconds is None:
                raise OverflowError("timestamp too large to convert to C _PyTime_t")
            return seconds * times

        return raising_or_not

    for name in ("time", "time_ns"):
        monkeypatch.setattr(time, name, getattr(time, name))  # restored at the end
    monkeypatch.setattr(wall_clock, "_READ", read(1))
    monkeypatch.setattr(wall_clock, "_READ_NS", read(10**9))
    for _ in range(2):
        wall_clock.bound_wall_clock()
        assert time.time() == bounded
        assert time.time_ns() == bounded * 10**9
