"""Rows of the quantizers' comparison: as JSON that grows over several runs, and as Markdown tables."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.device import device_facts

OURS = "Ingot "
_HEADER = "| quantizer | mean KL | perplexity | top-1 | of the best package's KL |\n|---|---|---|---|---|"


@dataclass(frozen=True)
class Row:
    """One quantizer on one case; KL in nats per token. `failure` is the reason why there are no figures."""

    model: str
    bits: int
    group_size: int
    quantizer: str
    kl: float | None = None
    perplexity: float | None = None
    top1_agreement: float | None = None
    seconds: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    failure: str = ""

    @property
    def case(self) -> tuple[str, int, int]:
        """The case: rows of one case are compared with each other."""
        return self.model, self.bits, self.group_size

    @property
    def is_ours(self) -> bool:
        """Whether Ingot made it."""
        return self.quantizer.startswith(OURS)

    def line(self) -> str:
        """For the log."""
        start = f"{self.model}, {self.bits} bits, groups of {self.group_size}: {self.quantizer}"
        if self.kl is None:
            return f"{start}: {self.failure}"
        return f"{start}: KL {self.kl:.5f}, perplexity {self.perplexity:.4f}, top-1 {self.top1_agreement:.4f}"


def best_kl(rows: Iterable[Row], *, ours: bool) -> float | None:
    """The smallest KL of Ingot's rows, or of the packages'."""
    found = [row.kl for row in rows if row.is_ours == ours and row.kl is not None and row.bits < 16]
    return min(found, default=None)


def markdown(rows: Sequence[Row]) -> str:
    """A table of the best of both per case, then one table per case, best first."""
    cases = {row.case: [other for other in rows if other.case == row.case] for row in rows if row.bits < 16}
    floats = {row.model: row for row in rows if row.bits >= 16}
    return "\n\n".join([_summary(cases), *(_case(case, found, floats.get(case[0])) for case, found in cases.items())])


def _summary(cases: dict[tuple[str, int, int], list[Row]]) -> str:
    lines = [
        "| model | bits | groups | best package | KL | best of Ingot | KL | ratio |\n|---|---|---|---|---|---|---|---|"
    ]
    for (model, bits, group), rows in cases.items():
        theirs, ours = _best(rows, ours=False), _best(rows, ours=True)
        lines.append(f"| {model} | {bits} | {group} | {_named(theirs)} | {_named(ours)} | {_ratio(ours, theirs)} |")
    return "\n".join(lines)


def _case(case: tuple[str, int, int], rows: Sequence[Row], baseline: Row | None) -> str:
    model, bits, group = case
    peak = best_kl(rows, ours=False)
    measured = sorted((row for row in rows if row.kl is not None), key=lambda row: row.kl or 0.0)
    title = f"### {model}, {bits} bits, groups of {group}"
    lines = [_line(row, peak) for row in ([baseline] if baseline else []) + measured]
    lines += [f"| {row.quantizer} | {row.failure} | | | |" for row in rows if row.kl is None]
    return "\n".join([title, "", _HEADER, *lines])


def _line(row: Row, peak: float | None) -> str:
    share = f"{row.kl / peak:.2f}" if peak and row.kl else ""
    name = f"**{row.quantizer}**" if row.is_ours else row.quantizer
    return f"| {name} | {row.kl:.5f} | {row.perplexity:.4f} | {row.top1_agreement:.4f} | {share} |"


def _best(rows: Sequence[Row], *, ours: bool) -> Row | None:
    least = best_kl(rows, ours=ours)
    return next((row for row in rows if row.is_ours == ours and row.kl == least and least is not None), None)


def _named(row: Row | None) -> str:
    return "| " if row is None else f"{row.quantizer.removeprefix(OURS)} | {row.kl:.5f}"


def _ratio(ours: Row | None, theirs: Row | None) -> str:
    return "" if ours is None or theirs is None else f"{(ours.kl or 0.0) / (theirs.kl or 1.0):.2f}"


def read_rows(path: Path) -> list[Row]:
    """The rows of an earlier run; none where there is no file."""
    if not path.is_file():
        return []
    return [Row(**row) for row in json.loads(path.read_text("utf-8"))["rows"]]


def update_json(path: Path, model: str, calibration: dict[str, object], measured: Sequence[Row]) -> None:
    """Put rows in the place of those of the same case and quantizer, and leave the others."""
    old = json.loads(path.read_text("utf-8")) if path.is_file() else {"calibration": {}}
    replaced = {(*row.case, row.quantizer) for row in measured}
    kept = [row for row in read_rows(path) if (*row.case, row.quantizer) not in replaced]
    document = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_facts(),
        "calibration": {**old["calibration"], model: calibration},
        "rows": [
            asdict(row) for row in sorted([*kept, *measured], key=lambda row: (row.model, -row.bits, -row.group_size))
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
