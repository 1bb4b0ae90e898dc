"""Tokens of a text in the middle of an output: those that spell it and nothing before it."""

from collections.abc import Callable

from ingot.runtime.constraints.vocabulary import TokenBytes
from ingot.runtime.text.tokenizer import Tokenizer
from tests.each_case import each_case
from tests.runtime.engines import demo_tokenizer, sentencepiece_tokenizer

TEXTS = ["entrue", " en", "e", '{"id": true}', "é, \n", ""]


@each_case("text", TEXTS)
@each_case("make", [demo_tokenizer, sentencepiece_tokenizer])
def test_tokens_spell_a_text_without_the_space_of_its_beginning(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    vocabulary = TokenBytes(tokenizer, tokenizer.vocab_size)
    assert b"".join(vocabulary.tokens[token] for token in vocabulary(text)).decode() == text
    assert vocabulary(text) == vocabulary(text.encode())


def test_tokens_are_as_long_as_those_of_a_prompt() -> None:
    tokenizer = sentencepiece_tokenizer()
    vocabulary = TokenBytes(tokenizer, tokenizer.vocab_size)
    assert [tokenizer.token(token) for token in vocabulary("entrue")] == ["en", "true"]
