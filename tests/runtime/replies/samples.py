"""Replies as models of each format write them, with what they say."""

from dataclasses import dataclass
from typing import Any

from ingot.runtime.replies import FORMATS, ReplyDelta, ReplyTemplate, ToolCall


@dataclass(frozen=True)
class Sample:
    """A reply in a format: its text, the end of its prompt, and the message."""

    format: str
    text: str
    message: ReplyDelta
    prompt: str = "<|im_start|>assistant\n"

    @property
    def template(self) -> ReplyTemplate:
        return FORMATS[self.format].template


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "properties": {
                    "days": {"type": "integer"},
                    "on": {"type": "boolean"},
                    "note": {"type": ["string", "null"]},
                }
            },
        },
    }
]
SAMPLES = [
    Sample(
        "hermes",
        "Plain é漢😀 text with < and <tool, and [1].",
        ReplyDelta("Plain é漢😀 text with < and <tool, and [1]."),
    ),
    Sample(
        "hermes",
        "<think>\nA <tool_call> here is thought.\n</think>\n\nLet me see.\n"
        '<tool_call>\n{"name": "f", "arguments": {"é": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n',
        ReplyDelta(
            "Let me see.",
            "A <tool_call> here is thought.",
            (ToolCall("f", '{"é": 1}'), ToolCall("g", "{}")),
        ),
    ),
    Sample("hermes", "It is so.</think>\n\n7", ReplyDelta("7", "It is so."), prompt="<|im_start|>assistant\n<think>\n"),
    Sample("hermes", " 7 \n", ReplyDelta("7"), prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    Sample(
        "hermes",
        'One\n<tool_call>{"name": "f"</tool_call>\nTwo',
        ReplyDelta('One\n<tool_call>{"name": "f"</tool_call>\nTwo'),
    ),
    Sample("hermes", 'Cut <tool_call>{"name": "f", "argu', ReplyDelta('Cut\n<tool_call>{"name": "f", "argu')),
    Sample(
        "hermes",
        'Cut <tool_call>{"name": "f", "arguments": {"a": "b\\"',
        ReplyDelta("Cut", "", (ToolCall("f", '{"a": "b\\"'),)),
    ),
    Sample(
        "hermes",
        '<tool_call>{"arguments": {"b": [{"c": "}"}], "name": 1}, "name": "f"</tool_call> <tool_call>{"name": "g"}'
        '</tool_call><tool_call>{"id": [1], "name": "h", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ReplyDelta(
            "",
            "",
            (ToolCall("f", '{"b": [{"c": "}"}], "name": 1}'), ToolCall("g", "{}"), ToolCall("h", '{"a": 1}')),
        ),
    ),
    Sample(
        "hermes",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        ReplyDelta('<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ),
    Sample("hermes", "<think>never ends", ReplyDelta("", "never ends")),
    Sample(
        "qwen-xml",
        "Now.\n<tool_call>\n<function=f>\n<parameter=days>\n7\n</parameter>\n<parameter=on>\ntrue\n</parameter>\n"
        "<parameter=note>\ntwo\nlines\n</parameter>\n</function>\n</tool_call>",
        ReplyDelta("Now.", "", (ToolCall("f", '{"days": 7, "on": true, "note": "two\\nlines"}'),)),
    ),
    Sample(
        "qwen-xml",
        "<tool_call><function=now></function></tool_call><tool_call><function=f><parameter=text>a </parameter>?"
        '<parameter=on>no</parameter><parameter=note>\n\n"<b>\n\n</parameter>\n<parameter=more>cut </par',
        ReplyDelta(
            "",
            "",
            (
                ToolCall("now", "{}"),
                ToolCall("f", '{"text": "a </parameter>?", "on": "no", "note": "\\n\\"<b>\\n", "more": "cut '),
            ),
        ),
    ),
    Sample(
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": 5}]',
        ReplyDelta(', {"name": 5}]', "", (ToolCall("f", "{}"),)),
    ),
    Sample(
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]',
        ReplyDelta("", "", (ToolCall("f", '{"a": [1]}'), ToolCall("g", "{}"))),
        prompt="[INST] [TOOL_CALLS] [/INST]",
    ),
    Sample(
        "mistral-args",
        '[THINK]hm[/THINK]So:[TOOL_CALLS]f[ARGS]{"a": "[x]"}[TOOL_CALLS]g[CALL_ID]abc123def[ARGS]{}',
        ReplyDelta("So:", "hm", (ToolCall("f", '{"a": "[x]"}'), ToolCall("g", "{}"))),
        prompt="[/INST]",
    ),
    Sample(
        "llama-json",
        '{"name": "f", "parameters": {"q": "{\\"name\\": 1}"}}',
        ReplyDelta("", "", (ToolCall("f", '{"q": "{\\"name\\": 1}"}'),)),
        prompt="<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    Sample("llama-json", 'See {"name": "f"} there.', ReplyDelta('See {"name": "f"} there.')),
    Sample("llama-json", '{"name": "a person"}', ReplyDelta('{"name": "a person"}')),
    Sample("reasoning", "<think>a</think>b<think>c</think> d", ReplyDelta("b\nd", "a\nc")),
    Sample(
        "json-list",
        '[{"name": "f", "arguments": {"days": 1}}, {"name": "f", "arguments": {}}]',
        ReplyDelta("", "", (ToolCall("f", '{"days": 1}'), ToolCall("f", "{}"))),
    ),
]
