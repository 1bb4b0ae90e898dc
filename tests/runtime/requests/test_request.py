"""Stop strings that span tokens, end tokens, the length limit, and which text may be shown meanwhile."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import RequestError
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.requests.request import StopChecker, StopScanner, StopUpdate
from ingot.runtime.text.detokenizer import Detokenizer, TextDecoder

EOS = 99


class Letters(Detokenizer):
    """Token i is the i-th letter; the text ends in half a character."""

    def __init__(self) -> None:
        super().__init__(TextDecoder(), lambda token_id: chr(ord("a") + token_id))

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


def test_of_two_stop_strings_that_end_together_the_longer_wins() -> None:
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


class Counted(str):
    """A text that counts the characters that are read of it."""

    num_read = 0

    def __getitem__(self, place: object) -> str:
        part = super().__getitem__(place)  # type: ignore[index]
        Counted.num_read += len(part)
        return part


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("a" * 20_000 + "b", "a" * 40_000 + "c"),
        ("ab" * 20_000 + "c", "ab" * 19_000 + "b" + "ab" * 100),
        ("aab" * 9_000, ("aab" * 400 + "a") * 20),
        ("a" * 8_000_000, "a" * 1000 + "b"),
    ],
)
def test_a_long_stop_string_takes_time_in_proportion_to_the_text(stop: str, text: str) -> None:
    Counted.num_read = 0
    scanner = StopScanner([Counted(stop)])
    shown = "".join(scanner.push(character)[0] for character in text) + scanner.flush()
    assert shown == text
    assert Counted.num_read < 12 * len(text)


def test_an_end_token_ends_without_text_of_its_own() -> None:
    checker = StopChecker(SamplingParams(), {EOS}, Letters())
    assert checker.push(0) == StopUpdate("a")
    assert checker.push(EOS) == StopUpdate("?", "stop", EOS)


def test_stop_strings_are_looked_for_after_min_tokens() -> None:
    checker = StopChecker(SamplingParams(max_tokens=9, min_tokens=2, stop=("b", "cd")), {EOS}, Letters())
    assert checker.push(1) == StopUpdate("b")
    assert checker.push(2) == StopUpdate("c")
    assert checker.push(3) == StopUpdate("d"), "a stop string that begins before is not one"
    assert checker.push(1) == StopUpdate("", "stop", "b")
    checker = StopChecker(SamplingParams(max_tokens=2, min_tokens=2, stop=("b",)), {EOS}, Letters())
    checker.push(1)
    assert checker.push(1) == StopUpdate("b?", "length")


def test_ignore_eos_continues_but_stop_token_ids_still_end() -> None:
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


def test_flush_returns_the_text_held_back_of_an_aborted_sequence() -> None:
    checker = StopChecker(SamplingParams(stop=("ab",)), {EOS}, Letters())
    assert checker.push(0) == StopUpdate("")
    assert checker.flush() == "a?"


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(RequestError, match=r"stop is \('x',\), but there is no tokenizer.*stop_token_ids"):
        StopChecker(SamplingParams(stop=("x",)), {EOS})
