"""The parts of the time of requests add up; shapes of traffic and what changed are seen."""

import random
from dataclasses import replace

import pytest

from ingot.runtime.doctor import ScrapeWindow, changes_of, parts_of, shapes_of
from ingot.runtime.doctor.request_time import RequestTime
from ingot.runtime.engine.engine import Engine
from tests.runtime.doctor.loads import Clock, Load, Prompt, TimedExecutor, serve
from tests.runtime.doctor.test_traffic_rules import bursts, preempting_pool, window

_LOAD = Load(num_requests=60, per_second=8)


def served(load: Load, *, max_sequences: int = 32, ends_idle: bool = True) -> ScrapeWindow:
    """Return what an engine counted, in a window of 60 seconds."""
    clock = Clock()
    with Engine(
        TimedExecutor(clock, num_blocks=4096, context_tokens=2048), clock=clock, max_sequences=max_sequences
    ) as engine:
        return window(serve(engine, clock, load, random.Random(3), until_idle=ends_idle), seconds=60.0)


def test_the_parts_add_up_to_the_time_of_all_requests() -> None:
    for found in (served(_LOAD), preempting_pool(), bursts()):
        whole = found.distribution("e2e_request_latency_seconds").total
        parts = parts_of(found)
        assert sum(part.seconds for part in parts) == pytest.approx(whole)
        assert sum(part.share for part in parts) == pytest.approx(1.0)
        assert all(part.bound_by for part in parts)


def test_paused_time_is_that_of_preempted_requests() -> None:
    time = RequestTime.of(preempting_pool())
    assert time.share(time.paused) > 0.1
    assert RequestTime.of(served(_LOAD)).paused == 0


def test_the_time_of_the_engine_is_that_of_its_steps() -> None:
    found = served(_LOAD)
    steps = sum(found.distribution(f"{kind}_step_seconds").count for kind in ("prefill", "decode"))
    assert steps == found.counted("steps") == found.distribution("step_sequences").count
    busy = RequestTime.of(found).busy_share
    assert busy
    assert busy == pytest.approx((0.004 * steps + 0.00005 * found.counted("computed_tokens")) / 60.0, rel=1e-3)


def _system(rng: random.Random, length: int) -> Prompt:
    shared = random.Random(0)
    return [shared.randrange(1, 256) for _ in range(200)] + [rng.randrange(1, 256) for _ in range(length)]


def _mixed(rng: random.Random, length: int) -> Prompt:
    return [rng.randrange(1, 256) for _ in range(20 if rng.random() < 0.9 else 900)]


@pytest.mark.parametrize(
    ("load", "name"),
    [
        (replace(_LOAD, prompt_tokens=(5, 30)), "many short prompts"),
        (replace(_LOAD, prompt_tokens=(800, 1000), per_second=1), "few long prompts"),
        (replace(_LOAD, prompt=_system), "a constant system prompt"),
        (replace(_LOAD, prompt=_mixed), "mixed lengths"),
    ],
)
def test_a_shape_of_traffic_is_seen(load: Load, name: str) -> None:
    (shape,) = shapes_of(served(load))
    assert shape.name == name
    assert shape.cause
    assert shape.action


def test_bursts_over_idle_are_a_shape_too() -> None:
    assert "bursts over idle" in [shape.name for shape in shapes_of(bursts())]


def test_a_window_without_requests_has_no_shape_and_no_parts() -> None:
    empty = served(replace(_LOAD, num_requests=0))
    assert (parts_of(empty), shapes_of(empty), changes_of(empty)) == ([], [], [])


def test_what_changed_since_the_time_before_is_said() -> None:
    clock = Clock()
    with Engine(TimedExecutor(clock, num_blocks=4096, context_tokens=2048), clock=clock, max_sequences=32) as engine:
        before = serve(engine, clock, _LOAD, random.Random(1))
        same = serve(engine, clock, _LOAD, random.Random(2))
        longer = serve(engine, clock, replace(_LOAD, prompt_tokens=(300, 600)), random.Random(3))
    assert changes_of(window(same, before)) == []
    changes = changes_of(window(longer, same))
    assert changes[0].startswith("tokens of a prompt: 4")
    assert changes[0].endswith(" before")
