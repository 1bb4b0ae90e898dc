"""Errors: hints in messages, and all problems of a recipe in one message."""

import pytest

from ingot.errors import Problem, RecipeError, did_you_mean, one_of

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
