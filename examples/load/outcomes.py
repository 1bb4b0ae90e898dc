"""Outcomes of the requests of a replay, and the report and table made of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from ingot.planning.simulation.traces import Json

Kind = Literal["ok", "refused", "failed", "connection_error", "unfinished"]

_LATE_SECONDS = 0.1  # of the sender's p99: from there on the report warns
_QUANTILES = (0.5, 0.9, 0.99)


@dataclass
class Outcome:
    """One request. Times are in seconds, since it was first sent if not otherwise said."""

    due_seconds: float  # since the replay began
    late_seconds: float = 0.0  # from when it was due until it was sent
    kind: Kind = "unfinished"
    reason: str = ""
    message: str = ""  # the server's, or the connection's
    num_retries: int = 0
    first_seconds: float | None = None  # to the first token
    end_seconds: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    gap_seconds: list[float] = field(default_factory=list)  # between events with tokens


def report_of(outcomes: Sequence[Outcome], seconds: float) -> Json:
    """Counts, tokens and quantiles; times and tokens are those of whole answers."""
    whole = [each for each in outcomes if each.kind == "ok"]
    kinds = Counter(each.kind for each in outcomes)
    totals = {
        name: sum(getattr(each, name) for each in whole) for name in ("prompt_tokens", "cached_tokens", "output_tokens")
    }
    times = {
        "ttft_seconds": [each.first_seconds for each in whole if each.first_seconds is not None],
        "tpot_seconds": [tpot for each in whole if (tpot := _tpot_seconds(each)) is not None],
        "itl_seconds": [gap for each in whole for gap in each.gap_seconds],
        "e2e_seconds": [each.end_seconds for each in whole if each.end_seconds is not None],
        "late_seconds": [each.late_seconds for each in outcomes],
    }
    return {
        "seconds": round(seconds, 3),
        "requests": {"sent": len(outcomes), **{kind: kinds[kind] for kind in get_args(Kind)}},
        "retries": sum(each.num_retries for each in outcomes),
        "reasons": _reasons(outcomes),
        **totals,
        "prompt_tokens_per_second": round(totals["prompt_tokens"] / seconds, 1) if seconds else 0.0,
        "output_tokens_per_second": round(totals["output_tokens"] / seconds, 1) if seconds else 0.0,
        **{name: _quantiles(values) for name, values in times.items()},
    }


def _tpot_seconds(outcome: Outcome) -> float | None:
    """Mean seconds of a token after the first."""
    return sum(outcome.gap_seconds) / (outcome.output_tokens - 1) if outcome.output_tokens > 1 else None


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = np.quantile(values, _QUANTILES)
    return {f"p{100 * share:.0f}": round(float(each), 6) for share, each in zip(_QUANTILES, found, strict=True)}


def _reasons(outcomes: Sequence[Outcome]) -> dict[str, Json]:
    """Why requests had no whole answer: how often, and the first message."""
    found: dict[str, Json] = {}
    for each in outcomes:
        if each.reason:
            found.setdefault(each.reason, {"count": 0, "message": each.message})["count"] += 1
    return found


_ROWS = (
    ("TTFT, ms", "ttft_seconds", "to the first token"),
    ("TPOT, ms", "tpot_seconds", "mean of a request's tokens after the first"),
    ("ITL, ms", "itl_seconds", "between two events of a stream, which may have several tokens"),
    ("E2E, ms", "e2e_seconds", "to the end"),
    ("late, ms", "late_seconds", "requests sent later than due: the sender's own delay"),
)


def table_of(report: Json) -> str:
    """The report as text."""
    counts = report["requests"]
    lines = [
        f"{counts['sent']} requests in {report['seconds']:.1f} s: "
        + ", ".join(f"{counts[kind]} {kind.replace('_', ' ')}" for kind in get_args(Kind))
        + f"; {report['retries']} retries",
        *(f"  {each['count']} x {reason}: {each['message']}" for reason, each in report["reasons"].items()),
        f"tokens a second: {report['prompt_tokens_per_second']} of prompts, "
        f"{report['output_tokens_per_second']} of outputs",
        f"cached: {_share(report['cached_tokens'], report['prompt_tokens'])} of the prompts' tokens"
        + (f"; the trace repeats {_share(*repeats)}" if (repeats := report.get("repeated")) else ""),
        "",
        f"{'':10}" + "".join(f"{f'p{100 * share:.0f}':>10}" for share in _QUANTILES),
    ]
    for title, name, meaning in _ROWS:
        values = (report[name] or {}).values()
        cells = "".join(f"{1000 * each:10.1f}" for each in values) or f"{'-':>10}" * len(_QUANTILES)
        lines.append(f"{title:10}{cells}  {meaning}")
    if (late := report["late_seconds"]) and late["p99"] > _LATE_SECONDS:
        lines.append("The sender was late: use a lower --speed, or a machine of its own; latencies have its delays.")
    return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
