"""Windows of an evaluation text, and refusals of unusable texts."""

import hashlib
from pathlib import Path

import pytest

from ingot.errors import DataError
from ingot.validation.options import AccuracyOptions
from ingot.validation.windows import EvaluationText, read_text, split_windows

OPTIONS = AccuracyOptions(tokens=8, window_tokens=4)


def _text(tokens: int, bos: int | None = None) -> EvaluationText:
    return EvaluationText("text.txt", "0" * 64, tuple(range(tokens)), bos)


def test_consecutive_windows_predict_every_token_except_the_first_once() -> None:
    first, second = split_windows(_text(20), OPTIONS)
    assert (first.inputs, first.targets.tolist()) == ((0, 1, 2, 3), [1, 2, 3, 4])
    assert (second.inputs, second.targets.tolist()) == ((4, 5, 6, 7), [5, 6, 7, 8])


def test_a_bos_token_starts_every_window_and_predicts_no_target() -> None:
    first, second = split_windows(_text(9, bos=77), OPTIONS)
    assert first.inputs == (77, 0, 1, 2, 3)
    assert second.inputs[0] == 77
    assert first.skipped_rows == 1
    assert first.targets.tolist() == [1, 2, 3, 4]


def test_a_text_that_is_one_token_too_short_is_refused_with_counts_and_advice() -> None:
    with pytest.raises(DataError, match="has 8 tokens; 2 windows of 4 need 9") as error:
        split_windows(_text(8), OPTIONS)
    assert str(error.value).endswith("Give a longer text, or set evaluation window_tokens to 3 and tokens to 6")


def test_the_error_for_a_short_text_says_how_many_tokens_it_can_predict() -> None:
    with pytest.raises(DataError, match=r"or set evaluation tokens to 8$"):
        split_windows(_text(9), AccuracyOptions(tokens=12, window_tokens=4))
    assert len(split_windows(_text(9), OPTIONS)) == 2


def test_reading_gives_the_text_and_the_digest_of_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes("Grüße".encode())
    assert read_text(file) == ("Grüße", hashlib.sha256("Grüße".encode()).hexdigest())


def test_a_missing_text_and_one_that_is_not_utf8_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read as text"):
        read_text(tmp_path / "absent.txt")
    (tmp_path / "latin.txt").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match="byte 2 is not UTF-8"):
        read_text(tmp_path / "latin.txt")
