"""Scenarios, the order of rounds, and their figures as JSON records and a Markdown table. No clock, no process.

Engines take turns: A B C, then C B A, and so on, so that disturbances affect all of them alike.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.table import Table

MIN_ROUNDS = 2  # one in each direction


@dataclass(frozen=True)
class Scenario:
    """One kind of measurement: the tokens counted (prompt or later ones), and the number of sequences."""

    phase: Literal["prefill", "decode"]
    batch: int
    prompt_tokens: int
    new_tokens: int

    def __str__(self) -> str:
        return f"{self.phase}, batch {self.batch}"

    @property
    def counted_tokens(self) -> int:
        """Tokens that pass through the model in the measured time; the first new token belongs to the prefill."""
        return self.batch * (self.prompt_tokens if self.phase == "prefill" else self.new_tokens - 1)

    @property
    def warm_up(self) -> "Scenario":
        """A short scenario that runs the same code."""
        return Scenario(self.phase, self.batch, min(self.prompt_tokens, 32), min(self.new_tokens, 4))


@dataclass(frozen=True)
class Spread:
    """Median of the rounds, with the slowest and the fastest."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))


def scenarios(batches: Sequence[int], prompt_tokens: int, new_tokens: int) -> list[Scenario]:
    """Decode after a short prompt, then prefill of a whole one, each at every batch size."""
    decode = [Scenario("decode", batch, 32, new_tokens) for batch in batches]
    return decode + [Scenario("prefill", batch, prompt_tokens, 1) for batch in batches]


def order_of_round(names: Sequence[str], round_index: int) -> list[str]:
    """Names in their order in even rounds, reversed in odd ones."""
    return list(names) if round_index % 2 == 0 else list(reversed(names))


def another_round(done: int, spent_seconds: float, max_rounds: int, budget_seconds: float) -> bool:
    """Whether to measure once more: always twice, never past `max_rounds`, nor when the time is used up."""
    return done < MIN_ROUNDS or (done < max_rounds and spent_seconds < budget_seconds)


def bandwidth_share(scenario: Scenario, tokens_per_second: float, weight_bytes: int, bandwidth: float) -> float | None:
    """Weight bytes that decode reads per second, over the measured read bandwidth (bytes per second).

    A step reads the weights once for all sequences. Prefill is bound by arithmetic: None.
    """
    if scenario.phase == "prefill":
        return None
    return weight_bytes * tokens_per_second / scenario.batch / bandwidth


@dataclass(frozen=True)
class Result:
    """One engine in one scenario: tokens per second over the rounds."""

    shape: str
    threads: int
    scenario: Scenario
    peer: str
    tokens_per_second: Spread
    disturbed_rounds: int  # rounds in which other processes used the same cores
    weight_bytes: int
    bandwidth: float  # bytes per second that this machine reads with the same number of threads

    @property
    def bandwidth_share(self) -> float | None:
        """Share of the memory bandwidth that decode reaches; None for prefill."""
        return bandwidth_share(self.scenario, self.tokens_per_second.median, self.weight_bytes, self.bandwidth)

    def record(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self) | {"bandwidth_share": self.bandwidth_share}


def ratio_to(results: Sequence[Result], ours: str, theirs: str) -> float | None:
    """Median of `ours` over that of `theirs` within one scenario; None when either was not measured."""
    medians = {result.peer: result.tokens_per_second.median for result in results}
    return medians[ours] / medians[theirs] if ours in medians and theirs in medians else None


def make_table(results: Sequence[Result], peers: Sequence[str], ours: Sequence[str]) -> Table:
    """One row per shape, thread count and scenario; a column per engine; ratios to each peer."""
    theirs = [peer for peer in peers if peer not in ours]
    table = Table(
        title="tokens per second: median (slowest to fastest round), share of memory bandwidth",
        caption="* other processes used the same cores during some of the rounds",
    )
    for heading in ("shape", "threads", "scenario", *peers):
        table.add_column(heading)
    for peer in theirs:
        table.add_column(f"best of ours / {peer}", justify="right")
    for group in _groups(results):
        cells = {result.peer: _cell(result) for result in group}
        first = group[0]
        ratios = [_best_ratio(group, ours, peer) for peer in theirs]
        row = [first.shape, str(first.threads), str(first.scenario), *(cells.get(peer, "-") for peer in peers)]
        table.add_row(*row, *ratios)
    return table


def _groups(results: Sequence[Result]) -> list[list[Result]]:
    groups: dict[tuple[str, int, Scenario], list[Result]] = {}
    for result in results:
        groups.setdefault((result.shape, result.threads, result.scenario), []).append(result)
    return list(groups.values())


def _cell(result: Result) -> str:
    spread, share = result.tokens_per_second, result.bandwidth_share
    text = f"{spread.median:.1f} ({spread.low:.1f} to {spread.high:.1f})"
    text += "*" if result.disturbed_rounds else ""
    return text if share is None else f"{text} {share:.0%}"


def _best_ratio(group: Sequence[Result], ours: Sequence[str], theirs: str) -> str:
    ratios = [ratio for one in ours if (ratio := ratio_to(group, one, theirs)) is not None]
    return f"{max(ratios):.2f}" if ratios else "-"
