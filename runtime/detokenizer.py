"""From tokens to text as they come: never half a character, and in the end exactly what decoding all at once gives.

Each token is looked at once, so that the cost is linear in the output.
"""

from collections.abc import Sequence
from typing import Protocol

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
