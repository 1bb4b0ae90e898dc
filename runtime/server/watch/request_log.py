"""Records of requests that have ended, served or not: a line of JSON in a log, or spans of a trace.

Never its texts.
"""

import json
import logging
import queue
import select
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import RawIOBase

from ingot.runtime.asking.outputs import Completion

_log = logging.getLogger(__name__)
_MOST_LINES = 10_000  # that wait for a slow log: a few MB
_CLOSE_SECONDS = 5.0
CLIENT_LEFT, CLIENT_LEFT_STATUS = "client_closed_request", 499  # nginx's, for a client that got no answer


@dataclass(frozen=True, kw_only=True)
class Record:
    """A request that has ended: its answer, and the results of its prompts, in order, as far as they were begun.

    A client that left has results too, with the finish reason "abort".

    operation      "chat" or "text_completion"
    model          None: it was refused before its model was found
    group          the holder of its API key
    headers        of the request, such as traceparent
    status         of the answer; 200 for a stream that began, whatever it ended with
    error          code of the error that it ended with; None: it was served
    prompt_tokens  None: the prompt was not encoded
    output_tokens  those generated, with the candidates of `best_of` that were not returned
    started_unix   seconds since 1970 at its arrival
    ended_unix     the same at `ended_seconds`, which is by the engine's clock as all times of the results are
    """

    request_id: str
    operation: str
    model: str | None
    group: str
    headers: Mapping[str, str]
    status: int
    error: str | None
    results: Sequence[Completion]
    prompt_tokens: int | None
    output_tokens: int
    started_unix: float
    ended_unix: float
    ended_seconds: float

    def unix(self, seconds: float) -> float:
        """A time of the engine's clock, since 1970."""
        return self.ended_unix + seconds - self.ended_seconds

    @property
    def choices(self) -> list[Completion]:
        """The choices of all prompts."""
        return [choice for result in self.results for choice in result.choices]

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompts that came from the prefix cache; None where that is not known."""
        return sum(result.cached_tokens for result in self.results) if self.results else None

    @property
    def num_preemptions(self) -> int:
        """Times that choices had to wait again."""
        return sum(choice.metrics.num_preemptions for choice in self.choices)

    @property
    def arrived_unix(self) -> float:
        """Since 1970: when it arrived at its engine, or at the server if it was not served to its end."""
        return self.unix(self.results[0].metrics.arrival_seconds) if self.results else self.started_unix

    @property
    def finished_unix(self) -> float:
        """Since 1970: when its last token came, or its error."""
        if not self.results:
            return self.ended_unix
        return self.unix(max(choice.metrics.finish_seconds for choice in self.choices))

    def as_json(self) -> dict[str, object]:
        """Numbers and names."""
        return {
            "time": round(self.ended_unix, 3),
            "request_id": self.request_id,
            "operation": self.operation,
            "model": self.model,
            "key": self.group,
            "status": self.status,
            "error": self.error,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "finish_reasons": [choice.finish_reason for choice in self.choices],
            **numbers_of(self.results),
            **({} if self.results else {"e2e_seconds": _rounded(self.ended_unix - self.started_unix)}),
        }


def numbers_of(results: Sequence[Completion]) -> dict[str, object]:
    """Preemptions of all choices, times of the first one, and the time until the last one's end; None without any."""
    metrics = [choice.metrics for result in results for choice in result.choices]
    first = metrics[0] if metrics else None
    return {
        "preemptions": sum(each.num_preemptions for each in metrics),
        "queue_seconds": _rounded(first.queue_seconds if first else None),
        "ttft_seconds": _rounded(first.ttft_seconds if first else None),
        "tpot_seconds": _rounded(first.tpot_seconds if first else None),
        "e2e_seconds": _rounded(max((each.e2e_seconds for each in metrics), default=None)),
    }


RecordObserver = Callable[[Record], object]


class RequestLog:
    """Writes a line of JSON for each record, in a thread of its own: a log that is read slowly stops no request.

    While the log cannot be written, as on a full disk, or more lines wait than may, lines are lost; each time that
    begins, it is said once. The file is a raw one: a buffered one has a lock, with which a thread that can never end
    its write would keep the process from ending.
    """

    def __init__(self, file: RawIOBase) -> None:
        self._file = file
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MOST_LINES)
        self._fails = self._is_full = False
        self._thread = threading.Thread(target=self._write_all, name="request-log", daemon=True)
        self._thread.start()

    def __call__(self, record: Record) -> None:
        """Have a line written."""
        try:
            self._lines.put_nowait(json.dumps(record.as_json()).encode() + b"\n")
        except queue.Full:
            if not self._is_full:
                _log.error("requests cannot be logged: %d lines wait; others are lost until they can", _MOST_LINES)
            self._is_full = True
        else:
            self._is_full = False

    @property
    def num_waiting(self) -> int:
        """Lines that are not written yet."""
        return self._lines.unfinished_tasks

    def close(self) -> None:
        """Write the lines that wait, unless the log is not read."""
        try:
            self._lines.put(None, timeout=_CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(_CLOSE_SECONDS)

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write(line)
            except (OSError, ValueError) as error:  # ValueError: it was closed
                if not self._fails:
                    _log.error("requests cannot be logged: %s; lines are lost until they can", error)
                self._fails = True
            else:
                self._fails = False
            self._lines.task_done()

    def _write(self, line: bytes) -> None:
        while line:
            written = self._file.write(line)
            if written is None:
                # Another process made it non-blocking, such as a shell's program that shares the terminal.
                select.select([], [self._file], [])
            line = line[written or 0 :]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
