"""`ingot top`: the metrics of a server, again and again, in the terminal."""

import json
import sys
import time

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ingot.cli.console import visible
from ingot.cli.metrics_source import DEFAULT_URL, scrape
from ingot.runtime.doctor import Window

_COLUMNS = (
    "",
    "running",
    "waiting",
    "tokens/s",
    "requests/s",
    "refused/s",
    "TTFT p50",
    "p99",
    "gap p50",
    "p99",
    "KV",
    "prefix hits",
)
_SECONDS_PER_HOUR = 3600


def top_command(url: str | None, seconds: float, price: float | None, once: bool, as_json: bool) -> None:
    """Print until interrupted."""
    source = url or DEFAULT_URL
    before = scrape(source)
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            started = time.monotonic()
            time.sleep(seconds)
            after = scrape(source)
            window = Window(before, after, time.monotonic() - started)
            rows = [facts_of(window.of(name), price) | {"model": name} for name in window.models]
            if as_json:
                print(json.dumps(rows), flush=True)
            elif sys.stdout.isatty() and not once:
                live.update(_table(rows), refresh=True)
            else:
                console.print(_table(rows))
            if once:
                return
            before = after


def facts_of(window: Window, price: float | None = None) -> dict[str, float | str | None]:
    """What a row shows of one model; seconds and shares."""
    seconds = window.seconds or 1.0
    ttft = window.distribution("time_to_first_token_seconds")
    gaps = window.distribution("inter_token_latency_seconds")
    queries, tokens = window.counted("prefix_cache_queries"), window.counted("generation_tokens")
    return {
        "running": window.now("num_requests_running"),
        "waiting": window.now("num_requests_waiting"),
        "tokens_per_second": tokens / seconds,
        "requests_per_second": window.counted("finished_requests") / seconds,
        "refused_per_second": window.counted("turned_away") / seconds,
        "ttft_p50": ttft.quantile(0.5) if ttft.count else None,
        "ttft_p99": ttft.quantile(0.99) if ttft.count else None,
        "gap_p50": gaps.quantile(0.5) if gaps.count else None,
        "gap_p99": gaps.quantile(0.99) if gaps.count else None,
        "kv_usage": window.now("kv_cache_usage_perc"),
        "prefix_hits": window.counted("prefix_cache_hits") / queries if queries else None,
        "cost_per_1000_tokens": 1000 * price * seconds / _SECONDS_PER_HOUR / tokens if price and tokens else None,
    }


def _table(rows: list[dict[str, float | str | None]]) -> Table:
    table = Table(box=None, pad_edge=False)
    has_cost = any(row["cost_per_1000_tokens"] for row in rows)
    for number, name in enumerate((*_COLUMNS, "per 1000 tokens") if has_cost else _COLUMNS):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        cells = [
            visible(str(row["model"])),
            *(f"{row[name]:.0f}" for name in ("running", "waiting", "tokens_per_second")),
            *(f"{row[name]:.1f}" for name in ("requests_per_second", "refused_per_second")),
            *(_milliseconds(row[name]) for name in ("ttft_p50", "ttft_p99", "gap_p50", "gap_p99")),
            *(_share(row[name]) for name in ("kv_usage", "prefix_hits")),
        ]
        cost = row["cost_per_1000_tokens"]
        table.add_row(*map(Text, cells), *([f"{cost:.6f}" if cost else "-"] if has_cost else []))
    return table


def _milliseconds(seconds: float | str | None) -> str:
    return "-" if seconds is None else f"{1000 * float(seconds):.3g} ms"


def _share(value: float | str | None) -> str:
    return "-" if value is None else f"{100 * float(value):.0f} %"
