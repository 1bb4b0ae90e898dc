"""Metrics that evidence reports and gates limit, in one table for recipes, validation and reports.

To add a metric: its row here, its measurement in validation/, a line in docs/recipes.md. A metric of the section
`latency` is measured at every concurrency of the recipe; `metric@level` names it at one of them.
"""

from dataclasses import dataclass
from typing import Literal

Section = Literal["evaluation", "latency", "memory", "verify"]


@dataclass(frozen=True)
class MetricFacts:
    """Definition of a metric.

    comparison  ratio: candidate over baseline; absolute: a value of the candidate, or of the pair
    section     recipe section that requests it; None: always measured
    count       key of the section without which, or with 0, the metric is not measured; None: always with the section
    least, most limits that a gate may have: below, none can be met, or all are; above, the limit decides nothing
    advice      what to do when a gate on it fails
    """

    name: str
    definition: str
    unit: str
    better: Literal["lower", "higher"]
    comparison: Literal["ratio", "absolute"]
    section: Section | None
    least: float = 0.001
    most: float = 1000
    count: str | None = None
    advice: str = "Use more bits, a smaller block or another recipe, or loosen the limit if the value is acceptable"

    @property
    def is_share(self) -> bool:
        """Whether it is a share, from 0 to 1."""
        return (self.least, self.most) == (0, 1)


_OBJECTIVE_ADVICE = "Lower the load (latency.concurrency), loosen latency.slo, or choose a faster recipe"
_ROWS = (
    MetricFacts(
        "perplexity_ratio",
        "Perplexity of the candidate over that of the baseline, on the same tokens.",
        unit="x",
        better="lower",
        comparison="ratio",
        section="evaluation",
    ),
    MetricFacts(
        "perplexity",
        "exp of the mean negative log-likelihood per predicted token of the evaluation text.",
        unit="",
        better="lower",
        comparison="absolute",
        section="evaluation",
        least=1,
        most=1_000_000,
    ),
    MetricFacts(
        "kl_mean",
        "Mean over predicted tokens of KL = sum p log(p / q), baseline p, candidate q, over the next token.",
        unit="nats",
        better="lower",
        comparison="absolute",
        section="evaluation",
        least=0,
        most=100,
    ),
    MetricFacts(
        "kl_p99",
        "99th percentile over predicted tokens of the KL of `kl_mean`.",
        unit="nats",
        better="lower",
        comparison="absolute",
        section="evaluation",
        least=0,
        most=100,
    ),
    MetricFacts(
        "top1_agreement",
        "Share of predicted tokens where candidate and baseline find the same token likeliest.",
        unit="",
        better="higher",
        comparison="absolute",
        section="evaluation",
        least=0,
        most=1,
    ),
    MetricFacts(
        "greedy_agreement",
        "Share of greedily generated tokens that candidate and baseline have at the same place, on the same prompts.",
        unit="",
        better="higher",
        comparison="absolute",
        section="evaluation",
        least=0,
        most=1,
        count="generations",
    ),
    MetricFacts(
        "greedy_common_tokens",
        "Mean number of greedily generated tokens before candidate and baseline first differ.",
        unit="tokens",
        better="higher",
        comparison="absolute",
        section="evaluation",
        least=0,
        most=1_000_000,
        count="generations",
    ),
    MetricFacts(
        "ttft_ratio",
        "Time to first token, from sending the request to its first token, candidate over baseline.",
        unit="x",
        better="lower",
        comparison="ratio",
        section="latency",
    ),
    MetricFacts(
        "tpot_ratio",
        "Time per output token, (E2E - TTFT) / (output tokens - 1), candidate over baseline.",
        unit="x",
        better="lower",
        comparison="ratio",
        section="latency",
    ),
    MetricFacts(
        "e2e_ratio",
        "End-to-end time, from sending the request to its last token, candidate over baseline.",
        unit="x",
        better="lower",
        comparison="ratio",
        section="latency",
    ),
    MetricFacts(
        "throughput_ratio",
        "Output tokens per second over all requests of a run, candidate over baseline.",
        unit="x",
        better="higher",
        comparison="ratio",
        section="latency",
    ),
    MetricFacts(
        "goodput",
        "Requests per second of the candidate that kept all limits of `latency.slo`; the mean over rounds.",
        unit="requests/s",
        better="higher",
        comparison="absolute",
        section="latency",
        least=0,
        most=1_000_000,
        count="slo",
        advice=_OBJECTIVE_ADVICE,
    ),
    MetricFacts(
        "slo",
        "Share of the candidate's requests that kept all limits of `latency.slo`.",
        unit="",
        better="higher",
        comparison="absolute",
        section="latency",
        least=0,
        most=1,
        count="slo",
        advice=_OBJECTIVE_ADVICE,
    ),
    MetricFacts(
        "size_ratio",
        "Bytes of program and weights on disk, candidate over baseline.",
        unit="x",
        better="lower",
        comparison="ratio",
        section=None,
    ),
    MetricFacts(
        "peak_memory_ratio",
        "Peak resident memory of a process that loads the artifact and generates, candidate over baseline.",
        unit="x",
        better="lower",
        comparison="ratio",
        section="memory",
    ),
    MetricFacts(
        "verify",
        "Pairs of runtime features that change an answer; the interval also counts those that were not exercised.",
        unit="",
        better="lower",
        comparison="absolute",
        section="verify",
        least=0,
        most=0,
        advice="The runtime serves wrong answers on this machine: report it with the command that repeats the pair",
    ),
)

METRICS: dict[str, MetricFacts] = {row.name: row for row in _ROWS}
