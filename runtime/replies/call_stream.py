"""Calls of tools, read from a region of a reply while it arrives: the name first, then the arguments piece by piece.

Arguments that are JSON are passed on as the model wrote them; those that a format spells as tagged parameters become
JSON. A call begins when its name and the first character of its arguments are known, and is not taken back after that:
arguments that the model did not finish, or that are not JSON, arrive so. What the pieces add up to does not depend on
where the text was split.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from ingot.runtime.replies.arguments import argument_text, is_only_text
from ingot.runtime.replies.template import FieldSpec

TAGGED_PARAMETERS = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
"""The pattern of parameters that can be read as they arrive."""

_OPENING_TAG = regex.compile(r"<parameter=([^>\n]+)>(?:\n|(?=[^\n]))")  # needs the character after the tag
_CLOSING_TAG, _LONGEST_CLOSING = "</parameter>", "\n</parameter>"
_BLANKS = " \t\r\n"
_IN_STRING, _OUTSIDE = regex.compile(r'["\\]'), regex.compile(r'["{}\[\]]')
_END_OF_SCALAR = regex.compile(r"[\s,\]}]")


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for, or a piece of one; `arguments` are JSON text. Without a name: more arguments of
    the call before it."""

    name: str
    arguments: str


def joined(calls: Sequence[ToolCall], more: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """Calls with more of them, where pieces are added to their call."""
    found = list(calls)
    for call in more:
        if found and not call.name:
            found[-1] = ToolCall(found[-1].name, found[-1].arguments + call.arguments)
        else:
            found.append(call)
    return tuple(found)


@dataclass(frozen=True)
class CallShape:
    """Where a template's region has its calls.

    is_list         a JSON list of calls; otherwise one call
    name_key        key of the call's name; None: the opening delimiter has captured it
    arguments_key   key of its arguments; None: they are the whole region
    may_lack        whether a call without arguments is one
    is_tagged       the region has tagged parameters instead of JSON
    """

    is_list: bool = False
    name_key: str | None = None
    arguments_key: str | None = None
    may_lack: bool = False
    is_tagged: bool = False

    @classmethod
    def of(cls, spec: FieldSpec) -> "CallShape | None":
        """The shape of a field's regions; None for one that has to be read as a whole."""
        function = spec.transform.get("function") if isinstance(spec.transform, dict) else None
        if spec.content == "xml-inline" and spec.content_args == {"tag_pattern": TAGGED_PARAMETERS}:
            is_call = function == {"name": "{name}", "arguments": "{content}"} and not spec.transform_each
            return cls(is_tagged=True) if is_call else None
        if spec.content != "json" or spec.content_args:
            return None
        if function == "{content}" and not spec.transform_each:
            return cls(name_key="name", arguments_key="arguments", may_lack=True)
        if not isinstance(function, dict) or function.keys() != {"name", "arguments"}:
            return None
        return cls._of_places(str(function["name"]), str(function["arguments"]), spec.transform_each)

    @classmethod
    def _of_places(cls, name: str, arguments: str, is_list: bool) -> "CallShape | None":
        if not is_list and (name, arguments) == ("{name}", "{content}"):
            return cls()
        prefix = "" if is_list else "content."
        keys = [regex.fullmatch(rf"\{{{regex.escape(prefix)}(\w+)\}}", place) for place in (name, arguments)]
        if keys[0] is None or keys[1] is None:
            return None
        return cls(is_list=is_list, name_key=keys[0][1], arguments_key=keys[1][1])

    def reader(self, name: str, tools: Sequence[Mapping[str, Any]]) -> "JsonCalls | TaggedCall":
        """What reads one region, whose opening delimiter has captured this name, if any."""
        return TaggedCall(name, tools) if self.is_tagged else JsonCalls(self, name)


class JsonCalls:
    """Reads calls that are JSON objects. `has_begun` once a call is known; before that the region may be anything."""

    def __init__(self, shape: CallShape, name: str) -> None:
        self.has_begun = False
        self._shape = shape
        self._captured = name
        self._text = ""
        self._found: list[ToolCall] = []
        self._advance = JsonCalls._list if shape.is_list else JsonCalls._call
        self._begin_call()

    def feed(self, text: str) -> list[ToolCall]:
        """The pieces that a piece of the region adds."""
        self._text += text
        self._found = []
        while self._advance(self):
            pass
        return self._found

    @property
    def is_in_arguments(self) -> bool:
        """Whether it has begun arguments that are not complete."""
        return self._advance is JsonCalls._arguments and self._has_arguments

    def close(self, *, is_complete: bool) -> list[ToolCall]:
        """What the end of the region adds: nothing, because a JSON value shows its own."""
        return []

    @property
    def has_ended(self) -> bool:
        """Whether nothing that follows is part of a call."""
        return self._advance is JsonCalls._done

    def _begin_call(self) -> None:
        self._name, self._has_arguments, self._is_shown = self._captured, False, False
        self._held = ""  # arguments whose call has no name yet
        self._key = ""
        self._depth, self._in_string, self._is_escaped = 0, False, False

    # States: each passes some of the text and says whether it could.

    def _list(self) -> bool:
        return self._next({"[": JsonCalls._call})

    def _call(self) -> bool:
        if self._shape.arguments_key is None:
            return self._next({"{": JsonCalls._arguments}, consume=False)
        return self._next({"{": JsonCalls._member})

    def _member(self) -> bool:
        self._text = self._text.lstrip(_BLANKS)
        if self._text[:1] != '"':
            return self._next({",": JsonCalls._member, "}": JsonCalls._end_call})
        key = self._complete_value()
        if key in (_INCOMPLETE, _INVALID):
            return key is _INVALID and self._give_up()
        self._key = key
        self._advance = JsonCalls._colon
        return True

    def _colon(self) -> bool:
        return self._next({":": JsonCalls._value})

    def _value(self) -> bool:
        self._text = self._text.lstrip(_BLANKS)
        if not self._text:
            return False
        if self._key == self._shape.arguments_key and not self._has_arguments and self._text[0] == "{":
            self._advance = JsonCalls._arguments
            return True
        value = self._complete_value()
        if value in (_INCOMPLETE, _INVALID):
            return value is _INVALID and self._give_up()
        if self._key == self._shape.name_key and not self._name:
            if not isinstance(value, str) or not value:
                return self._give_up()
            self._name = value
            self._show("")
        elif self._key == self._shape.arguments_key and not self._has_arguments:
            if not isinstance(value, str):
                return self._give_up()
            self._has_arguments = True
            self._show(value)
        self._advance = JsonCalls._member
        return True

    def _arguments(self) -> bool:
        """Pass on an object, to its last brace."""
        if not self._text:
            return False
        end = self._end_of_nested()
        taken, self._text = (self._text, "") if end is None else (self._text[:end], self._text[end:])
        self._has_arguments = True
        self._show(taken)
        if end is not None:
            self._advance = JsonCalls._end_call if self._shape.arguments_key is None else JsonCalls._member
        return True

    def _end_call(self) -> bool:
        if not self._has_arguments and self._shape.may_lack and self._name:
            self._has_arguments = True
            self._show("{}")
        if not self._has_arguments or not self._name or not self._shape.is_list:
            return self._give_up()
        self._begin_call()
        self._advance = JsonCalls._more
        return True

    def _more(self) -> bool:
        return self._next({",": JsonCalls._call, "]": JsonCalls._done})

    def _done(self) -> bool:
        """Ignore the rest: one call was read, or what follows is not one."""
        self._text = ""
        return False

    def _give_up(self) -> bool:
        self._advance = JsonCalls._done
        return True

    def _show(self, arguments: str) -> None:
        """Pass on arguments, or hold them until the call's name is known."""
        self._held += arguments
        if not self._name or not self._has_arguments:
            return
        self._found.append(ToolCall("" if self._is_shown else self._name, self._held))
        self._held, self._is_shown, self.has_begun = "", True, True

    def _next(self, states: Mapping[str, Any], *, consume: bool = True) -> bool:
        """Go on by the next character that is not blank; give up at another."""
        self._text = self._text.lstrip(_BLANKS)
        if not self._text:
            return False
        state = states.get(self._text[0])
        if state is None:
            return self._give_up()
        self._text = self._text[int(consume) :]
        self._advance = state
        return True

    def _complete_value(self) -> Any:
        """The JSON value that the text begins with, which is removed; `_INCOMPLETE` while it goes on, or `_INVALID`."""
        if self._text[0] in '{["':
            end = self._end_of_nested()
            if end is None:
                self._depth, self._in_string, self._is_escaped = 0, False, False  # it is looked at again
        else:
            scalar = _END_OF_SCALAR.search(self._text)
            end = scalar.start() if scalar else None
        if end is None:
            return _INCOMPLETE
        taken, self._text = self._text[:end], self._text[end:]
        try:
            return json.loads(taken, strict=False)
        except (ValueError, RecursionError):
            return _INVALID

    def _end_of_nested(self) -> int | None:
        """Where the object, list or text ends that the text is in, or begins with; None where it goes on."""
        place: int = 0
        while place < len(self._text):
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            match = (_IN_STRING if self._in_string else _OUTSIDE).search(self._text, place)
            if match is None:
                return None
            place = match.end()
            if match[0] == "\\":
                self._is_escaped = True
            elif match[0] == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if match[0] in "{[" else -1
            if self._depth <= 0 and not self._in_string:
                return place
        return None


_INCOMPLETE, _INVALID = object(), object()


class TaggedCall:
    """Reads one call whose arguments are tagged parameters. A parameter that is text arrives as it is written."""

    has_begun = is_in_arguments = True  # until it is closed

    def __init__(self, name: str, tools: Sequence[Mapping[str, Any]]) -> None:
        self._name = name
        self._tools = tools
        self._text = ""
        self._key: str | None = None
        self._is_shown = self._is_written = False
        self._num_arguments = 0

    def feed(self, text: str) -> list[ToolCall]:
        """The pieces that a piece of the region adds."""
        self._text += text
        written = "" if self._is_shown else "{"
        while (more := self._next()) is not None:
            written += more
        return self._piece(written)

    def close(self, *, is_complete: bool) -> list[ToolCall]:
        """What the end of the region adds. A reply that was cut short leaves its JSON open."""
        written = "" if self._is_shown else "{"
        return self._piece(written + "}" if is_complete and self._key is None else written)

    def _piece(self, arguments: str) -> list[ToolCall]:
        if not arguments:
            return []
        name, self._is_shown = "" if self._is_shown else self._name, True
        return [ToolCall(name, arguments)]

    def _next(self) -> str | None:
        """What the next tag, or text of a parameter, adds; None where more text is needed."""
        if self._key is None:
            opening = _OPENING_TAG.search(self._text)
            if opening is None:
                return None
            self._key, self._text = opening[1], self._text[opening.end() :]
            self._is_written = is_only_text(self._name, self._key, self._tools)
            separator, self._num_arguments = ", " if self._num_arguments else "", self._num_arguments + 1
            return f"{separator}{json.dumps(self._key, ensure_ascii=False)}: " + ('"' if self._is_written else "")
        end = self._text.find(_CLOSING_TAG)
        if end >= 0:
            value, self._text = self._text[:end].removesuffix("\n"), self._text[end + len(_CLOSING_TAG) :]
            key, self._key = self._key, None
            return _quoted(value) + '"' if self._is_written else argument_text(self._name, key, value, self._tools)
        safe = len(self._text) - len(_LONGEST_CLOSING) + 1  # what follows may be a closing tag
        if not self._is_written or safe <= 0:
            return None
        value, self._text = self._text[:safe], self._text[safe:]
        return _quoted(value)


def _quoted(text: str) -> str:
    """The text inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
