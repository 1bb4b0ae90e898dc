"""How the reply of one chat is read: by the model's template, into content, reasoning and tool calls.

A model's template is that of its tokenizer_config.json or, where it has none, of the format that its chat template
shows (`ingot.runtime.replies.formats`). A reply that must be a call, or an answer by a schema after reasoning, is
constrained by the same template.
"""

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ingot.runtime.asking.prompts import TokenIds
from ingot.runtime.constraints.constraint import Constraint, JsonWhitespace
from ingot.runtime.replies.call_stream import ToolCall
from ingot.runtime.replies.formats import JSON_LIST, CallSyntax, ReplyFormat, format_of
from ingot.runtime.replies.grammar import Calls, Reasoning, reply_constraint
from ingot.runtime.replies.parser import TOOL_CALLS, ReplyDelta, ReplyParser
from ingot.runtime.replies.template import ReplyTemplate
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.text.messages import Message
from ingot.runtime.text.tokenizer import Tokenizer

_END_TOKENS = 256  # of a prompt, in which the template's anchor is looked for
_ID_CHARS = 24
_DEVELOPER = "developer"
_LIST_SYNTAX = JSON_LIST.calls or CallSyntax()
_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Chat:
    """A conversation to be answered, in the form of chat templates.

    tools       the functions that the reply may call; `must_call`: it is a call; `many_calls`: it may be several
    variables   of the chat template
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    must_call: bool = False
    many_calls: bool = True
    variables: Mapping[str, Any] | None = None

    @property
    def may_reason(self) -> bool:
        """Whether a constrained reply may begin with reasoning: unless the request turns it off, in OpenAI's words or
        by a variable of the chat templates of Qwen, DeepSeek and Granite.
        """
        given = self.variables or {}
        is_off = given.get("reasoning_effort") == "none" or False in (
            given.get("enable_thinking"),
            given.get("thinking"),
        )
        return not is_off


@dataclass(frozen=True)
class ReplyPlan:
    """How a reply is read, and what it must be.

    template             None: the text is the content
    prompt               the end of the prompt
    strips, is_exact     as those of `ReplyParser`
    most_calls           calls after these are left out
    keep_special_tokens  those that are delimiters of the template
    """

    template: ReplyTemplate | None = None
    prompt: str = ""
    strips: bool = True
    is_exact: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    most_calls: int | None = None
    call_id_chars: int = _ID_CHARS
    keep_special_tokens: tuple[str, ...] = ()
    constraint: Constraint | None = None

    def reader(self) -> "ReplyReader | None":
        """A reader for one choice; None where the text is the content."""
        return ReplyReader(self) if self.template else None


@dataclass
class ReplyReader:
    """Reads one choice; calls get their ids and numbers."""

    plan: ReplyPlan
    num_calls: int = 0
    _is_dropping: bool = False  # whether the present call is beyond those that are allowed
    _parser: ReplyParser = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        assert plan.template is not None
        self._parser = ReplyParser(plan.template, plan.prompt, plan.tools, strips=plan.strips, is_exact=plan.is_exact)

    def parts(self, text: str, *, is_last: bool) -> list[ReplyDelta]:
        """What a piece of text adds, in order, without calls beyond those that are allowed."""
        return [self._allowed(part) for part in self._parser.parts(text, is_last=is_last)]

    def read(self, text: str, *, is_last: bool) -> "ReplyMessage":
        """What a piece of text adds to the message."""
        first = self.num_calls
        delta = sum(self.parts(text, is_last=is_last), ReplyDelta())
        num_begun = 0
        calls = []
        for call in delta.calls:
            num_begun += bool(call.name)
            calls.append(self._call(first + num_begun - 1, call))
        return ReplyMessage(delta.content, delta.reasoning, calls)

    @property
    def ends_with_calls(self) -> bool:
        """Whether the reply has calls, of which none was cut short."""
        return bool(self.num_calls) and not self._parser.is_cut

    def call_id(self) -> str:
        """An id for a new call."""
        return _call_id(self.plan.call_id_chars)

    def _allowed(self, part: ReplyDelta) -> ReplyDelta:
        calls: list[ToolCall] = []
        for call in part.calls:
            if call.name:
                self._is_dropping = self.num_calls == self.plan.most_calls
                self.num_calls += not self._is_dropping
            calls += [] if self._is_dropping else [call]
        return replace(part, calls=tuple(calls))

    def _call(self, index: int, call: ToolCall) -> dict[str, Any]:
        if not call.name:
            return {"index": index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": index, "id": self.call_id(), "type": "function", "function": function}


@dataclass(frozen=True)
class ReplyMessage:
    """Parts of a message, or of a delta of one; calls are in OpenAI's form, with their index. In a delta, one without
    an id is more of the arguments of a call that began before."""

    content: str
    reasoning: str
    calls: list[dict[str, Any]]

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class ModelReplies:
    """What is the same for all replies of one model. ArtifactError for a damaged template."""

    def __init__(self, tokenizer: Tokenizer, whitespace: JsonWhitespace = "compact") -> None:
        self._tokenizer = tokenizer
        self._whitespace: JsonWhitespace = whitespace
        self._format: ReplyFormat | None = format_of(tokenizer.chat_template_text)
        own = tokenizer.response_template
        self._template = ReplyTemplate.load(own) if own else self._format.template if self._format else None
        marks = self._format.reasoning if self._format else ()
        reasons = own or any(mark in tokenizer.chat_template_text for mark in marks)
        self._reasoning = self._template.reasoning if self._template and reasons else None
        spelled = self._format.calls if self._format else None
        self._syntax = spelled if self._template and spelled and _reads(self._template, spelled) else None

    @property
    def call_syntax(self) -> CallSyntax:
        """How a call is spelled that is required."""
        return self._syntax or _LIST_SYNTAX

    def known_roles(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with `system` in place of OpenAI's role `developer`, if the chat template does not have that."""
        if _DEVELOPER in self._tokenizer.chat_template_text:
            return messages
        return [{**each, "role": "system"} if each.get("role") == _DEVELOPER else each for each in messages]

    def spaced(self, constraint: Constraint | None) -> Constraint | None:
        """A request's constraint with the server's rule for the white space of JSON."""
        return constraint and replace(constraint, whitespace=self._whitespace)

    def plan(
        self,
        prompt: TokenIds,
        tools: Sequence[Mapping[str, Any]],
        *,
        must_call: bool,
        many_calls: bool,
        answer: Constraint | None,
        may_reason: bool = True,
        continues: bool = False,
    ) -> ReplyPlan:
        """How to read the reply to a prompt. ApiError for tools that the model's format cannot call, RequestError for
        schemas that cannot be followed.

        `may_reason`: a constrained reply may begin with reasoning, if the model's template has any.
        `continues`: the reply continues the last message, so that its white space counts.
        """
        template, syntax = self._template, self._syntax
        id_chars = self._format.call_id_chars if self._format else _ID_CHARS
        if must_call and syntax is None:
            template, syntax = self._list_template(), self.call_syntax
        if tools and (template is None or TOOL_CALLS not in template.fields):
            raise ApiError(
                400,
                "how the model writes calls of tools is not known: its chat template has none of the known formats, and"
                ' its tokenizer_config.json no response_template; use tool_choice "required", which constrains the'
                " reply to calls",
                param="tools",
            )
        answer = self.spaced(answer)
        if template is None:
            return ReplyPlan(constraint=answer)
        if not tools:
            template = template.without(TOOL_CALLS)
        end = self._end_of(prompt)
        special = {
            text: number for text, number in self._tokenizer.special_tokens.items() if text in template.delimiters()
        }
        calls = (
            Calls(tools, syntax, many_calls, self._whitespace) if syntax and (must_call or (tools and answer)) else None
        )
        is_open = ReplyParser(template, end).is_reasoning
        field = template.reasoning if is_open else self._reasoning
        reasoning = Reasoning.of(field, end, is_open=is_open, is_off=not may_reason)
        constraint = reply_constraint(answer, calls, reasoning, special)
        is_whole = answer is not None and answer.kind == "grammar"  # it spells the whole reply, reasoning and all
        if constraint is not None and constraint == answer and not is_whole:
            return ReplyPlan(constraint=constraint)  # there is nothing but the answer
        if constraint is not None and reasoning is None and template.reasoning and not is_whole:
            template = template.without(template.reasoning.name)  # a call may contain its delimiters
        is_exact = constraint is not None and not is_whole
        return ReplyPlan(
            template,
            # What else a prompt has after its anchor, such as Functionary's ">>>", begins no answer of a constraint.
            "" if is_exact and not is_open else end,
            strips=not continues,
            is_exact=is_exact,
            tools=tools,
            most_calls=None if many_calls else 1,
            call_id_chars=id_chars,
            keep_special_tokens=tuple(special),
            constraint=constraint,
        )

    def _list_template(self) -> ReplyTemplate:
        """The template of calls in a JSON list, after the reasoning that the model's own has."""
        plain = JSON_LIST.template
        assert plain.reasoning
        plain = plain.without(plain.reasoning.name)
        if self._template is None or self._reasoning is None:
            return plain
        fields = {self._reasoning.name: self._reasoning, **plain.fields}
        return ReplyTemplate(fields, self._template.anchor, plain.source)

    def _end_of(self, prompt: TokenIds) -> str:
        return self._tokenizer.decode([int(token) for token in prompt[-_END_TOKENS:]], skip_special_tokens=False)


def _reads(template: ReplyTemplate, syntax: CallSyntax) -> bool:
    """Whether a template reads calls that are spelled so: an artifact's own may read others than its chat template
    shows.
    """
    parser = ReplyParser(template)
    read = parser.feed(f'{syntax.begin}{{"name": "f", "{syntax.arguments_key}": {{}}}}{syntax.end}') + parser.finish()
    return read.calls == (ToolCall("f", "{}"),)


def _call_id(num_chars: int) -> str:
    """An id of letters and digits; some chat templates check the length."""
    prefix = "call_" if num_chars == _ID_CHARS else ""
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(num_chars))
