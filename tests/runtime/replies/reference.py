"""A slow reader of replies for tests: the whole text at once, by recursion and look-ahead, without any stream.

It shares with `ReplyParser` only the schemas' types of tagged parameters. It reads the formats of `FORMATS`.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

import regex

from ingot.runtime.replies import ReplyDelta, ToolCall
from ingot.runtime.replies.arguments import argument_text, is_only_text, parameter_names

BLANKS = " \t\r\n"
_WORDS = {"True": "true", "False": "false", "None": "null", "NaN": "null", "Infinity": "null", "-Infinity": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_THINK = ("<think>", "</think>")
_DROPPED = "\0"  # in the place of a tag that is not complete: the one before it is followed by something
_OPENING = {
    "hermes": r"\s*<tool_call>",
    "qwen-xml": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "mistral": r"\[TOOL_CALLS\]",
    "mistral-args": r"\[TOOL_CALLS\]\s*(?P<name>[^\s\[\{]+)\s*(?:\[CALL_ID\][^\[\{]*)?(?:\[ARGS\])?\s*(?=\{)",
    "llama-json": r"(?:\A\s*|<\|python_tag\|>\s*)(?=\{\s*\"(?:type|name)\"\s*:)",
    "json-list": r"\s*(?=\[)",
}
_CLOSING = {
    "hermes": r"</tool_call>",
    "qwen-xml": r"</function>\s*</tool_call>",
    "mistral-args": r"(?=\[TOOL_CALLS\])",
}


class Unfinished(Exception):
    """A value whose text ended or broke: what it says so far, and where it broke; None at the end of the text."""

    def __init__(self, written: str, place: int | None) -> None:
        self.written, self.place = written, place


@dataclass
class Message:
    """A message in the making: chunks of text, of which blanks at the ends do not count."""

    content: list[str] = field(default_factory=lambda: [""])
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    is_cut: bool = False

    def delta(self) -> ReplyDelta:
        return ReplyDelta(_joined(self.content), _joined(self.reasoning), tuple(self.calls))


def _joined(chunks: list[str]) -> str:
    return "\n".join(text for each in chunks if (text := each.strip()))


def read(name: str, text: str, tools: list[Any]) -> tuple[ReplyDelta, bool]:
    """The message of a reply, and whether a call in it is not complete."""
    message, place, think = Message(), 0, _think(name)
    openings = [re.compile(re.escape(think[0]))]
    openings += [re.compile(_OPENING[name], re.DOTALL)] if name in _OPENING else []
    while place < len(text):
        found = [match for each in openings if (match := each.search(text, place))]
        first = min(found, key=lambda match: (match.start(), -match.end()), default=None)
        if first is None:
            message.content[-1] += text[place:]
            break
        message.content[-1] += text[place : first.start()]
        message.content.append("")
        if first[0] == think[0]:
            end = text.find(think[1], first.end())
            message.reasoning.append(text[first.end() : end if end >= 0 else len(text)])
            place = end + len(think[1]) if end >= 0 else len(text)
        elif name == "qwen-xml":
            place = _read_tagged(text, first, tools, message)
        else:
            place = _read_region(name, text, first, message)
    return message.delta(), message.is_cut


def _think(name: str) -> tuple[str, str]:
    return ("[THINK]", "[/THINK]") if name.startswith("mistral") else _THINK


def _read_region(name: str, text: str, opening: "re.Match[str]", message: Message) -> int:
    """Read a region of JSON calls; the place after it."""
    calls = _Calls(name, text, opening.groupdict().get("name") or "")
    calls.read(opening.end())
    message.calls += calls.found
    message.is_cut |= calls.is_open
    rest = calls.unread_from
    closing = re.compile(_CLOSING[name]).search(text, calls.end) if name in _CLOSING else None
    if name in _CLOSING and calls.found and calls.is_between:
        openings = [re.compile(each, re.DOTALL) for each in (_OPENING[name], re.escape(_think(name)[0]))]
        found = [match.start() for each in openings if (match := each.search(text, calls.end))]
        if found and (not closing or min(found) <= closing.start()):
            message.content[-1] += text[rest : min(found)]
            message.content.append("")
            return min(found)
    end = closing.start() if closing else len(text)
    if calls.is_open:
        end = end if name in _CLOSING else len(text)
        call = message.calls[-1]
        message.calls[-1] = ToolCall(call.name, call.arguments + text[calls.end : end])
    elif not calls.found and name not in _CLOSING:
        message.content[-1] += text[opening.start() : calls.end]
        return calls.end
    elif not calls.found:
        message.content[-1] += text[opening.start() : closing.end() if closing else len(text)]
    elif name not in _CLOSING:
        message.content[-1] += text[rest : calls.end]
        return calls.end
    else:
        message.content[-1] += text[rest:end]
    message.content.append("")
    return closing.end() if closing else len(text)


class _Calls:
    """Calls as JSON: `end` is where they stop, `unread_from` where the last one did; `is_open`: it is not complete."""

    def __init__(self, name: str, text: str, captured: str) -> None:
        self.text, self.captured = text, captured
        self.is_list = name in ("mistral", "json-list")
        self.may_lack = name == "hermes"
        self.name_key = "" if name == "mistral-args" else "name"
        self.found: list[ToolCall] = []
        self.is_open, self.is_between, self.end, self.unread_from = False, False, 0, 0

    def read(self, place: int) -> None:
        try:
            self.end = self._read(place)
        except Unfinished as error:
            self.end = len(self.text) if error.place is None else error.place
        if self.unread_from == 0:
            self.unread_from = self.end

    def _read(self, place: int) -> int:
        if not self.name_key:
            self.unread_from, _ = self._object(place, self.captured)
            self.is_between = True
            return self.unread_from
        place = self._expect(place, "[") if self.is_list else place
        place = self._expect(place, "{")
        while True:
            if not self._call(place):
                return self.end
            place = _skip(self.text, self.unread_from)
            character = self.text[place : place + 1]
            if not character:
                return place
            if self.is_list and character == "]":
                self.unread_from = place + 1
                return place + 1
            if character == "{" and not self.is_list:
                place += 1
            elif character in (",;" if not self.is_list else ","):
                place = self._expect(place + 1, "{")
            else:
                return place

    def _expect(self, place: int, character: str) -> int:
        place = _skip(self.text, place)
        if self.text[place : place + 1] != character:
            raise Unfinished("", place if place < len(self.text) else None)
        return place + 1

    def _object(self, place: int, name: str) -> tuple[int, str]:
        """An object of arguments that are shown as they are read."""
        try:
            written, end = value(self.text, place)
        except Unfinished as error:
            self.found.append(ToolCall(name, error.written))
            self.is_open = True
            raise
        self.found.append(ToolCall(name, written))
        return end, written

    def _call(self, place: int) -> bool:
        """Read an object after its brace; False where it is not a call, and `end` says where it stopped."""
        name, arguments, is_shown = "", "", False
        self.is_between = False
        try:
            while True:
                place = _skip(self.text, place)
                character = self.text[place : place + 1]
                if character == ",":
                    place += 1
                    continue
                if character == "}":
                    break
                if character != '"':
                    raise Unfinished("", place if character else None)
                key, place = value(self.text, place)
                key = _loads(key, place)
                place = _skip(self.text, self._expect(place, ":"))
                is_arguments = key in ("arguments", "parameters") and not arguments
                if is_arguments and self.text[place : place + 1] == "{":
                    if name:
                        is_shown = True
                        place, arguments = self._object(place, name)
                        self.unread_from = place
                    else:
                        arguments, place = self._held(place)
                    continue
                if place == len(self.text):
                    raise Unfinished("", None)
                written, place = value(self.text, place)
                item = _loads(written, place)
                if key == "name" and not name:
                    if not isinstance(item, str) or not item:
                        raise Unfinished("", place)
                    name = item
                elif is_arguments:
                    arguments = _object_text(item, place)
                if name and arguments and not is_shown:
                    is_shown = True
                    self.found.append(ToolCall(name, arguments))
                    self.unread_from = place
        except Unfinished as error:
            # An object that only its text's end stops may be what the name comes after.
            self.end = len(self.text) if error.place is None else error.place
            if is_shown and not self.is_open:
                self.unread_from = self.end
            return False
        if not arguments and self.may_lack and name:
            is_shown = True
            self.found.append(ToolCall(name, "{}"))
        self.end, self.is_between = place + 1, is_shown
        if is_shown:
            self.unread_from = self.end
        return is_shown

    def _held(self, place: int) -> tuple[str, int]:
        return value(self.text, place)


def _skip(text: str, place: int) -> int:
    while text[place : place + 1] and text[place] in BLANKS:
        place += 1
    return place


def _loads(written: str, place: int) -> Any:
    try:
        return json.loads(written)
    except ValueError:
        raise Unfinished("", place) from None


def _object_text(item: Any, place: int) -> str:
    """The object that a string spells."""
    text = item.strip() if isinstance(item, str) else ""
    try:
        written, end = value(text, 0)
    except Unfinished:
        raise Unfinished("", place) from None
    if text[0] != "{" or end < len(text):
        raise Unfinished("", place)
    return written


def value(text: str, place: int, is_inner: bool = False) -> tuple[str, int]:
    """A JSON value at a place, as it is to be written, and where it ends."""
    character = text[place : place + 1]
    if not character:
        raise Unfinished("", None)
    if character == '"':
        return _string(text, place)
    if character in "{[":
        return _group(text, place)
    end = place
    while end < len(text) and not text[end].isspace() and text[end] not in ',:[]{}"':
        end += 1
    if end == place:
        raise Unfinished("", place)
    if end == len(text):
        raise Unfinished("", None)
    scalar = text[place:end]
    if _NUMBER.fullmatch(scalar):
        return (scalar if abs(float(scalar)) != float("inf") else json.dumps(scalar)), end
    if scalar in ("true", "false", "null") or scalar in _WORDS:
        return _WORDS.get(scalar, scalar), end
    if not is_inner:
        raise Unfinished("", end)
    return json.dumps(scalar, ensure_ascii=False), end


def _string(text: str, place: int) -> tuple[str, int]:
    written, place = '"', place + 1
    while True:
        rest = text[place:]
        if not rest:
            raise Unfinished(written, None)
        if rest[0] == '"':
            return written + '"', place + 1
        if pair := re.match(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})", rest):
            written, place = written + pair[0], place + pair.end()
        elif lone := re.match(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}", rest):
            if re.fullmatch(r"\\u[dD][89abAB]..", lone[0]) and re.fullmatch(r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?", rest[6:]):
                raise Unfinished(written, None)
            written, place = written + "\\ufffd", place + 6
        elif known := re.match(r"\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})", rest):
            written, place = written + known[0], place + known.end()
        elif re.fullmatch(r"\\(?:u[0-9a-fA-F]{0,3})?", rest):
            raise Unfinished(written, None)
        elif rest[0] == "\\":
            written, place = written + "\\\\", place + 1
        else:
            written, place = written + (rest[0] if rest[0] >= " " else json.dumps(rest[0])[1:-1]), place + 1


def _group(text: str, place: int) -> tuple[str, int]:
    """An object or a list, from its opening bracket to its closing one."""
    is_object, written, comma = text[place] == "{", text[place], ""
    closing, place = "}" if is_object else "]", place + 1

    def blanks() -> str:
        nonlocal place
        begin, place = place, _skip(text, place)
        return text[begin:place]

    try:
        while True:
            space = blanks()
            comma, written = (comma + space, written) if comma else ("", written + space)
            if text[place : place + 1] == closing:
                return written + closing, place + 1
            if is_object and text[place : place + 1] != '"':
                raise Unfinished("", place if text[place:] else None)
            if text[place : place + 1] in ('"', "{", "["):
                written, comma = written + comma, ""
            item, place = value(text, place, is_inner=True)
            written, comma = written + comma + item, ""
            if is_object:
                written += blanks()
                if text[place : place + 1] != ":":
                    raise Unfinished("", place if text[place:] else None)
                place += 1
                written += ":" + blanks()
                item, place = value(text, place, is_inner=True)
                written += item
            written += blanks()
            if text[place : place + 1] == ",":
                comma, place = ",", place + 1
            elif text[place : place + 1] != closing:
                raise Unfinished("", place if text[place:] else None)
    except Unfinished as error:
        held = comma if error.place is not None else ""
        raise Unfinished(written + held + error.written, error.place) from None


def _read_tagged(text: str, opening: "re.Match[str]", tools: list[Any], message: Message) -> int:
    name = opening["name"]
    closing = re.compile(_CLOSING["qwen-xml"]).search(text, opening.end())
    body = text[opening.end() : closing.start() if closing else len(text)]
    if not closing:
        # A tag that is not complete is dropped: of the region's end, or of a parameter.
        partial = regex.search(_CLOSING["qwen-xml"], body, partial=True)
        body = body[: partial.start()] if partial else body
        tags = "|".join("</?" + "parameter"[:size] for size in range(1, 10))
        tag = rf"(?:</?|{tags}|<parameter=[^\n>]*>?)\Z"
        body = re.sub(tag, _DROPPED, body)
    arguments = _parameters(body, name, tools, is_complete=bool(closing))
    message.calls.append(ToolCall(name, arguments))
    message.is_cut |= not closing
    message.content.append("")
    return closing.end() if closing else len(text)


def _parameters(body: str, name: str, tools: list[Any], *, is_complete: bool) -> str:
    known, written, place, separator = parameter_names(name, tools), "{", 0, ""
    while tag := re.compile(r"<parameter=([^>\n]+)>(?:\n|(?=[^\n]))").search(body, place):
        key, begin, is_closed = tag[1], tag.end(), False
        place = begin
        while place < len(body):
            rest = body[place:]
            following = re.match(r"<parameter=([^>\n]+)>(?:\n|(?=[^\n]))", rest)
            at_line = place == begin or body[place - 1] == "\n"
            if following and (at_line or following[1] in known):
                break
            if re.match(r"</parameter>[ \t\r\n]*(?:<parameter=[^>\n]+>[\s\S]|\0?\Z)", rest):
                is_closed = True
                break
            place += 1
        shown = body[begin:place]
        shown = shown.removesuffix(_DROPPED).removesuffix("\n")
        is_done = is_complete or is_closed or place < len(body)
        written += separator + json.dumps(key, ensure_ascii=False) + ": "
        separator = ", "
        if is_only_text(name, key, tools):
            written += json.dumps(shown, ensure_ascii=False)[: None if is_done else -1]
        elif is_done:
            written += argument_text(name, key, shown, tools)
        if is_closed:
            place += len("</parameter>")
    return written + ("}" if is_complete else "")
