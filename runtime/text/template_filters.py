"""The filters and tests of a template: jinja2's own, each paid for before it runs.

Filters that jinja2 computes lazily are computed at once here and give an iterator over the result, so that no chain of
generators grows. `pprint`, `striptags`, `urlize` and `xmlattr` are left out: their time grows with the square of the
text, and no prompt needs them.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinja2 import Environment, pass_context, pass_environment, pass_eval_context
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.filters import make_attrgetter, sync_do_slice
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, Undefined
from jinja2.tests import TESTS as TABLE_OF_TESTS
from markupsafe import Markup

from ingot.runtime.text.template_budget import (
    ESCAPE_GROWTH,
    ITEM_UNITS,
    NODE_UNITS,
    BudgetError,
    checked_key,
    checked_number,
    items_of,
    spend,
    text_units,
    tree_units,
)
from ingot.runtime.text.template_operations import (
    as_text,
    binary,
    compared,
    contains,
    formatted,
    joined,
    pay_for_pieces,
    replaced_units,
    to_json,
)

_JINJA_TESTS: Mapping[str, Callable[..., Any]] = TABLE_OF_TESTS  # type: ignore[assignment]  # a union, to jinja2
_MAX_NUMBER_CHARACTERS = 1000
_MAX_PRECISION = 300
_LOOKUP_UNITS = 4 * NODE_UNITS


def _on_text(name: str, growth: int = 3) -> Callable[..., Any]:
    """A filter of one text, whose result is at most `growth` times longer."""

    def bounded(value: Any, *args: Any) -> Any:
        text = as_text(value)
        spend(growth * text_units(text) + NODE_UNITS)
        return JINJA_FILTERS[name](text, *args)

    return bounded


def _on_words(name: str) -> Callable[..., Any]:
    """A filter that splits a text into words."""

    def bounded(value: Any) -> Any:
        text = as_text(value)
        pay_for_pieces(text)
        spend(3 * text_units(text))
        return JINJA_FILTERS[name](text)

    return bounded


def _trim(value: Any, chars: str | None = None) -> Any:
    text = as_text(value)
    spend(text_units(text) + (len(text) * len(chars) // 8 if isinstance(chars, str) else 0))
    return text.strip(chars)


def _center(value: Any, width: int = 80) -> Any:
    text = as_text(value)
    spend(text_units(text) + 4 * max(width, 0))
    return text.center(width)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
    if not isinstance(s, str):
        raise TypeError(f"indent of a {type(s).__name__}; it needs a text")
    pay_for_pieces(s)
    lines = len(s.splitlines()) + 1
    indention = text_units(width) if isinstance(width, str) else max(width, 0)
    spend(ESCAPE_GROWTH * text_units(s) + ESCAPE_GROWTH * lines * indention)
    return JINJA_FILTERS["indent"](s, width, first, blank)


def _wordwrap(environment: Environment, s: str, width: int = 79, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(s, str):
        raise TypeError(f"wordwrap of a {type(s).__name__}; it needs a text")
    pay_for_pieces(s)
    spend(16 * text_units(s) + text_units(s) * text_units(s) // max(width, 1))  # a long word is sliced line by line
    for value in (*args, *kwargs.values()):
        spend(text_units(value) * (len(s) + 1) if isinstance(value, str) else NODE_UNITS)
    return JINJA_FILTERS["wordwrap"](environment, s, width, *args, **kwargs)


def _truncate(environment: Environment, s: str, *args: Any, **kwargs: Any) -> Any:
    for value in (s, *args, *kwargs.values()):
        spend(3 * text_units(value) if isinstance(value, str) else NODE_UNITS)
    return JINJA_FILTERS["truncate"](environment, s, *args, **kwargs)


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = (str(as_text(value)) for value in (s, old, new))
    spend(replaced_units(text, old, new, -1 if count is None else count))
    return text.replace(old, new, -1 if count is None else count)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("format takes positional or keyword arguments, not both")
    return formatted(as_text(value), kwargs or args)


def _join(eval_context: EvalContext, value: Any, d: Any = "", attribute: Any = None) -> str:
    items = items_of(value)
    if attribute is not None:
        items = _looked_up(eval_context.environment, items, attribute)
    return joined(str(as_text(d)), [str(as_text(item)) for item in items])


def _looked_up(environment: Environment, items: list[Any], attribute: Any) -> list[Any]:
    """The attribute of each item, as `map(attribute=...)` finds it."""
    _pay_for_path(attribute, len(items))
    return list(map(make_attrgetter(environment, attribute), items))


def _urlencode(value: Any) -> str:
    spend(9 * ESCAPE_GROWTH * tree_units(value))
    if isinstance(value, Mapping):
        value = {key: as_text(item) for key, item in value.items()}
    elif hasattr(value, "__iter__") and not isinstance(value, str):
        value = [tuple(map(as_text, items_of(pair))) for pair in items_of(value)]
    return str(JINJA_FILTERS["urlencode"](value))


def _safe(value: Any) -> Markup:
    return Markup(as_text(value))


# Numbers.


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _MAX_NUMBER_CHARACTERS:
        raise BudgetError(f"a number of {len(value)} characters, more than {_MAX_NUMBER_CHARACTERS}")
    return value


def _int(value: Any, default: Any = 0, base: int = 10) -> Any:
    spend(_LOOKUP_UNITS)
    return checked_number(JINJA_FILTERS["int"](_short(value), default, base))


def _float(value: Any, default: Any = 0.0) -> Any:
    spend(_LOOKUP_UNITS)
    return JINJA_FILTERS["float"](_short(value), default)


def _round(value: Any, precision: int = 0, method: Any = "common") -> Any:
    if isinstance(precision, int) and abs(precision) > _MAX_PRECISION:
        raise BudgetError(f"round to {precision} digits; at most {_MAX_PRECISION} are allowed")
    if not isinstance(value, int | float | Undefined):
        raise TypeError(f"round of a {type(value).__name__}; it needs a number")
    return checked_number(JINJA_FILTERS["round"](value, precision, method))


def _absolute(value: Any) -> Any:
    return abs(value)


def _filesizeformat(value: Any, binary: bool = False) -> Any:
    spend(_LOOKUP_UNITS)
    return JINJA_FILTERS["filesizeformat"](_short(value), binary)


def _sum(environment: Environment, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    items = items_of(iterable)
    if attribute is not None:
        items = _looked_up(environment, items, attribute)
    if isinstance(start, str):
        raise TypeError("sum of texts; use join")
    for item in items:
        spend(NODE_UNITS)
        start = binary("+", start, item)
    return start


# Sequences.


def _eager(name: str) -> Callable[..., Any]:
    """map, select and their like: computed at once."""

    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        items = items_of(value or ())
        spend(_LOOKUP_UNITS * (len(items) + 1))
        for argument in (*args, *kwargs.values()):
            _pay_for_path(argument, len(items))
        return iter(list(JINJA_FILTERS[name](context, items, *args, **kwargs)))

    return bounded


def _batch(value: Any, linecount: int, fill_with: Any = None) -> Iterator[Any]:
    items = items_of(value)
    spend(NODE_UNITS * (len(items) + 1) + (ITEM_UNITS * max(linecount, 0) if fill_with is not None else 0))
    return iter(list(JINJA_FILTERS["batch"](items, linecount, fill_with)))


def _slice(value: Any, slices: int, fill_with: Any = None) -> Iterator[Any]:
    items = items_of(value)
    spend(2 * NODE_UNITS * (len(items) + max(slices, 0) + 1))
    return iter(list(sync_do_slice(items, slices, fill_with)))


def _items(value: Any) -> Iterator[Any]:
    spend(NODE_UNITS * (len(value) if isinstance(value, Mapping) else 1))
    return iter(list(JINJA_FILTERS["items"](value)))


def _list(value: Any) -> list[Any]:
    return items_of(value)


def _reverse(value: Any) -> Any:
    if isinstance(value, str):
        spend(text_units(value))
        return value[::-1]
    items = items_of(value)
    items.reverse()
    return iter(items) if hasattr(value, "__reversed__") or hasattr(value, "__len__") else items


def _ordered(items: Any) -> None:
    """Pay for sorting, or for comparing all with one."""
    count = len(items)
    spend(tree_units(items) * (1 + count.bit_length()) + _LOOKUP_UNITS * count)


def _sort(
    environment: Environment, value: Any, reverse: bool = False, case_sensitive: bool = False, attribute: Any = None
) -> Any:
    items = items_of(value)
    _ordered(items)
    _pay_for_path(attribute, len(items))
    return JINJA_FILTERS["sort"](environment, items, reverse, case_sensitive, attribute)


def _groupby(
    environment: Environment, value: Any, attribute: Any, default: Any = None, case_sensitive: bool = False
) -> Any:
    items = items_of(value)
    _ordered(items)
    _pay_for_path(attribute, len(items))
    return JINJA_FILTERS["groupby"](environment, items, attribute, default, case_sensitive)


def _pay_for_path(attribute: Any, items: int) -> None:
    if isinstance(attribute, str):
        parts = attribute.count(".") + attribute.count(",") + len(attribute) // 64 + 1
        spend(_LOOKUP_UNITS * parts * (items + 1))


def _dictsort(value: Any, *args: Any, **kwargs: Any) -> Any:
    _ordered(value)
    return JINJA_FILTERS["dictsort"](value, *args, **kwargs)


def _extreme(name: str) -> Callable[..., Any]:
    @pass_environment
    def bounded(environment: Environment, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Any:
        items = items_of(value)
        _ordered(items)
        _pay_for_path(attribute, len(items))
        return JINJA_FILTERS[name](environment, items, case_sensitive, attribute)

    return bounded


def _unique(environment: Environment, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Any:
    items = items_of(value)
    keys = items if attribute is None else _looked_up(environment, items, attribute)
    _ordered(keys)
    for key in keys:
        checked_key(key)
    return iter(list(JINJA_FILTERS["unique"](environment, items, case_sensitive, attribute)))


def _random(context: Context, seq: Any) -> Any:
    return JINJA_FILTERS["random"](context, items_of(seq))


def _attr(environment: Environment, obj: Any, name: str) -> Any:
    spend(_LOOKUP_UNITS)
    return JINJA_FILTERS["attr"](environment, obj, name)


FILTERS: Mapping[str, Callable[..., Any]] = {
    **{name: _on_text(name) for name in ("capitalize", "lower", "upper")},
    **{name: _on_text(name, ESCAPE_GROWTH) for name in ("e", "escape", "forceescape")},
    **{name: _on_words(name) for name in ("title", "wordcount")},
    **{name: _eager(name) for name in ("map", "reject", "rejectattr", "select", "selectattr")},
    **{name: _extreme(name) for name in ("max", "min")},
    **{name: JINJA_FILTERS[name] for name in ("count", "d", "default", "first", "last", "length")},
    "abs": _absolute,
    "attr": pass_environment(_attr),
    "batch": _batch,
    "center": _center,
    "dictsort": _dictsort,
    "filesizeformat": _filesizeformat,
    "float": _float,
    "format": _format,
    "groupby": pass_environment(_groupby),
    "indent": _indent,
    "int": _int,
    "items": _items,
    "join": pass_eval_context(_join),
    "list": _list,
    "random": pass_context(_random),
    "replace": _replace,
    "reverse": _reverse,
    "round": _round,
    "safe": _safe,
    "slice": _slice,
    "sort": pass_environment(_sort),
    "string": as_text,
    "sum": pass_environment(_sum),
    "tojson": to_json,
    "trim": _trim,
    "truncate": pass_environment(_truncate),
    "unique": pass_environment(_unique),
    "urlencode": _urlencode,
    "wordwrap": pass_environment(_wordwrap),
}


# Tests.


def _compare_test(symbol: str) -> Callable[[Any, Any], Any]:
    return lambda left, right: compared(symbol, left, right)


def _number_test(name: str) -> Callable[..., Any]:
    """A test by `%`, which would format a text."""

    def bounded(value: Any, *args: Any) -> Any:
        for operand in (value, *args):
            if not isinstance(operand, int | float | Undefined):
                raise TypeError(f"{name!r} of a {type(operand).__name__}; it needs a number")
        return _JINJA_TESTS[name](value, *args)

    return bounded


def _case_test(name: str) -> Callable[[Any], Any]:
    def bounded(value: Any) -> Any:
        text = as_text(value)
        spend(len(text))
        return _JINJA_TESTS[name](text)

    return bounded


def _in(value: Any, seq: Any) -> bool:
    return contains(seq, value)


def _is_filter(value: Any) -> bool:
    return checked_key(value) in FILTERS


def _is_test(value: Any) -> bool:
    return checked_key(value) in TESTS


_COMPARE_TESTS = {
    "eq": ("==", "eq", "equalto"),
    "ne": ("!=", "ne"),
    "lt": ("<", "lt", "lessthan"),
    "lteq": ("<=", "le"),
    "gt": (">", "gt", "greaterthan"),
    "gteq": (">=", "ge"),
}
_CONSTANT_TESTS = (
    *("boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable", "mapping", "none"),
    *("number", "sameas", "sequence", "string", "true", "undefined"),
)
TESTS: Mapping[str, Callable[..., Any]] = {
    **{name: _JINJA_TESTS[name] for name in _CONSTANT_TESTS},
    **{name: _compare_test(symbol) for symbol, names in _COMPARE_TESTS.items() for name in names},
    **{name: _number_test(name) for name in ("divisibleby", "even", "odd")},
    **{name: _case_test(name) for name in ("lower", "upper")},
    "filter": _is_filter,
    "in": _in,
    "test": _is_test,
}
