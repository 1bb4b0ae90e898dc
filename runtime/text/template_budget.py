"""The budget of one rendering: what a template may compute, in units of about a byte written or a nanosecond.

A chat template is a foreign program. Every step that it takes is paid for before it is taken: a node of the template, a
character of a text, an item of a list. When the budget is spent, the rendering ends with BudgetError. What an operation
costs is computed from the sizes of its operands, so a text of 10 GB is refused and not built.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2.runtime import Undefined

BASE_UNITS = 2**25  # 32 MB of text, or a million nodes; a second at the worst
UNITS_PER_INPUT_UNIT = 32  # templates copy and search each message a few times; real ones use a quarter of this
UNITS_PER_PAIR = 512  # of messages: a template may look at those that follow each
MAX_PAIR_UNITS = 2**29
MAX_INPUT_UNITS = 2**24  # messages, tools and variables: 16 million ASCII characters
NODE_UNITS = 32
ITEM_UNITS = 16
MAX_NESTING = 100
MAX_MACRO_DEPTH = 60
MAX_INTEGER_BITS = 256
ESCAPE_GROWTH = 6  # a character as JSON (\u0000), in repr (\U0001f600 has 4 bytes) or as HTML (&quot;)

SCALARS = (str, int, float, bool, type(None), Undefined)


class BudgetError(jinja2.TemplateRuntimeError):
    """The template does more than it may."""


class RenderingBudget:
    """What is left of a rendering's units, and how deep its macros and recursive loops are nested."""

    __slots__ = ("depth", "left")

    def __init__(self, input_units: int, num_messages: int) -> None:
        pairs = min(UNITS_PER_PAIR * num_messages**2, MAX_PAIR_UNITS)
        self.left = BASE_UNITS + UNITS_PER_INPUT_UNIT * input_units + pairs
        self.depth = 0


_budget: ContextVar[RenderingBudget] = ContextVar("ingot_template_budget")


@contextmanager
def limited(budget: RenderingBudget) -> Iterator[None]:
    """Pay from this budget in the block; renderings in other threads have their own."""
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)


def spend(units: int) -> None:
    """Pay for the next step. Raises BudgetError when the budget does not suffice."""
    budget = _budget.get()
    budget.left -= units
    if budget.left < 0:
        raise BudgetError("its loops, or the texts that it builds, exceed the limit for a conversation of this size")


@contextmanager
def nested() -> Iterator[None]:
    """Run a macro or a recursive loop in the block. Raises BudgetError when they are nested too deep."""
    budget = _budget.get()
    budget.depth += 1
    if budget.depth > MAX_MACRO_DEPTH:
        raise BudgetError(f"its macros or recursive loops are nested more than {MAX_MACRO_DEPTH} deep")
    try:
        yield
    finally:
        budget.depth -= 1


def text_units(text: str) -> int:
    """Bytes of a text in memory, at most."""
    return len(text) if text.isascii() else 4 * len(text)


def tree_units(value: object) -> int:
    """Units of a value with everything in it, each time it occurs.

    Raises BudgetError when that exceeds the budget (a list that contains another twice, thirty levels deep, is small in
    memory and endless as text), or when it is nested too deep.
    """
    if isinstance(value, str):
        return text_units(value)
    if isinstance(value, SCALARS):
        return NODE_UNITS
    left = _budget.get().left
    total, depth, level = 0, 0, [value]
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise BudgetError(f"a value is nested more than {MAX_NESTING} deep")
        following: list[object] = []
        for item in level:
            total += NODE_UNITS
            if isinstance(item, str):
                total += text_units(item)
            elif isinstance(item, Mapping):
                following.extend(item)
                following.extend(item.values())
            elif isinstance(item, list | tuple) or is_view(item):
                following.extend(item)  # type: ignore[arg-type]
            if total + NODE_UNITS * len(following) > left:
                spend(left + 1)
        level = following
    return total


_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


def is_view(value: object) -> bool:
    """Whether this is `dict.keys()`, `.values()` or `.items()`."""
    return isinstance(value, _VIEWS)


def items_of(values: Iterable[Any]) -> list[Any]:
    """The items as a list, paid for. An iterator is consumed; all of them come from lists."""
    if isinstance(values, str | list | tuple | Mapping) or is_view(values) or isinstance(values, range):
        spend(ITEM_UNITS * len(values) * (5 if isinstance(values, str) else 1))  # type: ignore[arg-type]
        return list(values)
    items = list(values)
    spend(ITEM_UNITS * len(items))
    return items


def checked_number(value: Any) -> Any:
    """The value; BudgetError for an integer of too many bits, TypeError for a complex number."""
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise BudgetError(f"a number has more than {MAX_INTEGER_BITS} bits")
    if isinstance(value, complex):
        raise TypeError("the result is a complex number")
    return value


def checked_key(value: Any) -> Any:
    """The value; TypeError unless it may be a key. (Hashing a deeply nested tuple overflows CPython's stack.)"""
    if not isinstance(value, SCALARS):
        raise TypeError(f"a {type(value).__name__} is used as a key; keys are texts and numbers")
    return value
