"""Fourteen planted faults, of which each is named first, and fifty healthy runs, in which nothing is found."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from ingot.runtime.doctor import MachineReading, MachineWindow, ObservedFacts, Scrape, ScrapeWindow, diagnose
from ingot.runtime.doctor.machine import Disk, Link, throttling, usable_cores
from ingot.runtime.engine.engine import Engine
from ingot.runtime.speculation.prompt_lookup import PromptLookup
from ingot.runtime.speculation.speculator import Speculator
from tests.runtime.doctor.loads import (
    VOCAB_SIZE,
    Clock,
    Load,
    Prompt,
    SlowPartExecutor,
    TimedExecutor,
    serve,
    window_of,
)
from tests.runtime.kv.tiered_engines import tiered_engine

QUIET = MachineReading(
    taken_seconds=0.0,
    cores=4.0,
    all_cores=4,
    threads=4,
    busy_seconds=100.0,
    own_seconds=1.0,
    swapped_pages=1000,
    free_memory_bytes=8 << 30,
    clock_share=0.97,
    links=(Link("0000:01:00.0", 16, 16),),
    disk=Disk("/kv", 50 << 30, 100 << 30),
    open_files_limit=65536,
)


def machine(seconds: float = 5.0, own_cores: float = 3.5, **changes: object) -> MachineWindow:
    """A machine on which the server alone is busy, but for what is changed at the end."""
    later = replace(QUIET, taken_seconds=seconds, busy_seconds=100.0 + own_cores * seconds + 0.1)
    return MachineWindow(QUIET, replace(later, **changes))  # type: ignore[arg-type]


def facts(text: str, own_cores: float = 3.5, **changes: object) -> ObservedFacts:
    """An engine's metrics and those of its server, on a machine."""
    server = f"process_cpu_seconds_total {own_cores * 2.0}\nprocess_open_fds 40\nprocess_max_fds 1024\n"
    server += "".join(f'ingot_engine_cpu_seconds_total{{model_name="{name}"}} {own_cores * 1.5}\n' for name in "ab")
    server += "ingot_compute_threads 4\ningot_usable_cores 4\n"
    if "process_open_fds" in text:
        server = ""
    return ObservedFacts(window_of(text + server), machine(own_cores=own_cores, **changes))  # type: ignore[arg-type]


def healthy(seed: int, **load: object) -> str:
    """An engine of some size, at a load that it can serve."""
    rng, clock = random.Random(seed), Clock()
    num_sequences = rng.choice([8, 16, 64])
    executor = TimedExecutor(clock, num_blocks=rng.choice([256, 1024]), block_tokens=16)
    speculator = Speculator(PromptLookup(), vocab_size=VOCAB_SIZE, num_draft_tokens=3) if rng.random() < 0.3 else None
    engine = Engine(executor, max_sequences=num_sequences, clock=clock, speculator=speculator)
    given = Load(num_requests=rng.randint(20, 80), per_second=rng.uniform(0.5, 10), **load)  # type: ignore[arg-type]
    with engine:
        return serve(engine, clock, given, rng, until_idle=rng.random() < 0.7)


@pytest.mark.parametrize("seed", range(50))
def test_nothing_is_found_in_healthy_runs(seed: int) -> None:
    rng = random.Random(seed)
    shared = [rng.randrange(1, VOCAB_SIZE) for _ in range(64)]  # a system prompt in front of all prompts of some runs

    def prompt(own: random.Random, length: int) -> Prompt:
        return (shared if seed % 3 == 0 else []) + [own.randrange(1, VOCAB_SIZE) for _ in range(length)]

    own_cores = rng.uniform(0.1, 3.9)
    clock_share = rng.uniform(0.3, 1) if own_cores < 1.5 else rng.uniform(0.7, 1)
    found = diagnose(facts(healthy(seed, prompt=prompt), own_cores, clock_share=clock_share, swapped_pages=1000 + seed))
    assert [each.name for each in found] == []


def thrashing_tiers() -> ObservedFacts:
    """Four sequences grow in a pool that holds about two; host memory takes what is preempted."""
    clock = Clock()
    engine = tiered_engine(
        partial(TimedExecutor, clock), clock=clock, num_blocks=40, num_slots=400, max_sequences=6, max_batch_tokens=64
    )
    load = Load(num_requests=60, per_second=60, prompt_tokens=(8, 16), output_tokens=(60, 100))
    with engine:
        return facts(serve(engine, clock, load, random.Random(1)))


def full_pool() -> ObservedFacts:
    """More requests arrive than the pool holds, and they wait."""
    clock = Clock()
    engine = Engine(TimedExecutor(clock, num_blocks=48, block_tokens=4), max_sequences=64, clock=clock)
    load = Load(num_requests=80, per_second=100, prompt_tokens=(30, 50), output_tokens=(20, 60))
    with engine:
        return facts(serve(engine, clock, load, random.Random(2), until_idle=False))


def slow_part(block_seconds: float = 0.001) -> ObservedFacts:
    """One conversation after the other, each twice as long as the fast part of the pool."""
    clock = Clock()
    executor = SlowPartExecutor(clock, block_seconds=block_seconds, num_blocks=60, num_fast_blocks=20, block_tokens=4)
    with Engine(executor, max_sequences=2, clock=clock) as engine:
        load = Load(num_requests=12, per_second=0.2, prompt_tokens=(90, 110), output_tokens=(50, 80))
        return facts(serve(engine, clock, load, random.Random(6)))


def date_first() -> ObservedFacts:
    """A long system prompt that all share, after a date that differs."""
    rng = random.Random(3)
    system = [rng.randrange(1, VOCAB_SIZE) for _ in range(200)]

    def prompt(own: random.Random, length: int) -> Prompt:
        date = [own.randrange(1, VOCAB_SIZE) for _ in range(4)]
        return date + system + [own.randrange(1, VOCAB_SIZE) for _ in range(length)]

    return facts(healthy(3, prompt=prompt))


def evicted_prefixes() -> ObservedFacts:
    """Prompts that come again after more others than the pool holds."""
    clock, rng = Clock(), random.Random(3)
    known = [[rng.randrange(1, VOCAB_SIZE) for _ in range(150)] for _ in range(10)]
    turns = count()

    def prompt(own: random.Random, length: int) -> Prompt:
        return known[next(turns) % len(known)] + [own.randrange(1, VOCAB_SIZE) for _ in range(length)]

    engine = Engine(TimedExecutor(clock, num_blocks=40, block_tokens=16), max_sequences=2, clock=clock)
    with engine:
        load = Load(num_requests=120, per_second=1, prompt_tokens=(4, 8), output_tokens=(1, 4), prompt=prompt)
        return facts(serve(engine, clock, load, random.Random(4)))


def cold() -> ObservedFacts:
    """The first step takes three seconds."""
    clock = Clock()
    engine = Engine(TimedExecutor(clock, num_blocks=1024, cold_seconds=3.0), max_sequences=64, clock=clock)
    with engine:
        return facts(serve(engine, clock, Load(num_requests=100, per_second=2), random.Random(4)))


def full_batch() -> ObservedFacts:
    """Blocks for many requests, and a batch of two."""
    clock = Clock()
    engine = Engine(TimedExecutor(clock, num_blocks=1024), max_sequences=2, clock=clock)
    with engine:
        load = Load(num_requests=60, per_second=40)
        return facts(serve(engine, clock, load, random.Random(5), until_idle=False))


def test_a_slow_part_that_is_as_fast_as_memory_is_not_named() -> None:
    assert "kv-slow-part" not in [each.name for each in diagnose(slow_part(block_seconds=0.0))]


HEALTHY = healthy(0)
_FILES = "process_open_fds 1001\nprocess_max_fds 1024\nprocess_cpu_seconds_total 17.5\n"
_THREADS = "process_open_fds 10\nprocess_max_fds 1024\nprocess_cpu_seconds_total 17.5\n"
FAULTS: dict[str, Callable[[], ObservedFacts]] = {
    "kv-tiers-thrash": thrashing_tiers,
    "kv-pool-full": full_pool,
    "kv-slow-part": slow_part,
    "prefix-differs": date_first,
    "prefix-lost": evicted_prefixes,
    "cold-start": cold,
    "batch-full": full_batch,
    "busy-neighbours": lambda: facts(HEALTHY, busy_seconds=100.0 + 5.5 * 5.0),  # two processes that spin
    "threads-over-cores": lambda: facts(HEALTHY + _THREADS + "ingot_compute_threads 8\ningot_usable_cores 4\n"),
    "swap": lambda: facts(HEALTHY, swapped_pages=9000),
    "low-clocks": lambda: facts(HEALTHY, clock_share=0.31),
    "open-files": lambda: facts(HEALTHY + _FILES + "ingot_compute_threads 4\ningot_usable_cores 4\n"),
    "disk-full": lambda: facts(_with(HEALTHY, "kv_failed_transfers", 40), disk=Disk("/kv", 0, 100 << 30)),
    "small-pages": lambda: facts(HEALTHY + "ingot_weight_bytes 95e6\ningot_weight_huge_bytes 4e6\n"),
    "narrow-gpu-link": lambda: facts(HEALTHY, links=(Link("0000:01:00.0", 4, 16),)),
}


def _with(text: str, name: str, value: float) -> str:
    return f"{text}ingot_{name}_total {value}\n"


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_first_with_its_numbers(name: str) -> None:
    found = diagnose(FAULTS[name]())
    assert found
    assert found[0].name == name, [(each.name, each.weight, dict(each.numbers)) for each in found]
    assert found[0].numbers
    assert found[0].cause
    assert found[0].action


@pytest.mark.parametrize(("name", "num_blocks", "max_sequences"), [("batch-full", 1024, 2), ("kv-pool-full", 16, 64)])
def test_waits_of_a_load_that_is_over_are_found(name: str, num_blocks: int, max_sequences: int) -> None:
    """Forty requests between two scrapes, at both of which none waits."""
    clock = Clock()
    executor = TimedExecutor(clock, num_blocks=num_blocks, block_tokens=16)
    load = Load(num_requests=40, per_second=100, prompt_tokens=(30, 50), output_tokens=(20, 60))
    with Engine(executor, clock=clock, max_sequences=max_sequences) as engine:
        before = Scrape.parse(serve(engine, clock, replace(load, num_requests=1), random.Random(1)), "before")
        after = Scrape.parse(serve(engine, clock, load, random.Random(2)), "after")
        assert engine.metrics().num_waiting == 0
    (found,) = diagnose(ObservedFacts(ScrapeWindow(before, after)))
    assert found.name == name
    assert found.numbers["queue_share"] > 0.3
    assert found.numbers["share_of_steps"] > 0.3


def test_a_server_that_served_before_is_not_cold() -> None:
    """One step of a warm engine takes three seconds, as where another process had its processors."""
    clock = Clock()
    with Engine(executor := TimedExecutor(clock, num_blocks=1024), max_sequences=64, clock=clock) as engine:
        load = Load(num_requests=100, per_second=2)
        before = Scrape.parse(serve(engine, clock, load, random.Random(4)), "before")
        executor.cold_seconds = 3.0
        after = Scrape.parse(serve(engine, clock, load, random.Random(5)), "after")
    assert [each.name for each in diagnose(ObservedFacts(ScrapeWindow(Scrape(), after)))] == ["cold-start"]
    assert [each.name for each in diagnose(ObservedFacts(ScrapeWindow(before, after)))] == ["uneven-latency"]


def test_requests_that_wait_for_one_step_are_healthy() -> None:
    """Answers of one token wait for about as long as they are computed, and nothing is full."""
    clock = Clock()
    load = Load(num_requests=80, per_second=400, prompt_tokens=(8, 16), output_tokens=(1, 1))
    with Engine(TimedExecutor(clock, num_blocks=1024), max_sequences=64, clock=clock) as engine:
        window = window_of(serve(engine, clock, load, random.Random(3)))
    queue, whole = (window.distribution(name) for name in ("request_queue_time_seconds", "e2e_request_latency_seconds"))
    assert queue.mean > 0.25 * whole.mean
    assert diagnose(ObservedFacts(window)) == []


def test_a_fault_hides_no_other() -> None:
    both = facts(HEALTHY, swapped_pages=9000, links=(Link("0000:01:00.0", 4, 16),))
    assert [each.name for each in diagnose(both)] == ["swap", "narrow-gpu-link"]


def test_before_a_start_the_machine_alone_is_looked_at() -> None:
    found = diagnose(ObservedFacts(machine=machine(own_cores=0.0, open_files_limit=256, cores=2.0), max_requests=256))
    assert [each.name for each in found] == ["threads-over-cores", "open-files"]
    assert diagnose(ObservedFacts(machine=machine(own_cores=0.0), max_requests=256)) == []


def test_huge_pages_that_are_off_are_found_before_a_start() -> None:
    (found,) = diagnose(ObservedFacts(machine=machine(own_cores=0.0, huge_pages="never"), max_requests=256))
    assert found.name == "huge-pages-off"
    assert diagnose(ObservedFacts(machine=machine(own_cores=0.0, huge_pages="madvise"), max_requests=256)) == []
    assert diagnose(facts(HEALTHY, huge_pages="never")) == []  # of a server the pages of its weights count


def test_a_machine_is_read_from_its_files(tmp_path: Path) -> None:
    files = {
        "proc/stat": "cpu  100 0 50 900 0 0 0 10 0 0\ncpu0 50 0 25 450 0 0 0 5 0 0\ncpu1 50 0 25 450 0 0 0 5 0 0\n",
        "proc/vmstat": "pgpgin 5\npswpin 30\npswpout 12\n",
        "proc/meminfo": "MemTotal: 100 kB\nMemAvailable:     40 kB\n",
        "proc/self/limits": "Limit Soft Hard Units\nMax open files   256    4096    files\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "sys/fs/cgroup/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/cpu.stat": "usage_usec 5\nnr_periods 40\nnr_throttled 10\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1000000\n",
        "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "4000000\n",
        "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
        "sys/bus/pci/devices/0000:01:00.0/current_link_width": "4\n",
        "sys/bus/pci/devices/0000:01:00.0/max_link_width": "16\n",
        "sys/bus/pci/devices/0000:02:00.0/vendor": "0x8086\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    reading = MachineReading.take(tmp_path, disk=tmp_path)
    assert (reading.all_cores, reading.cores, reading.busy_seconds) == (2, 0.5, 1.6)
    assert (reading.swapped_pages, reading.free_memory_bytes) == (42, 40960)
    assert (reading.periods, reading.throttled, reading.clock_share) == (40, 10, 0.25)
    assert reading.links == (Link("0000:01:00.0", 4, 16),)
    assert (reading.open_files_limit, reading.huge_pages) == (256, "madvise")
    assert reading.disk
    assert reading.disk.total_bytes > 0


_GROUP = "sys/fs/cgroup/system.slice/ingot.service"


@pytest.mark.parametrize(
    ("group", "quotas", "cores", "periods"),
    [
        ("/system.slice/ingot.service", {_GROUP: "50000 100000"}, 0.5, (40, 10)),
        (
            "/system.slice/ingot.service/child",
            {_GROUP: "25000 100000", f"{_GROUP}/child": "max 100000"},
            0.25,
            (40, 10),
        ),
        (
            "/system.slice/ingot.service",
            {_GROUP: "80000 100000", "sys/fs/cgroup/system.slice": "30000 100000"},
            0.3,
            (),
        ),
        ("/../../elsewhere", {_GROUP: "50000 100000", "sys/fs/cgroup": "90000 100000"}, 0.9, ()),
        ("/", {_GROUP: "50000 100000"}, 1.0, None),
    ],
)
def test_the_tightest_quota_of_the_groups_around_a_process_counts(
    group: str, quotas: dict[str, str], cores: float, periods: tuple[int, ...] | None, tmp_path: Path
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"1:cpuset:/docker\n0::{group}\n")
    for folder, quota in quotas.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "cpu.max").write_text(f"{quota}\n")
    (tmp_path / _GROUP / "cpu.stat").write_text("usage_usec 5\nnr_periods 40\nnr_throttled 10\n")
    assert min(1.0, usable_cores(tmp_path)) == cores
    assert throttling(tmp_path) == ((periods or (0, 0)) if periods is not None else None)


def test_a_quota_is_the_servers_where_it_reports_one() -> None:
    quota = "ingot_compute_threads 2\ningot_usable_cores 2.5\ningot_quota_periods_total 100\n"
    (found,) = diagnose(facts(f"{HEALTHY}{_THREADS}{quota}ingot_throttled_periods_total 40\n"))
    assert (found.name, found.numbers["throttled_share"], found.numbers["usable_cores"]) == ("cpu-quota", 0.4, 2.5)


def test_a_machine_without_these_files_is_read_too(tmp_path: Path) -> None:
    reading = MachineReading.take(tmp_path)
    assert (reading.busy_seconds, reading.swapped_pages, reading.clock_share, reading.links) == (None, None, None, ())
    assert (
        diagnose(ObservedFacts(machine=MachineWindow(replace(reading, threads=1), replace(reading, threads=1)))) == []
    )


@pytest.mark.parametrize(("is_ready", "name"), [(0, "engine-down"), (1, "engine-restarts")])
def test_an_engine_that_failed_is_named_first(is_ready: int, name: str) -> None:
    server = f'ingot_ready {is_ready}\ningot_engine_restarts_total{{model_name="fake"}} 3\n'
    first = diagnose(facts(healthy(3) + server))[0]
    assert (first.name, first.numbers["restarts_since_start"]) == (name, 3)
    assert not diagnose(facts(healthy(3) + server.replace("} 3", "} 0")))
