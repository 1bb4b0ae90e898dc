"""Replies of every format, read at every split of every byte."""

import codecs
import random
from collections.abc import Iterable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.runtime.replies import FORMATS, ReplyDelta, ReplyParser, ReplyTemplate, ToolCall
from tests.each_case import each_case
from tests.runtime.replies.samples import SAMPLES, TOOLS, Sample

NUMBERED = each_case("number", range(len(SAMPLES)))
PIECES = [
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "\n",
        " ",
        "a",
        "{",
        '{"name": "f", "arguments": {}}',
        "</tool",
    ),
    *("<function=f>", "</function>", "<parameter=days>7</parameter>", "[TOOL_CALLS]", "[ARGS]", "[", "é", "[/THINK]"),
    *(
        '{"name": "g", "arguments": {"a": ',
        '"}"',
        "}",
        ", ",
        '"name": "h"',
        "<parameter=",
        "note>",
        "</parameter>",
        "]",
    ),
    *('[{"name": "f", "arguments": {}}]', '{"name": "f", "parameters": {}}', "<|python_tag|>", "<", "[THINK]"),
]


@cache
def template(name: str) -> ReplyTemplate:
    return FORMATS[name].template


def read(parser: ReplyParser, pieces: Iterable[bytes]) -> ReplyDelta:
    """The joined deltas of bytes that arrive in pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    found = ReplyDelta()
    for piece in pieces:
        found += parser.feed(decoder.decode(piece))
    return found + parser.finish()


def parser_of(sample: Sample) -> ReplyParser:
    return ReplyParser(template(sample.format), sample.prompt, TOOLS)


@NUMBERED
def test_a_reply_says_what_its_model_meant(number: int) -> None:
    sample = SAMPLES[number]
    assert read(parser_of(sample), [sample.text.encode()]) == sample.message


@NUMBERED
def test_no_split_changes_what_is_read(number: int) -> None:
    """Every split in two, byte by byte, and random ones."""
    sample = SAMPLES[number]
    data, rng = sample.text.encode(), random.Random(number)
    splits = [[data[:at], data[at:]] for at in range(len(data) + 1)]
    splits.append([data[at : at + 1] for at in range(len(data))])
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(data) + 1), min(len(data), rng.randrange(2, 9))))
        splits.append([data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)])
    for split in splits:
        assert read(parser_of(sample), split) == sample.message, split


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([*FORMATS]),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.integers(1, 7),
)
def test_whatever_a_model_writes_is_read_the_same_in_a_stream(name: str, text: str, size: int) -> None:
    data = text.encode()
    whole = read(ReplyParser(template(name)), [data])
    assert read(ReplyParser(template(name)), [data[at : at + size] for at in range(0, len(data), size)]) == whole


def test_text_is_shown_as_soon_as_it_cannot_be_a_delimiter() -> None:
    parser = ReplyParser(template("hermes"))
    assert parser.feed("Hello <") == ReplyDelta("Hello")
    assert parser.feed("b> you") == ReplyDelta(" <b> you")
    assert parser.feed("<think>why") == ReplyDelta("", "why")
    assert not parser.feed("</thi")
    assert parser.feed("nk>so").content == "\nso"


def test_arguments_are_shown_while_they_are_written() -> None:
    parser = ReplyParser(template("hermes"))
    assert not parser.feed('<tool_call>{"name": "write", "arguments": ').calls
    assert parser.feed('{"text": "a long').calls == (ToolCall("write", '{"text": "a long'),)
    assert parser.feed(" story").calls == (ToolCall("", " story"),)
    assert parser.feed(' with } and \\" in it"').calls == (ToolCall("", ' with } and \\" in it"'),)
    assert parser.feed("}, ").calls == (ToolCall("", "}"),)
    assert not parser.feed('"id": 7}</tool_call>') + parser.finish()
    parser = ReplyParser(template("qwen-xml"), tools=TOOLS)
    assert parser.feed("<tool_call><function=f>").calls == ()
    assert parser.feed("<parameter=days>").calls == (ToolCall("f", "{"),)
    assert parser.feed("7</parameter><parameter=text>One long story").calls == (
        ToolCall("", '"days": 7, "text": "One long story'),
    )
    assert parser.feed(" goes on\n</parameter>").calls == (ToolCall("", " goes on"),)
    assert (parser.feed("</function></tool_call>") + parser.finish()).calls == (ToolCall("", '"}'),)


def test_without_tools_a_call_is_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert ReplyParser(template("hermes").without("tool_calls")).feed(text + ".").content == text + "."


def test_the_prompt_tells_whether_reasoning_has_begun() -> None:
    assert ReplyParser(template("hermes"), "x<|im_start|>assistant\n<think>\n").is_reasoning
    assert not ReplyParser(template("hermes"), "<think><|im_start|>assistant\n").is_reasoning


def test_a_long_reply_costs_time_in_proportion_to_its_length() -> None:
    """By the work done: the text that the parser keeps stays short."""
    parser = ReplyParser(template("hermes"))
    for _ in range(2000):
        parser.feed("some words < ")
        assert len(parser._buffer) < 200


EXACT = [  # text that a constraint spells, its prompt, and what it says
    ('{"a": "x <tool_call> y"}', "", ReplyDelta('{"a": "x <tool_call> y"}')),
    ('{"a": "<think>x</think>y"}', "", ReplyDelta('{"a": "<think>x</think>y"}')),
    ("  y <tool_call> z \n", "", ReplyDelta("  y <tool_call> z \n")),
    (" \n", "", ReplyDelta(" \n")),
    ("<think>so</think>\n\na <think> b ", "", ReplyDelta("a <think> b ", "so")),
    ("<think>so</think>\n\n<think>", "", ReplyDelta("<think>", "so")),
    ("so\n</think>\n\n1 <tool_call>", "<|im_start|>assistant\n<think>\n", ReplyDelta("1 <tool_call>", "so")),
    (
        '<tool_call>\n{"name": "f", "arguments": {"e": "a</tool_call>b", "g": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"e": "<tool_call>"}}\n</tool_call>',
        "",
        ReplyDelta(
            calls=(ToolCall("f", '{"e": "a</tool_call>b", "g": 1}'), ToolCall("f", '{"e": "<tool_call>"}')),
        ),
    ),
]


@pytest.mark.parametrize(("text", "prompt", "message"), EXACT)
def test_what_a_constraint_spells_is_read_to_its_last_character_at_every_split(
    text: str, prompt: str, message: ReplyDelta
) -> None:
    data = text.encode()
    splits = [[data[:at], data[at:]] for at in range(len(data) + 1)]
    for split in [*splits, [data[at : at + 1] for at in range(len(data))]]:
        parser = ReplyParser(template("hermes"), prompt, TOOLS, is_exact=True)
        assert read(parser, split) == message, split


def test_a_reply_that_continues_a_text_keeps_its_white_space() -> None:
    for prompt in ("", "<|im_start|>assistant\ndef read_file(self, "):
        parser = ReplyParser(template("hermes"), prompt, strips=False)
        assert read(parser, [b" file, ", b"x \n"]).content == " file, x \n"


def test_a_call_that_is_cut_short_is_known() -> None:
    whole = '<tool_call>\n{"name": "f", "arguments": {"e": 1}}\n</tool_call>'
    cases = {whole: False, whole[:-13]: False, whole[:-14]: False, whole[:-15]: True, "so": False}
    for text, is_cut in cases.items():
        for is_exact in (False, True):
            parser = ReplyParser(template("hermes"), "", TOOLS, is_exact=is_exact)
            read(parser, [text.encode()])
            assert parser.is_cut == is_cut, text
