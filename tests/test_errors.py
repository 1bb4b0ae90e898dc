"""Errors: hints in messages, and all problems of a recipe in one message."""

from ingot.errors import Problem, RecipeError, did_you_mean, near_names, one_of, shown, unknown
from tests.each_case import each_case

NAMES = ("quantize-weights", "clean-up", "awq")


@each_case(
    ("name", "hint"),
    [
        ("quantise-weights", " Did you mean 'quantize-weights'?"),
        ("clean-upp", " Did you mean 'clean-up'?"),
        ("CLEAN-UP", " Did you mean 'clean-up'?"),
        ("weights", " Did you mean 'quantize-weights'?"),
        ("xyz", ""),
        ("", ""),
        ("clean-up" * 1000, ""),
    ],
)
def test_the_nearest_name_is_suggested_if_it_is_near(name: str, hint: str) -> None:
    assert did_you_mean(name, NAMES) == hint


def test_at_most_three_names_are_suggested_the_nearest_first_and_none_that_is_much_less_near() -> None:
    assert near_names("int4-cpy", ("fp32-cpu", "int4-cpu", "int4-cuda", "int8-cpu")) == ["int4-cpu"]
    assert did_you_mean("layer.1", ("layer.0", "layer.2", "layer.3", "layer.4")) == (
        " Did you mean 'layer.0', 'layer.2' or 'layer.3'?"
    )


def test_an_unknown_name_is_shown_with_the_nearest_or_else_with_all_names() -> None:
    assert unknown("pass", "cleanup", NAMES, "passes") == "unknown pass 'cleanup'. Did you mean 'clean-up'?"
    assert unknown("pass", "\x1b[2J", NAMES, "passes") == (
        "unknown pass '\\x1b[2J'; passes: awq, clean-up, quantize-weights."
    )
    assert unknown("option", 4, ()) == "unknown option 4; known: none."


def test_allowed_names_are_listed_in_order() -> None:
    assert one_of(NAMES) == "awq, clean-up, quantize-weights"
    assert one_of(()) == ""


def test_a_recipe_error_counts_and_lists_every_problem_with_its_place() -> None:
    problems = [
        Problem("mine.yaml", 3, "unknown key 'a'", column=7),
        Problem("mine.yaml", 4, "unknown key 'b'"),
        Problem("base.yaml", 0, "names no checkpoint"),
    ]
    error = RecipeError(iter(problems))
    assert error.problems == tuple(problems)
    assert str(error) == (
        "3 problems in mine.yaml, base.yaml:\n"
        "mine.yaml:3:7: unknown key 'a'\n"
        "mine.yaml:4: unknown key 'b'\n"
        "base.yaml: names no checkpoint"
    )
    assert error.exit_code == 2


def test_a_single_problem_is_not_counted() -> None:
    assert str(RecipeError([Problem("mine.yaml", 3, "unknown key 'a'", column=7)])) == "mine.yaml:3:7: unknown key 'a'"


def test_the_message_shows_the_first_of_very_many_problems() -> None:
    error = RecipeError(Problem("mine.yaml", line, "wrong") for line in range(1, 1001))
    lines = str(error).splitlines()
    assert len(error.problems) == 1000
    assert (lines[0], lines[-1]) == ("1000 problems in mine.yaml:", "... and 950 more")
    assert len(lines) == 52


@each_case(
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
