"""Replies are read as transformers' `parse_response` reads them, by the same templates."""

import json
from typing import Any

import pytest

from ingot.runtime.replies import ReplyParser, ReplyTemplate
from tests.runtime.replies.samples import SAMPLES, TOOLS, Sample

pytestmark = pytest.mark.oracle


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


# transformers raises for a call that is not JSON or has no arguments, and keeps the last region of a field alone.
COMPARED = [
    sample
    for sample in SAMPLES
    if sample.message.content.count("<tool_call>") == 0
    and all(_is_json(call.arguments) for call in sample.message.calls)
    and "\n" not in sample.message.content + sample.message.reasoning
]


@pytest.mark.parametrize("sample", COMPARED, ids=lambda sample: f"{sample.format}: {sample.text[:20]}")
def test_a_reply_says_what_transformers_reads(sample: Sample) -> None:
    from transformers.utils.chat_parsing import parse_response

    source, text = dict(sample.template.source), sample.text.rstrip()  # white space after a call is a region to it
    try:
        expected = parse_response(text, source, prefix=sample.prompt, tools=TOOLS)
    except (ValueError, KeyError):
        pytest.skip("transformers refuses this reply")
    parser = ReplyParser(ReplyTemplate.load(source), sample.prompt, TOOLS)
    found = parser.feed(text) + parser.finish()
    assert found.content == expected.get("content", "")
    assert found.reasoning == expected.get("reasoning_content", "")
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == _calls(expected.get("tool_calls", []))


def _calls(calls: Any) -> list[tuple[str, Any]]:
    """Name and arguments of each call: one without a list is that of a field that does not repeat."""
    calls = calls if isinstance(calls, list) else [calls]
    flat = [each for call in calls for each in (call if isinstance(call, list) else [call])]
    return [(call["function"]["name"], call["function"]["arguments"]) for call in flat]
