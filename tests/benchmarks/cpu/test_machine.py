"""The load of other processes is read from /proc; the bandwidth probe compiles and reads."""

import os
import shutil

import pytest
from benchmarks.cpu.machine import (
    CpuTimes,
    busy_ticks,
    measure_read_bandwidth,
    other_cores,
    process_ticks,
    read_memory,
    read_times,
)


def test_it_reads_with_two_threads() -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert measure_read_bandwidth(2, repeats=1, buffer_bytes=1 << 20) > 0


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.cpu import machine as bandwidth

    bandwidth._compiled.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="no C compiler 'no-such-compiler'"):
        measure_read_bandwidth(1, repeats=1, buffer_bytes=1 << 20)


def test_idle_and_waiting_ticks_are_not_busy_and_guests_are_not_counted_twice() -> None:
    #        user nice system idle iowait irq softirq steal guest guest_nice
    assert busy_ticks("cpu  100 10 20 1000 50 1 2 3 40 5\ncpu0 1 2 3\n") == 100 + 10 + 20 + 1 + 2 + 3


def test_a_process_name_may_hold_spaces_and_brackets() -> None:
    assert process_ticks("42 (a (b) c) S 1 42 42 0 -1 4194304 100 0 0 0 70 30 0 0 20 0 1 0") == 100


def test_ended_programs_of_a_process_count_as_its_own() -> None:
    assert process_ticks("42 (bench) S 1 42 42 0 -1 4194304 100 0 0 0 70 30 500 60 20 0 1 0") == 660


def test_huge_pages_of_this_process_are_counted_as_part_of_its_memory() -> None:
    memory = read_memory(os.getpid())
    assert memory is None or 0 <= memory.huge_bytes <= memory.rss_bytes


def test_what_the_measured_process_used_is_not_others_load() -> None:
    before, after = CpuTimes(at=0.0, machine=10.0, process=1.0), CpuTimes(at=2.0, machine=14.0, process=4.0)
    assert other_cores(before, after) == pytest.approx(0.5)


def test_without_a_snapshot_nothing_is_known_and_nothing_is_blamed() -> None:
    assert other_cores(None, None) == 0.0


def test_times_of_this_process_can_be_read() -> None:
    times = read_times(os.getpid())
    assert times is None or times.machine >= times.process >= 0
