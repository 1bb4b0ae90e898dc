"""When a sequence ends, and which of its text may be shown already.

Text that could be the beginning of a stop string is held back, and shown as soon as it cannot become one. The outcome
depends on the text alone, never on how tokens split it.
"""

from collections.abc import Collection
from dataclasses import dataclass

from ingot.errors import RequestError
from ingot.runtime.outputs import FinishReason
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.text.detokenizer import Detokenizer


@dataclass(frozen=True)
class StopUpdate:
    """The outcome of one token: text to show, and whether and why the sequence has ended.

    `matched` is the stop string or the id of the end token that ended it; None otherwise.
    """

    text: str
    finish_reason: FinishReason | None = None
    matched: str | int | None = None


class StopChecker:
    """Decides after every token of one sequence whether it ends.

    End tokens (the model's, unless `ignore_eos`, and `stop_token_ids`) give no text. Without a detokenizer there is no
    text at all, and stop strings are refused with RequestError.
    """

    def __init__(
        self, params: SamplingParams, eos_token_ids: Collection[int], detokenizer: Detokenizer | None = None
    ) -> None:
        if params.stop and detokenizer is None:
            raise RequestError(
                f"stop is {params.stop!r}, but there is no tokenizer to make text; use stop_token_ids instead"
            )
        model_ends = () if params.ignore_eos else eos_token_ids
        self._end_tokens = frozenset(model_ends) | frozenset(params.stop_token_ids)
        self._max_tokens = params.max_tokens
        self._detokenizer = detokenizer
        self._scanner = StopScanner(params.stop)
        self._num_tokens = 0

    def push(self, token_id: int) -> StopUpdate:
        """Process the next generated token. Must not be called again after a finish reason."""
        self._num_tokens += 1
        if token_id in self._end_tokens:
            return self._finish("", "stop", token_id)
        text = self._detokenizer.push(token_id) if self._detokenizer else ""
        if self._num_tokens == self._max_tokens:
            return self._finish(text, "length", None)
        shown, stop = self._scanner.push(text)
        return StopUpdate(shown, "stop" if stop else None, stop)

    def flush(self) -> str:
        """Text held back so far, for a sequence that is aborted."""
        return self._finish("", "abort", None).text

    def _finish(self, text: str, reason: FinishReason, matched: int | None) -> StopUpdate:
        """End here, unless a stop string in the last text ends it earlier."""
        text += self._detokenizer.flush() if self._detokenizer else ""
        shown, stop = self._scanner.push(text)
        if stop:
            return StopUpdate(shown, "stop", stop)
        return StopUpdate(shown + self._scanner.flush(), reason, matched)


class StopScanner:
    """Searches text that arrives in pieces for stop strings."""

    def __init__(self, stop: Collection[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string that ended it, if any.

        The stop string that is complete first wins; of those complete at the same character, the longest.
        """
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            shown, self._held = self._held[:start], ""
            return shown, stop
        safe = len(self._held) - self._num_held_back()
        shown, self._held = self._held[:safe], self._held[safe:]
        return shown, None

    def flush(self) -> str:
        """Text held back, once no text follows it."""
        held, self._held = self._held, ""
        return held

    def _num_held_back(self) -> int:
        """Length of the longest suffix of the held text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
