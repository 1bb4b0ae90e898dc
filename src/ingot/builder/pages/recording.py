"""A recording of a simulated run for its page, made while it runs, in bounded memory.

Series have at most `MOST_BINS` bins of equal width, which doubles whenever the run outgrows them. Of single requests,
steps and block tables, the first are kept, or every second, fourth and so on of them.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ingot.planning.simulation.timed_request import ComputedTokens, EndedRequest, ObservedSteps, StepWatch
from ingot.runtime.kv.blocks import BlockManager

MOST_BINS = 120
MOST_REQUESTS = 2048
MOST_SPANS = 96
MOST_STEPS = 160
_MOST_MOMENTS = 24
_MOST_TABLES = 8
_MOST_BLOCKS = 64
_CELLS = 400
_FIRST_WIDTH = 1 / 64

SERIES = (
    "busy",
    "running",
    "waiting",
    "blocks",
    "cached_blocks",
    "prompt_tokens",
    "output_tokens",
    "hit_tokens",
    "restored_tokens",
    "preemptions",
    "itl",
    "ttft",
    "first_tokens",
)
"""Sums over a bin: seconds times engines, sequences or blocks, counts, and seconds of tokens or of first tokens."""


_TTFT, _KEPT = SERIES.index("ttft"), SERIES.index("cached_blocks")


@dataclass
class Series:
    """Sums over bins of equal width, of which there are at most `MOST_BINS`."""

    width: float = _FIRST_WIDTH
    sums: list[list[float]] = field(default_factory=list)

    def spread(self, begin: float, end: float, amounts: Iterable[tuple[int, float]]) -> None:
        """Add amounts, by number of their series, evenly over a time."""
        while end > self.width * MOST_BINS:
            self._halve()
        found, first, last = list(amounts), int(begin / self.width), int(end / self.width)
        while len(self.sums) <= last:
            self.sums.append([0.0] * len(SERIES))
        length = end - begin
        for number in range(first, last + 1):
            share = 1.0
            if length > 0:
                share = (min(end, (number + 1) * self.width) - max(begin, number * self.width)) / length
            for series, amount in found if length > 0 or number == first else ():
                self.sums[number][series] += amount * share

    def _halve(self) -> None:
        self.width *= 2
        pairs = [self.sums[at : at + 2] for at in range(0, len(self.sums), 2)]
        self.sums = [[sum(each) for each in zip(*pair, strict=True)] for pair in pairs]


@dataclass
class RequestLife:
    """Times of one request: spans of [kind, begin, end, tokens, replica], in which a step computes some of it."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    preemptions: int = 0
    finish: float | None = None
    reason: str = "open"
    spans: list[list[Any]] = field(default_factory=list)

    def add(self, kind: str, begin: float, end: float, tokens: int, replica: int) -> None:
        """Add a span; one that continues the decoding before lengthens it."""
        last = self.spans[-1] if self.spans else None
        if last and kind == "decode" == last[0] and last[4] == replica and begin - last[2] < 1e-9:
            last[2], last[3] = end, last[3] + tokens
        elif len(self.spans) < MOST_SPANS:
            self.spans.append([kind, begin, end, tokens, replica])


class Recording:
    """Records the steps of all replicas of a run, and how its requests end."""

    def __init__(self) -> None:
        self.series = Series()
        self.lives: dict[int, RequestLife] = {}
        self.steps: list[tuple[float, float, int, int, int]] = []
        self.num_steps = self.num_blocks = self.num_ended = 0
        self.now = 0.0
        self._moments: list[dict[str, Any]] = []
        self._moment_seconds, self._next_moment = _FIRST_WIDTH, 0.0

    def watch(self, replica: int) -> StepWatch:
        """Return what is to be called with each step of a replica."""
        seen = _Counters()

        def record(steps: ObservedSteps) -> None:
            if seen.is_new:
                self.num_blocks += steps.scheduler.blocks.num_blocks
            self._add(replica, steps, seen)

        return record

    def end(self, ended: EndedRequest) -> None:
        """Record how a request has ended."""
        self.num_ended += 1
        if ended.completion and (first := ended.completion.metrics.first_token_seconds) is not None:
            waited = first - ended.completion.metrics.arrival_seconds
            self.series.spread(first, first, ((_TTFT, waited), (_TTFT + 1, 1.0)))
        life = self.lives.get(ended.request.lengths.line)
        if life is None and len(self.lives) < MOST_REQUESTS:
            life = self.lives[ended.request.lengths.line] = _life(ended.request)
        if life is None:
            return
        done = ended.completion
        life.reason = done.finish_reason if done else "refused"
        if done:
            life.arrival, life.finish = done.metrics.arrival_seconds, done.metrics.finish_seconds
            life.prompt_tokens, life.output_tokens = done.prompt_tokens, done.metrics.num_output_tokens
            life.cached_tokens, life.preemptions = done.cached_tokens, done.metrics.num_preemptions

    @property
    def moments(self) -> list[float]:
        """Seconds of the block tables that were kept."""
        return [round(each["seconds"], 3) for each in self._moments]

    def _add(self, replica: int, steps: ObservedSteps, seen: "_Counters") -> None:
        scheduler, begin, end = steps.scheduler, steps.begin, steps.end
        self.now = max(self.now, end)
        self.num_steps += steps.num_steps
        prompt = sum(each.num_tokens for each in steps.computed if each.is_prompt)
        output = sum(each.num_tokens for each in steps.computed if not each.is_prompt)
        seconds, blocks = end - begin, scheduler.blocks
        kept = blocks.num_blocks - blocks.num_free - blocks.num_in_use
        if begin > seen.end and seen.kept:  # an idle engine keeps them
            self.series.spread(seen.end, begin, [(_KEPT, (begin - seen.end) * seen.kept)])
        seen.end, seen.kept = end, kept
        # What another engine sent is counted as found, and is not.
        is_sent = any(each.request.received_tokens for each in steps.computed)
        hits: Counter[str] = Counter() if is_sent else scheduler.prefix_hit_tokens
        amounts = (
            seconds,
            seconds * len(scheduler.running),
            seconds * scheduler.waiting.num_sequences,
            seconds * blocks.num_in_use,
            seconds * kept,
            prompt,
            output,
            *seen.growth(hits["device"], hits["host"], scheduler.num_preemptions),
            seconds * sum(not each.is_prompt for each in steps.computed),
        )
        self.series.spread(begin, end, ((number, amount) for number, amount in enumerate(amounts) if amount))
        if replica == 0 and len(self.steps) < MOST_STEPS:
            self.steps.append((begin, end, steps.num_steps, prompt, output))
        for each in steps.computed:
            self._live(replica, each, begin, end)
        if replica == 0 and end >= self._next_moment:
            self._moment(steps)

    def _live(self, replica: int, computed: ComputedTokens, begin: float, end: float) -> None:
        line = computed.request.lengths.line
        life = self.lives.get(line)
        if life is None:
            if len(self.lives) >= MOST_REQUESTS:
                return
            life = self.lives[line] = _life(computed.request)
        life.add("prompt" if computed.is_prompt else "decode", begin, end, computed.num_tokens, replica)

    def _moment(self, steps: ObservedSteps) -> None:
        """Keep the block tables of a moment; of too many, every second."""
        blocks = steps.scheduler.blocks
        lines = {each.request.lengths.line: each for each in steps.computed}
        by_blocks = sorted(blocks.tables.items(), key=lambda each: -len(each[1].blocks))
        self._moments.append(
            {
                "seconds": steps.end,
                "sequences": len(blocks.tables),
                "tables": [
                    [number, len(table.blocks), table.blocks[:_MOST_BLOCKS].tolist()]
                    for number, table in by_blocks[:_MOST_TABLES]
                ],
                "waiting": steps.scheduler.waiting.num_sequences,
                "computed": len(lines),
                "cells": _cells(blocks),
            }
        )
        if len(self._moments) > _MOST_MOMENTS:
            self._moments = self._moments[::2]
            self._moment_seconds *= 2
        self._next_moment = steps.end + self._moment_seconds

    def series_json(self) -> dict[str, Any]:
        """The series alone."""
        sums = self.series.sums
        return {
            "width": self.series.width,
            "series": {name: [float(f"{each[at]:.6g}") for each in sums] for at, name in enumerate(SERIES)},
            "blocks": self.num_blocks,
        }

    def as_json(self, shown: int = 24) -> dict[str, Any]:
        """All that a page draws: the series, the first replica's steps and block tables, and some requests."""
        lives = sorted(self.lives.items())
        first = _worst(lives, shown)
        return {
            **self.series_json(),
            "steps": [[round(begin, 6), round(end, 6), *counts] for begin, end, *counts in self.steps],
            "num_steps": self.num_steps,
            "moments": self._moments,
            "requests": [{"line": line, **_rounded(life)} for line, life in lives[first : first + shown]],
            "num_kept": len(lives),
            "num_requests": self.num_ended,
        }


@dataclass
class _Counters:
    """Totals of a replica after its last step, when that ended, and the idle blocks that it kept."""

    counts: tuple[int, ...] = (0, 0, 0)
    end: float = 0.0
    kept: int = 0
    is_new: bool = True

    def growth(self, *counts: int) -> tuple[int, ...]:
        found = tuple(now - before for now, before in zip(counts, self.counts, strict=True))
        self.counts, self.is_new = counts, False
        return found


def _life(request: Any) -> RequestLife:
    return RequestLife(request.seconds, request.lengths.prompt_tokens, request.lengths.output_tokens)


def _cells(blocks: BlockManager) -> str:
    """Return the pool in at most 400 cells: of the blocks of each, the tenths in use, from 0 to 9."""
    size = -(-blocks.num_blocks // _CELLS)
    used = [0] * -(-blocks.num_blocks // size)
    for block in {block for table in blocks.tables.values() for block in table.blocks}:
        used[block // size] += 1
    return "".join(str(min(9, -(-count * 9 // size))) for count in used)


def _worst(lives: list[tuple[int, RequestLife]], shown: int) -> int:
    """Return the place from which so many requests have the most preemptions, then the longest waits."""

    def trouble(life: RequestLife) -> float:
        waited = life.spans[0][1] - life.arrival if life.spans else 0.0
        return life.preemptions * 1e6 + waited

    starts = range(0, max(1, len(lives) - shown + 1), max(1, shown // 4))
    return max(starts, key=lambda at: sum(trouble(life) for _, life in lives[at : at + shown]))


def _rounded(life: RequestLife) -> dict[str, Any]:
    spans = [
        [kind, round(begin, 6), round(end, 6), tokens, replica] for kind, begin, end, tokens, replica in life.spans
    ]
    return {**vars(life), "spans": spans, "is_whole": len(spans) < MOST_SPANS}
