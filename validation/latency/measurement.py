"""Measures latency of candidate and baseline under the same load. See metrics.py for their ratios.

Both engines are in memory, and their runs alternate A B, B A, A B, ..., so that drift of the machine (heat, other
processes) affects both equally and each round gives one paired ratio. The first wave of each engine at each concurrency
is discarded as warm-up, and the garbage collector is off during a run. Rounds are added until the gates on latency are
decided or the time is over; see sequential.py.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ingot.errors import UsageError
from ingot.progress import Stage
from ingot.settings import num_threads
from ingot.validation.latency.sequential import Stop, sample_until_decided
from ingot.validation.machine import LoadMeter, MachineLoad
from ingot.validation.options import LatencyLoad
from ingot.validation.statistics import CONFIDENCE
from ingot.validation.subject import LatencySubject

Clock = Callable[[], float]

_WARM_UP_ROUND = 1 << 31


@dataclass(frozen=True)
class Run:
    """One engine at one concurrency in one round."""

    round: int
    level: int
    side: str


def runs_of_round(options: LatencyLoad, number: int) -> list[Run]:
    """The runs of one round, all levels: the baseline first in even rounds, the candidate first in odd ones."""
    sides = ("baseline", "candidate") if number % 2 == 0 else ("candidate", "baseline")
    return [Run(number, level, side) for level in options.concurrency for side in sides]


def prompts(options: LatencyLoad, vocab_size: int, round_number: int, level: int) -> list[list[int]]:
    """Prompts of a run, [requests][prompt_tokens]: the same for both engines, different in every round."""
    rng = np.random.default_rng((options.seed, round_number, level))
    ids = rng.integers(0, vocab_size, size=(max(options.requests, level), options.prompt_tokens))
    return [[int(token) for token in row] for row in ids]


@dataclass(frozen=True)
class RequestRecord:
    """One request: the times of its submission and of each token, in seconds from the start of the run."""

    submitted: float
    token_seconds: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """Time to first token, from submission, queueing included."""
        return self.token_seconds[0] - self.submitted

    @property
    def e2e(self) -> float:
        """End-to-end time, from submission to the last token."""
        return self.token_seconds[-1] - self.submitted

    @property
    def tpot(self) -> float:
        """Time per output token after the first: (e2e - ttft) / (output tokens - 1)."""
        return (self.e2e - self.ttft) / (len(self.token_seconds) - 1)

    @property
    def itl(self) -> tuple[float, ...]:
        """Inter-token latencies: the gaps between consecutive tokens."""
        return tuple(b - a for a, b in zip(self.token_seconds, self.token_seconds[1:], strict=False))


@dataclass(frozen=True)
class RunRecord:
    """The requests of one run in order of submission; `seconds` from the start to the last token."""

    run: Run
    seconds: float
    requests: tuple[RequestRecord, ...]

    @property
    def output_tokens(self) -> int:
        """Number of tokens that the run generated."""
        return sum(len(request.token_seconds) for request in self.requests)


@dataclass(frozen=True)
class LatencyResult:
    """Every run except warm-up, in order.

    load  of other processes during the runs, if it was measured
    stop  how the number of rounds was found; None: they were fixed before
    """

    options: LatencyLoad
    runs: tuple[RunRecord, ...]
    load: MachineLoad | None = None
    stop: Stop | None = None

    @property
    def num_rounds(self) -> int:
        """Number of rounds that were run."""
        return 1 + max(record.run.round for record in self.runs)

    @property
    def confidence(self) -> float:
        """Confidence of one interval; above 95 % if several looks at the growing sample share the error."""
        return 1 - self.stop.error if self.stop else CONFIDENCE


def measure_latency(
    candidate: LatencySubject,
    baseline: LatencySubject,
    options: LatencyLoad,
    clock: Clock = time.perf_counter,
    meter: LoadMeter | None = None,
    is_decided: Callable[[LatencyResult], bool] | None = None,
) -> LatencyResult:
    """Run rounds on both until `is_decided`, or the time is over; without it, `options.rounds` of them.

    UsageError when a request does not fit the model's context.
    """
    sides: Mapping[str, LatencySubject] = {"candidate": candidate, "baseline": baseline}
    _require_context(sides, options)
    meter = meter or LoadMeter(num_threads())
    steps = len(sides) * len(options.concurrency)
    stage = Stage("latency", (options.rounds + 1) * steps)
    planned_rounds = options.rounds
    for level in options.concurrency:
        for side in sides:
            _warm_up(sides[side], options, level, clock)
            stage.advance()
    records: list[RunRecord] = []

    def run_round(number: int, planned: int) -> None:
        nonlocal stage, planned_rounds
        if planned > planned_rounds:
            stage, planned_rounds = Stage("more latency rounds", (planned - number) * steps), planned
        meter.start()
        for run in runs_of_round(options, number):
            records.append(_run(sides[run.side], run, options, clock))
            stage.advance()
        meter.stop()

    def result(stop: Stop) -> LatencyResult:
        return LatencyResult(options, tuple(records), meter.load, stop)

    decided = (lambda stop: is_decided(result(stop))) if is_decided else None
    stop = sample_until_decided(run_round, decided, options.rounds, options.max_seconds, clock)
    if stage.done < stage.total:  # the time was over before the planned rounds
        stage.total = stage.done
        stage.advance(0)
    return result(stop)


def closed_loop(
    subject: LatencySubject, requests: Sequence[Sequence[int]], output_tokens: int, concurrency: int, clock: Clock
) -> list[RequestRecord]:
    """Keep `concurrency` requests in flight until all are done, replacing a finished one immediately."""
    waiting = deque(requests)
    submitted: dict[int, float] = {}
    tokens: dict[int, list[float]] = {}
    running = 0
    start = clock()
    while waiting or running:
        for _ in range(min(concurrency - running, len(waiting))):
            moment = clock() - start
            request = subject.submit(waiting.popleft(), output_tokens)
            submitted[request], tokens[request] = moment, []
            running += 1
        events = subject.step()
        now = clock() - start
        for event in events:
            tokens[event.request] += [now] * event.new_tokens
            running -= event.finished
    return [RequestRecord(submitted[request], tuple(tokens[request])) for request in submitted]


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Collect garbage now, and not again until the block ends."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _run(subject: LatencySubject, run: Run, options: LatencyLoad, clock: Clock) -> RunRecord:
    requests = prompts(options, subject.vocab_size, run.round, run.level)
    with garbage_collection_paused():
        records = closed_loop(subject, requests, options.output_tokens, run.level, clock)
    return RunRecord(run, max(record.token_seconds[-1] for record in records), tuple(records))


def _warm_up(subject: LatencySubject, options: LatencyLoad, level: int, clock: Clock) -> None:
    """Run one wave of requests, with prompts of no round."""
    wave = prompts(options, subject.vocab_size, _WARM_UP_ROUND, level)[:level]
    closed_loop(subject, wave, options.output_tokens, level, clock)


def _require_context(sides: Mapping[str, LatencySubject], options: LatencyLoad) -> None:
    for name, subject in sides.items():
        if options.sequence_tokens > subject.context_tokens:
            raise UsageError(
                f"latency prompt_tokens + output_tokens is {options.sequence_tokens}, but the {name}'s context is "
                f"limited to {subject.context_tokens}; lower one of them"
            )
