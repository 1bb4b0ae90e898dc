"""Reads one JSON value (RFC 8259) that arrives in pieces, in time linear in its length and without recursion.

A model's slips that have one meaning are mended on the way: control characters, unknown escapes and halves of surrogate
pairs in strings, a comma before a closing bracket, NaN, None and True. Any other word, and a number beyond 64 bits,
becomes a string where it is inside of a list or an object. What is written is JSON for as long as the text is a value.
"""

import json
import re
from enum import Enum, auto
from math import isfinite
from typing import Any

_BLANKS = " \t\r\n"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r'[^\s,:\[\]{}"]+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {
    **{word: word for word in ("true", "false", "null")},
    "True": "true",
    "False": "false",
    "None": "null",
    "NaN": "null",
    "Infinity": "null",
    "-Infinity": "null",
}
_ESCAPES = '"\\/bfnrt'
_HEX = "0123456789abcdefABCDEF"
_CLOSING = {"{": "}", "[": "]"}
_HIGH_HALVES, _LOW_HALVES = range(0xD800, 0xDC00), range(0xDC00, 0xE000)
_UNKNOWN_CHARACTER = "\\ufffd"


class _State(Enum):
    VALUE = auto()
    ITEM = auto()  # a value, or the end of a list
    KEY = auto()  # a key, or the end of an object
    COLON = auto()
    AFTER = auto()  # a comma, or the end of what the value is in
    STRING = auto()
    ESCAPE = auto()
    UNICODE = auto()
    SCALAR = auto()
    ENDED = auto()
    FAILED = auto()


class JsonScanner:
    """The state of a value that is being read. `feed` passes text, `take` returns what was written since then."""

    def __init__(self) -> None:
        self._state = _State.VALUE
        self._nesting: list[str] = []
        self._is_key = False
        self._written: list[str] = []
        self._comma: list[str] = []  # and the blanks after it, until a value follows
        self._scalar_pieces: list[str] = []
        self._held = ""  # of an escape
        self._high = ""  # an escape that is the first half of a surrogate pair

    @property
    def has_ended(self) -> bool:
        """Whether the value is complete."""
        return self._state is _State.ENDED

    @property
    def has_failed(self) -> bool:
        """Whether the text is not a JSON value."""
        return self._state is _State.FAILED

    def take(self) -> str:
        """Return what was written since the last call."""
        written, self._written = "".join(self._written), []
        return written

    def feed(self, text: str, place: int) -> int:
        """Read text from a place on, and return where it stopped: at the end of the value, of the text, or at an error.

        A number or word ends at the character after it.
        """
        while place < len(text) and self._state not in (_State.ENDED, _State.FAILED):
            match self._state:
                case _State.STRING:
                    place = self._string(text, place)
                case _State.ESCAPE | _State.UNICODE:
                    place = self._escape(text, place)
                case _State.SCALAR:
                    place = self._scalar(text, place)
                case _:
                    place = self._structure(text, place)
        return place

    def _structure(self, text: str, place: int) -> int:
        character = text[place]
        if character in _BLANKS:
            if self._nesting:
                (self._comma or self._written).append(character)
            return place + 1
        match self._state, character:
            case (_State.COLON, ":"):
                self._write(":")
                self._state = _State.VALUE
            case (_State.AFTER, ","):
                self._comma = [","]
                self._state = _State.KEY if self._nesting[-1] == "{" else _State.ITEM
            case ((_State.KEY | _State.AFTER | _State.ITEM), ("}" | "]")):
                return self._close(character, place)
            case ((_State.KEY | _State.VALUE | _State.ITEM), '"'):
                self._is_key = self._state is _State.KEY
                self._write('"')
                self._state = _State.STRING
            case ((_State.VALUE | _State.ITEM), ("{" | "[")):
                self._write(character)
                self._nesting.append(character)
                self._state = _State.KEY if character == "{" else _State.ITEM
            case ((_State.VALUE | _State.ITEM), _) if _SCALAR.match(character):
                self._scalar_pieces = []
                self._state = _State.SCALAR
                return place
            case _:
                self._fail()
                return place
        return place + 1

    def _close(self, character: str, place: int) -> int:
        if not self._nesting or _CLOSING[self._nesting[-1]] != character:
            self._fail()
            return place
        self._nesting.pop()
        self._comma = []  # one before a closing bracket says nothing
        self._write(character)
        self._end_value()
        return place + 1

    def _string(self, text: str, place: int) -> int:
        if text[place] != "\\":
            self._end_pair("")
        if plain := _PLAIN.match(text, place):
            self._written.append(plain[0])
            return plain.end()
        match text[place]:
            case '"':
                self._written.append('"')
                if self._is_key:
                    self._state = _State.COLON
                else:
                    self._end_value()
            case "\\":
                self._held = "\\"
                self._state = _State.ESCAPE
            case control:
                self._written.append(json.dumps(control)[1:-1])
        return place + 1

    def _escape(self, text: str, place: int) -> int:
        character = text[place]
        if self._state is _State.ESCAPE:
            if character == "u":
                self._held += "u"
                self._state = _State.UNICODE
                return place + 1
            if character in _ESCAPES:
                return self._end_escape(self._held + character, place + 1)
            return self._end_escape("\\\\", place)
        if character not in _HEX:
            return self._end_escape("\\" + self._held, place)
        self._held += character
        return self._end_escape(self._held, place + 1) if len(self._held) == len("\\uXXXX") else place + 1

    def _end_escape(self, written: str, place: int) -> int:
        self._end_pair(written)
        self._state = _State.STRING
        return place

    def _end_pair(self, escape: str) -> None:
        """Write an escape, and before it a first half of a pair, which alone is not a character."""
        code = int(escape[2:], 16) if len(escape) == len("\\uXXXX") and escape[1] == "u" else 0
        is_pair = bool(self._high) and code in _LOW_HALVES
        if self._high:
            self._written.append(self._high if is_pair else _UNKNOWN_CHARACTER)
        self._high = escape if code in _HIGH_HALVES else ""
        if not self._high:
            self._written.append(_UNKNOWN_CHARACTER if code in _LOW_HALVES and not is_pair else escape)

    def _scalar(self, text: str, place: int) -> int:
        if found := _SCALAR.match(text, place):
            self._scalar_pieces.append(found[0])
            return found.end()
        scalar = "".join(self._scalar_pieces)
        word = scalar if _NUMBER.fullmatch(scalar) and isfinite(float(scalar)) else _WORDS.get(scalar)
        if word is None and not self._nesting:
            self._fail()
            return place
        self._write(json.dumps(scalar, ensure_ascii=False) if word is None else word)
        self._end_value()
        return place

    def _write(self, text: str) -> None:
        self._written += [*self._comma, text]
        self._comma = []

    def _fail(self) -> None:
        self._write("")
        self._state = _State.FAILED

    def _end_value(self) -> None:
        self._state = _State.AFTER if self._nesting else _State.ENDED


def loaded(text: str) -> Any:
    """The value of a JSON text of strict syntax. ValueError for another, also for one that is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deep") from error


def mended_object(text: str) -> str | None:
    """The JSON of an object that is the whole text; None for another text."""
    scanner = JsonScanner()
    text = text.strip()
    if text[:1] != "{" or scanner.feed(text, 0) < len(text) or not scanner.has_ended:
        return None
    return scanner.take()


def dumped(value: Any) -> str:
    """A value as JSON that every reader takes. ValueError for what JSON has no word for, or is nested too deep."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise ValueError("the value is nested too deep") from error
    return whole_characters(text)


def whole_characters(text: str) -> str:
    """The text with U+FFFD for halves of surrogate pairs, which have no UTF-8."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
