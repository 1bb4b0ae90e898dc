"""The figures of a run: as records for JSON, as a table for people."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from benchmarks.rounds import Scenario, Spread, bandwidth_share


@dataclass(frozen=True)
class Result:
    """One engine in one scenario: tokens per second over the rounds."""

    shape: str
    threads: int
    scenario: Scenario
    peer: str
    tokens_per_second: Spread
    disturbed_rounds: int  # rounds in which other processes wanted the same cores
    weight_bytes: int
    bandwidth: float  # bytes per second that this machine reads with as many threads

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
    """One row per shape, thread count and scenario; a column per engine; ratios to each peer that is not ours."""
    theirs = [peer for peer in peers if peer not in ours]
    table = Table(
        title="tokens per second: median (slowest to fastest round), share of memory bandwidth",
        caption="* other processes wanted the same cores during some of the rounds",
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
