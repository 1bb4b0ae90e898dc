"""The page of `ingot simulate --html`: the figures of the terminal, with charts."""

from collections.abc import Sequence

from ingot.builder.pages.plan_page import read_script
from ingot.builder.pages.recording import Recording
from ingot.planning.service_levels import LevelBounds
from ingot.planning.simulation.figures import Figures
from ingot.validation.report.page import Page, PageControl, PagePanel, PageSection, PageTable

SCRIPTS = ("drawing.js", "timelines.js")
QUEUE = PagePanel("sequences", "Queue", "Sequences that run, and that wait for a place or for blocks.")
TOKENS = PagePanel("tokens", "Prefill and decode", "Tokens of prompts and of outputs that are computed in a second.")
UTILIZATION = PagePanel("utilization", "Utilization", "Engines that compute, on average over each bin of time.")
_TIMELINES = (
    PagePanel("life", "Life of requests", "When each waits, when its prompt is computed, and when it decodes.", True),
    QUEUE,
    TOKENS,
    PagePanel("steps-panel", "Steps", "What single steps compute: prompts delay the decoding of others."),
    PagePanel("pool", "KV growth", "Blocks of all replicas: of running sequences, and kept for later prompts."),
    PagePanel("prefix", "Prefix timeline", "Tokens of prompts that a cache has, and those that are computed."),
    UTILIZATION,
    PagePanel("table-panel", "Block table", "The KV pool of the first replica at the chosen moment.", True),
)


def simulation_page(
    title: str,
    load: str,
    level: LevelBounds,
    found: Figures,
    around: Sequence[Figures],
    source: str,
    recording: Recording,
    together: Figures | None = None,
) -> Page:
    """The page of a simulated run.

    around      runs at other rates; () if none was asked for
    source      where the times of steps are from
    recording   of the run, for timelines
    together    the same replicas without pools for prompts and for decoding
    """
    times = {"Queue": found.queue, "TTFT": found.ttft, "TPOT": found.tpot, "End to end": found.e2e}
    rows = [
        (name, *(f"{value * 1e3:,.1f}" for value in (one.mean, one.p50, one.p90, one.p99)))
        for name, one in times.items()
    ]
    slow = [
        (f"{name} {at}", getattr(times[name], at) * 1e3) for name in ("TTFT", "TPOT") for at in ("p50", "p90", "p99")
    ]
    sections = [
        PageSection(
            "times",
            "Times",
            panels=[_bars("quantiles", "Times at p50, p90 and p99", "Of TTFT and of TPOT, in milliseconds.", slow)],
            tables=[PageTable("Milliseconds over all requests.", ("Time", "Mean", "p50", "p90", "p99"), rows)],
        ),
        PageSection("engines", "Requests and engines", facts=_run_facts(found)),
    ]
    if together:
        sections.append(_pools(found, together))
    sections.append(_timelines(recording))
    if around:
        sections.append(_rates(around))
    keeps = found.good_share >= level.percentile and not found.is_saturated
    queue = "The queue grows without bound: requests arrive faster than they end." if found.is_saturated else ""
    return Page(
        kind="Ingot simulation",
        title=title,
        sentences=[
            f"{load}: {found.good_share:.1%} of {found.num_requests:,} requests keep the service level"
            f" ({_bounds(level)}); {level.percentile:.0%} must.",
            *([queue] if queue else []),
        ],
        facts={
            "Offered": f"{found.offered_rate:.4g} requests/s",
            "Goodput": f"{found.goodput:.4g} requests/s",
            "TTFT p99": f"{found.ttft.p99 * 1e3:,.0f} ms",
            "TPOT p99": f"{found.tpot.p99 * 1e3:,.1f} ms",
            "Output": f"{found.output_tokens_per_second:,.0f} tokens/s",
            "Busy": f"{found.busy_share:.0%}",
        },
        sections=sections,
        sources=f"The engine's own scheduler in virtual time. Times of steps: {source}.",
        verdict="PASS" if keeps else "FAIL",
        scripts=[read_script(name) for name in (*SCRIPTS, "run_page.js")],
        data={"run": {**recording.as_json(), "is_split": together is not None}},
    )


def _timelines(recording: Recording) -> PageSection:
    moments = recording.moments
    note = (
        "Recorded while the engine's own scheduler ran. Long runs are shown in bins, and of single requests, steps and"
        " block tables a part, which each figure states."
    )
    control = PageControl("moment", "Moment", moments or [0.0], len(moments) // 2, unit="s")
    return PageSection("timelines", "Timelines", note, controls=[control], panels=_TIMELINES)


def _pools(found: Figures, together: Figures) -> PageSection:
    rows = [
        (
            name,
            f"{each.goodput:.4g}",
            f"{each.good_share:.1%}",
            *(f"{getattr(getattr(each, time), at) * 1e3:,.1f}" for time in ("ttft", "tpot") for at in ("p50", "p99")),
            f"{each.output_tokens_per_second:,.0f}",
        )
        for name, each in (("disaggregated", found), ("colocated", together))
    ]
    header = ("Replicas", "Goodput/s", "Good", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "TPOT p99 ms", "Tokens/s")
    panels = []
    for title, time in (("Time to first token", "ttft"), ("Time per output token", "tpot")):
        values = [
            (f"{words} {at}", getattr(getattr(each, time), at) * 1e3)
            for at in ("p50", "p99")
            for words, each in (("disaggregated", found), ("colocated", together))
        ]
        panels.append(_bars(f"pools-{time}", title, "The same requests and replicas, in milliseconds.", values))
    note = "Prompts and decoding on replicas of their own, and the same replicas with whole requests."
    table = PageTable("Disaggregated and colocated.", header, rows)
    return PageSection("pools", "Disaggregated and colocated", note, panels=panels, tables=[table])


def _bounds(level: LevelBounds) -> str:
    names = {"ttft": "TTFT", "tpot": "TPOT", "end_to_end": "end to end"}
    return ", ".join(f"{names[name]} at most {seconds:g} s" for name, seconds in level.bounds.items())


def _run_facts(found: Figures) -> dict[str, str]:
    return {
        "Ended": f"{found.num_finished:,} of {found.num_requests:,} in {found.seconds:,.1f} s; {found.num_refused:,}"
        f" refused, {found.num_timeouts:,} timed out",
        "Steps": f"{found.num_steps:,}, with {found.mean_batch:.1f} tokens each on average",
        "Preemptions": f"{found.num_preemptions:,}",
        "Prefix cache": f"{found.cached_share:.1%} of the prompts' tokens",
        "Most open requests": f"{found.most_open:,}",
    }


def _rates(around: Sequence[Figures]) -> PageSection:
    chart = {
        "kind": "curve",
        "points": [(one.offered_rate, one.goodput) for one in around],
        "labels": ("Offered, requests/s", "Goodput, requests/s"),
    }
    caption = "Requests a second that keep the service level, of those that arrive."
    panels = [PagePanel("goodput", "Goodput over offered load", caption, chart=chart)]
    rows = [
        (
            f"{one.offered_rate:.4g}",
            f"{one.goodput:.4g}",
            f"{one.good_share:.1%}",
            f"{one.ttft.p99 * 1e3:,.0f}",
            f"{one.tpot.p99 * 1e3:,.1f}",
            "grows" if one.is_saturated else "bounded",
        )
        for one in around
    ]
    header = ("Offered/s", "Goodput/s", "Good", "TTFT p99 ms", "TPOT p99 ms", "Queue")
    return PageSection(
        "rates", "Other rates", panels=panels, tables=[PageTable("The same requests at other rates.", header, rows)]
    )


def _bars(name: str, title: str, caption: str, values: Sequence[tuple[str, float]]) -> PagePanel:
    """A panel with a bar for each time, in milliseconds."""
    return PagePanel(name, title, caption, chart={"kind": "bars", "unit": "ms", "rows": values})
