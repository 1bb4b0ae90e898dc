"""The metrics that a gate may limit and that evidence reports: one table for recipes, validation and reports.

To add a metric: its row here, its measurement in validation/, a line in docs/recipes.md. A latency metric is
measured at every concurrency of the recipe; `metric@level` names it at one of them.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MetricFacts:
    """What a metric means. `comparison`: against the baseline, as a ratio, or a value of the candidate alone."""

    name: str
    definition: str
    unit: str
    better: Literal["lower", "higher"]
    comparison: Literal["ratio", "absolute"]
    per_concurrency: bool = False


def _ratio(
    name: str, definition: str, better: Literal["lower", "higher"] = "lower", *, per_concurrency: bool = False
) -> MetricFacts:
    return MetricFacts(name, definition, "candidate / baseline", better, "ratio", per_concurrency)


_ROWS = (
    _ratio("perplexity_ratio", "Perplexity of the candidate over that of the baseline, on the same tokens."),
    MetricFacts(
        "perplexity",
        "exp of the mean negative log-likelihood per predicted token of the evaluation text.",
        "",
        "lower",
        "absolute",
    ),
    MetricFacts(
        "kl_mean",
        "Mean over predicted tokens of KL(baseline || candidate) between the two next-token distributions.",
        "nats",
        "lower",
        "absolute",
    ),
    MetricFacts("kl_p99", "99th percentile of that KL divergence over predicted tokens.", "nats", "lower", "absolute"),
    MetricFacts(
        "top1_agreement",
        "Share of predicted tokens where candidate and baseline find the same token likeliest.",
        "",
        "higher",
        "absolute",
    ),
    _ratio(
        "ttft_ratio", "Median time to first token, from sending the request to its first token.", per_concurrency=True
    ),
    _ratio("tpot_ratio", "Median time per output token, (E2E - TTFT) / (output tokens - 1).", per_concurrency=True),
    _ratio("e2e_ratio", "Median end-to-end time, from sending the request to its last token.", per_concurrency=True),
    _ratio(
        "throughput_ratio", "Output tokens per second over all requests of a round.", "higher", per_concurrency=True
    ),
    _ratio("size_ratio", "Bytes of program and weights on disk."),
    _ratio("peak_memory_ratio", "Peak resident memory of a process that loads the artifact and generates."),
)

METRICS: dict[str, MetricFacts] = {row.name: row for row in _ROWS}
