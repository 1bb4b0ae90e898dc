"""Errors: hints in messages, and all problems of a recipe in one message."""

import pytest

from ingot.errors import Problem, RecipeError, did_you_mean, one_of, shown

NAMES = ("quantize-weights", "clean-up", "awq")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("quantise-weights", " Did you mean 'quantize-weights'?"),
        ("clean-upp", " Did you mean 'clean-up'?"),
        ("xyz", ""),
    ],
)
def test_the_nearest_name_is_suggested_if_it_is_near(name: str, hint: str) -> None:
    assert did_you_mean(name, NAMES) == hint


def test_allowed_names_are_listed_in_order() -> None:
    assert one_of(NAMES) == "awq, clean-up, quantize-weights"
    assert one_of(()) == ""


def test_a_recipe_error_lists_every_problem_with_file_and_line() -> None:
    problems = [Problem("mine.yaml", 3, "unknown key 'a'"), Problem("mine.yaml", 0, "names no checkpoint")]
    error = RecipeError(iter(problems))
    assert error.problems == tuple(problems)
    assert str(error) == "mine.yaml:3: unknown key 'a'\nmine.yaml: names no checkpoint"
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("mine", "'mine'"),
        ("a" * 80, repr("a" * 80)),
        ("a" * 5000, f"'{'a' * 80}'... (5,000 characters)"),
        ("\x1b[2J\ud800", "'\\x1b[2J\\ud800'"),
        (None, "None"),
        ([1] * 100, f"{str([1] * 100)[:80]}..."),
    ],
)
def test_a_value_is_shown_at_a_bounded_length(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_value_that_cannot_be_written_is_shown_by_its_type() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    assert shown(nested) == "a value of type list"
    assert shown(10**5000) == "a value of type int"


def test_the_limit_of_a_shown_value_can_be_set() -> None:
    assert shown("abcdef", limit=3) == "'abc'... (6 characters)"
