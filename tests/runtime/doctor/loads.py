"""Engines under load on a clock that steps advance, so that a run takes milliseconds and is the same every time."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.doctor import Scrape, ScrapeWindow
from ingot.runtime.engine.engine import Engine
from ingot.runtime.engine.metrics_export import prometheus_text
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.server.models.prompt_repeats import PromptPieces
from tests.simulators.fake_executor import FakeExecutor

VOCAB_SIZE = 256
STEP_SECONDS, TOKEN_SECONDS = 0.004, 0.00005
Prompt = list[int]


@dataclass
class Clock:
    """Seconds, moved by hand."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class TimedExecutor(FakeExecutor):
    """Moves the clock with each step; `cold_seconds` are those of the next one alone, beyond the usual."""

    def __init__(self, clock: Clock, *, cold_seconds: float = 0.0, **options: Any) -> None:
        super().__init__(**{"vocab_size": VOCAB_SIZE, **options})
        self._clock = clock
        self.cold_seconds = cold_seconds

    def forward(self, batch: ForwardBatch) -> FloatArray:
        num_tokens = batch.num_tokens
        self._clock.now += STEP_SECONDS + TOKEN_SECONDS * num_tokens + self.cold_seconds
        self.cold_seconds = 0.0
        return super().forward(batch)


class SlowPartExecutor(TimedExecutor):
    """Takes `block_seconds` longer for each block of the pool's slow part that a step reads."""

    def __init__(self, clock: Clock, *, block_seconds: float, **options: Any) -> None:
        super().__init__(clock, **options)
        self._block_seconds = block_seconds

    def forward(self, batch: ForwardBatch) -> FloatArray:
        self._clock.now += self._block_seconds * int((batch.block_tables >= self.num_fast_blocks).sum())
        return super().forward(batch)


@dataclass
class Load:
    """Requests that arrive `per_second`, with lengths in these ranges. `prompts` makes prompts of a length."""

    num_requests: int = 60
    per_second: float = 8.0
    prompt_tokens: tuple[int, int] = (20, 60)
    output_tokens: tuple[int, int] = (5, 40)
    prompt: Callable[[random.Random, int], Prompt] = field(
        default=lambda rng, length: [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]
    )


def serve(engine: Engine, clock: Clock, load: Load, rng: random.Random, until_idle: bool = True) -> str:
    """Serve a load; returns the metrics afterwards, or when the last request has arrived."""
    pieces = PromptPieces()
    arrivals = list(_arrivals(load, clock.now, rng))
    while arrivals or engine.has_unfinished():
        while arrivals and arrivals[0][0] <= clock.now:
            arrival, prompt, params = arrivals.pop(0)
            pieces.observe(prompt)
            engine.add(prompt, params, arrival_seconds=arrival)
        if not engine.has_unfinished():
            clock.now = arrivals[0][0]
            continue
        engine.step()
        if not arrivals and not until_idle:
            break
    extra = {
        "ingot_prompt_pieces_total": pieces.num_pieces,
        "ingot_repeated_prompt_pieces_total": pieces.num_repeated,
        "ingot_leading_prompt_pieces_total": pieces.num_leading,
    }
    return prometheus_text(engine.metrics()) + "".join(f"{name} {value}\n" for name, value in extra.items())


def _arrivals(load: Load, now: float, rng: random.Random) -> Iterator[tuple[float, Prompt, SamplingParams]]:
    for _ in range(load.num_requests):
        now += rng.expovariate(load.per_second)
        prompt = load.prompt(rng, rng.randint(*load.prompt_tokens))
        yield now, prompt, SamplingParams(max_tokens=rng.randint(*load.output_tokens), ignore_eos=True)


def window_of(text: str) -> ScrapeWindow:
    """The totals of one scrape."""
    return ScrapeWindow(Scrape(), Scrape.parse(text, "the engine"))
