"""Calls of tools, read from a region of a reply while it arrives: the name first, then the arguments piece by piece.

Arguments that are JSON are passed on as the model wrote them, but for slips that have one meaning (`json_scanner`);
those that a format spells as tagged parameters become JSON. A call begins when its name and the first character of its
arguments are known, and is not taken back after that: arguments that the model did not finish, or that are not JSON,
arrive so, and `is_in_arguments` says it. Whatever is in a string is part of it. The pieces do not depend on where the
text was split, and take time linear in its length.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from ingot.runtime.replies.arguments import argument_text, is_only_text, parameter_names
from ingot.runtime.replies.json_scanner import JsonScanner, dumped, loaded, mended_object
from ingot.runtime.replies.template import FieldSpec

TAGGED_PARAMETERS = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
"""The pattern of parameters that can be read as they arrive."""

_ALIASES = {"arguments": ("arguments", "parameters"), "parameters": ("parameters", "arguments")}
_OPENING_TAG = re.compile(r"<parameter=([^>\n]+)>(?:\n|(?=[^\n]))")  # needs the character after the tag
_BEGUN_TAG = re.compile(r"<parameter=[^>\n]*>?\Z|<[a-z]{0,9}\Z")
_CLOSING_TAG, _NEXT_TAG = "</parameter>", "<parameter="
_BLANKS = " \t\r\n"
_BLANK_RUN = re.compile(r"[ \t\r\n]*")


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
    """Reads calls that are JSON objects: one or, after blanks, `;` or `,`, several, or those of a list.

    calls        pieces of calls since they were last taken
    has_begun    whether a call is known; before that the region may be anything
    has_stopped  whether the calls have ended: the text after them is for others
    """

    def __init__(self, shape: CallShape, name: str) -> None:
        self.calls: list[ToolCall] = []
        self.has_begun = self.has_stopped = False
        self._shape = shape
        self._captured = name
        self._has_list_ended = False
        self._raw: list[str] = []  # of a call that is not known yet, with the blanks and the separator before it
        self._advance: _Advance = JsonCalls._list if shape.is_list else JsonCalls._call
        self._begin_call()

    def feed(self, text: str, place: int) -> int:
        """Read text from a place on, and return where it stopped: at the end of the text, or where calls have ended."""
        while place < len(text) and not self.has_stopped:
            begin, is_known, num_pieces = place, self._is_shown, len(self.calls)
            place = self._advance(self, text, place)
            if len(self.calls) > num_pieces or self._has_list_ended:
                self._raw = []
            elif not is_known:
                self._raw.append(text[begin:place])
        return place

    def feed_raw(self, text: str) -> None:
        """Add text to arguments that are not JSON."""
        self.calls.append(ToolCall("", text))

    def take(self) -> list[ToolCall]:
        """Return the pieces since the last time."""
        calls, self.calls = self.calls, []
        return calls

    @property
    def is_in_arguments(self) -> bool:
        """Whether it has begun arguments that are not complete, or are not JSON."""
        return self._is_shown and not self._is_whole

    @property
    def is_between(self) -> bool:
        """Whether a call has ended and no other one has begun: what stopped it is not in a string of one."""
        return self.has_begun and not self._is_inside

    @property
    def unread(self) -> str:
        """The text that was read since the last call, or from the beginning, and is not part of one."""
        return "".join(self._raw)

    def _begin_call(self) -> None:
        self._name, self._key = self._captured, ""
        self._held: list[str] = []  # arguments whose call has no name yet
        self._has_arguments = self._is_shown = self._is_whole = self._is_inside = False
        self._scanner = JsonScanner()

    # States: each reads some of the text from a place on, and returns where it stopped.

    def _list(self, text: str, place: int) -> int:
        return self._next(text, place, {"[": JsonCalls._call})

    def _call(self, text: str, place: int) -> int:
        if self._shape.arguments_key is None:
            return self._next(text, place, {"{": JsonCalls._arguments}, passes=False)
        return self._next(text, place, {"{": JsonCalls._member})

    def _member(self, text: str, place: int) -> int:
        self._is_inside = True
        if text[place] == '"':
            self._advance = JsonCalls._read_key
            return place
        if text[place] == "}":
            self._end_call()
            return place + 1
        return self._next(text, place, {",": JsonCalls._member})

    def _read_key(self, text: str, place: int) -> int:
        return self._value_then(text, place, self._take_key)

    def _take_key(self, key: Any) -> None:
        self._key = key
        self._advance = JsonCalls._colon

    def _colon(self, text: str, place: int) -> int:
        return self._next(text, place, {":": JsonCalls._value})

    def _value(self, text: str, place: int) -> int:
        """Look at the first character of a value: arguments that are an object are passed on while they arrive."""
        end = _blank_run(text, place)
        if end > place:
            return end
        is_object = self._is_arguments_key and text[place] == "{"
        self._advance = JsonCalls._arguments if is_object else JsonCalls._other_value
        return place

    @property
    def _is_arguments_key(self) -> bool:
        assert self._shape.arguments_key
        names = _ALIASES.get(self._shape.arguments_key, (self._shape.arguments_key,))
        return self._key in names and not self._has_arguments

    def _other_value(self, text: str, place: int) -> int:
        return self._value_then(text, place, self._take_value)

    def _take_value(self, value: Any) -> None:
        self._advance = JsonCalls._member
        if self._key == self._shape.name_key and not self._name:
            if not isinstance(value, str) or not value:
                self._stop()
                return
            self._name = value
            self._show("")
        elif self._is_arguments_key:
            arguments = mended_object(value) if isinstance(value, str) else None
            if arguments is None:
                self._stop()
                return
            self._has_arguments = self._is_whole = True
            self._show(arguments)

    def _value_then(self, text: str, place: int, take: Callable[[Any], None]) -> int:
        """Read a value whole."""
        place = self._scanner.feed(text, place)
        if self._scanner.has_failed:
            self._stop()
        elif self._scanner.has_ended:
            scanner, self._scanner = self._scanner, JsonScanner()
            try:
                value = loaded(scanner.take())
            except ValueError:
                self._stop()
            else:
                take(value)
        return place

    def _arguments(self, text: str, place: int) -> int:
        """Pass on an object, to its last brace."""
        self._is_inside = True
        place = self._scanner.feed(text, place)
        self._has_arguments = True
        self._show(self._scanner.take())
        if self._scanner.has_failed:
            self._stop()
        elif self._scanner.has_ended:
            self._scanner = JsonScanner()
            self._advance = JsonCalls._member
            self._is_whole = True
            if self._shape.arguments_key is None:
                self._end_call()
        return place

    def _end_call(self) -> None:
        """The object of a call has ended: another may follow, unless the delimiter before it has named it."""
        if not self._has_arguments and self._shape.may_lack and self._name:
            self._has_arguments = self._is_whole = True
            self._show("{}")
        self._is_inside = not self._is_shown
        if not self._is_shown or self._captured:
            self._stop()
            return
        self._begin_call()
        self._advance = JsonCalls._more

    def _more(self, text: str, place: int) -> int:
        if self._shape.is_list:
            if text[place] == "]":
                self._stop()
                self._has_list_ended = True
                return place + 1
            return self._next(text, place, {",": JsonCalls._call})
        separators = {";": JsonCalls._next_call, ",": JsonCalls._next_call, "{": JsonCalls._member}
        return self._next(text, place, separators)

    def _next_call(self, text: str, place: int) -> int:
        return self._next(text, place, {"{": JsonCalls._member})

    def _stop(self) -> None:
        self.has_stopped = True

    def _show(self, arguments: str) -> None:
        """Pass on arguments, or hold them until the call's name is known."""
        self._held.append(arguments)
        if not self._name or not self._has_arguments:
            return
        self.calls.append(ToolCall("" if self._is_shown else self._name, "".join(self._held)))
        self._held, self._is_shown, self.has_begun = [], True, True

    def _next(self, text: str, place: int, states: "Mapping[str, _Advance]", *, passes: bool = True) -> int:
        """Go on by the next character that is not blank, and pass it; stop at another than those of `states`."""
        end = _blank_run(text, place)
        if end > place:
            return end
        state = states.get(text[place])
        if state is None:
            self._stop()
            return place
        self._advance = state
        return place + passes


_Advance = Callable[[JsonCalls, str, int], int]


def _blank_run(text: str, place: int) -> int:
    found = _BLANK_RUN.match(text, place)
    assert found
    return found.end()


class TaggedCall:
    """Reads one call whose arguments are tagged parameters. A parameter that is text arrives as it is written.

    A parameter ends at a closing tag after which nothing but another parameter or the end of the call comes, and where
    its closing tag is missing at the next opening tag, at the beginning of a line or of a parameter that the tool has.
    """

    has_begun = has_stopped = is_in_arguments = True  # until it is closed

    def __init__(self, name: str, tools: Sequence[Mapping[str, Any]]) -> None:
        self._name = name
        self._tools = tools
        self._known_keys = parameter_names(name, tools)
        self._text = ""
        self._key: str | None = None
        self._value: list[str] = []  # of a parameter that is not only text
        self._end = ""  # what may be the end of a parameter: a line break, or a closing tag and blanks
        self._is_shown = self._is_text = self._begins_line = False
        self._num_arguments = 0
        self._written: list[str] = []

    def feed_raw(self, text: str) -> None:
        """Read a piece of the region."""
        self._text += text
        while self._text and (self._in_value() if self._key is not None else self._between()):
            pass

    def take(self) -> list[ToolCall]:
        """Return the pieces since the last time."""
        arguments, self._written = "".join(self._written), []
        if not self._is_shown:
            self._is_shown = True
            return [ToolCall(self._name, "{" + arguments)]
        return [ToolCall("", arguments)] if arguments else []

    def close(self, *, is_complete: bool) -> None:
        """Read the end of the region. A reply that was cut short leaves its JSON open, and a tag in it is dropped."""
        if self._key is not None and (is_complete or self._is_closed):
            while is_complete and self._text:
                if not self._in_value():
                    # It begins no tag, but may have one in it.
                    self._add_value(self._text[0])
                    self._text = self._text[1:]
            self._end_value()
        if is_complete:
            self._written.append("}")

    def _between(self) -> bool:
        """Look for the next opening tag."""
        opening = _OPENING_TAG.search(self._text)
        if opening is None:
            begun = _BEGUN_TAG.search(self._text, max(0, len(self._text) - _LONGEST_TAG))
            self._text = begun[0] if begun else ""
            return False
        self._begin_value(opening)
        return True

    def _begin_value(self, opening: "re.Match[str]") -> None:
        self._key, self._text = opening[1], self._text[opening.end() :]
        self._end, self._begins_line = "", True
        self._is_text = is_only_text(self._name, self._key, self._tools)
        separator, self._num_arguments = ", " if self._num_arguments else "", self._num_arguments + 1
        self._written += [separator, dumped(self._key), ": ", '"' if self._is_text else ""]

    def _in_value(self) -> bool:
        """Read a parameter up to the next tag; False where more text is needed."""
        if self._is_closed and (blanks := _blank_run(self._text, 0)):
            self._end, self._text = self._end + self._text[:blanks], self._text[blanks:]
            if len(self._end) > _LONGEST_TAG:
                self._keep_end()
            return True
        begin = self._text.find("<")
        if begin == 0:
            return self._tag()
        plain = self._text if begin < 0 else self._text[:begin]
        self._text = self._text[len(plain) :]
        self._add_value(plain)
        return True

    @property
    def _is_closed(self) -> bool:
        """Whether a closing tag was read that may be part of the value."""
        return _CLOSING_TAG in self._end

    def _tag(self) -> bool:
        """Read a tag, or a character that begins none; False where more text is needed."""
        if self._text.startswith(_CLOSING_TAG):
            if self._is_closed:
                self._keep_end()
            self._end, self._text = self._end + _CLOSING_TAG, self._text[len(_CLOSING_TAG) :]
            return True
        opening = _OPENING_TAG.match(self._text)
        if opening and (self._is_closed or self._begins_line or opening[1] in self._known_keys):
            self._end_value()
            self._begin_value(opening)
            return True
        if not opening and self._may_become_a_tag():
            return False
        self._add_value("<")
        self._text = self._text[1:]
        return True

    def _may_become_a_tag(self) -> bool:
        if _CLOSING_TAG.startswith(self._text) or _NEXT_TAG.startswith(self._text):
            return True
        is_open = "\n" not in self._text and ">" not in self._text[:-1]
        return self._text.startswith(_NEXT_TAG) and is_open and len(self._text) < _LONGEST_TAG

    def _keep_end(self) -> None:
        """Make what might have been the end of the value a part of it."""
        kept, self._end = self._end, ""
        self._add_value(kept)

    def _add_value(self, text: str) -> None:
        """Add to a parameter's value; a line break at its end may belong to the closing tag."""
        if not text:
            return
        text, self._end = self._end + text, ""
        self._begins_line = text.endswith("\n")
        if self._begins_line:
            text, self._end = text[:-1], "\n"
        if self._is_text:
            self._written.append(_quoted(text))
        else:
            self._value.append(text)

    def _end_value(self) -> None:
        assert self._key is not None
        if self._is_text:
            self._written.append('"')
        else:
            self._written.append(argument_text(self._name, self._key, "".join(self._value), self._tools))
        self._key, self._value, self._end = None, [], ""


_LONGEST_TAG = 1024


def _quoted(text: str) -> str:
    """The text inside of a JSON string."""
    return dumped(text)[1:-1]
