"""Filters and tests of templates: the values of jinja2, and refusals of what costs too much."""

import jinja2
import pytest
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.tests import TESTS as JINJA_TESTS

from ingot.runtime.text.template_budget import BudgetError
from ingot.runtime.text.template_filters import FILTERS, TESTS
from tests.each_case import each_case
from tests.runtime.text.rendering import rendered, rendered_by_jinja

EXPRESSIONS = [
    *("-3 | abs", "people[0] | attr('name')", "numbers | batch(3) | list", "numbers | batch(3, 0) | list"),
    *("'a' | center(5)", "text | capitalize", "numbers | count", "nothing | d(1)", "'' | default('x', true)"),
    *("mapping | dictsort", "mapping | dictsort(reverse=true)", "'<' | e", "'<' | escape | forceescape"),
    *("12345 | filesizeformat", "numbers | first", "'1.5' | float", "'x' | float(2)", "'%s %d' | format('a', 1)"),
    *("people | groupby('age') | list", "people | groupby('name', case_sensitive=true) | list", "text | indent"),
    *("text | indent('> ', true, blank=true)", "'42' | int", "'x' | int(7)", "'ff' | int(base=16)", "'4.5' | int"),
    *("mapping | items | list", "nothing | items | list", "numbers | join", "people | join(', ', attribute='name')"),
    *("numbers | last", "text | length", "text | list", "mapping | list", "text | lower"),
    *("words | map('upper') | list", "people | map(attribute='name') | list", "nothing | map('upper') | list"),
    *("people | map(attribute='x', default=0) | list", "numbers | max", "people | min(attribute='age')"),
    *("[1] | random", "numbers | reject('odd') | list", "people | rejectattr('age', 'gt', 1) | list"),
    *("text | replace('l', 'LL', 2)", "12 | replace(1, 2)", "text | reverse", "numbers | reverse | list"),
    *("2.345 | round(1)", "2.5 | round(method='floor')", "('<' | safe) + '&'", "numbers | select | list"),
    *("people | selectattr('name', 'in', ['Ann']) | list", "numbers | slice(3) | list", "numbers | slice(3, 0) | list"),
    *("words | sort", "words | sort(true, true)", "people | sort(attribute='age,name')", "mapping | string"),
    *("numbers | sum", "people | sum('age')", "[[1], [2]] | sum(start=[])", "text | title", "'  a ' | trim"),
    *("'aba' | trim('a')", "text | truncate(9)", "text | truncate(9, true, '!', 0)", "words | unique | list"),
    *("people | unique(attribute='age') | list", "text | upper", "'a b&é' | urlencode", "mapping | urlencode"),
    *("text | wordcount", "text | wordwrap(6)", "text | wordwrap(6, wrapstring='|', break_long_words=false)"),
]
TESTED = [
    *(
        "none is boolean",
        "text is callable",
        "x is defined",
        "6 is divisibleby 3",
        "1 is eq 1",
        "1 is ne 2",
        "'a' is escaped",
    ),
    *("2 is even", "1 is false", "'upper' is filter", "1.5 is float", "2 is ge 1", "2 is gt 1", "1 is in numbers"),
    *("1 is integer", "text is iterable", "1 is le 1", "'a' is lower", "1 is lt 2", "mapping is mapping"),
    *("none is none", "1 is number", "1 is odd", "none is sameas none", "text is sequence", "text is string"),
    *("'odd' is test", "true is true", "x is undefined", "'A' is upper", "1 is equalto 1", "1 is lessthan 2"),
    *("2 is greaterthan 1", "numbers is eq [3, 1, 2, 1]"),
]


@each_case("expression", [*EXPRESSIONS, *TESTED])
def test_a_filter_has_the_value_of_jinja(expression: str) -> None:
    assert rendered(expression) == rendered_by_jinja(expression)


def test_every_filter_is_tried_or_left_out() -> None:
    left_out = {"pprint", "striptags", "urlize", "xmlattr"}
    assert set(JINJA_FILTERS) == set(FILTERS) | left_out
    tried = " ".join(EXPRESSIONS)
    assert {name for name in FILTERS if f"| {name}" not in tried} == {"tojson"}  # not jinja's: test_template_operations


def test_every_test_is_tried() -> None:
    symbols = {"==", "!=", "<", "<=", ">", ">="}
    assert set(TESTS) == set(JINJA_TESTS)
    tried = " ".join(TESTED)
    assert {name for name in TESTS if f"is {name}" not in tried} == symbols


def test_lazy_filters_give_iterators_as_in_jinja() -> None:
    for expression in ("numbers | map('abs')", "numbers | select", "words | unique", "numbers | batch(2)"):
        assert rendered(f"({expression}) is sequence") == rendered_by_jinja(f"({expression}) is sequence") == "False"
        assert rendered(f"({expression}) | first") == rendered_by_jinja(f"({expression}) | first")


@each_case(
    "expression",
    [
        "'a' | center(10**9)",
        "numbers | batch(10**9, 0) | list",
        "numbers | slice(10**9) | list",
        "text | indent(10**9)",
        "text | replace('', 'x' * 10**7)",
        "words | join('x' * 20000000)",
        "('9' * 9999) | int",
        "1 | round(-999)",
        "people | map(attribute='a.' * 10**7) | list",
        "('a' * 10**6) | wordwrap(1)",
        "('a' * 10**6) | wordwrap(10**6, wrapstring='x' * 999)",
    ],
)
def test_what_costs_too_much_is_refused(expression: str) -> None:
    with pytest.raises(BudgetError):
        rendered(expression)


@pytest.mark.parametrize("expression", ["'%99d' is odd", "'%99d' is even", "'%99d' is divisibleby 2"])
def test_a_test_by_modulo_does_not_format(expression: str) -> None:
    with pytest.raises(TypeError, match="it needs a number"):
        rendered(expression)


def test_a_private_filter_cannot_be_named() -> None:
    with pytest.raises(jinja2.TemplateRuntimeError, match="not the name of a filter"):
        rendered("numbers | map('bounded pay', -1000) | list")
