"""Engines take turns, disturbed figures are measured again, an engine that fails is left out of the cell."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.adapters.base import Timing
from benchmarks.cpu import turns
from benchmarks.cpu.turns import Limits, measure_quietly, measure_turns
from benchmarks.peers import PeerFailed

LIMITS = Limits(rounds=3, seconds=1000.0, patience_seconds=60.0)


def peer(name: str) -> Any:
    return SimpleNamespace(name=name, pid=1, spare_cores=0)


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(turns, "read_times", lambda pid: None)


def others(monkeypatch: pytest.MonkeyPatch, *loads: float) -> Iterator[float]:
    found = iter(loads)
    monkeypatch.setattr(turns, "other_cores", lambda before, after: next(found))
    return found


def test_engines_take_turns_in_both_directions() -> None:
    order: list[tuple[str, int]] = []

    def measure(peer: Any, number: int) -> Timing:
        order.append((peer.name, number))
        return Timing(seconds=2.0, cpu_seconds=3.0, steps=5)

    figures, failed = measure_turns({"a": peer("a"), "b": peer("b")}, measure, 4, LIMITS)
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert not failed
    assert [figure.tokens_per_second for figure in figures["a"]] == [10.0] * 3
    assert [figure.cpu_seconds for figure in figures["b"]] == [0.15] * 3


def test_an_engine_may_leave_its_processor_time_out() -> None:
    figures, _ = measure_turns({"a": peer("a")}, lambda peer, number: Timing(2.0, None, 5), 4, LIMITS)
    assert [(figure.tokens_per_second, figure.cpu_seconds) for figure in figures["a"]] == [(10.0, None)] * 3


def test_an_engine_that_fails_is_named_and_the_others_go_on() -> None:
    def measure(peer: Any, number: int) -> Timing:
        if peer.name == "a" and number == 1:
            raise PeerFailed("out of memory")
        return Timing(1.0, 1.0, 1)

    figures, failed = measure_turns({"a": peer("a"), "b": peer("b")}, measure, 1, LIMITS)
    assert failed == {"a": "out of memory"}
    assert {name: len(each) for name, each in figures.items()} == {"b": 3}


def test_a_disturbed_figure_is_measured_again_until_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    left = others(monkeypatch, 0.9, 0.05, 0.5)
    seconds = iter([4.0, 2.0, 1.0])
    figure = measure_quietly(peer("a"), lambda one: Timing(next(seconds), 1.0, 1), 1, patience_seconds=60.0)
    assert (figure.tokens_per_second, figure.is_quiet) == (0.5, True)
    assert next(left) == 0.5


def test_the_calmest_of_three_disturbed_figures_is_kept_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    others(monkeypatch, 0.9, 0.4, 0.7)
    seconds = iter([4.0, 2.0, 1.0])
    figure = measure_quietly(peer("a"), lambda one: Timing(next(seconds), 1.0, 1), 1, patience_seconds=60.0)
    assert (figure.tokens_per_second, figure.other_cores, figure.is_quiet) == (0.5, 0.4, False)


def test_without_patience_a_figure_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    left = others(monkeypatch, 0.9, 0.1)
    assert not measure_quietly(peer("a"), lambda one: Timing(1.0, 1.0, 1), 1, patience_seconds=0.0).is_quiet
    assert next(left) == 0.1
