"""Events of a stream are the same JSON whether they are made by parts or as a whole."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.runtime.server.api.answers import AnswerForm, ChatForm, ChoicesAnswer, CompletionForm

TEXTS = ["def f", '"quotes" \\ and\nlines', "", "ünï 🙂 \u2028", "%s {}", "end"]


def contents(answer: ChoicesAnswer, index: int, texts: list[str]) -> list[Any]:
    events = [answer.event(index, text, [], None) for text in texts]
    assert all(event.startswith(b"data: ") and event.endswith(b"\n\n") for event in events if event)
    return [json.loads(event[6:]) for event in events if event]


@pytest.mark.parametrize("form", [CompletionForm(), ChatForm()])
@pytest.mark.parametrize("has_usage", [False, True])
def test_later_events_differ_from_the_second_in_their_text_alone(form: AnswerForm, has_usage: bool) -> None:
    answer = ChoicesAnswer(form, SimpleNamespace(), "a model", has_usage=has_usage)  # type: ignore[arg-type]
    for index in (0, 3):
        found = contents(answer, index, TEXTS)
        assert [text for text in TEXTS if text] == [_text(each) for each in found]
        second = found[1]
        for each in found[2:]:
            assert list(each) == list(second)
            assert {**each, "choices": second["choices"]} == second
            (choice,), (like) = each["choices"], second["choices"][0]
            assert list(choice) == list(like)
            assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (index, None, None)
        assert ("usage" in second) == has_usage


def _text(event: dict[str, Any]) -> str:
    (choice,) = event["choices"]
    text: str = choice["text"] if "text" in choice else choice["delta"]["content"]
    return text
