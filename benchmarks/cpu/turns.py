"""Measure engines in turns, each figure again while other processes disturb it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from benchmarks.adapters.base import Timing
from benchmarks.cpu.machine import other_cores, read_times
from benchmarks.cpu.rounds import Figure, another_round, order_of_round
from benchmarks.peers import PeerFailed, PeerProcess

# After a measurement an engine's threads spin for some milliseconds; the next one waits until they sleep.
_SETTLE_SECONDS = 0.1
# Cores that others may use before a measurement counts as disturbed: ticks are coarse, and a system is never idle.
_NOISE = 0.15
_MOST_TRIES = 3  # of a figure: each makes a decoded sequence longer


class Measure(Protocol):
    """Times an engine in a round."""

    def __call__(self, peer: PeerProcess, number: int) -> Timing: ...


@dataclass(frozen=True)
class Limits:
    """Most rounds, seconds after which no round begins, and seconds to wait for other processes, per figure."""

    rounds: int
    seconds: float
    patience_seconds: float


def measure_turns(
    running: Mapping[str, PeerProcess], measure: Measure, step_tokens: int, limits: Limits
) -> tuple[dict[str, list[Figure]], dict[str, str]]:
    """Figures of every engine, round by round, in alternating order; and why engines failed, which have no figures.

    step_tokens   tokens of one timed step
    """
    figures: dict[str, list[Figure]] = {name: [] for name in running}
    failed: dict[str, str] = {}
    begin, done = time.perf_counter(), 0
    while figures and another_round(done, time.perf_counter() - begin, limits.rounds, limits.seconds):
        for name in order_of_round(list(figures), done):
            try:
                figure = measure_quietly(
                    running[name], partial(measure, number=done), step_tokens, limits.patience_seconds
                )
            except PeerFailed as error:
                failed[name] = str(error)
                del figures[name]
                continue
            figures[name].append(figure)
        done += 1
    return figures, failed


def measure_quietly(
    peer: PeerProcess, measure: Callable[[PeerProcess], Timing], step_tokens: int, patience_seconds: float
) -> Figure:
    """Measure, and repeat while other processes use the engine's cores, until the patience ends; keep the calmest."""
    tries: list[Figure] = []
    begin = time.perf_counter()
    while not tries or (
        not tries[-1].is_quiet and len(tries) < _MOST_TRIES and time.perf_counter() - begin < patience_seconds
    ):
        time.sleep(_SETTLE_SECONDS)
        before = read_times(peer.pid)
        timing = measure(peer)
        others = other_cores(before, read_times(peer.pid))
        tokens = step_tokens * timing.steps
        is_quiet = others <= peer.spare_cores + _NOISE
        cpu_seconds = None if timing.cpu_seconds is None else timing.cpu_seconds / tokens
        tries.append(Figure(tokens / timing.seconds, cpu_seconds, others, is_quiet))
    return min(tries, key=lambda figure: figure.other_cores)
