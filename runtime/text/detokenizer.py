"""From tokens to text as they arrive: never half a character, and in the end exactly what decoding at once gives.

The `decoder` entry of tokenizer.json, read into one flat form (`TextDecoder`), says how a token becomes text. Two kinds
are in use: byte-level BPE (every token is bytes) and SentencePiece (a token is text with U+2581 for space, or one byte
such as <0xE2>). All others are refused, because a guess would garble text silently. To add a decoder step, add its row
to `_STEPS` and its effect to `TextDecoder.piece`.

`tokenizers.decoders.DecodeStream` does not suffice, as test_detokenizer.py shows: it raises when a wrong byte follows a
character spelled in byte tokens, which any model may generate, and it loses an incomplete character at the end.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from re import fullmatch
from typing import Any

from ingot.errors import ArtifactError, one_of, shown

_MAX_GROWTH = 64


class Detokenizer:
    """Turns one sequence's tokens into text, at a cost linear in the output.

    decoder         how a token becomes text
    token           the vocabulary: token id -> entry, or None for a token that gives no text
    prompt_tokens   context: the text continues where they end, with the space that SentencePiece hides at the start of
                    a text, and with the rest of a character that the prompt began

    Bytes that are not UTF-8 become U+FFFD: one for each maximal wrong part in byte-level BPE (as the Unicode standard
    advises and `tokenizers` does), one for each wrong byte of byte fallback. (There, `tokenizers` replaces a whole run
    of byte tokens for one wrong byte; that cannot be streamed, and loses characters.)
    """

    def __init__(
        self, decoder: "TextDecoder", token: Callable[[int], str | None], prompt_tokens: Sequence[int] = ()
    ) -> None:
        self._decoder = decoder
        self._token = token
        self._first = True
        self._to_strip = self._decoder.strip_count
        self._bytes = b""  # the beginning of an incomplete character
        for token_id in prompt_tokens:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Text that this token completes; may be empty."""
        token = self._token(token_id)
        if token is None:
            return ""
        piece = self._decoder.piece(token, first=self._first)
        self._first = False
        if isinstance(piece, bytes):
            return self._stripped(self._characters(piece, final=False))
        return self._stripped(self._characters(b"", final=True) + piece)

    def flush(self) -> str:
        """The remaining text at the end: U+FFFD for a character that was never completed."""
        return self._stripped(self._characters(b"", final=True))

    def _characters(self, data: bytes, *, final: bool) -> str:
        """Complete characters of the bytes so far; keeps an incomplete one at the end unless `final`."""
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
                text += "\N{REPLACEMENT CHARACTER}" * (1 if self._decoder.byte_level else error.end - error.start)
                data = data[error.end :]
        return text

    def _stripped(self, text: str) -> str:
        """Text without the leading characters that the decoder strips at the start of the output."""
        while text and self._to_strip:
            if text[0] != self._decoder.strip:
                self._to_strip = 0
                break
            text, self._to_strip = text[1:], self._to_strip - 1
        return text


@dataclass(frozen=True)
class TextDecoder:
    """The decoder of tokenizer.json.

    byte_level          tokens spell bytes in the alphabet of GPT-2
    byte_fallback       tokens such as <0xE2> are one byte
    replacements        (old, new) within one token, in order
    metaspace           the character that represents a space; dropped at the start of the text if `drop_first`
    spaced              tokens are joined by spaces (a tokenizer without a decoder)
    plain_tokens        added tokens, which are text even where their letters spell bytes
    strip, strip_count  leading character of the whole text to drop, and how many of them at most
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    metaspace: str = ""
    drop_first: bool = False
    spaced: bool = False
    plain_tokens: frozenset[str] = frozenset()
    strip: str = ""
    strip_count: int = 0

    @classmethod
    def parse(cls, spec: object, file: str) -> "TextDecoder":
        """Read the `decoder` entry of `file`. Raises ArtifactError for an unknown step."""
        if spec is None:
            return cls(spaced=True)
        steps = _entry(spec, "decoders", file) if _entry(spec, "type", file) == "Sequence" else [spec]
        if not isinstance(steps, list):
            raise ArtifactError(f"{file}: decoders of the decoder is {shown(steps)}; it must be a list")
        decoder = cls()
        for step in steps:
            kind = _entry(step, "type", file)
            if not isinstance(kind, str) or kind not in _STEPS:
                raise _refusal(file, f"the decoder {shown(kind)}", one_of([*_STEPS, "Sequence"]))
            decoder = _STEPS[kind](decoder, step, file)
        return decoder

    def piece(self, token: str, *, first: bool) -> str | bytes:
        """Text or bytes of one token; `first` means that it begins the text."""
        if self.byte_level:
            return token.encode() if token in self.plain_tokens else _spelled_bytes(token)
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.metaspace:
            token = token.replace(self.metaspace, "" if first and self.drop_first else " ")
        if self.byte_fallback and fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return f" {token}" if self.spaced and not first else token


def _spelled_bytes(token: str) -> bytes:
    """Bytes that a byte-level token spells. An added token is plain text."""
    alphabet = byte_alphabet()
    values = [alphabet.get(character) for character in token]
    known = [value for value in values if value is not None]
    return bytes(known) if len(known) == len(values) else token.encode()


@cache
def byte_alphabet() -> Mapping[str, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable bytes are themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _entry(step: object, key: str, file: str) -> Any:
    """A required key of a decoder step. Raises ArtifactError when it is missing."""
    if not isinstance(step, dict) or key not in step:
        raise ArtifactError(f"{file}: the decoder step {shown(step)} has no {key!r}; the file is damaged")
    return step[key]


def _refusal(file: str, found: str, allowed: str) -> ArtifactError:
    return ArtifactError(f"{file}: {found} is not supported; allowed: {allowed}; convert the tokenizer to one of them")


def _byte_level(decoder: TextDecoder, step: object, file: str) -> TextDecoder:
    if decoder != TextDecoder():
        raise _refusal(file, "a decoder ByteLevel after other steps", "ByteLevel as the first step")
    return replace(decoder, byte_level=True)


def _byte_fallback(decoder: TextDecoder, step: object, file: str) -> TextDecoder:
    return replace(decoder, byte_fallback=True)


def _fuse(decoder: TextDecoder, step: object, file: str) -> TextDecoder:
    return decoder  # tokens are always joined without a separator


def _replace(decoder: TextDecoder, step: object, file: str) -> TextDecoder:
    pattern = _entry(step, "pattern", file)
    old = pattern.get("String") if isinstance(pattern, dict) else None
    if not isinstance(old, str) or not old or decoder.byte_level:
        raise _refusal(file, f"the decoder Replace with pattern {shown(pattern)}", "a plain string, before Fuse")
    new = _text(step, "content", file)
    growth = prod(max(1.0, len(to) / len(of)) for of, to in (*decoder.replacements, (old, new)))
    if growth > _MAX_GROWTH:
        raise _refusal(file, f"a decoder that makes a token {growth:,.0f} times longer", f"{_MAX_GROWTH} times")
    return replace(decoder, replacements=(*decoder.replacements, (old, new)))


def _strip(decoder: TextDecoder, step: object, file: str) -> TextDecoder:
    if _entry(step, "stop", file) != 0:
        raise _refusal(file, "a decoder Strip that cuts the end", "stop 0")
    start = _entry(step, "start", file)
    if type(start) is not int or start < 0:
        raise _refusal(file, f"a decoder Strip with start {shown(start)}", "a whole number from 0")
    return replace(decoder, strip=_character(step, "content", file), strip_count=start)


def _metaspace(decoder: TextDecoder, step: object, file: str) -> TextDecoder:
    scheme = step.get("prepend_scheme", "always") if isinstance(step, dict) else "always"
    return replace(decoder, metaspace=_character(step, "replacement", file), drop_first=scheme != "never")


def _text(step: object, key: str, file: str) -> str:
    value = _entry(step, key, file)
    if not isinstance(value, str):
        raise ArtifactError(f"{file}: {key} of the decoder is {shown(value)}; it must be a text")
    return value


def _character(step: object, key: str, file: str) -> str:
    value = _text(step, key, file)
    if len(value) != 1:
        raise ArtifactError(f"{file}: {key} of the decoder is {shown(value)}; it must be one character")
    return value


_STEPS: dict[str, Callable[[TextDecoder, object, str], TextDecoder]] = {
    "ByteLevel": _byte_level,
    "ByteFallback": _byte_fallback,
    "Fuse": _fuse,
    "Replace": _replace,
    "Strip": _strip,
    "Metaspace": _metaspace,
}
