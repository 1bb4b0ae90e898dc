"""Latency and throughput of a steady load, in closed form: a step model, a load, and how many sequences fit.

    TPOT        the average step while the load runs: decode rows, and the prompts that begin meanwhile
    ITL         the same without prompts: the time of a token while no prompt begins
    TTFT        the wait for a place, and a prompt's own step with the decoding of the others in it

Requests that do not fit wait; by Little's law a closed loop of N requests that completes X a second spends N / X each.
"""

from dataclasses import dataclass, replace
from typing import Any

from ingot.planning.load import Load
from ingot.planning.step_model import StepModel, joined


@dataclass(frozen=True)
class Latency:
    """Predicted times in seconds, and rates, of a load; `running` sequences decode at a time."""

    load: Load
    running: float
    ttft: float
    tpot: float
    itl: float
    relative_error: float

    @property
    def end_to_end(self) -> float:
        """Seconds of a request."""
        return self.ttft + (self.load.output_tokens - 1) * self.tpot

    @property
    def tokens_per_second(self) -> float:
        """Tokens of output a second, of all requests."""
        return self.running / self.tpot

    @property
    def requests_per_second(self) -> float:
        """Requests that end in a second."""
        return self.tokens_per_second / self.load.output_tokens

    @property
    def bounded(self) -> dict[str, float]:
        """The times that service levels bound."""
        return {"ttft": self.ttft, "tpot": self.tpot, "end_to_end": self.end_to_end}

    @property
    def upper(self) -> dict[str, float]:
        """Upper ends of their 95 % intervals."""
        return {name: seconds * (1 + self.relative_error) for name, seconds in self.bounded.items()}

    def as_json(self) -> dict[str, Any]:
        """All figures; times in seconds."""
        return {
            "concurrency": self.load.concurrency,
            "running": self.running,
            "ttft_seconds": self.ttft,
            "tpot_seconds": self.tpot,
            "itl_seconds": self.itl,
            "end_to_end_seconds": self.end_to_end,
            "tokens_per_second": self.tokens_per_second,
            "requests_per_second": self.requests_per_second,
            "relative_error": self.relative_error,
        }


@dataclass(frozen=True)
class ClosedBatches(Latency):
    """Predicted times of batches that are closed, each of which takes so many seconds."""

    batch_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of output a second, of all requests."""
        return self.running * self.load.output_tokens / self.batch_seconds


def predict(model: StepModel, load: Load, most_sequences: float) -> Latency:
    """Predict a load of which so many sequences, at least one, fit at a time."""
    running = min(float(load.concurrency), most_sequences)
    assert running > 0
    tpot = model.seconds(load.average_step(running)) / load.step_tokens
    first = model.seconds(joined(load.prefill_step(), load.decode_step(max(0.0, running - 1))))
    waiting = max(0.0, load.concurrency - running)
    wait = waiting / running * (first + (load.output_tokens - 1) * tpot)
    itl = model.seconds(load.decode_step(running)) / load.step_tokens
    return Latency(load, running, wait + first, tpot, itl, model.relative_error)


def predict_static(model: StepModel, load: Load, most_sequences: float, longest: float = 1.0) -> ClosedBatches:
    """Predict a load in batches that are closed: others start only once all of a batch has ended.

    longest   tokens of a batch's longest output, in means: until it ends, the others' places are empty

    By Little's law a request waits for N / X less its own time, where X is a batch over its seconds.
    """
    running = min(float(load.concurrency), most_sequences)
    assert running > 0
    assert longest >= 1
    tpot = model.seconds(load.decode_step(running / longest)) / load.step_tokens
    batch = model.seconds(load.prefill_step(running)) + (longest * load.output_tokens - 1) * tpot
    ttft = load.concurrency / running * batch - (load.output_tokens - 1) * tpot
    return ClosedBatches(load, running, ttft, tpot, tpot, model.relative_error, batch)


def sweep(model: StepModel, load: Load, most_sequences: float) -> list[Latency]:
    """Predict powers of two of requests at a time, up to as many as fit."""
    counts = [1 << power for power in range(20) if 1 << power <= max(1.0, most_sequences)]
    if counts[-1] < int(most_sequences) < 1 << 20:
        counts.append(int(most_sequences))
    return [predict(model, replace(load, concurrency=count), most_sequences) for count in counts]
