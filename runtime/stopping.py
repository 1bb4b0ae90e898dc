"""When a sequence ends, and which text may be shown already.

Text that could be the beginning of a stop string is held back, and shown as soon as it cannot be one any more. The
outcome depends on the text alone, never on how tokens cut it.

From tokens to text as they come: never half a character, and in the end exactly what decoding all at once gives.

Each token is looked at once, so that the cost is linear in the output.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ingot.errors import RequestError
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.text_decoder import TextDecoder

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenSource(Protocol):
    """What a detokenizer needs of a tokenizer."""

    @property
    def text_decoder(self) -> TextDecoder:
        """How tokens become text."""
        ...

    def token(self, token_id: int, *, skip_special_tokens: bool = True) -> str | None:
        """The vocabulary's entry; None for an unknown id, and for a special token unless those are wanted."""
        ...


class Detokenizer:
    """Turns one sequence's tokens into text.

    `prompt_tokens` are taken as said already: the text then goes on where the prompt ends, with the space that
    SentencePiece hides at the start of a text, and with the end of a character that the prompt began.

    Bytes that are no UTF-8 become U+FFFD: one for each maximal wrong part in byte-level BPE (as the Unicode standard
    advises and `tokenizers` does), one for each wrong byte of byte fallback. (There, `tokenizers` gives up
    a whole run of byte tokens for one wrong byte; that cannot be streamed, and loses characters.)
    """

    def __init__(
        self, source: TokenSource, prompt_tokens: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._source = source
        self._decoder = source.text_decoder
        self._skip_special_tokens = skip_special_tokens
        self._first = True
        self._to_strip = self._decoder.strip_count
        self._bytes = b""  # the beginning of a character that is not complete yet
        for token_id in prompt_tokens:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Text that this token completes; may be empty."""
        token = self._source.token(token_id, skip_special_tokens=self._skip_special_tokens)
        if token is None:
            return ""
        piece = self._decoder.piece(token, first=self._first)
        self._first = False
        if isinstance(piece, bytes):
            return self._stripped(self._characters(piece, final=False))
        return self._stripped(self._characters(b"", final=True) + piece)

    def flush(self) -> str:
        """Text of what is left at the end: U+FFFD for a character that was never completed."""
        return self._stripped(self._characters(b"", final=True))

    def _characters(self, data: bytes, *, final: bool) -> str:
        """Complete characters of the bytes so far; the incomplete one at the end is kept unless `final`."""
        data, self._bytes = self._bytes + data, b""
        text = ""
        while data:
            try:
                return text + data.decode()
            except UnicodeDecodeError as error:
                text += data[: error.start].decode()
                if error.reason == "unexpected end of data" and not final:
                    self._bytes = data[error.start :]
                    return text
                text += _REPLACEMENT * (1 if self._decoder.byte_level else error.end - error.start)
                data = data[error.end :]
        return text

    def _stripped(self, text: str) -> str:
        """Text without the leading characters that the decoder strips, which only happens at the very start."""
        while text and self._to_strip:
            if text[0] != self._decoder.strip:
                self._to_strip = 0
                break
            text, self._to_strip = text[1:], self._to_strip - 1
        return text


FinishReason = Literal["stop", "length"]


class TokenTexts(Protocol):
    """What turns tokens into text: a Detokenizer."""

    def push(self, token_id: int) -> str:
        """Text that this token completes."""
        ...

    def flush(self) -> str:
        """Text of what is left at the end."""
        ...


@dataclass(frozen=True)
class StopUpdate:
    """What one token brought: text to show, and whether and by what the sequence has ended.

    `matched` is the stop string, or the id of the end token; None while it goes on and at the length limit.
    """

    text: str
    finish_reason: FinishReason | None = None
    matched: str | int | None = None


class StopScanner:
    """Looks for stop strings in a text that comes in parts."""

    def __init__(self, stop: Collection[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string that ended it.

        The stop string that is complete first wins; of those complete at the same character, the longest.
        """
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            shown, self._held = self._held[:start], ""
            return shown, stop
        safe = len(self._held) - self._beginning_at_end()
        shown, self._held = self._held[:safe], self._held[safe:]
        return shown, None

    def flush(self) -> str:
        """Text held back, once nothing follows it."""
        held, self._held = self._held, ""
        return held

    def _beginning_at_end(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0


class StopChecker:
    """Decides after every token of one sequence whether it ends.

    End tokens (the model's, unless `ignore_eos`, and `stop_token_ids`) give no text. Without a detokenizer the
    sequence is tokens only; stop strings are then refused with RequestError.
    """

    def __init__(
        self, params: SamplingParams, eos_token_ids: Collection[int], detokenizer: TokenTexts | None = None
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
        """Take the next generated token. Must not be called again once a finish reason was given."""
        self._num_tokens += 1
        if token_id in self._end_tokens:
            return self._finish("", "stop", token_id)
        text = self._detokenizer.push(token_id) if self._detokenizer else ""
        if self._num_tokens == self._max_tokens:
            return self._finish(text, "length", None)
        shown, stop = self._scanner.push(text)
        return StopUpdate(shown, "stop" if stop else None, stop)

    def flush(self) -> str:
        """Text held back so far, for a sequence that is ended from outside."""
        return self._finish("", "stop", None).text

    def _finish(self, text: str, reason: FinishReason, matched: int | None) -> StopUpdate:
        """End here, unless a stop string in the last text ends it before."""
        text += self._detokenizer.flush() if self._detokenizer else ""
        shown, stop = self._scanner.push(text)
        if stop:
            return StopUpdate(shown, "stop", stop)
        return StopUpdate(shown + self._scanner.flush(), reason, matched)
