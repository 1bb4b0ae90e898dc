"""How a tokenizer's tokens become text: the `decoder` of tokenizer.json, read into one flat form.

Two kinds are in use: byte-level BPE (every token is bytes) and SentencePiece (a token is text with U+2581 for
space, or one byte such as <0xE2>). Whatever does not fit is refused, because a guess would garble text silently.
To add a decoder step, add its row to `_STEPS` and its effect to `TextDecoder.piece`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from re import fullmatch
from typing import Any

from ingot.errors import ArtifactError, one_of


@dataclass(frozen=True)
class TextDecoder:
    """The decoder of tokenizer.json.

    byte_level          tokens spell bytes in the alphabet of GPT-2
    byte_fallback       tokens such as <0xE2> are one byte
    replacements        (old, new) within one token, in order
    metaspace           the character that stands for a space; at the very start it is dropped if `drop_first`
    spaced              tokens are joined by spaces (a tokenizer without a decoder)
    strip, strip_count  leading character of the whole text that is dropped, at most this often
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    metaspace: str = ""
    drop_first: bool = False
    spaced: bool = False
    strip: str = ""
    strip_count: int = 0

    @classmethod
    def parse(cls, spec: object, file: str) -> "TextDecoder":
        """Read the `decoder` entry of `file`. Raises ArtifactError for a step that is not known."""
        if spec is None:
            return cls(spaced=True)
        steps = _entry(spec, "decoders", file) if _entry(spec, "type", file) == "Sequence" else [spec]
        decoder = cls()
        for step in steps:
            kind = _entry(step, "type", file)
            if kind not in _STEPS:
                raise _refusal(file, f"the decoder {kind!r}", one_of([*_STEPS, "Sequence"]))
            decoder = _STEPS[kind](decoder, step, file)
        return decoder

    def piece(self, token: str, *, first: bool) -> str | bytes:
        """Text or bytes of one token; `first` is whether it opens the text."""
        if self.byte_level:
            return _spelled_bytes(token)
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.metaspace:
            token = token.replace(self.metaspace, "" if first and self.drop_first else " ")
        if self.byte_fallback and fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return f" {token}" if self.spaced and not first else token


def _spelled_bytes(token: str) -> bytes:
    """Bytes that a byte-level token spells; an added token is spelled in plain text."""
    alphabet = _byte_alphabet()
    values = [alphabet.get(character) for character in token]
    known = [value for value in values if value is not None]
    return bytes(known) if len(known) == len(values) else token.encode()


@cache
def _byte_alphabet() -> Mapping[str, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable bytes are themselves, the rest counts on from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _entry(step: object, key: str, file: str) -> Any:
    """A required key of a decoder step."""
    if not isinstance(step, dict) or key not in step:
        raise ArtifactError(f"{file}: the decoder step {step!r} has no {key!r}; the file is damaged")
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
    return decoder  # text is joined without anything between anyway


def _replace(decoder: TextDecoder, step: object, file: str) -> TextDecoder:
    pattern = _entry(step, "pattern", file)
    if not isinstance(pattern, dict) or "String" not in pattern or decoder.byte_level:
        raise _refusal(file, f"the decoder Replace with pattern {pattern!r}", "a plain string, before Fuse")
    return replace(decoder, replacements=(*decoder.replacements, (pattern["String"], _entry(step, "content", file))))


def _strip(decoder: TextDecoder, step: object, file: str) -> TextDecoder:
    if _entry(step, "stop", file) != 0:
        raise _refusal(file, "a decoder Strip that cuts the end", "stop 0")
    return replace(decoder, strip=_entry(step, "content", file), strip_count=_entry(step, "start", file))


def _metaspace(decoder: TextDecoder, step: object, file: str) -> TextDecoder:
    scheme = step.get("prepend_scheme", "always") if isinstance(step, dict) else "always"
    return replace(decoder, metaspace=_entry(step, "replacement", file), drop_first=scheme != "never")


_STEPS: dict[str, Callable[[TextDecoder, object, str], TextDecoder]] = {
    "ByteLevel": _byte_level,
    "ByteFallback": _byte_fallback,
    "Fuse": _fuse,
    "Replace": _replace,
    "Strip": _strip,
    "Metaspace": _metaspace,
}
