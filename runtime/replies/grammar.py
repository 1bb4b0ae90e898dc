"""What a reply may be, as one grammar: reasoning if the model writes it, then calls of tools, or a constrained answer.

Calls are spelled as the model's format spells them, their arguments by each tool's schema. Delimiters that are special
tokens are named by their ids.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.errors import RequestError
from ingot.runtime.constraints.compiler import lark_of
from ingot.runtime.constraints.constraint import MADE_HERE, Constraint, JsonWhitespace
from ingot.runtime.constraints.schemas import schema_expression
from ingot.runtime.replies.arguments import function_of
from ingot.runtime.replies.formats import CallSyntax
from ingot.runtime.replies.template import ReplyField

_MOST_BLANKS = 4  # after reasoning: a weak model would write them until max_tokens
TOOLS = "tools"  # the field of a request whose schemas are to blame


@dataclass(frozen=True)
class Calls:
    """Calls that a reply may be: of these tools, spelled so; more than one only if `many`."""

    tools: Sequence[Mapping[str, Any]]
    syntax: CallSyntax
    many: bool
    whitespace: JsonWhitespace = "compact"


@dataclass(frozen=True)
class Reasoning:
    """Reasoning before the reply: its delimiters; `is_open` where the prompt has written the opening one.

    is_off   the reply has none: it ends at once where the prompt has opened it
    """

    opening: str
    closing: str
    is_open: bool
    is_off: bool = False

    @classmethod
    def of(cls, field: ReplyField | None, prompt: str, *, is_open: bool, is_off: bool) -> "Reasoning | None":
        """That of a template's field; None where there cannot be any.

        That is where its delimiters are not single texts, where the end of the prompt has closed it, and where it is
        off.
        """
        if field is None or not isinstance(field.spec.open, str) or not isinstance(field.spec.close, str):
            return None
        is_over = is_off or prompt.rstrip().endswith(field.spec.close)
        return None if is_over and not is_open else cls(field.spec.open, field.spec.close, is_open, is_off)


def reply_constraint(
    answer: Constraint | None, calls: Calls | None, reasoning: Reasoning | None, special: Mapping[str, int]
) -> Constraint | None:
    """The constraint of a reply that is reasoning, if there is any, and then an answer or calls, whichever are given.

    None where nothing is required. `special` are the ids of special tokens by their texts. RequestError for an answer
    by a grammar of its own where the reply may be something else too: rules of two grammars cannot be mixed.
    """
    if answer is None and calls is None:
        return None
    if answer is not None and answer.kind == "grammar":
        if calls is not None:
            raise RequestError("a grammar cannot be combined with tools; use tool_choice none", field=TOOLS)
        return answer
    if calls is None and reasoning is None:
        return answer
    spell = _Speller(special)
    rules, kinds = [], []
    if answer is not None:
        rules.append(f"answer: {_expression(answer)}")
        kinds.append("answer")
    if calls is not None:
        rules += _call_rules(calls, spell)
        kinds.append("calls")
    reply = f"({' | '.join(kinds)})"
    if reasoning is None:
        return Constraint("grammar", "\n".join([MADE_HERE, f"start: {reply}", *rules]))
    rules += _thought_rules(reasoning, spell)
    before = "thought BLANKS?" if reasoning.is_open else "(thought BLANKS?)?"
    return Constraint("grammar", "\n".join([MADE_HERE, f"start: {before} {reply}", *rules]))


class _Speller:
    """Spells texts in Lark: special tokens by their ids, all else as strings."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special

    def is_special(self, text: str) -> bool:
        return text in self._special

    def __call__(self, text: str) -> str:
        """A sequence of Lark terms; "" for an empty text."""
        for token, number in sorted(self._special.items(), key=lambda one: -len(one[0])):
            before, found, after = text.partition(token)
            if found:
                return " ".join(part for part in (self(before), f"<[{number}]>", self(after)) if part)
        return json.dumps(text, ensure_ascii=False) if text else ""


def _expression(constraint: Constraint) -> str:
    """The texts of a constraint, other than a grammar, within a grammar."""
    if constraint.kind == "json_schema":
        return schema_expression(constraint.source, constraint.whitespace)
    return lark_of(constraint).removeprefix("start: ")


def _call_rules(calls: Calls, spell: _Speller) -> list[str]:
    syntax = calls.syntax
    one = "one_call"
    if syntax.wraps_each:
        one = f"{spell(syntax.begin)} one_call {spell(syntax.end)}"
    many = f"({spell(syntax.separator)} {one})*" if calls.many and syntax.separator else ""
    inner = f"{one} {many}"
    if not syntax.wraps_each:
        inner = f"{spell(syntax.begin)} {inner} {spell(syntax.end)}"
    spelled = [_call(function_of(tool), syntax, calls.whitespace) for tool in calls.tools]
    return [f"calls: {inner}", "one_call: " + "\n  | ".join(spelled)]


def _call(function: Mapping[str, Any], syntax: CallSyntax, whitespace: JsonWhitespace) -> str:
    name = json.dumps(function["name"], ensure_ascii=False)
    head = json.dumps(f'{{"name": {name}, "{syntax.arguments_key}": ', ensure_ascii=False)
    schema = {"type": "object", **(function.get("parameters") or {})}
    try:
        arguments = _expression(Constraint.json_schema(schema, whitespace=whitespace))
    except RequestError as error:
        raise RequestError(f"the parameters of the tool {name}: {error}", field=TOOLS) from error
    return f'{head} {arguments} "}}"'


def _thought_rules(reasoning: Reasoning, spell: _Speller) -> list[str]:
    opening = "" if reasoning.is_open else spell(reasoning.opening)
    blanks = f"BLANKS: /[ \\t\\r\\n]{{1,{_MOST_BLANKS}}}/"
    if reasoning.is_off:
        return [f"thought: {spell(reasoning.closing)}", blanks]
    if spell.is_special(reasoning.closing):
        return [f"thought: {opening} /(?s:.*)/ {spell(reasoning.closing)}", blanks]
    closing = json.dumps(reasoning.closing, ensure_ascii=False)
    return [f"thought: {opening} thinking", f"thinking[suffix={closing}]: /(?s:.*)/", blanks]
