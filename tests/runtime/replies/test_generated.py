"""Generated replies of every format, at every split, against a slow reader."""

import random
from typing import Any

import pytest

from ingot.runtime.replies import FORMATS, ReplyParser, ReplyTemplate
from tests.each_case import each_case
from tests.runtime.replies import generated
from tests.runtime.replies.comparison import PROMPT, problems, read
from tests.runtime.replies.samples import TOOLS

FORMAT = each_case("name", list(FORMATS))
FOUND = [
    ("mistral-args", '[TOOL_CALLS]f[ARGS]{} a  b [TOOL_CALLS]g[ARGS]{"a": 1}'),
    ("mistral-args", '[TOOL_CALLS]wipe[ARGS]{{"é": "[THINK]"} '),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": flase}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a" 1}}</tool_call><tool_call>{"name": "g"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800", "b": "\\ud83d\\ude00"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999, "b": [NaN, 01]}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": NaN}"}</tool_call>'),
    (
        "qwen-xml",
        "<tool_call><function=f><parameter=no</parameter><parameter=days>true</parameter></function></tool_call>",
    ),
    ("qwen-xml", '<tool_call><function=f><parameter=x>["\\ud800"]</parameter></function></tool_call>'),
]
HOSTILE = [" ", "{", "<", '"', "\\", ", ", "7", "<parameter=", "</parameter>", "\n</parameter>", "[TOOL_CALLS]"]
BEGUN = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": ',
    "qwen-xml": "<tool_call><function=f><parameter=x>",
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": ',
    "mistral-args": '[TOOL_CALLS]f[ARGS]{"a": ',
    "llama-json": '{"name": "f", "parameters": {"a": ',
    "json-list": '[{"name": "f", "arguments": {"a": ',
    "reasoning": "<think>",
}


@FORMAT
def test_generated_replies_are_read_as_the_slow_reader_does_at_every_split(name: str) -> None:
    for seed in range(8):
        assert not problems(name, generated.reply(name, random.Random(f"{name} {seed}")))


@pytest.mark.parametrize(("name", "text"), FOUND)
def test_what_generated_replies_have_found_stays_mended(name: str, text: str) -> None:
    assert not problems(name, text)


def test_a_call_that_broke_is_known_although_another_follows() -> None:
    _, is_cut = read(
        "hermes", ['<tool_call>{"name": "f", "arguments": {"a" 1}}</tool_call><tool_call>{"name": "g"}</tool_call>']
    )
    assert is_cut


def test_a_call_after_one_without_a_closing_delimiter_is_not_lost() -> None:
    message, _ = read("hermes", ['<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}</tool_call>'])
    assert [call.name for call in message.calls] == ["f", "g"]


@FORMAT
def test_a_call_that_is_cut_anywhere_is_the_beginning_of_the_whole_one(name: str) -> None:
    for seed in range(2):
        text = generated.call(name, random.Random(seed))
        whole, _ = read(name, [text])
        for end in range(len(text)):
            cut, _ = read(name, [text[:end]])
            for one, other in zip(cut.calls, whole.calls, strict=False):
                assert other.arguments.startswith(one.arguments), text[:end]


class CountingParser(ReplyParser):
    """Counts the characters that it gives to patterns."""

    num_searched = 0

    def _next_delimiter(self, final: bool) -> Any:
        self.num_searched += len(self._buffer) - self._place
        return super()._next_delimiter(final)


@FORMAT
def test_no_text_is_searched_again_and_again(name: str) -> None:
    """Four times as long a text, one character at a time, has about four times as many characters searched."""
    for begun in ("", BEGUN[name]):
        for piece in HOSTILE:
            short, long = (_num_searched(name, begun, piece * (size // len(piece))) for size in (400, 1600))
            assert long < 6 * short + 1000, (begun, piece, short, long)


def _num_searched(name: str, begun: str, text: str) -> int:
    reader = CountingParser(FORMATS[name].template, PROMPT, TOOLS)
    for character in begun + text:
        reader.feed(character)
    return reader.num_searched


@FORMAT
def test_deep_nesting_does_not_recurse(name: str) -> None:
    for bracket in "{[":
        read(name, [BEGUN[name], bracket * 100_000])
        read(name, [BEGUN[name], '{"a":' * 20_000 + "1" + "}" * 20_002])


def test_arguments_of_a_template_that_is_read_whole_are_strict_json() -> None:
    template = ReplyTemplate.load(
        {
            "fields": {
                "tool_calls": {
                    "open": "<t>",
                    "close": "</t>",
                    "content": "json",
                    "content_args": {"unquoted_keys": True},
                    "transform": {"type": "function", "function": "{content}"},
                },
                "content": {},
            }
        }
    )
    for arguments in ("{a: NaN}", "{a: 1e999}", '"text"', "[1]"):
        text = f'<t>{{name: "f", arguments: {arguments}}}</t>'
        assert ReplyParser(template).feed(text).content == text
    call = ReplyParser(template).feed('<t>{name: "\\ud800", arguments: {a: "\\ud800"}}</t>').calls[0]
    assert (call.name, call.arguments) == ("\ufffd", '{"a": "\ufffd"}')
