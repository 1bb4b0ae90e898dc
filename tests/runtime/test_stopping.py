"""The stream: never half a character, and in the end what decoding all at once gives, on real tokenizers.

Stop strings that span tokens, end tokens, the length limit, and what may be shown meanwhile.
"""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.errors import RequestError
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.stopping import Detokenizer, StopChecker, StopScanner, StopUpdate
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
def decoded_at_once(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def stream(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


@settings(deadline=None)
@given(st.text())
def test_the_stream_of_any_text_adds_up_to_what_the_tokenizers_package_decodes(
    tokenizer: Tokenizer, decoded_at_once: tokenizers.Tokenizer, text: str
) -> None:
    token_ids = decoded_at_once.encode(text).ids
    parts = stream(tokenizer.detokenizer(), token_ids)
    assert "".join(parts) == decoded_at_once.decode(token_ids) == tokenizer.decode(token_ids)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**16), max_size=30))
def test_any_tokens_stream_to_what_they_decode_to_at_once(
    tokenizer: Tokenizer, decoded_at_once: tokenizers.Tokenizer, numbers: list[int]
) -> None:
    """Random bytes too. Only runs of byte tokens that are no UTF-8 may read better than in the package."""
    token_ids = [number % (tokenizer.vocab_size + 3) for number in numbers]
    text = "".join(stream(tokenizer.detokenizer(), token_ids))
    assert text == tokenizer.decode(token_ids)
    expected = decoded_at_once.decode(token_ids)
    if not tokenizer.text_decoder.byte_fallback or "\ufffd" not in expected:
        assert text == expected
    assert len(text) <= len(expected)


@settings(deadline=None)
@given(st.text(max_size=20), st.text(max_size=20))
def test_after_a_prompt_the_stream_goes_on_where_the_prompt_ends(
    tokenizer: Tokenizer, decoded_at_once: tokenizers.Tokenizer, prompt: str, answer: str
) -> None:
    before = decoded_at_once.encode(prompt).ids
    after = decoded_at_once.encode(answer, add_special_tokens=False).ids
    continued = "".join(stream(tokenizer.detokenizer(before), after))
    assert tokenizer.decode(before) + continued == decoded_at_once.decode(before + after)


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


EOS = 99


class Letters:
    """Token i is the i-th letter; one half of a pair is kept until the end."""

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id)

    def flush(self) -> str:
        return "?"


def feed(stop: tuple[str, ...], *parts: str) -> list[tuple[str, str | None]]:
    scanner = StopScanner(stop)
    return [scanner.push(part) for part in parts]


def test_text_that_may_begin_a_stop_string_is_held_back_and_released_when_it_cannot() -> None:
    assert feed(("END",), "an E", "N", "D") == [("an ", None), ("", None), ("", "END")]
    assert feed(("END",), "an E", "N", "ergy") == [("an ", None), ("", None), ("ENergy", None)]
    assert feed(("END",), "EEN", "END") == [("E", None), ("EN", "END")]


def test_the_stop_string_and_what_follows_are_cut() -> None:
    assert feed(("\n\n",), "one\n\ntwo") == [("one", "\n\n")]


def test_the_stop_string_that_is_complete_first_wins_however_the_text_is_cut() -> None:
    stop = ("abcd", "bc")
    assert feed(stop, "xabcd") == [("xa", "bc")]
    assert feed(stop, "xa", "b", "c") == [("x", None), ("", None), ("a", "bc")]


def test_of_two_that_end_together_the_longer_wins() -> None:
    assert feed(("c", "bc"), "abc") == [("a", "bc")]


def test_without_stop_strings_everything_is_shown_at_once() -> None:
    assert feed((), "a", "", "b") == [("a", None), ("", None), ("b", None)]


def reference(text: str, stop: list[str]) -> str:
    """Text before the stop string that is complete first; of those, the longest."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    return text[: min(ends)[1]] if ends else text


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_the_outcome_depends_on_the_text_alone(parts: list[str], stop: list[str]) -> None:
    scanner = StopScanner(stop)
    shown, stopped = "", None
    for part in parts:
        text, stopped = scanner.push(part)
        shown += text
        assert stopped or not any(s in shown for s in stop), "nothing of a stop string is ever shown"
        if stopped:
            break
    shown += "" if stopped else scanner.flush()
    assert shown == reference("".join(parts), stop)
    assert (stopped is not None) == any(s in "".join(parts) for s in stop)


def test_an_end_token_ends_without_text_of_its_own() -> None:
    checker = StopChecker(SamplingParams(), {EOS}, Letters())
    assert checker.push(0) == StopUpdate("a")
    assert checker.push(EOS) == StopUpdate("?", "stop", EOS)


def test_ignore_eos_goes_on_but_stop_token_ids_still_end() -> None:
    checker = StopChecker(SamplingParams(ignore_eos=True, stop_token_ids=(7,)), {0})
    assert checker.push(0) == StopUpdate("")
    assert checker.push(7) == StopUpdate("", "stop", 7)


def test_the_length_limit_ends_and_releases_what_was_held_back() -> None:
    checker = StopChecker(SamplingParams(max_tokens=2, stop=("bcd",)), {EOS}, Letters())
    assert checker.push(1) == StopUpdate("")
    assert checker.push(2) == StopUpdate("bc?", "length")


def test_a_stop_string_in_the_last_token_counts_as_stop() -> None:
    checker = StopChecker(SamplingParams(max_tokens=2, stop=("b",)), {EOS}, Letters())
    assert checker.push(0) == StopUpdate("a")
    assert checker.push(1) == StopUpdate("", "stop", "b")


def test_an_end_token_at_the_length_limit_counts_as_stop() -> None:
    checker = StopChecker(SamplingParams(max_tokens=1), {EOS}, Letters())
    assert checker.push(EOS).finish_reason == "stop"


def test_flush_gives_what_was_held_back_for_a_sequence_ended_from_outside() -> None:
    checker = StopChecker(SamplingParams(stop=("ab",)), {EOS}, Letters())
    assert checker.push(0) == StopUpdate("")
    assert checker.flush() == "a?"


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(RequestError, match=r"stop is \('x',\), but there is no tokenizer.*stop_token_ids"):
        StopChecker(SamplingParams(stop=("x",)), {EOS})
