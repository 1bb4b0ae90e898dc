"""Formats of replies in wide use, as data, for checkpoints without a template of their own.

A format is recognized by the texts that its models' chat templates contain. To add one, add its row. `calls` says how
calls are spelled, for requests that require one: the constraint is made of it (`grammar`). A pattern must not end with
a part that is optional: whether it is there is not known until more text has arrived.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.runtime.replies.call_stream import TAGGED_PARAMETERS
from ingot.runtime.replies.template import ReplyTemplate


@dataclass(frozen=True)
class CallSyntax:
    """Calls as JSON objects: `begin`, the objects with `separator` between them, `end`.

    Where `wraps_each` each object has a begin and an end of its own.
    """

    begin: str = ""
    end: str = ""
    separator: str = ""
    arguments_key: str = "arguments"
    wraps_each: bool = False


@dataclass(frozen=True)
class ReplyFormat:
    """A format by its name.

    marks          texts that the chat template of such a model contains: all of one of these groups
    call_id_chars  length of the ids of calls, which some chat templates check
    """

    name: str
    fields: Mapping[str, Any]
    anchors: Sequence[str]
    marks: Sequence[Sequence[str]] = ()
    calls: CallSyntax | None = None
    call_id_chars: int = 24
    reasoning: Sequence[str] = field(default=("<think>", "</think>"))

    @property
    def template(self) -> ReplyTemplate:
        """The template of the format."""
        opening, closing = self.reasoning
        source = {
            "start_anchor": list(self.anchors),
            "fields": {"reasoning_content": {"open": opening, "close": closing}, **self.fields, "content": {}},
        }
        return ReplyTemplate.load(source)


# From their first one alone: a search that begins at each of many blanks costs the square of their number.
_BLANKS_BEFORE = r"(?:(?<!\s)\s+)?"
_FUNCTION = {"type": "function", "function": "{content}"}
_ANCHORS = (
    "<|im_start|>assistant\n",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "[/INST]",
    "<\uff5cAssistant\uff5c>",
)
_HERMES = {
    "open_pattern": _BLANKS_BEFORE + "<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": _FUNCTION,
}
_QWEN_XML = {
    "open_pattern": _BLANKS_BEFORE + r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": TAGGED_PARAMETERS},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
_MISTRAL = {
    "open": "[TOOL_CALLS]",
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
    "transform_each": True,
}
_MISTRAL_ARGS = {
    "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[^\s\[\{]+)\s*(?:\[CALL_ID\][^\[\{]*)?(?:\[ARGS\])?\s*(?=\{)",
    "close_pattern": r"(?=\[TOOL_CALLS\])",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
_LLAMA_JSON = {
    "open_pattern": r"(?:\A\s*|<\|python_tag\|>\s*)(?=\{\s*\"(?:type|name)\"\s*:)",
    "content": "json",
    "transform": {
        "type": "function",
        "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
    },
}
_JSON_LIST = {
    "open_pattern": _BLANKS_BEFORE + r"(?=\[)",
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
    "transform_each": True,
}

_ROWS = (
    ReplyFormat("qwen-xml", {"tool_calls": _QWEN_XML}, _ANCHORS, (("<tool_call>", "<function="),)),
    ReplyFormat(
        "hermes",
        {"tool_calls": _HERMES},
        _ANCHORS,
        (("<tool_call>",),),
        CallSyntax("<tool_call>\n", "\n</tool_call>", "\n", wraps_each=True),
    ),
    ReplyFormat(
        "mistral-args",
        {"tool_calls": _MISTRAL_ARGS},
        _ANCHORS,
        (("[TOOL_CALLS]", "[ARGS]"),),
        call_id_chars=9,
        reasoning=("[THINK]", "[/THINK]"),
    ),
    ReplyFormat(
        "mistral",
        {"tool_calls": _MISTRAL},
        _ANCHORS,
        (("[TOOL_CALLS]",),),
        CallSyntax("[TOOL_CALLS][", "]", ", "),
        call_id_chars=9,
        reasoning=("[THINK]", "[/THINK]"),
    ),
    ReplyFormat(
        "llama-json",
        {"tool_calls": _LLAMA_JSON},
        _ANCHORS,
        (("<|python_tag|>",), ("ipython", '"parameters"')),
        CallSyntax(arguments_key="parameters"),
    ),
    ReplyFormat("reasoning", {}, _ANCHORS, (("</think>",), ("<think>",))),
    ReplyFormat("json-list", {"tool_calls": _JSON_LIST}, _ANCHORS, calls=CallSyntax("[", "]", ", ")),
)

FORMATS: Mapping[str, ReplyFormat] = {row.name: row for row in _ROWS}
JSON_LIST = FORMATS["json-list"]
"""What a required call is written as where the model's format has no JSON: no model writes it by itself."""


def format_of(chat_template: str) -> ReplyFormat | None:
    """The format of the model whose chat template this is; None for one that is not known."""
    for row in _ROWS:
        if any(all(mark in chat_template for mark in group) for group in row.marks):
            return row
    return None
