"""Latency of candidate and baseline under the same load, interleaved, one record per request.

Both engines stand in memory; runs alternate A B, B A, A B, ... so that drift of the machine (heat, neighbours) falls on
both alike, and each round gives one paired ratio. The first runs, which touch memory for the first time, are thrown
away; the garbage collector rests while the clock runs.

What latency runs ask for: options and seeded prompts.
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
from ingot.validation.subject import LatencySubject


@dataclass(frozen=True)
class ServiceLevel:
    """The objective behind goodput: a request counts when both hold. Seconds."""

    ttft_seconds: float
    tpot_seconds: float

    def __post_init__(self) -> None:
        for name in ("ttft_seconds", "tpot_seconds"):
            if not getattr(self, name) > 0:
                raise UsageError(f"latency slo {name} is {getattr(self, name)}; it must be above 0")


@dataclass(frozen=True)
class LatencyOptions:
    """Which load is put on both engines.

    concurrency    levels: requests kept in flight (closed loop)
    prompt_tokens  of each request, random token ids
    output_tokens  of each request, exactly; end-of-sequence is ignored
    requests       per run; a run is one engine at one level in one round
    rounds         pairs of runs per level, in the order A B, B A, A B, ...
    seed           of the prompts
    slo            objective for goodput
    """

    concurrency: tuple[int, ...] = (1, 4)
    prompt_tokens: int = 128
    output_tokens: int = 64
    requests: int = 8
    rounds: int = 5
    seed: int = 0
    slo: ServiceLevel | None = None

    def __post_init__(self) -> None:
        if not self.concurrency or any(level < 1 for level in self.concurrency):
            raise UsageError(
                f"latency concurrency is {list(self.concurrency)}; give levels of 1 or more, such as [1, 4]"
            )
        if len(set(self.concurrency)) < len(self.concurrency):
            raise UsageError(f"latency concurrency {list(self.concurrency)} names a level twice")
        for name, least in (("prompt_tokens", 1), ("output_tokens", 2), ("requests", 1), ("rounds", 2)):
            if getattr(self, name) < least:
                raise UsageError(f"latency {name} is {getattr(self, name)}; it must be {least} or more")

    @property
    def sequence_tokens(self) -> int:
        """Prompt and output of one request together."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True)
class Run:
    """One engine at one concurrency in one round."""

    round: int
    level: int
    side: str


def schedule(options: LatencyOptions) -> Iterator[Run]:
    """Every run in order: per round all levels, baseline first in even rounds and candidate first in odd ones."""
    for number in range(options.rounds):
        sides = ("baseline", "candidate") if number % 2 == 0 else ("candidate", "baseline")
        yield from (Run(number, level, side) for level in options.concurrency for side in sides)


def prompts(options: LatencyOptions, vocab_size: int, round_number: int, level: int) -> list[list[int]]:
    """Prompts of a run, [requests][prompt_tokens]: the same for both engines, new in every round."""
    rng = np.random.default_rng((options.seed, round_number, level))
    ids = rng.integers(0, vocab_size, size=(max(options.requests, level), options.prompt_tokens))
    return [[int(token) for token in row] for row in ids]


Clock = Callable[[], float]


@dataclass(frozen=True)
class RequestRecord:
    """One request: when it was submitted and when each of its tokens came, seconds from the start of its run."""

    submitted: float
    token_seconds: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """Time to first token: from submission, queueing included."""
        return self.token_seconds[0] - self.submitted

    @property
    def e2e(self) -> float:
        """From submission to the last token."""
        return self.token_seconds[-1] - self.submitted

    @property
    def tpot(self) -> float:
        """Time per output token after the first: (e2e - ttft) / (output tokens - 1)."""
        return (self.e2e - self.ttft) / (len(self.token_seconds) - 1)

    @property
    def itl(self) -> tuple[float, ...]:
        """Inter-token latencies: the gaps between neighbouring tokens."""
        return tuple(b - a for a, b in zip(self.token_seconds, self.token_seconds[1:], strict=False))


@dataclass(frozen=True)
class RunRecord:
    """One run's requests in order of submission; `seconds` from its start to its last token."""

    run: Run
    seconds: float
    requests: tuple[RequestRecord, ...]

    @property
    def output_tokens(self) -> int:
        """Tokens that the run made."""
        return sum(len(request.token_seconds) for request in self.requests)


@dataclass(frozen=True)
class LatencyResult:
    """Every counted run, in the order in which they ran."""

    options: LatencyOptions
    runs: tuple[RunRecord, ...]


def measure_latency(
    candidate: LatencySubject,
    baseline: LatencySubject,
    options: LatencyOptions,
    clock: Clock = time.perf_counter,
) -> LatencyResult:
    """Run the whole schedule on both. UsageError when a request does not fit the model's context."""
    sides: Mapping[str, LatencySubject] = {"candidate": candidate, "baseline": baseline}
    _require_context(sides, options)
    runs = list(schedule(options))
    stage = Stage("latency", len(runs) + len(sides) * len(options.concurrency))
    for level in options.concurrency:
        for side in sides:
            _warm_up(sides[side], options, level, clock)
            stage.advance()
    records = []
    for run in runs:
        records.append(_run(sides[run.side], run, options, clock))
        stage.advance()
    return LatencyResult(options, tuple(records))


def closed_loop(
    subject: LatencySubject, requests: Sequence[Sequence[int]], output_tokens: int, concurrency: int, clock: Clock
) -> list[RequestRecord]:
    """Keep `concurrency` requests in flight until all are done; a finished one is replaced at once."""
    waiting = deque(requests)
    submitted: dict[int, float] = {}
    tokens: dict[int, list[float]] = {}
    running = 0
    start = clock()
    while waiting or running:
        for _ in range(min(concurrency - running, len(waiting))):
            asked = clock() - start
            request = subject.submit(waiting.popleft(), output_tokens)
            submitted[request], tokens[request] = asked, []
            running += 1
        events = subject.step()
        now = clock() - start
        for event in events:
            tokens[event.request] += [now] * event.new_tokens
            running -= event.finished
    return [RequestRecord(submitted[request], tuple(tokens[request])) for request in submitted]


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Collect now, then not until the block ends."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _run(subject: LatencySubject, run: Run, options: LatencyOptions, clock: Clock) -> RunRecord:
    wanted = prompts(options, subject.vocab_size, run.round, run.level)
    with garbage_collection_paused():
        records = closed_loop(subject, wanted, options.output_tokens, run.level, clock)
    return RunRecord(run, max(record.token_seconds[-1] for record in records), tuple(records))


def _warm_up(subject: LatencySubject, options: LatencyOptions, level: int, clock: Clock) -> None:
    """One wave of requests, on prompts of their own."""
    wanted = prompts(options, subject.vocab_size, options.rounds, level)[:level]
    closed_loop(subject, wanted, options.output_tokens, level, clock)


def _require_context(sides: Mapping[str, LatencySubject], options: LatencyOptions) -> None:
    for name, subject in sides.items():
        if options.sequence_tokens > subject.context_tokens:
            raise UsageError(
                f"latency prompt_tokens + output_tokens is {options.sequence_tokens}, the {name}'s context holds "
                f"{subject.context_tokens}; lower one of them"
            )
