"""Marks on streams: in order with queued work, read by the device's clock or the host's."""

from types import SimpleNamespace
from typing import Any

import pytest

from ingot.errors import EngineError
from ingot.runtime.cuda.driver import stopwatch
from ingot.runtime.cuda.driver.stopwatch import EventStopwatch, HostStopwatch, laps
from tests.simulators.interpreted_device import InterpretedDevice

SUCCESS, NOT_READY, BROKEN = 0, 600, 700


class Driver:
    """A driver whose events have the listed times, in milliseconds."""

    CUresult = SimpleNamespace(CUDA_ERROR_NOT_READY=NOT_READY)

    def __init__(self, times: list[float], ready: int = SUCCESS) -> None:
        self.times, self.ready = iter(times), ready
        self.recorded: list[tuple[dict[str, float], Any]] = []

    def cuEventCreate(self, flags: int) -> tuple[int, dict[str, float]]:  # noqa: N802
        assert flags == 0, "events without timing have no times"
        return SUCCESS, {}

    def cuEventRecord(self, event: dict[str, float], stream: Any) -> tuple[int]:  # noqa: N802
        event["at"] = next(self.times)
        self.recorded.append((event, stream))
        return (SUCCESS,)

    def cuEventQuery(self, event: dict[str, float]) -> tuple[int]:  # noqa: N802
        return (self.ready,)

    def cuEventSynchronize(self, event: dict[str, float]) -> tuple[int]:  # noqa: N802
        return (SUCCESS,)

    def cuEventElapsedTime(self, first: dict[str, float], last: dict[str, float]) -> tuple[int, float]:  # noqa: N802
        return SUCCESS, last["at"] - first["at"]

    def cuGetErrorString(self, status: int) -> tuple[int, bytes]:  # noqa: N802
        return SUCCESS, b"it broke"


def test_laps_are_the_times_between_marks_of_the_devices_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver([10.0, 12.0, 15.0, 15.5])
    runs: list[Any] = []
    monkeypatch.setattr(stopwatch, "load_driver", lambda: driver)
    found = laps(EventStopwatch(), "a stream", runs.append, 3, warm_up=2)
    assert found == pytest.approx([2e-3, 3e-3, 0.5e-3])
    assert runs == ["a stream"] * 5
    assert {stream for _, stream in driver.recorded} == {"a stream"}


@pytest.mark.parametrize(("status", "reached"), [(SUCCESS, True), (NOT_READY, False)])
def test_a_mark_reports_whether_the_device_reached_it(
    status: int, reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopwatch, "load_driver", lambda: Driver([1.0], status))
    watch = EventStopwatch()
    assert watch.reached(watch.mark("a stream")) is reached


def test_a_failure_of_queued_work_is_raised_when_a_mark_is_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopwatch, "load_driver", lambda: Driver([1.0], BROKEN))
    watch = EventStopwatch()
    with pytest.raises(EngineError, match="querying an event: 700"):
        watch.reached(watch.mark("a stream"))


def test_a_device_without_a_clock_is_waited_for_at_every_mark() -> None:
    device = InterpretedDevice()
    stream, address = device.make_stream(), device.allocate(256, "a test")
    watch = HostStopwatch(device)
    before = watch.mark(stream)
    device.clear(address, 256, stream)
    after = watch.mark(stream)
    assert not device.view(address, 256).any()
    assert watch.reached(after)
    assert watch.seconds(before, after) >= 0
