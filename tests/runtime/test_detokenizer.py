"""The stream: never half a character, and in the end what decoding all at once gives, on real tokenizers."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.runtime.detokenizer import Detokenizer
from ingot.runtime.text_decoder import TextDecoder
from ingot.runtime.tokenizer import Tokenizer
from tests.data_paths import DEMO_MODEL, shared_data

TEXT = "Once upon a time, Zoë said:  'naïve 😀 漢字' \n\n\tdef f(x): return x  "


def model_folder(name: str) -> Path:
    return DEMO_MODEL if name == "stdlib-llama-6m" else shared_data(f"models/{name}")


@pytest.fixture(scope="module", params=["stdlib-llama-6m", "stories260K", "babyllama-105"])
def folder(request: pytest.FixtureRequest) -> Path:
    return model_folder(request.param)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def stream(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


@settings(deadline=None)
@given(st.text())
def test_the_stream_of_any_text_adds_up_to_what_the_tokenizers_package_decodes(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, text: str
) -> None:
    token_ids = reference.encode(text).ids
    parts = stream(tokenizer.detokenizer(), token_ids)
    assert "".join(parts) == reference.decode(token_ids) == tokenizer.decode(token_ids)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**16), max_size=30))
def test_any_tokens_stream_to_what_they_decode_to_at_once(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, numbers: list[int]
) -> None:
    """Random bytes too. Only runs of byte tokens that are no UTF-8 may read better than in the package."""
    token_ids = [number % (tokenizer.vocab_size + 3) for number in numbers]
    text = "".join(stream(tokenizer.detokenizer(), token_ids))
    assert text == tokenizer.decode(token_ids)
    expected = reference.decode(token_ids)
    if not tokenizer.text_decoder.byte_fallback or "\ufffd" not in expected:
        assert text == expected
    assert len(text) <= len(expected)


@settings(deadline=None)
@given(st.text(max_size=20), st.text(max_size=20))
def test_after_a_prompt_the_stream_goes_on_where_the_prompt_ends(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, prompt: str, answer: str
) -> None:
    before = reference.encode(prompt).ids
    after = reference.encode(answer, add_special_tokens=False).ids
    continued = "".join(stream(tokenizer.detokenizer(before), after))
    assert tokenizer.decode(before) + continued == reference.decode(before + after)


def test_the_prompts_last_space_is_not_lost() -> None:
    tokenizer = Tokenizer.load(model_folder("stories260K"))
    once, upon = tokenizer.encode("Once"), tokenizer.encode("upon", add_special_tokens=False)
    assert "".join(stream(tokenizer.detokenizer(once), upon)) == " upon"
    assert tokenizer.decode(upon) == "upon"


def test_no_part_of_a_stream_holds_half_a_character(tokenizer: Tokenizer) -> None:
    parts = stream(tokenizer.detokenizer(), tokenizer.encode(TEXT, add_special_tokens=False))
    assert not any("\ufffd" in part for part in parts)


def test_a_character_comes_with_its_last_byte_and_not_before() -> None:
    tokenizer = Tokenizer.load(model_folder("stories260K"))
    bytes_of = {byte: index for index in range(512) if (byte := tokenizer.token(index)) is not None}
    token_ids = [bytes_of[f"<0x{byte:02X}>"] for byte in "€\n".encode()]
    assert stream(tokenizer.detokenizer([bytes_of["▁a"]]), token_ids) == ["", "", "€", "\n", ""]


def test_a_character_that_is_never_completed_becomes_one_replacement() -> None:
    decoder = Detokenizer(FakeSource(TextDecoder(byte_level=True), ["Ã", "a", "â", "Ĥ"]))
    assert stream(decoder, [0, 1, 2, 3]) == ["", "\ufffda", "", "", "\ufffd"]


def test_byte_fallback_keeps_the_good_characters_around_a_wrong_byte() -> None:
    decoder = Detokenizer(FakeSource(TextDecoder(byte_fallback=True), ["<0xC3>", "<0xA9>", "<0xFF>", "x"]))
    assert stream(decoder, [0, 1, 2, 0, 3]) == ["", "é", "\ufffd", "", "\ufffdx", ""]


def test_special_and_unknown_tokens_give_no_text_unless_wanted() -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL)
    assert tokenizer.decode([0, 10**6]) == ""
    assert tokenizer.decode([0], skip_special_tokens=False) == "<|endoftext|>"


def test_each_token_is_looked_at_once() -> None:
    source = FakeSource(TextDecoder(byte_level=True), ["a", "Ã"])
    detokenizer = Detokenizer(source)
    for token_id in [0, 1, 1, 1] * 50:
        detokenizer.push(token_id)
    assert source.calls == 200


class FakeSource:
    """A vocabulary given as a list."""

    def __init__(self, decoder: TextDecoder, vocabulary: list[str]) -> None:
        self.text_decoder = decoder
        self.calls = 0
        self._vocabulary = vocabulary

    def token(self, token_id: int, *, skip_special_tokens: bool = True) -> str | None:
        self.calls += 1
        return self._vocabulary[token_id]
