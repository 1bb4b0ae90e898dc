"""The budget of a rendering: units of values, and errors when they exceed it."""

from typing import Any

import pytest

from ingot.runtime.text.template_budget import (
    BASE_UNITS,
    ITEM_UNITS,
    NODE_UNITS,
    BudgetError,
    RenderingBudget,
    checked_key,
    checked_number,
    items_of,
    limited,
    nested,
    spend,
    text_units,
    tree_units,
)
from tests.each_case import each_case


def test_a_budget_is_spent_once() -> None:
    budget = RenderingBudget(0, 0)
    with limited(budget):
        spend(BASE_UNITS)
        assert budget.left == 0
        with pytest.raises(BudgetError, match="exceed the limit"):
            spend(1)
        with pytest.raises(BudgetError):
            spend(0)


def test_a_budget_grows_with_characters_and_messages() -> None:
    assert RenderingBudget(1000, 0).left > RenderingBudget(0, 0).left
    assert RenderingBudget(0, 1000).left > RenderingBudget(0, 10).left
    assert RenderingBudget(0, 10**9).left == RenderingBudget(0, 10**8).left


def test_nesting_ends_after_the_block() -> None:
    with limited(RenderingBudget(0, 0)):
        for _ in range(1000):
            with nested():
                pass
        with pytest.raises(BudgetError, match="nested more than 60 deep"):
            deeper()


def deeper() -> None:
    with nested():
        deeper()


def test_units_of_a_text_are_its_bytes_at_most() -> None:
    assert text_units("abc") == 3
    assert text_units("é") == text_units("😀") == 4


def test_units_of_a_tree_count_what_occurs_twice_twice() -> None:
    with limited(RenderingBudget(0, 0)):
        once = tree_units(["abc"])
        assert tree_units([["abc"], ["abc"]]) == 2 * once + NODE_UNITS
        assert tree_units({"a": ["abc"]}) > once
        assert tree_units({"a": 1}.items()) > tree_units([])
        tree: Any = ["abc"]
        for _ in range(60):
            tree = [tree, tree]
        with pytest.raises(BudgetError):
            tree_units(tree)


def test_a_deep_value_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(101):
        deep = [deep]
    with limited(RenderingBudget(0, 0)), pytest.raises(BudgetError, match="nested more than 100 deep"):
        tree_units(deep)


@each_case("values", ["ab", (1, 2), {"a": 1, "b": 2}, {"a": 1, "b": 2}.keys(), range(2), iter([1, 2])])
def test_items_are_paid_for(values: Any) -> None:
    budget = RenderingBudget(0, 0)
    with limited(budget):
        assert len(items_of(values)) == 2
    assert budget.left <= BASE_UNITS - 2 * ITEM_UNITS


def test_numbers_and_keys_are_checked() -> None:
    assert checked_number(2**255) == 2**255
    with pytest.raises(BudgetError, match="more than 256 bits"):
        checked_number(2**256)
    with pytest.raises(TypeError, match="complex"):
        checked_number(1j)
    assert checked_key("a") == "a"
    with pytest.raises(TypeError, match="a tuple is used as a key"):
        checked_key((1,))
