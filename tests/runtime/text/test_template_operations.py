"""Operators, methods and functions of templates: Python's values, and refusals of what costs too much."""

import json
from typing import Any

import jinja2
import pytest

from ingot.runtime.text.template_budget import BASE_UNITS, BudgetError, RenderingBudget, limited
from ingot.runtime.text.template_operations import METHODS, binary, contains, sliced, to_json
from tests.each_case import each_case
from tests.runtime.text.rendering import rendered, rendered_by_jinja

EXPRESSIONS = [
    *("1 + 2.5", "7 // 2", "7 / 2", "-7 % 3", "2 ** 10", "2 ** -1", "3 - 5", "true + 1", "'a' + 'b'", "[1] + [2]"),
    *(
        "(1,) + (2,)",
        "'ab' * 3",
        "3 * [1]",
        "'a' * -1",
        "'%s-%03d' % ('a', 7)",
        "'%(x)s' % {'x': [1]}",
        "1 ~ 'a' ~ none",
    ),
    *("text[1:4]", "text[::-1]", "numbers[-2:]", "range(9)[2:5] | list", "numbers == [3, 1, 2, 1]", "words < ['c']"),
    *("'Hello' in text", "'x' not in text", "3 in numbers", "'a' in mapping", "'a' in mapping.keys()", "2 in range(3)"),
    *("[1] in [[1], 2]", "1 < 2 < 3", "1 < 3 < 2", "mapping.items() | list", "mapping.get('x', 5)", "mapping.get('b')"),
    *("text.split()", "text.split('l')", "text.split('l', 1)", "text.rsplit('l', maxsplit=1)", "text.splitlines(true)"),
    *("text.find('l')", "text.rfind('l')", "text.count('l')", "text.index('l')", "text.replace('l', 'L', 1)"),
    *(
        "text.partition(' ')",
        "text.rpartition(' ')",
        "text.startswith(('a', 'H'))",
        "text.endswith('>')",
        "text.title()",
    ),
    *("text.strip('H>')", "text.lstrip()", "text.rstrip('>')", "'a'.center(5, '*')", "'a'.ljust(3)", "'a'.rjust(3)"),
    *("'7'.zfill(3)", "'a\tb'.expandtabs(4)", "'ß'.upper()", "'ß'.casefold()", "'aB'.swapcase()", "', '.join(words)"),
    *("'ab'.removeprefix('a')", "'ab'.removesuffix('b')", "'{} {x}'.format(1, x=2)", "'{:>4}|{!r}'.format('a', 'b')"),
    *(
        "'{0[name]}'.format(people[0])",
        "'{a}'.format_map({'a': 1})",
        "numbers.index(2)",
        "numbers.count(1)",
        "(1, 2).index(2)",
    ),
    *(
        "dict(a=1)",
        "dict([('a', 1)], b=2)",
        "dict(mapping)",
        "'12'.isdigit()",
        "(2.0).is_integer()",
        "(5).bit_length()",
    ),
    *(
        "namespace(a=1).a",
        "cycler(1, 2).next()",
        "joiner()()",
        "range(2, 8, 3) | list",
        "('<' | safe).join(['&', 'a'])",
    ),
]


@each_case("expression", EXPRESSIONS)
def test_an_expression_has_the_value_of_jinja(expression: str) -> None:
    assert rendered(expression) == rendered_by_jinja(expression)


@each_case(
    "expression",
    [
        "'a' * 10**9",
        "10**9 * [1]",
        "10 ** 100",
        "1e308 | int * 1",
        "'%999999999d' % 1",
        "'%.999999999f' % 1",
        "'%*d' % (10**9, 1)",
        "'%(a(b))999999999d' % {'a(b)': 1}",
        "('%(a)s' * 9999) % {'a': 'x' * 9999}",
        "'{:999999999}'.format(1)",
        "'{:{}}'.format(1, 10**9)",
        "'{0:{1}}'.format('a', 10**9)",
        "'a'.center(10**9)",
        "'a'.zfill(10**9)",
        "'\t'.expandtabs(10**9)",
        "('a' * 9999).replace('', 'x' * 9999)",
        "('x' * 9999).join(('a' * 9999) | list)",
        "('ab' * 99999).rfind('b' * 9999)",
        "('a' * 99999).strip('b' * 9999)",
        "strftime_now('%c' * 9999)",
        "[[1] * 9999] | tojson(indent=10**6)",
        "[1, 2] | tojson(indent='x' * 10**7)",
    ],
)
def test_what_costs_too_much_is_refused(expression: str) -> None:
    with pytest.raises(BudgetError):
        rendered(expression)


@pytest.mark.parametrize(
    ("symbol", "left", "right"),
    [("-", {1: 2}.keys(), []), ("+", 1, "a"), ("*", [1], [1]), ("//", "a", 1), ("*", "a", 1.5)],
)
def test_an_operator_is_for_numbers_texts_and_lists(symbol: str, left: Any, right: Any) -> None:
    with limited(RenderingBudget(0, 0)), pytest.raises(TypeError):
        binary(symbol, left, right)


@pytest.mark.parametrize("value", ["namespace()", "raise_exception", "text.upper", "mapping.items()", "[namespace()]"])
def test_only_plain_data_has_a_text(value: str) -> None:
    for expression in (value, f"'%s' % {value}", f"'{{}}'.format({value})", f"{value} | string", f"{value} ~ ''"):
        with pytest.raises(TypeError, match=r"has no text|object has no|not all arguments"):
            rendered(expression)


@pytest.mark.parametrize("call", ["text.encode()", "text.translate({})", "text.maketrans('a', 'b')", "(1).to_bytes(1)"])
def test_a_method_that_is_not_listed_cannot_be_called(call: str) -> None:
    with pytest.raises(jinja2.exceptions.SecurityError, match="is not available"):
        rendered(call)


def test_methods_that_change_their_object_are_not_listed() -> None:
    assert not {"append", "extend", "insert", "pop", "remove", "reverse", "sort", "clear"} & set(METHODS[list])
    assert not {"update", "pop", "popitem", "setdefault", "clear"} & set(METHODS[dict])
    left_out = {name for name in dir(str) if not name.startswith("_")} - set(METHODS[str])
    assert left_out == {
        "encode",
        "format",
        "format_map",
        "join",
        "maketrans",
        "translate",
    }  # three are checked elsewhere


@pytest.mark.parametrize(
    "options", [{}, {"indent": 2}, {"ensure_ascii": True}, {"separators": (",", ":")}, {"sort_keys": True}], ids=str
)
def test_json_is_that_of_python(options: dict[str, Any]) -> None:
    value = {"b": [1, 2.5, None, True], "a": "é<&>\n\U0001f600"}
    with limited(RenderingBudget(0, 0)):
        assert to_json(value, **options) == json.dumps(value, **{"ensure_ascii": False, **options})


def test_a_refused_operation_leaves_no_budget() -> None:
    budget = RenderingBudget(0, 0)
    with limited(budget):
        with pytest.raises(BudgetError):
            binary("*", "a", BASE_UNITS)
        with pytest.raises(BudgetError):
            sliced("abc", None, None, None)
    assert budget.left < 0


def test_searching_costs_more_in_longer_texts() -> None:
    short, long = RenderingBudget(0, 0), RenderingBudget(0, 0)
    with limited(short):
        assert contains("a" * 10, "a")
    with limited(long):
        assert contains("a" * 10_000, "a")
    assert long.left < short.left


def test_an_exception_of_the_template_has_its_message() -> None:
    with pytest.raises(jinja2.TemplateError, match=r"\[1, 'a'\]"):
        rendered("raise_exception([1, 'a'])")
