"""Prompts from texts and conversations: what is refused before it is encoded, and what reaches the chat template."""

from pathlib import Path
from typing import Any, cast

import pytest

from ingot.errors import RequestError
from ingot.runtime.asking.prompt_encoder import PromptEncoder
from ingot.runtime.asking.prompts import ChatPrompt
from ingot.runtime.text.tokenizer import Tokenizer
from tests.runtime.engines import HELLO, chat_tokenizer, demo_tokenizer
from tests.simulators.fake_executor import FakeExecutor

MODEL = FakeExecutor(context_tokens=8).model


class CountingTokenizer:
    """One token for a text of any length."""

    def __init__(self, max_chars_per_token: int | None) -> None:
        self.max_chars_per_token = max_chars_per_token
        self.encoded: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append(text)
        return [1]

    def render_chat(self, messages: Any, **options: Any) -> str:
        return "".join(message["content"] for message in messages) * int(options.get("times", 1))


def encoder(max_chars_per_token: int | None, max_chars: int | None = None) -> tuple[PromptEncoder, CountingTokenizer]:
    tokenizer = CountingTokenizer(max_chars_per_token)
    return PromptEncoder(cast(Tokenizer, tokenizer), MODEL, max_chars), tokenizer


@pytest.mark.parametrize(
    ("per_token", "max_chars", "most", "reason"),
    [
        (3, None, 24, "fit the model's context of 8 tokens"),
        (3, 10, 10, "are allowed by max_prompt_chars"),
        (3, 100, 100, "are allowed by max_prompt_chars"),
        (None, None, 512, "are accepted for the model's context of 8 tokens, unless max_prompt_chars is set"),
    ],
)
def test_a_text_that_is_too_long_is_refused_before_it_is_encoded(
    per_token: int | None, max_chars: int | None, most: int, reason: str
) -> None:
    under_test, tokenizer = encoder(per_token, max_chars)
    under_test.encode("x" * most)
    with pytest.raises(RequestError) as caught:
        under_test.encode("x" * (most + 1))
    assert str(caught.value) == f"the prompt has {most + 1} characters, and at most {most} {reason}: shorten it"
    assert len(tokenizer.encoded) == 1


def test_a_conversation_that_is_too_long_is_refused_before_and_after_it_is_rendered() -> None:
    under_test, tokenizer = encoder(3)
    under_test.encode(ChatPrompt([{"role": "user", "content": "x" * 8}]))
    nested: list[Any] = []
    nested.append(nested)
    cases: list[tuple[list[Any], dict[str, Any] | None]] = [
        ([{"role": "user", "content": "x" * 25}], None),
        ([{"role": "user", "content": [{"type": "text", "text": "x" * 25}]}], None),
        ([{"role": "user", "content": "x"}], {"mood": "x" * 25}),
        ([{"role": "user", "content": "x"}] * 30, None),
        (nested, None),
    ]
    for messages, variables in cases:
        with pytest.raises(RequestError, match="the conversation has more than 24 characters, and at most 24 fit"):
            under_test.encode(ChatPrompt(messages, variables=variables))
    with pytest.raises(RequestError, match="the conversation has 30 characters"):
        under_test.encode(ChatPrompt([{"role": "u", "content": "x"}], variables={"times": 30}))
    assert len(tokenizer.encoded) == 1


def test_tools_and_variables_reach_the_template(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    under_test = PromptEncoder(tokenizer, FakeExecutor().model)
    tokens = under_test.encode_chat(ChatPrompt(HELLO, tools=[{"name": "f"}, {"name": "g"}], variables={"mood": "calm"}))
    assert tokenizer.decode(tokens) == "f g calm user: Hello"
    assert tokenizer.decode(under_test.encode_chat(ChatPrompt(HELLO))) == "user: Hello"


@pytest.mark.parametrize("name", ["messages", "tools", "self", 3])
def test_a_variable_with_a_name_that_is_taken_is_refused(tmp_path: Path, name: Any) -> None:
    under_test = PromptEncoder(chat_tokenizer(tmp_path), FakeExecutor().model)
    with pytest.raises(RequestError, match=f"{name}"):
        under_test.encode(ChatPrompt(HELLO, variables={name: 1}))


def test_without_a_tokenizer_only_token_ids_are_taken() -> None:
    under_test = PromptEncoder(None, MODEL)
    assert under_test.encode([1, 2]) == [1, 2]
    with pytest.raises(RequestError, match="no tokenizer, so it takes no text"):
        under_test.encode("text")
    with pytest.raises(RequestError, match="no tokenizer, so it takes no messages"):
        under_test.encode(ChatPrompt(HELLO))


def test_the_longest_text_that_fits_the_demo_models_context_is_not_refused() -> None:
    tokenizer, model = demo_tokenizer(), FakeExecutor().model
    longest = max(range(tokenizer.vocab_size), key=lambda token: len(tokenizer.decode([token])))
    text = tokenizer.decode([longest] * model.context_tokens)
    assert len(PromptEncoder(tokenizer, model).encode(text)) <= model.context_tokens
