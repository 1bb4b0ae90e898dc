"""Reads a reply as it arrives: deltas of content, of reasoning and of tool calls.

However the text is split, the joined deltas are the same: a delimiter that is not complete yet is held back, and so is
white space that may be at the end of a field. A region that does not become what its field says, such as a tool call
without a name, is content. A field that occurs again continues on a new line; transformers keeps its last region alone,
which a stream could not take back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from ingot.runtime.replies.arguments import typed_arguments
from ingot.runtime.replies.call_stream import CallShape, JsonCalls, TaggedCall, ToolCall, joined
from ingot.runtime.replies.contents import read_region
from ingot.runtime.replies.json_scanner import dumped, mended_object, whole_characters
from ingot.runtime.replies.template import REASONING_FIELDS, Delimiter, ReplyField, ReplyTemplate

TOOL_CALLS = "tool_calls"
_SECONDS = 1.0  # most that a pattern may take on one piece of text
_JOIN = "\n"
_LOOK_BEHIND_CHARS = 64
_SHORT_HELD_CHARS, _HELD_PARTS = 256, 4


@dataclass(frozen=True)
class ReplyDelta:
    """What a piece of text adds to the message. A call without a name is more of the arguments of the one before."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def __add__(self, other: "ReplyDelta") -> "ReplyDelta":
        return ReplyDelta(
            self.content + other.content, self.reasoning + other.reasoning, joined(self.calls, other.calls)
        )


class ReplyParser:
    """Reads one reply.

    prompt     the end of the prompt: what follows the template's anchor in it begins the reply, such as "<think>"
    tools      the functions of the request, whose schemas say the types of arguments that have none of their own
    strips     whether white space at the ends of the content is left out: not where it continues a text
    is_exact   whether a constraint spells the reply: reasoning, then calls or an answer. What the answer contains is
               content to its last character
    """

    def __init__(
        self,
        template: ReplyTemplate,
        prompt: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        strips: bool = True,
        is_exact: bool = False,
    ) -> None:
        self._template = template
        self._tools = tools
        self._strips = strips
        self._is_exact = is_exact
        self._in_answer = False  # that a constraint spells
        self._has_reasoned = self._has_called = False
        self.is_cut = False
        """Whether a call has ended whose arguments are not complete, or are not JSON."""
        self._arrived: list[str] = []  # text that is not in the buffer yet
        self._num_arrived = 0
        self._buffer = ""
        self._place = 0
        self._region: _Region | None = None  # an explicit one
        self._texts = {"content": _Text(), "reasoning": _Text()}
        self._parts: list[ReplyDelta] = []
        begun = _after_anchor(template.anchor, prompt)
        self._prompt_end = 0  # in the buffer: what is before is not the reply's
        if begun:
            self.feed(begun)
            self._prompt_end = len(self._buffer)
        self.is_reasoning = self._region is not None and self._region.field is template.reasoning
        """Whether the prompt has opened the model's reasoning."""

    def feed(self, text: str) -> ReplyDelta:
        """What a piece of text adds."""
        return sum(self.parts(text, is_last=False), ReplyDelta())

    def finish(self) -> ReplyDelta:
        """What the end adds: text that was held back."""
        return sum(self.parts("", is_last=True), ReplyDelta())

    def parts(self, text: str, *, is_last: bool) -> list[ReplyDelta]:
        """What a piece of text adds, in the order of the text: each is of content, of reasoning or of calls."""
        self._parts = []
        self._arrived.append(text)
        # Where much is held back, a pattern looks at all of it again: not before it has grown by a part.
        self._num_arrived += len(text)
        held = len(self._buffer) - self._place
        if not is_last and held > _SHORT_HELD_CHARS and self._num_arrived < held // _HELD_PARTS:
            return []
        self._buffer, self._arrived, self._num_arrived = self._buffer + "".join(self._arrived), [], 0
        self._read(final=False)
        if is_last:
            self._read(final=True)
        return self._parts

    def _read(self, *, final: bool) -> None:
        while self._step(final=final):
            pass
        if final:
            is_tagged = self._region is not None and isinstance(self._region.reader, TaggedCall)
            # What is held of tagged parameters is the beginning of their closing delimiter.
            self._take(self._place if is_tagged else len(self._buffer))
            self._close("", is_complete=False)
        dropped = max(0, self._place - _LOOK_BEHIND_CHARS)  # what is kept also tells \A and lookbehinds where they are
        self._buffer, self._place = self._buffer[dropped:], self._place - dropped
        self._prompt_end = max(0, self._prompt_end - dropped)

    def _step(self, *, final: bool) -> bool:
        """Pass the next delimiter, or the JSON of calls; False when the text so far has no further one for certain."""
        if self._region and isinstance(self._region.reader, JsonCalls) and not self._region.reader.has_stopped:
            return self._read_calls(self._region, self._region.reader)
        found, held = self._next_delimiter(final)
        if self._begins_answer(found[0].start() if found else held, is_end=final and found is None):
            return True
        if found is None:
            if not final:
                self._take(held)
            return False
        match, field = found
        self._take(match.start())
        self._place = match.end()
        self._close("" if field else match[0], is_complete=True)
        if field:
            captures = {name: text for name, text in match.groupdict().items() if text}
            self._region = _Region(field, match[0], captures, self._reader(field, captures), [])
        return True

    def _read_calls(self, region: "_Region", reader: JsonCalls) -> bool:
        """Have calls read up to the end of their JSON, in which no delimiter counts."""
        self._place = reader.feed(self._buffer, self._place)
        self._add_calls(reader.take())
        if reader.has_stopped and not reader.is_in_arguments and (reader.has_begun or not region.field.closing):
            self._has_called |= reader.has_begun
            unread = reader.unread if reader.has_begun else region.opened + reader.unread
            if unread.strip():
                self._show("content", unread, None)
            if region.field.closing is None:
                self._region = None
        return reader.has_stopped

    def _begins_answer(self, end: int, *, is_end: bool) -> bool:
        """Whether the text up to a place, at which a region may open, begins the answer that a constraint spells."""
        if not self._is_exact or self._region or self._in_answer or self._has_called:
            return False
        text = self._buffer[self._place : end]
        blanks = len(text) - len(text.lstrip())
        self._in_answer = blanks < len(text) or (is_end and bool(text))
        if self._in_answer and self._has_reasoned:
            self._place += blanks  # they are between both
        return self._in_answer

    def _next_delimiter(self, final: bool) -> "tuple[tuple[regex.Match[str], ReplyField | None] | None, int]":
        """The first delimiter, the longest of those, with the field that it opens; and where one may begin that is not
        complete yet."""
        held = len(self._buffer)
        if self._in_answer:
            return None, held  # what it contains opens nothing
        best: tuple[regex.Match[str], ReplyField | None] | None = None
        for delimiter, field in self._watched():
            try:
                match = delimiter.pattern.search(self._buffer, self._place, partial=not final, timeout=_SECONDS)
            except TimeoutError:
                # What a pattern takes too long for is content, and so is all that follows.
                self._in_answer = True
                return None, len(self._buffer)
            if match is None or (final and match.start() == match.end() == len(self._buffer)):
                continue
            at_edge = match.end() == len(self._buffer)
            if not final and (match.partial or (at_edge and (delimiter.may_grow or match.start() == match.end()))):
                held = min(held, match.start())
                continue
            ends_region = match.start() < match.end() or field or self._region
            if ends_region and (best is None or _before(match, best[0])):
                best = match, field
        return (best if best and best[0].start() < held else None), held

    def _watched(self) -> list[tuple[Delimiter, ReplyField | None]]:
        """Delimiters that count here, each with the field that it opens.

        After a call has ended, another region may open although the closing delimiter is missing.
        """
        field = self._region.field if self._region else self._template.default
        reader = self._region.reader if self._region else None
        watched: list[tuple[Delimiter, ReplyField | None]] = []
        if field and field.closing:
            watched.append((field.closing, None))
        if self._region is None or (isinstance(reader, JsonCalls) and reader.is_between):
            # An answer that a constraint spells may be the very text that opens reasoning, of which there is one.
            passed = self._template.reasoning if self._is_exact and self._has_reasoned else None
            fields = [each for each in self._template.fields.values() if each is not passed]
            watched += [(each.opening, each) for each in fields if each.opening]
        return watched

    def _take(self, end: int) -> None:
        """Give the text up to a place to the region that it is in."""
        region = self._region
        if region is None or region.is_text:
            self._place = max(self._place, min(self._prompt_end, end))  # the prompt's text is not shown
        text, self._place = self._buffer[self._place : end], end
        if not text:
            return
        if self._in_answer:
            self._add_text("content", text, False, "")
        elif region is None:
            default = self._template.default
            self._show(_kind_of(default.name) if default else "", text, default)
        elif region.is_text:
            self._show(_kind_of(region.field.name), text, region.field)
        elif region.reader and not region.reader.has_begun:
            region.body.append(text)
        elif isinstance(region.reader, JsonCalls) and not region.reader.is_in_arguments:
            # The blanks between a call and its closing delimiter are not content, even where all others are kept.
            self._add_text("content", text, True, _JOIN)
        elif region.reader:
            region.reader.feed_raw(text)
            self._add_calls(region.reader.take())
        else:
            region.body.append(text)

    def _close(self, delimiter: str, *, is_complete: bool) -> None:
        region, self._region = self._region, None
        if region is None or region.is_text:
            self._has_reasoned |= region is not None and region.field is self._template.reasoning
            for text in self._texts.values():
                text.end_region()
            return
        reader = region.reader
        self._has_called = True
        if isinstance(reader, TaggedCall):
            reader.close(is_complete=is_complete)
            self.is_cut |= not is_complete
            self._add_calls(reader.take())
        elif reader and reader.has_begun:
            self.is_cut |= reader.is_in_arguments
            if not reader.has_stopped and reader.unread.strip():
                self._show("content", reader.unread, None)
            self._texts["content"].end_region()
        else:
            calls = None if reader else self._calls(region)
            if calls is None:
                self._show("content", region.opened + region.text + delimiter, None)
                self._texts["content"].end_region()
            else:
                self._add_calls(calls)

    def _reader(self, field: ReplyField, captures: Mapping[str, str]) -> JsonCalls | TaggedCall | None:
        """What reads the calls of a field's region as they arrive; None where it is read at its end."""
        shape = CallShape.of(field.spec) if field.name == TOOL_CALLS else None
        return shape.reader(captures.get("name", ""), self._tools) if shape else None

    def _add_calls(self, calls: Sequence[ToolCall]) -> None:
        if calls:
            self._parts.append(ReplyDelta(calls=tuple(calls)))

    def _show(self, kind: str, text: str, field: ReplyField | None) -> None:
        if kind not in self._texts:
            return
        strips = self._strips and (field is None or bool(field.spec.content_args.get("strip", True)))
        self._add_text(kind, text, strips, _JOIN if field is None or field.spec.join is None else field.spec.join)

    def _add_text(self, kind: str, text: str, strips: bool, join: str) -> None:
        shown = self._texts[kind].push(text, strips=strips, join=join)
        if shown:
            self._parts.append(ReplyDelta(content=shown) if kind == "content" else ReplyDelta(reasoning=shown))

    def _calls(self, region: "_Region") -> list[ToolCall] | None:
        """The calls of a region that is complete; None if it is not what its field says."""
        spec = region.field.spec
        try:
            value = read_region(
                region.text, spec.content, spec.content_args, spec.transform, region.captures, spec.transform_each
            )
            if region.field.name != TOOL_CALLS:
                return []  # a field of the template that OpenAI's messages do not have
            return [self._call(each) for each in (value if isinstance(value, list) else [value])]
        except (ValueError, TypeError, KeyError, TimeoutError):
            return None

    def _call(self, value: Any) -> ToolCall:
        function = value["function"] if isinstance(value, dict) and "function" in value else value
        name, arguments = function["name"], function.get("arguments", {})
        if not isinstance(name, str) or not name:
            raise ValueError("a call has no name")
        name = whole_characters(name)
        if isinstance(arguments, dict):
            arguments = dumped(typed_arguments(name, arguments, self._tools))
        mended = mended_object(arguments) if isinstance(arguments, str) else None
        if mended is None:
            raise ValueError("the arguments are not an object")
        return ToolCall(name, mended)


@dataclass
class _Region:
    """An open region: the delimiter that opened it, its captures, and its text unless that is shown as it arrives.

    `reader` reads its calls as they arrive.
    """

    field: ReplyField
    opened: str
    captures: dict[str, str]
    reader: JsonCalls | TaggedCall | None
    body: list[str]

    @property
    def text(self) -> str:
        """All of it, where nothing was shown yet."""
        unread = self.reader.unread if isinstance(self.reader, JsonCalls) else ""
        return unread + "".join(self.body)

    @property
    def is_text(self) -> bool:
        """Whether its text is shown as it arrives."""
        return self.field.spec.content == "text" and bool(_kind_of(self.field.name))


class _Text:
    """The text of content or reasoning: white space at the ends of its regions is left out."""

    def __init__(self) -> None:
        self._has_shown = self._in_region = False
        self._held: list[str] = []  # white space that may be at the end of a region

    def push(self, text: str, *, strips: bool, join: str) -> str:
        """What a piece of a region shows."""
        if strips and not text.strip():
            if self._in_region:
                self._held.append(text)
            return ""
        if strips:
            text = "".join([*self._held, text])
            text = text if self._in_region else text.lstrip()
            kept = text.rstrip()
            self._held = [text[len(kept) :]]
            text = kept
        if not text:
            return ""
        begins = self._has_shown and not self._in_region
        self._has_shown = self._in_region = True
        return join + text if begins else text

    def end_region(self) -> None:
        """End a region; what it holds back is white space at its end."""
        self._in_region, self._held = False, []


def _before(one: "regex.Match[str]", other: "regex.Match[str]") -> bool:
    """Whether a match begins first, or is the longer one that begins there."""
    return (one.start(), -one.end()) < (other.start(), -other.end())


def _kind_of(name: str) -> str:
    return "reasoning" if name in REASONING_FIELDS else "content" if name == "content" else ""


def _after_anchor(anchor: Delimiter | None, prompt: str) -> str:
    """What follows the last anchor in a prompt; nothing without one."""
    last = None
    for match in anchor.pattern.finditer(prompt, timeout=_SECONDS) if anchor else ():
        last = match
    return prompt[last.end() :] if last else ""
