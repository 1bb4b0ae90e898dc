"""How an option is declared: one field of a frozen dataclass, with its type, range, default and one sentence.

    @dataclass(frozen=True, kw_only=True)
    class ServerOptions:
        max_requests: Annotated[int, Range(ge=1, le=1 << 40), Doc("most open requests; more get 429")] = 256

`options_of` lists the declared options. Checks and their messages, the command line, shell completion, the recipe's
schema and tables of the docs are made from that list.

Types: bool, int, float, str, Path, Literal[...], tuple[X, ...], Mapping[str, X], X | None, object; a number may have a
Range, a list Items. A value of any other type is read by a function, Annotated[X, Reader(read)].
"""

import inspect
import math
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ingot.errors import UsageError, did_you_mean, shown

MOST_BYTES = 1 << 50  # far above any machine: a slip is refused when it is read
_UNITS: Mapping[str, int] = {
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
SIZE_PATTERN = rf"([0-9]{{1,16}}(?:\.[0-9]{{1,9}})?) ?({'|'.join(_UNITS)})?"


@dataclass(frozen=True, kw_only=True)
class Range:
    """Bounds of a number, as in `steps: Annotated[int, Range(ge=1, le=1000)] = 10`.

    There is a lower bound, `ge` or `gt`; without an upper one, `le` or `lt`, every finite number above is allowed.

    usual   a hint for messages
    words   what is allowed, for messages that type and bounds would not make well
    advice  what to do instead, for the end of messages
    bytes   the number is a size, which may be written with a unit, such as 8GiB
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    usual: float | None = None
    words: str = ""
    advice: str = ""
    bytes: bool = False

    def __post_init__(self) -> None:
        assert (self.ge is None) != (self.gt is None)
        assert self.le is None or self.lt is None

    def __contains__(self, value: float) -> bool:
        """Whether the number is within the bounds; NaN never is."""
        is_above = value > self.gt if self.gt is not None else self.ge is not None and value >= self.ge
        if self.is_open:
            return is_above and value < math.inf
        return is_above and (value < self.lt if self.lt is not None else self.le is not None and value <= self.le)

    @property
    def is_open(self) -> bool:
        """Whether there is no upper bound."""
        return self.le is None and self.lt is None

    def __str__(self) -> str:
        if self.is_open:
            return f"at least {_number(self.ge)}" if self.ge is not None else f"above {_number(self.gt)}"
        least = f"from {_number(self.ge)}" if self.ge is not None else f"above {_number(self.gt)},"
        most = f"below {_number(self.lt)}" if self.lt is not None else _number(self.le)
        hint = "" if self.usual is None else f" ({_number(self.usual)} is usual)"
        return f"{least} {'to' if self.ge is not None else 'up to'} {most}{hint}"


def _number(value: float | None) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


@dataclass(frozen=True)
class Doc:
    """The meaning of an option, without a period; `none` is what its default means, such as "no limit"."""

    text: str
    none: str = ""


@dataclass(frozen=True)
class Flag:
    """The command line's name of an option that is not --ITS-NAME, the placeholder of its value, and older names."""

    name: str = ""
    metavar: str | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reader:
    """Reads an option of a type of its own: `read` returns the value or raises ValueError with the reason.

    `allowed` says in words what is allowed; without it the message of the ValueError is shown. `schema` is the JSON
    Schema of what it reads, `reads` the type as pydantic checks it. With `is_text` a command line's word is the value,
    and not YAML.
    """

    read: Callable[[Any], Any]
    allowed: str = ""
    schema: Mapping[str, Any] = field(default_factory=dict, hash=False)
    is_text: bool = False
    reads: Any = object


@dataclass(frozen=True)
class Items:
    """Bounds of a list's length; `check` raises ValueError for values that do not go together."""

    least: int
    most: int
    check: Callable[[Any], None]


@dataclass(frozen=True)
class Option:
    """A declared option. `annotation` is its type, with the Range next to the number; `default` may be MISSING."""

    name: str
    annotation: Any
    default: object
    doc: Doc = Doc("")
    flag: Flag = Flag()
    reader: Reader | None = None
    items: Items | None = None

    @property
    def plain_default(self) -> object:
        """The default as plain data that YAML and JSON can hold; MISSING, which equals no value, without one."""
        return plain_value(self.default)

    @property
    def is_optional(self) -> bool:
        """Whether None is allowed."""
        return NoneType in _members(self.annotation)

    @property
    def single(self) -> Any:
        """The type of a value that is not None, with its Range."""
        others = [member for member in _members(self.annotation) if member is not NoneType]
        return others[0] if len(others) == 1 else self.annotation

    @property
    def range(self) -> Range | None:
        """The bounds of a number."""
        return get_args(self.single)[1] if get_origin(self.single) is Annotated else None

    @property
    def is_bytes(self) -> bool:
        """Whether it is a size in bytes."""
        return self.range is not None and self.range.bytes

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that are allowed, for an option that is one of a few."""
        return get_args(self.single) if _is_names(self.single) else ()

    @property
    def meaning(self) -> str:
        """The sentence of a recipe's key, where null is the default."""
        return f"{self.doc.text}; null: {self.doc.none or self.default}"


@cache
def options_of(declaring: type) -> Mapping[str, Option]:
    """The options that a dataclass declares, by name and in order.

    Meanings are those of `Doc`, or of the list in the docstring of the class or of one that it extends.
    """
    hints = get_type_hints(declaring, include_extras=True)
    listed = _listed_docs(declaring)
    found = {}
    for each in fields(declaring):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        found[each.name] = _option(each.name, hints[each.name], default, Doc(listed.get(each.name, "")))
    return found


def _option(name: str, hint: Any, default: object, doc: Doc) -> Option:
    given: dict[type, Any] = {}
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        given = {type(extra): extra for extra in extras}
    bounds = given.get(Range)
    annotation = hint if bounds is None else _bounded(hint, bounds)
    return Option(
        name, annotation, default, given.get(Doc, doc), given.get(Flag, Flag()), given.get(Reader), given.get(Items)
    )


def _bounded(annotation: Any, bounds: Range) -> Any:
    """Put the bounds next to the number of `int | None`."""
    if get_origin(annotation) in (Union, UnionType):
        members = [member if member is NoneType else _bounded(member, bounds) for member in get_args(annotation)]
        return Union[tuple(members)]  # noqa: UP007 - its members are known only here
    return Annotated[annotation, bounds]


def _listed_docs(declaring: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for base in reversed(declaring.__mro__):
        names: list[str] = []
        for line in inspect.cleandoc(vars(base).get("__doc__") or "").splitlines():
            if entry := re.fullmatch(r"(\w+(?:, \w+)*) {2,}(\S.*)", line):
                names = entry[1].split(", ")
                found.update(dict.fromkeys(names, entry[2]))
            elif names and line.startswith("    "):
                found.update({name: f"{found[name]} {line.strip()}" for name in names})
            else:
                names = []
    return found


_Declaring = TypeVar("_Declaring", bound=type)


def documented(declaring: _Declaring) -> _Declaring:
    """Add the list of its options to a dataclass's docstring."""
    width = max(map(len, options_of(declaring))) + 2
    lines = [
        textwrap.fill(f"{name:{width}}{option.doc.text}{_none(option)}", 120, subsequent_indent=" " * width)
        for name, option in options_of(declaring).items()
    ]
    declaring.__doc__ = "\n".join([inspect.cleandoc(declaring.__doc__ or ""), "", *lines])
    return declaring


def _none(option: Option) -> str:
    return f"; {option.default}: {option.doc.none}" if option.doc.none else ""


def convert_option(owner: str, option: str, value: object, annotation: Any) -> Any:
    """Return the value in the annotation's type; UsageError names owner, option, value and what is allowed.

    The value may be plain data from YAML or a command line: a list becomes a tuple, an int becomes a float where the
    annotation is one, and 1e4 becomes the int that it is.
    Written by hand because pydantic, strict or not, takes True for Literal[1] and 4.0 for Literal[4], and in strict
    mode refuses a list for a tuple.
    """
    value = _with_whole_number(value, annotation)
    try:
        return _convert(value, annotation)
    except _WrongTypeError:
        near = did_you_mean(value, get_args(annotation)) if _is_names(annotation) and isinstance(value, str) else ""
        raise UsageError(f"{owner}: {option} is {shown(value)}; allowed: {describe(annotation)}.{near}") from None


Refuse = Callable[[str, str], Exception]
"""Makes the error of a value that is not allowed: from the message and the option's name."""


def _usage_error(message: str, name: str) -> Exception:
    return UsageError(message)


def check_options(made: object, *, refuse: Refuse = _usage_error, full: bool = False) -> None:
    """Convert the values of a dataclass that has just been created to the types of its options.

    A value that is not allowed raises what `refuse` makes of the message of `read_option`, by default a UsageError.
    """
    declaring: type = type(made)
    for option in options_of(declaring).values():
        value = getattr(made, option.name)
        if value is option.default:
            continue
        try:
            object.__setattr__(made, option.name, read_option(option, value, full=full))  # frozen only from here on
        except ValueError as error:
            raise refuse(str(error), option.name) from None


def read_option(option: Option, value: object, *, full: bool = False, plain: bool = False) -> Any:
    """Return one value in its option's type. ValueError with a message that begins with the option's name.

    For a number out of its range the message has the range alone, and it says whether None is allowed; with `full` it
    has type and range. With `plain` the value is plain data of YAML, where a size may have a unit, and the message is
    in the words of YAML.
    """
    if plain:
        value = _of_plain_data(option, value)
    try:
        if option.reader is None or (value is None and option.is_optional):
            return _checked_items(_convert(value, option.annotation), option.items)
        return option.reader.read(value)
    except ValueError as error:
        allowed = option.reader.allowed if option.reader else ""
        message = f" is {shown(value)}; it must be {allowed}" if allowed else f": {error}"
        raise ValueError(f"{option.name}{message}") from None
    except _WrongTypeError as error:
        allowed = _allowed(option, error, _WORDS if plain else _PYTHON_WORDS, full=full)
        given = "null" if plain and value is None else shown(value)
        raise ValueError(f"{option.name} is {given}; it must be {allowed}") from None


def _checked_items(value: Any, items: Items | None) -> Any:
    if items is not None:
        if not items.least <= len(value) <= items.most:
            raise _WrongTypeError
        items.check(value)
    return value


def _of_plain_data(option: Option, value: object) -> object:
    if not option.is_bytes or not isinstance(value, str):
        return _with_whole_number(value, option.annotation)
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ValueError(f"{option.name}: {error}") from None


def _allowed(option: Option, error: "_WrongTypeError", words: Mapping[Any, str], *, full: bool) -> str:
    bounds, found = option.range, describe(option.single, words)
    if option.items is not None:
        return found.replace("a list", f"a list of {option.items.least} to {option.items.most} values")
    if bounds and (bounds.words or bounds.advice):
        return f"{found}: {bounds.advice}" if bounds.advice else found
    if full:
        return found
    found = str(bounds) if isinstance(error, _OutOfRangeError) else found
    return f"{found}, or {words[NoneType]} for the default" if option.is_optional else found


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as 4GiB, 1.5 GB or 4096. Raises ValueError for anything else."""
    found = re.fullmatch(SIZE_PATTERN, text.strip())
    if found is None:
        units = ", ".join(_UNITS)
        raise ValueError(f"{shown(text)} is not a size; write a number of bytes, or one with a unit: {units}")
    return round(float(found[1]) * _UNITS.get(found[2], 1))


_WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    NoneType: "null",
    object: "any value",
    Path: "a path",
}
_PYTHON_WORDS = {**_WORDS, bool: "True or False", NoneType: "None"}


def describe(annotation: Any, words: Mapping[Any, str] = _WORDS) -> str:
    """The values that an annotation allows, in words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _bounds_described(words[args[0]], *args)
    if origin is Literal and words is _PYTHON_WORDS:
        return f"one of {', '.join(map(str, args))}"
    if origin is Literal:
        return " or ".join(repr(arg) if isinstance(arg, str) else str(arg) for arg in args)
    if origin in (Union, UnionType):
        return " or ".join(describe(arg, words) for arg in args)
    if origin is tuple:
        return f"a list, each {describe(args[0], words)}"
    if origin is not None and issubclass(origin, Mapping):
        return f"a mapping from names to {describe(args[1], words)}"
    return words.get(annotation, str(annotation))


def _bounds_described(noun: str, scalar: type, bounds: Range) -> str:
    if bounds.words:
        return bounds.words
    if not bounds.is_open:
        return f"{noun} {bounds}"
    if scalar is int:
        return f"{noun}, {bounds}"
    return f"a finite number, {_number(bounds.ge)} or above" if bounds.ge is not None else f"a finite number {bounds}"


def plain_value(value: object) -> object:
    """The value with tuples as lists and mappings as dicts, all the way down."""
    if isinstance(value, Mapping):
        return {key: plain_value(item) for key, item in value.items()}
    return [plain_value(item) for item in value] if isinstance(value, tuple | list) else value


class _WrongTypeError(Exception):
    """The value does not have the annotation's type."""


class _OutOfRangeError(_WrongTypeError):
    """The value is a number of the right type, and out of its range."""


def _is_names(annotation: Any) -> bool:
    return get_origin(annotation) is Literal and all(isinstance(arg, str) for arg in get_args(annotation))


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _with_whole_number(value: object, annotation: Any) -> object:
    """A float without a fraction, such as 1e4, as an int, where only that fits the annotation."""
    if not isinstance(value, float) or not value.is_integer() or int not in _scalars(annotation):
        return value
    try:
        _convert(value, annotation)
    except _WrongTypeError:
        return int(value)
    return value


def _scalars(annotation: Any) -> list[Any]:
    """The types of the single values that an annotation allows."""
    members = _members(annotation)
    return [get_args(member)[0] if get_origin(member) is Annotated else member for member in members]


def _convert(value: object, annotation: Any) -> Any:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _convert_bounded(value, *args)
    if origin is Literal:
        return _convert_choice(value, args)
    if origin in (Union, UnionType):
        return _convert_union(value, args)
    if origin is tuple:
        return _convert_tuple(value, args[0])
    if origin is not None and issubclass(origin, Mapping):
        return _convert_mapping(value, args[1])
    return _convert_scalar(value, annotation)


def _convert_bounded(value: object, scalar: type, bounds: Range) -> Any:
    number = _convert_scalar(value, scalar)
    if number not in bounds:
        raise _OutOfRangeError
    return number


def _convert_choice(value: object, choices: tuple[object, ...]) -> object:
    for choice in choices:
        if type(value) is type(choice) and value == choice:  # True == 1
            return choice
    raise _WrongTypeError


def _convert_union(value: object, members: tuple[Any, ...]) -> Any:
    reason: type[_WrongTypeError] = _WrongTypeError
    for member in members:
        try:
            return _convert(value, member)
        except _OutOfRangeError:
            reason = _OutOfRangeError
        except _WrongTypeError:
            continue
    raise reason


def _convert_tuple(value: object, item: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _WrongTypeError
    return tuple(_convert(element, item) for element in value)


def _convert_mapping(value: object, item: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _WrongTypeError
    return {key: _convert(element, item) for key, element in value.items()}


def _convert_scalar(value: Any, expected: Any) -> Any:
    if expected is object or type(value) is expected:
        return value
    if expected is Path and isinstance(value, Path):
        return value
    if expected not in (int, float) or isinstance(value, bool) or not isinstance(value, Real):
        raise _WrongTypeError
    if isinstance(value, Integral) and (expected is int or abs(int(value)) < 1 << 1023):  # Python's largest float
        return expected(int(value))  # numpy's integers too
    if isinstance(value, Integral) or expected is int:
        raise _WrongTypeError
    return float(value)
