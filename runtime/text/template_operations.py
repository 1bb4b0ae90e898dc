"""What the operators, methods and functions of a template do, each paid for before it is done.

The tables below are complete: an operator, a method or a function that is not in them cannot be used by a template.
"""

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.runtime import Undefined
from jinja2.sandbox import SandboxedFormatter, safe_range
from jinja2.utils import Cycler, Joiner, Namespace
from markupsafe import Markup

from ingot.runtime.text.template_budget import (
    ESCAPE_GROWTH,
    ITEM_UNITS,
    MAX_INTEGER_BITS,
    MAX_NESTING,
    NODE_UNITS,
    SCALARS,
    BudgetError,
    checked_key,
    checked_number,
    items_of,
    spend,
    text_units,
    tree_units,
)

_MANY_CHARACTERS = 1 << 16
_MAX_DATE_FORMAT = 1000
_PIECE_UNITS = 80  # a small text in a list


def as_text(value: object) -> str:
    """`str(value)`, paid for. TypeError for a value that has no text, such as a macro."""
    if isinstance(value, str):
        return value
    if not isinstance(value, SCALARS):
        spend(ESCAPE_GROWTH * _printable_units(value))
    return str(value)


def _printable_units(value: object) -> int:
    """Units of the value; TypeError unless it, and everything in it, is plain data."""
    units = tree_units(value)  # has an end, and so has the walk below
    level = [value]
    while level:
        following: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                following.extend(item.values())
            elif isinstance(item, list | tuple):
                following.extend(item)
            elif not isinstance(item, (*SCALARS, range)):
                raise TypeError(f"{type(item).__name__} has no text")
        level = following
    return units


def concatenated(values: tuple[object, ...]) -> str:
    """The `~` operator."""
    texts = [str(as_text(value)) for value in values]
    spend(sum(map(text_units, texts)))
    return "".join(texts)


_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "**": operator.pow,
    "%": operator.mod,
}
_SEQUENCES = (str, list, tuple)


def binary(symbol: str, left: Any, right: Any) -> Any:
    """`left symbol right` for numbers, texts, lists and tuples."""
    if isinstance(left, int | float) and isinstance(right, int | float):
        if symbol == "**" and isinstance(left, int) and isinstance(right, int):
            spend(NODE_UNITS)
            if left.bit_length() * max(right, 0) > MAX_INTEGER_BITS * 2:
                raise BudgetError(f"a number has more than {MAX_INTEGER_BITS} bits")
        return checked_number(_OPERATORS[symbol](left, right))
    if isinstance(left, Undefined) or isinstance(right, Undefined):
        return _OPERATORS[symbol](left, right)  # raises UndefinedError
    if symbol == "+" and isinstance(left, _SEQUENCES) and isinstance(right, _SEQUENCES):
        escaped = ESCAPE_GROWTH if isinstance(left, Markup) or isinstance(right, Markup) else 1
        spend(escaped * (_sequence_units(left) + _sequence_units(right)))
    elif symbol == "*" and isinstance(left, _SEQUENCES) and isinstance(right, int):
        spend(_sequence_units(left) * max(right, 0))
    elif symbol == "*" and isinstance(right, _SEQUENCES) and isinstance(left, int):
        spend(_sequence_units(right) * max(left, 0))
    elif symbol == "%" and isinstance(left, str):
        return formatted(left, right)
    else:
        raise TypeError(f"{symbol!r} is not for {type(left).__name__} and {type(right).__name__}")
    return _OPERATORS[symbol](left, right)


def _sequence_units(value: Any) -> int:
    if isinstance(value, str):
        return text_units(value) + NODE_UNITS
    return ITEM_UNITS * len(value) + NODE_UNITS


def formatted(pattern: str, values: Any) -> str:
    """`pattern % values`. Every number in the pattern may be a width or a precision, and is paid for as such."""
    widths = sum(_number(digits) for digits in re.findall(r"\d+", pattern))
    arguments = values if isinstance(values, tuple) else (values,)
    if "*" in pattern:
        widths += sum(abs(value) for value in arguments if isinstance(value, int))
    specifiers = pattern.count("%")
    reused = specifiers if isinstance(values, Mapping) else 1
    spend(text_units(pattern) + widths + 512 * specifiers + ESCAPE_GROWTH * reused * _printable_units(arguments))
    text: str = pattern % values
    return text


def _number(digits: str) -> int:
    """The number; any that is too long for a format is too expensive."""
    return int(digits) if len(digits) < 12 else 10**12


class FormatMethod:
    """`text.format`, with every field paid for."""

    def __init__(self, environment: jinja2.Environment, text: str, name: str) -> None:
        self._formatter = _Formatter(environment)
        self._text = text
        self._takes_mapping = name == "format_map"

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        spend(text_units(self._text) + NODE_UNITS * (1 + self._text.count("{")) * 4)
        if self._takes_mapping:
            return self._formatter.vformat(self._text, (), *args, **kwargs)
        return self._formatter.vformat(self._text, args, kwargs)


class _Formatter(SandboxedFormatter):
    def convert_field(self, value: Any, conversion: Any) -> Any:
        as_text(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        text = as_text(value)
        widths = sum(_number(digits) for digits in re.findall(r"\d+", format_spec))
        spend(text_units(text) + 4 * widths + 512)
        return str(super().format_field(value, format_spec))


def sliced(value: Any, start: Any, stop: Any, step: Any) -> Any:
    """`value[start:stop:step]`."""
    part = slice(start, stop, step)
    if isinstance(value, (*_SEQUENCES, range)):
        count = len(range(*part.indices(len(value))))
        spend(NODE_UNITS + count * (ITEM_UNITS if not isinstance(value, str) else 1 if value.isascii() else 4))
    elif not isinstance(value, Undefined):
        raise TypeError(f"{type(value).__name__} has no slices")
    return value[part]


_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
}


def compared(symbol: str, left: Any, right: Any) -> Any:
    """A comparison, or `in` and `notin`."""
    if symbol == "in":
        return contains(right, left)
    if symbol == "notin":
        return not contains(right, left)
    pay_for_comparison(left, right)
    return _COMPARISONS[symbol](left, right)


def pay_for_comparison(left: Any, right: Any) -> None:
    """Comparing two values takes at most as long as walking either of them."""
    if isinstance(left, str) and isinstance(right, str):
        spend(min(len(left), len(right)) // 8)
    elif not isinstance(left, SCALARS) and not isinstance(right, SCALARS):
        spend(tree_units(left) + tree_units(right))


def contains(container: Any, item: Any) -> bool:
    """`item in container`."""
    if isinstance(container, str):
        if isinstance(item, str):
            spend(_search_units(container, item))
        return item in container
    if isinstance(container, (Mapping, type({}.keys()))):
        return checked_key(item) in container
    if isinstance(container, Undefined | type(None) | int | float):
        return item in container  # type: ignore[operator]  # False, or TypeError
    items = items_of(container)
    spend(len(items) * (ITEM_UNITS + len(item) // 8) if isinstance(item, str) else ITEM_UNITS * len(items))
    if not isinstance(item, SCALARS):
        spend(tree_units(item) + tree_units(items))
    return item in items


def _search_units(text: str, part: str) -> int:
    """CPython searches forward in linear time; short texts by comparing at every position."""
    return len(text) + len(text) * min(len(part), 128) // 4


def _backward_search_units(text: str, part: str) -> int:
    """CPython searches backward by comparing at every position."""
    return len(text) + len(text) * len(part) // 4


def _strip_units(text: str, characters: object) -> int:
    return text_units(text) + (len(text) * len(characters) // 8 if isinstance(characters, str) else 0)


def pay_for_pieces(text: str) -> None:
    """Splitting a text into the smallest pieces. A long text pays for all of them, a short one for a few."""
    pieces = len(text) if len(text) > _MANY_CHARACTERS else len(text) // 8
    spend(text_units(text) + _PIECE_UNITS * (pieces + 1))


# Methods: name -> units of a call with these arguments.
_Cost = Callable[..., int]


def _case(text: str) -> int:
    return 3 * text_units(text) + NODE_UNITS


def _scan(text: str, *_: Any) -> int:
    return len(text) + NODE_UNITS


def _find(text: str, part: Any, *_: Any) -> int:
    parts = part if isinstance(part, tuple) else (part,)
    return NODE_UNITS + sum(_search_units(text, each) for each in parts if isinstance(each, str))


def _backward_find(text: str, part: Any, *_: Any) -> int:
    return NODE_UNITS + (_backward_search_units(text, part) if isinstance(part, str) else 0)


def _strip(text: str, characters: Any = None) -> int:
    return NODE_UNITS + _strip_units(text, characters)


def _prefix(text: str, part: Any, *_: Any) -> int:
    return NODE_UNITS + (ITEM_UNITS * len(part) if isinstance(part, tuple) else 0) + tree_units(part)


def _remove(text: str, part: Any) -> int:
    return NODE_UNITS + text_units(text)


def _split(text: str, sep: Any = None, maxsplit: Any = -1) -> int:
    if not isinstance(sep, str):
        pay_for_pieces(text)
        return NODE_UNITS
    spend(_backward_search_units(text, sep))
    pieces = text.count(sep) if sep else 0
    return text_units(text) + _PIECE_UNITS * (1 + (min(pieces, maxsplit) if _limits(maxsplit) else pieces))


def _limits(maximum: Any) -> bool:
    return isinstance(maximum, int) and maximum >= 0


def _lines(text: str, keepends: Any = False) -> int:
    pay_for_pieces(text)
    return NODE_UNITS


def _padded(text: str, width: Any, fill: Any = " ") -> int:
    return text_units(text) + 4 * max(width if isinstance(width, int) else 0, 0) + NODE_UNITS


def _tabs(text: str, tabsize: Any = 8) -> int:
    size = tabsize if isinstance(tabsize, int) else 8
    return text_units(text) + 4 * text.count("\t") * max(size, 0) + NODE_UNITS


def replaced_units(text: str, old: Any, new: Any, count: Any = -1) -> int:
    """Units of `text.replace(old, new, count)`."""
    if not isinstance(old, str) or not isinstance(new, str):
        return NODE_UNITS
    spend(_search_units(text, old))
    found = text.count(old)
    found = min(found, count) if _limits(count) else found
    growth = ESCAPE_GROWTH if isinstance(text, Markup) else 1
    return growth * (text_units(text) + found * text_units(new) * (1 if text.isascii() else 4)) * 4


def _item_search(values: Any, item: Any, *_: Any) -> int:
    contains(values, item)  # pays
    return NODE_UNITS


def _copied(values: Any) -> int:
    return ITEM_UNITS * 2 * len(values) + NODE_UNITS


def _keyed(values: Any, key: Any, default: Any = None) -> int:
    checked_key(key)
    return NODE_UNITS


def _constant(*_: Any) -> int:
    return NODE_UNITS


def _changed(_: Any, *values: Any) -> int:
    return NODE_UNITS + 2 * tree_units(values)


_TEXT_METHODS: dict[str, _Cost] = {
    **dict.fromkeys(["capitalize", "casefold", "lower", "swapcase", "title", "upper"], _case),
    **dict.fromkeys(["isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower"], _scan),
    **dict.fromkeys(["isnumeric", "isprintable", "isspace", "istitle", "isupper"], _scan),
    **dict.fromkeys(["count", "find", "index"], _find),
    **dict.fromkeys(["rfind", "rindex"], _backward_find),
    **dict.fromkeys(["strip", "lstrip", "rstrip"], _strip),
    **dict.fromkeys(["startswith", "endswith"], _prefix),
    **dict.fromkeys(["removeprefix", "removesuffix"], _remove),
    **dict.fromkeys(["split", "rsplit"], _split),
    **dict.fromkeys(["center", "ljust", "rjust", "zfill"], _padded),
    "expandtabs": _tabs,
    "partition": lambda text, part: 2 * text_units(text) + _find(text, part),
    "replace": replaced_units,
    "rpartition": lambda text, part: 2 * text_units(text) + _backward_find(text, part),
    "splitlines": _lines,
}
METHODS: Mapping[type, Mapping[str, _Cost]] = {
    str: _TEXT_METHODS,
    Markup: _TEXT_METHODS,
    list: {"index": _item_search, "count": _item_search, "copy": _copied},
    tuple: {"index": _item_search, "count": _item_search},
    range: {"index": _item_search, "count": _item_search},
    dict: {"get": _keyed, **dict.fromkeys(["items", "keys", "values"], _constant), "copy": _copied},
    float: {"is_integer": _constant},
    bool: {"bit_length": _constant},
    int: {"bit_length": _constant},
    jinja2.runtime.LoopContext: {"cycle": _constant, "changed": _changed},
    Cycler: {"next": _constant, "reset": _constant},
}


def joined(separator: str, values: Iterable[Any]) -> str:
    """`separator.join(values)`."""
    items = items_of(values)
    texts = [item for item in items if isinstance(item, str)]
    growth = ESCAPE_GROWTH if isinstance(separator, Markup) else 1
    spend(growth * (sum(map(text_units, texts)) + (4 + text_units(separator)) * len(items)))
    return separator.join(items)


# Functions.


class BoundedNamespace(Namespace):
    """jinja2's namespace without names that begin with an underscore, which give access to CPython's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`: namespace(self=...) is allowed
        attributes = make_dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the template sets {name!r} on a namespace; rename it")


def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict(...)` with keys that are texts and numbers."""
    spend(_PIECE_UNITS * (len(kwargs) + 1))
    if not args or isinstance(args[0], Mapping):
        spend(_PIECE_UNITS * sum(len(arg) for arg in args if isinstance(arg, Mapping)))
        return dict(*args, **kwargs)
    pairs = [tuple(items_of(pair)) for pair in items_of(args[0])]
    spend(_PIECE_UNITS * len(pairs))
    for pair in pairs:
        checked_key(pair[0] if pair else None)
    return dict(pairs, *args[1:], **kwargs)


class Dict:
    """`dict` in a template: callable, without attributes that lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return make_dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """As dict.fromkeys."""
        items = items_of(keys)
        spend(_PIECE_UNITS * len(items))
        return dict.fromkeys(map(checked_key, items), value)


def raise_exception(message: object) -> NoReturn:
    """Refuse the conversation with the template's own message."""
    raise jinja2.TemplateError(str(as_text(message)))


def strftime_now(form: str) -> str:
    """The present date and time."""
    if len(form) > _MAX_DATE_FORMAT:
        raise BudgetError(f"a date format has {len(form)} characters, more than {_MAX_DATE_FORMAT}")
    spend(256 * len(form))  # the most that strftime writes
    return datetime.now().strftime(form)


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """json.dumps; jinja2's own filter escapes HTML."""
    units = tree_units(value)
    width = max(indent, 0) if isinstance(indent, int) else len(indent) if isinstance(indent, str) else 0
    width = width * MAX_NESTING + (tree_units(separators) if separators else 0)
    spend(ESCAPE_GROWTH * units + 4 * width * (units // NODE_UNITS if width else 0))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


GLOBALS: Mapping[str, Any] = {
    "cycler": Cycler,
    "dict": Dict(),
    "joiner": Joiner,
    "namespace": BoundedNamespace,
    "raise_exception": raise_exception,
    "range": safe_range,
    "strftime_now": strftime_now,
}
