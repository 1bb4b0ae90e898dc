"""A metric with its interval, and the values on both sides that it was made from."""

from dataclasses import dataclass

from ingot.validation.statistics import Estimate


@dataclass(frozen=True)
class Measured:
    """One measured metric.

    metric            its name in ingot.artifact.metrics.METRICS
    estimate          value and 95 % interval
    baseline, candidate   what each side measured, in `unit`; None where the metric is a comparison by nature (KL)
    unit              of baseline and candidate: "", "seconds", "tokens/s", "bytes"
    level             concurrency, for latency metrics
    sample_unit, sample_size   what the interval shrinks with: evaluation tokens, latency rounds, memory probes
    """

    metric: str
    estimate: Estimate
    baseline: float | None = None
    candidate: float | None = None
    unit: str = ""
    level: int | None = None
    sample_unit: str = ""
    sample_size: int = 1

    @property
    def key(self) -> str:
        """metric, or metric@level."""
        return self.metric if self.level is None else f"{self.metric}@{self.level}"
