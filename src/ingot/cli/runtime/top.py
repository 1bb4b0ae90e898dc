"""`ingot top`: the metrics of a server, again and again, in the terminal."""

import json
import sys
import time
from math import isfinite

from rich.console import Console

from ingot.cli.runtime.metrics_source import DEFAULT_URL, require_seconds, scrape
from ingot.cli.terminal.tables import print_table
from ingot.errors import UsageError
from ingot.runtime.doctor import ScrapeWindow

_COLUMNS = (
    *("model", "running", "waiting", "tokens/s", "requests/s", "refused/s"),
    *("TTFT p50", "TTFT p99", "gap p50", "gap p99", "KV", "prefix hits"),
)
_COST = "per 1000 tokens"
_OPTIONAL = ("prefix hits", "gap p99", "requests/s", "gap p50")  # the first to go where the terminal is narrow
_SECONDS_PER_HOUR = 3600
_NO_NAME = "engine"  # model of a text of ingot.prometheus_text, which names none


def top_command(url: str | None, seconds: float, price: float | None, once: bool, as_json: bool) -> None:
    """Print until interrupted, which is how it ends; with `once` the table is the result, and an interrupt an error."""
    require_seconds(seconds, least=0.1)
    if price is not None and not isfinite(price):
        raise UsageError(f"--price is {price:g}; it must be a number, such as 2.40")
    try:
        _watch(url or DEFAULT_URL, seconds, price, once, as_json)
    except KeyboardInterrupt:
        if once:
            raise


def _watch(source: str, seconds: float, price: float | None, once: bool, as_json: bool) -> None:
    before = scrape(source)
    console, is_live = Console(highlight=False), sys.stdout.isatty() and not once
    while True:
        started = time.monotonic()
        time.sleep(seconds)
        after = scrape(source)
        window = ScrapeWindow(before, after, time.monotonic() - started)
        named = {name: window.of(name) for name in window.models} or {_NO_NAME: window}
        rows = [facts_of(each, price) | {"model": name} for name, each in named.items()]
        if as_json:
            print(json.dumps(rows), flush=True)
        else:
            if is_live:
                console.clear()
            _print(rows)
        if once:
            return
        before = after


def facts_of(window: ScrapeWindow, price: float | None = None) -> dict[str, float | str | None]:
    """Values of one model's row, in seconds and shares. `price` of the machine per hour; None: take the server's."""
    seconds = window.seconds or 1.0
    if price is None:
        price = window.counted("cost") / seconds * _SECONDS_PER_HOUR
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


def _print(rows: list[dict[str, float | str | None]]) -> None:
    has_cost = any(row["cost_per_1000_tokens"] for row in rows)
    cells = []
    for row in rows:
        cost = row["cost_per_1000_tokens"]
        cells.append(
            [
                str(row["model"]),
                *(_whole(row[name]) for name in ("running", "waiting", "tokens_per_second")),
                *(f"{row[name]:.1f}" for name in ("requests_per_second", "refused_per_second")),
                *(_milliseconds(row[name]) for name in ("ttft_p50", "ttft_p99", "gap_p50", "gap_p99")),
                *(_share(row[name]) for name in ("kv_usage", "prefix_hits")),
                *([f"{cost:.6f}" if cost else "-"] if has_cost else []),
            ]
        )
    print_table("", (*_COLUMNS, _COST) if has_cost else _COLUMNS, cells, optional=_OPTIONAL)


def _whole(value: float | str | None) -> str:
    return "-" if value is None else f"{float(value):.0f}"


def _milliseconds(seconds: float | str | None) -> str:
    return "-" if seconds is None else f"{1000 * float(seconds):.3g} ms"


def _share(value: float | str | None) -> str:
    return "-" if value is None else f"{100 * float(value):.0f} %"
