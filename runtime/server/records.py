"""What is recorded of a request that was served: a line of JSON in a log, or spans of a trace. Never its texts."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from ingot.runtime.outputs import Completion


@dataclass(frozen=True)
class Record:
    """A served request: the results of its prompts, in order.

    operation      "chat" or "text_completion"
    group          the holder of its API key
    headers        of the request, such as traceparent
    ended_unix     seconds since 1970 at `ended_seconds`, which is by the engine's clock as all times of the results are
    """

    request_id: str
    operation: str
    model: str
    group: str
    headers: Mapping[str, str]
    results: Sequence[Completion]
    ended_unix: float
    ended_seconds: float

    def unix(self, seconds: float) -> float:
        """A time of the engine's clock, since 1970."""
        return self.ended_unix + seconds - self.ended_seconds

    def as_json(self) -> dict[str, object]:
        """Numbers and names."""
        choices = [choice for result in self.results for choice in result.choices]
        return {
            "time": round(self.ended_unix, 3),
            "request_id": self.request_id,
            "operation": self.operation,
            "model": self.model,
            "key": self.group,
            "prompt_tokens": sum(result.prompt_tokens for result in self.results),
            "cached_tokens": sum(result.cached_tokens for result in self.results),
            "output_tokens": sum(len(choice.token_ids) for choice in choices),
            "finish_reasons": [choice.finish_reason for choice in choices],
            **numbers_of(self.results),
        }


def numbers_of(results: Sequence[Completion]) -> dict[str, object]:
    """Preemptions of all choices, times of the first one, and the time until the last one's end."""
    metrics = [choice.metrics for result in results for choice in result.choices]
    return {
        "preemptions": sum(each.num_preemptions for each in metrics),
        "queue_seconds": _rounded(metrics[0].queue_seconds),
        "ttft_seconds": _rounded(metrics[0].ttft_seconds),
        "tpot_seconds": _rounded(metrics[0].tpot_seconds),
        "e2e_seconds": _rounded(max(each.e2e_seconds for each in metrics)),
    }


Observer = Callable[[Record], object]


def record_of(
    request_id: str,
    operation: str,
    model: str,
    group: str,
    headers: Mapping[str, str],
    results: Sequence[Completion],
    now: float,
) -> Record:
    """The record of a request that ended now, by the engine's clock."""
    return Record(request_id, operation, model, group, headers, results, time.time(), now)


class RequestLog:
    """Writes a line of JSON for each record."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, record: Record) -> None:
        self._stream.write(json.dumps(record.as_json()) + "\n")
        self._stream.flush()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
