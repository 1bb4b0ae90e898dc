"""Facts about the machine, from /proc and the installed packages, and the load of other processes."""

import getpass
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.validation.machine import LoadMeter, MachineLoad, Reading, cpu_facts, environment, memory_bytes


def test_the_environment_has_machine_and_versions_but_no_host_or_user() -> None:
    found = environment(threads=3)
    text = json.dumps(found)
    assert found["threads"] == 3
    assert found["packages"]["numpy"]
    assert found["python"].startswith(platform.python_implementation())
    assert platform.node() not in text
    assert f"/{getpass.getuser()}/" not in text


def test_the_instruction_sets_of_matrix_kernels_are_kept_in_order() -> None:
    text = "processor : 0\nmodel name : A CPU\nflags : fpu avx512_vnni avx2 sse4_2\nprocessor : 1\nmodel name : B\n"
    assert cpu_facts(text) == {"model": "A CPU", "flags": ["avx2", "avx512_vnni", "sse4_2"]}


def test_arm_flags_are_read_from_features() -> None:
    assert cpu_facts("Features : fp asimd i8mm\nCPU part : 0xd40\n") == {"model": "0xd40", "flags": ["asimd", "i8mm"]}


def test_memory_is_in_bytes_and_may_be_unknown() -> None:
    assert memory_bytes("MemTotal:  2 kB\nMemFree: 1 kB\n") == 2048
    assert memory_bytes("") is None


STAT = "cpu  100 20 30 5000 7 1 2 40 9 9\ncpu0 50 10 15 2500 3 1 1 20 0 0\ncpu1 50 10 15 2500 4 0 1 20 0 0\nintr 1\n"


def meter_of(*readings: Reading | None, threads: int = 2) -> LoadMeter:
    waiting: Iterator[Reading | None] = iter(readings)
    meter = LoadMeter(threads, lambda: next(waiting))
    for _ in range(len(readings) // 2):
        meter.start()
        meter.stop()
    return meter


def test_busy_time_is_user_nice_system_interrupts_and_steal_of_all_processors(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text(STAT)
    reading = Reading.now(tmp_path / "stat", ticks_per_second=100)
    assert reading is not None
    assert reading.busy == pytest.approx((100 + 20 + 30 + 1 + 2 + 40) / 100)
    assert reading.cores == 2


@pytest.mark.parametrize("text", ["", "intr 1 2 3\n", "cpu 1 2 3\n", "cpu a b c d e f g h i j\n", None])
def test_a_system_without_the_counters_has_no_load(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text)
    assert Reading.now(tmp_path / "stat") is None
    assert meter_of(None, None).load is None


def test_the_load_is_what_is_busy_without_us_over_all_rounds_and_in_the_busiest() -> None:
    rounds = (
        *(Reading(busy=10, own=5, wall=100, cores=4), Reading(busy=17, own=11, wall=102, cores=4)),  # 1 s in 2 s
        *(Reading(busy=50, own=20, wall=200, cores=4), Reading(busy=54, own=21, wall=201, cores=4)),  # 3 s in 1 s
    )
    assert meter_of(*rounds).load == MachineLoad(others=1.33, peak=3.0, cores=4, threads=2)


def test_our_own_time_beyond_the_busy_time_is_rounding_and_not_a_negative_load() -> None:
    readings = Reading(busy=10, own=5, wall=100, cores=2), Reading(busy=12, own=7.01, wall=101, cores=2)
    load = meter_of(*readings).load
    assert load is not None
    assert (load.others, load.is_busy) == (0.0, False)


@pytest.mark.parametrize(
    ("others", "cores", "threads", "busy"),
    [(0.1, 2, 2, False), (0.5, 2, 2, True), (0.5, 4, 2, False), (2.5, 4, 2, True), (1.0, 2, 4, True)],
)
def test_a_machine_is_busy_if_others_need_the_processors_of_our_threads(
    others: float, cores: int, threads: int, busy: bool
) -> None:
    assert MachineLoad(others, others, cores, threads).is_busy is busy


def test_the_load_reads_as_a_clause() -> None:
    load = MachineLoad(others=1.62, peak=1.94, cores=2, threads=2)
    assert str(load) == "other processes kept 1.6 of 2 processors busy (at most 1.9)"


@pytest.mark.skipif(Reading.now() is None, reason="no /proc/stat")
def test_another_process_counts_and_our_own_work_does_not() -> None:
    meter = LoadMeter(threads=1)
    meter.start()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        before = time.process_time()
        while time.process_time() < before + 0.3:
            pass
        meter.stop()
        other.kill()
    assert meter.load is not None
    assert meter.load.others > 0
