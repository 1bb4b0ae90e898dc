"""JSON schemas as grammars: what changes nothing is left out, dates and numbers are exact, refusals name their place.

llguidance compiles most schemas (`%json`). It reads numbers as floats and refuses some keywords at every value, so each
place of a schema is read here first. A schema with a number that llguidance would change is written as rules around
that number (`schema_rules`), the rest of it still as `%json`.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import lru_cache
from typing import Any, TypeGuard

from ingot.errors import one_of, shown
from ingot.runtime.constraints.constraint import MAX_DEPTH, JsonWhitespace
from ingot.runtime.constraints.dates import PATTERNS
from ingot.runtime.constraints.numbers import LARGEST_DOUBLE, NotExpressible, NumberRange, exact, is_native_constant
from ingot.runtime.constraints.schema_rules import (
    ANNOTATIONS,
    COMPACT,
    DEFINITIONS,
    GUIDANCE,
    LISTS,
    MAPS,
    MOST_CHARS,
    SCHEMAS,
    TYPES,
    Rules,
    brief,
    children,
    dumped,
    is_number,
    pointed,
    refusal,
    types_of,
)

_COUNTS = frozenset({"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"})
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_VALUES = frozenset({"const", "default", "enum", "example", "examples"})  # no schemas, whatever they look like
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
"""Formats of texts that are followed."""
_HINTS = frozenset({"binary", "double", "float", "int32", "int64", "password", "unknown"})
"""Formats of OpenAPI that exclude no text."""
_JSON_IN_LARK = re.compile(
    r"""(?P<other>"(?:\\.|[^"\\])*"|//[^\n]*|\#[^\n]*|/(?:\\.|[^/\\\n])+/)|(?P<json>%json\s*)|(?P<lark>%lark\b)""",
    re.VERBOSE,
)
# The drafts of JSON schema that have a keyword: what a draft does not know changes nothing in its schemas.
_SINCE = {
    "contains": 6,
    "propertyNames": 6,
    "if": 7,
    "then": 7,
    "else": 7,
    "not": 4,
    "uniqueItems": 4,
    "dependencies": 4,
}
_LATEST = 2019
_KEPT_EXPRESSIONS = 128
_DRAFT = re.compile(r"draft-0([467])\b")


def schema_grammar(source: str, whitespace: JsonWhitespace) -> str:
    """The grammar, in Lark's EBNF, of the texts that are valid by a schema. RequestError names place and value."""
    read = _Schema(source, "json_schema")
    if not read.is_special:
        return f"start: %json {spaced(read.text(source), whitespace)}"
    start, lines = read.ruled("json", whitespace)
    return "\n".join([f"start: {start}", *lines])


@lru_cache(_KEPT_EXPRESSIONS)
def schema_expression(source: str, whitespace: JsonWhitespace) -> str:
    """The same within a grammar, which `exact_grammar` makes exact. RequestError as above.

    The latest are kept: clients send the schemas of their tools with each request.
    """
    schema_grammar(source, whitespace)
    return f"%json {spaced(source, whitespace)}"


def exact_grammar(grammar: str) -> str:
    """A grammar whose schemas (`%json`) are exact, too."""
    if "%json" not in grammar:
        return grammar
    found, lines, place, num_chars, is_nested = [], list[str](), 0, 0, False
    prefix = "json"
    while prefix in grammar.replace("%json", "").lower():
        prefix += "x"
    while match := _JSON_IN_LARK.search(grammar, place):
        found.append(grammar[place : match.end()])
        place = match.end()
        is_nested |= bool(match["lark"])
        if match["json"] is None or (text := _json_at(grammar, place)) is None:
            continue
        read = _Schema(text, "grammar")
        place += len(text)
        if not read.is_special:
            found.append(read.text(text))
            continue
        if is_nested:
            reason = "it has a number that is too large or too precise for a schema inside of %lark; move it out"
            raise refusal("grammar", "#", reason)
        found[-1] = found[-1].removesuffix(match["json"])
        expression, more = read.ruled(f"{prefix}{len(lines)}", "flexible")
        found.append(expression)
        lines += more
        num_chars += sum(map(len, more))
        if num_chars > MOST_CHARS:
            raise refusal("grammar", "#", "its schemas take too many rules; make it simpler")
    return "\n".join(["".join([*found, grammar[place:]]), *lines])


def spaced(schema: str, whitespace: JsonWhitespace) -> str:
    """The JSON text of a schema with the option for its white space, unless it has options of its own."""
    value = json.loads(schema)
    if whitespace == "flexible" or value is False or (isinstance(value, dict) and GUIDANCE in value):
        return schema
    rest = schema.strip().removeprefix("{").lstrip() if value and isinstance(value, dict) else "}"
    return f'{{"{GUIDANCE}": {json.dumps(COMPACT)}{", " if rest != "}" else ""}{rest}'


def _json_at(text: str, place: int) -> str | None:
    """The JSON value at a place; None where llguidance will say what is wrong."""
    try:
        _, end = json.JSONDecoder().raw_decode(text, place)
    except (ValueError, RecursionError):
        return None
    return text[place:end]


class _Schema:
    """A schema, place by place.

    root      without what changes nothing
    ranges    of the places whose numbers llguidance would change, by the identity of the place's object
    special   places that have such numbers, or contain or refer to one that does
    places    JSON pointers
    """

    def __init__(self, source: str, kind: str) -> None:
        self.ranges: dict[int, NumberRange] = {}
        self.places: dict[int, str] = {}
        self.special: set[int] = set()
        self._kind = kind
        self._is_changed = False
        self._num_chars = 0
        try:
            self._given = json.loads(source, parse_float=exact)
        except NotExpressible as error:
            raise refusal(kind, "#", str(error)) from error
        if _depth(self._given) > MAX_DEPTH:
            raise refusal(kind, "#", f"it is nested more than {MAX_DEPTH} levels deep; move its inner parts to $defs")
        draft = _DRAFT.search(str(self._given.get("$schema"))) if isinstance(self._given, dict) else None
        self._draft = int(draft[1]) if draft else _LATEST
        self._reached = self._reachable()
        self.root = self._read(self._given, "#")
        if self.special:
            self._spread()

    @property
    def is_special(self) -> bool:
        """Whether llguidance would change a number of it."""
        return bool(self.special)

    def ruled(self, prefix: str, whitespace: JsonWhitespace) -> tuple[str, list[str]]:
        """An expression of its texts, and the rules that it needs, whose names begin with a prefix."""
        rules = Rules(prefix, self.ranges, self.special, self.places, self.root, whitespace, self._kind)
        try:
            return rules.expression(self.root), rules.lines
        except RecursionError:
            raise refusal(self._kind, "#", "it refers through too many steps; make it flatter") from None

    def text(self, source: str) -> str:
        """Its JSON text: as it was given, unless it was changed."""
        return dumped(self.root) if self._is_changed else source

    def _reachable(self) -> set[int]:
        """Places that the root contains or refers to: definitions that are not used may have anything."""
        found, waiting = set[int](), [self._given]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict) and id(value) not in found:
                found.add(id(value))
                waiting += [each for _, each in children(value)]
                waiting.append(pointed(self._given, value.get("$ref")))
        return found

    def _read(self, value: Any, place: str) -> Any:
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            raise refusal(self._kind, place, f"it is {shown(value)}; a schema is an object, true or false")
        kept = self._known(value, place)
        read = {}
        for key, each in kept.items():
            self._check(key, each, f"{place}/{key}")
            read[key] = self._inner(key, each, place)
        read = self._dated(read, place)
        self.places[id(read)] = place
        self._measure(read, place)
        return read

    def _inner(self, key: str, value: Any, place: str) -> Any:
        if key in MAPS:
            return {name: self._read(each, f"{place}/{key}/{_in_pointer(name)}") for name, each in value.items()}
        if key in LISTS or (key == "items" and isinstance(value, list)):
            return [self._read(each, f"{place}/{key}/{number}") for number, each in enumerate(value)]
        if key in SCHEMAS:
            return self._read(value, f"{place}/{key}")
        if key in _COUNTS and isinstance(value, Decimal):
            self._is_changed = True
            return int(value)
        return value if key in _VALUES else self._unread(value, f"{place}/{key}")

    def _unread(self, value: Any, place: str) -> Any:
        """A value of an unknown keyword, or definitions: what is referred to in it is read, all else left as it is."""
        if isinstance(value, list):
            return [self._unread(each, f"{place}/{number}") for number, each in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if id(value) in self._reached:
            return self._read(value, place)
        return {name: self._unread(each, f"{place}/{_in_pointer(name)}") for name, each in value.items()}

    def _known(self, schema: Mapping[str, Any], place: str) -> dict[str, Any]:
        """The keywords of a place that change something. RequestError for those that llguidance lacks."""
        kept, lacking = dict(schema), []
        for key, value in schema.items():
            if value is None and key not in _VALUES:
                del kept[key]  # as writers of optional fields spell what is absent
            elif (is_neutral := _NEUTRAL.get(key)) is None:
                continue
            elif self._draft < _SINCE.get(key, _LATEST) or is_neutral(schema, value):
                del kept[key]
            elif key == "unevaluatedProperties" and not kept.keys() & _APPLICATORS:
                kept["additionalProperties"] = kept.pop(key)
            else:
                lacking.append(json.dumps(key, ensure_ascii=False))
        if lacking:
            names = ", ".join(sorted(lacking))
            reason = f"it uses keywords that are not supported: {names}; leave them out, or express them otherwise"
            raise refusal(self._kind, place, reason)
        self._is_changed |= kept.keys() != schema.keys()
        return kept

    def _check(self, key: str, value: Any, place: str) -> None:
        """Refuse a value that a keyword cannot have."""
        expected = _EXPECTED.get(key)
        if expected is not None and not expected.fits(value):
            raise refusal(self._kind, place, f"it is {brief(value)}; it must be {expected.words}")

    def _dated(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """The schema with a pattern in place of a date's format, and without a format that excludes nothing."""
        name = schema.get("format")
        if name is not None and name not in FORMATS and name not in _HINTS and "string" in schema.get("type", TYPES):
            raise refusal(self._kind, f"{place}/format", f"it is {brief(name)}; it must be {one_of(FORMATS)}")
        if name in _HINTS:
            self._is_changed = True
            return {key: value for key, value in schema.items() if key != "format"}
        if name not in PATTERNS or "pattern" in schema:
            return schema
        self._is_changed = True
        named = {("pattern" if key == "format" else key): value for key, value in schema.items()}
        return {**named, "pattern": PATTERNS[name]}

    def _measure(self, schema: dict[str, Any], place: str) -> None:
        """Note the numbers of a place that llguidance would change."""
        types = types_of(schema)
        if not types & {"number", "integer"}:
            return
        if any(not _is_native(value) for value in (schema.get("const"), *(schema.get("enum") or ()))):
            self.special.add(id(schema))
        if not schema.keys() & {*_BOUNDS}:
            return
        found = _range_of(schema, is_integer="number" not in types)
        for key in ("minimum", "exclusiveMinimum") if found.low is None else ():
            self._is_changed |= schema.pop(key, None) is not None
        for key in ("maximum", "exclusiveMaximum") if found.high is None else ():
            self._is_changed |= schema.pop(key, None) is not None
        if found.is_native:
            return
        try:
            # The bounds of an empty range are checked, too.
            self._num_chars += sum(map(len, found.terminals("X")))
        except NotExpressible as error:
            raise refusal(self._kind, place, f"its numbers ({_said(schema)}) cannot be followed: {error}") from error
        if self._num_chars > MOST_CHARS:
            raise refusal(self._kind, place, f"its numbers ({_said(schema)}) and those before take too many rules")
        self.special.add(id(schema))
        self.ranges[id(schema)] = found

    def _spread(self) -> None:
        """Mark the places that contain a special one, or refer to it."""
        users: dict[int, list[int]] = {}
        reached, waiting = set[int](), [self.root]
        while waiting:
            value = waiting.pop()
            if not isinstance(value, dict) or id(value) in reached:
                continue
            reached.add(id(value))
            for inner in [*(each for _, each in children(value)), pointed(self.root, value.get("$ref"))]:
                if isinstance(inner, dict):
                    users.setdefault(id(inner), []).append(id(value))
                    waiting.append(inner)
        self.special &= reached
        marked = [*self.special]
        while marked:
            for user in users.get(marked.pop(), ()):
                if user not in self.special:
                    self.special.add(user)
                    marked.append(user)


@dataclass(frozen=True)
class _Expected:
    """Values that a keyword may have, and how that is said."""

    words: str
    fits: Callable[[Any], bool] = field(repr=False)


def _is_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_BOUND = _Expected("a number", is_number)
_STRICT = _Expected("a number", lambda value: is_number(value) or isinstance(value, bool))
_TEXT = _Expected("a text", lambda value: isinstance(value, str))
_OBJECT = _Expected("an object of schemas", lambda value: isinstance(value, dict))
_LIST = _Expected("a list of schemas", lambda value: isinstance(value, list))
_COUNT = _Expected(
    "a whole number from 0 to 4294967296",
    lambda value: is_number(value) and value in NumberRange(0, 1 << 32, integer=True),
)
_EXPECTED: Mapping[str, _Expected] = {
    **dict.fromkeys(_COUNTS, _COUNT),
    **dict.fromkeys(MAPS, _OBJECT),
    **dict.fromkeys(LISTS, _LIST),
    "type": _Expected(
        f"{one_of(TYPES)}, or a list of these",
        lambda value: value in TYPES if isinstance(value, str) else _is_texts(value) and {*value} <= {*TYPES},
    ),
    "minimum": _BOUND,
    "maximum": _BOUND,
    "exclusiveMinimum": _STRICT,
    "exclusiveMaximum": _STRICT,
    "multipleOf": _Expected("a number above 0", lambda value: is_number(value) and value > 0),
    "pattern": _TEXT,
    "format": _TEXT,
    "$ref": _TEXT,
    "required": _Expected("a list of texts", _is_texts),
    "enum": _Expected("a list of at least one value", lambda value: isinstance(value, list) and bool(value)),
}

_APPLICATORS = frozenset({"$ref", "additionalProperties", "allOf", "anyOf", "oneOf", "patternProperties"})


def _is_true(value: object) -> bool:
    """Whether a schema excludes nothing."""
    return value is True or (isinstance(value, dict) and value.keys() <= ANNOTATIONS | DEFINITIONS)


def _is_false(value: object) -> bool:
    return value is False or (isinstance(value, dict) and "not" in value and _is_true(value["not"]))


def _allows_names(value: object) -> bool:
    """Whether a schema excludes no text."""
    if not isinstance(value, dict):
        return value is True
    types = value.get("type", "string")
    about_others = {*_BOUNDS, *MAPS, *SCHEMAS, "prefixItems", "required", "maxItems", "minItems", "uniqueItems"}
    rest = value.keys() - {"type"} - ANNOTATIONS - DEFINITIONS - about_others
    is_any = all(key == "minLength" and value[key] == 0 for key in rest)
    return (types == "string" or (isinstance(types, list) and "string" in types)) and is_any


def _requires_nothing_new(schema: Mapping[str, Any], value: object) -> bool:
    """Whether properties require, in the presence of others, only what is required anyway, or nothing."""
    required = schema.get("required")
    known = {*required} if _is_texts(required) else set()
    if not isinstance(value, dict):
        return False
    return all(known.issuperset(each) if _is_texts(each) else _is_true(each) for each in value.values())


def _lacks_condition(schema: Mapping[str, Any], value: object) -> bool:
    branches = [schema[key] for key in ("then", "else") if key in schema]
    return "if" not in schema or all(map(_is_true, branches))


def _counts_nothing(schema: Mapping[str, Any], value: object) -> bool:
    """Whether `contains` and its counts exclude nothing."""
    if "contains" not in schema:
        return True
    return schema.get("minContains") == 0 and schema.get("maxContains") is None


_NEUTRAL: Mapping[str, Callable[[Mapping[str, Any], Any], bool]] = {
    "contains": _counts_nothing,
    "minContains": _counts_nothing,
    "maxContains": _counts_nothing,
    "uniqueItems": lambda schema, value: value is False or schema.get("maxItems") in (0, 1),
    "unevaluatedItems": lambda schema, value: _is_true(value),
    "unevaluatedProperties": lambda schema, value: _is_true(value) or "additionalProperties" in schema,
    "propertyNames": lambda schema, value: _allows_names(value),
    "dependentRequired": _requires_nothing_new,
    "dependentSchemas": _requires_nothing_new,
    "dependencies": _requires_nothing_new,
    "not": lambda schema, value: _is_false(value),
    "if": _lacks_condition,
    "then": _lacks_condition,
    "else": _lacks_condition,
    "$dynamicAnchor": lambda schema, value: True,
    "$dynamicRef": lambda schema, value: False,
    "$recursiveAnchor": lambda schema, value: True,
    "$recursiveRef": lambda schema, value: False,
}
"""Keywords that llguidance refuses at every value, and whether they change nothing at theirs."""


def _range_of(schema: Mapping[str, Any], *, is_integer: bool) -> NumberRange:
    """The numbers of a place, without bounds that exclude no number that readers of JSON can hold."""
    found = NumberRange(integer=is_integer, multiple_of=schema.get("multipleOf"))
    low, strict_low = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, strict_high = schema.get("maximum"), schema.get("exclusiveMaximum")
    if low is not None:
        found = found.above(low, excludes=strict_low is True)
    if high is not None:
        found = found.below(high, excludes=strict_high is True)
    if is_number(strict_low):
        found = found.above(strict_low, excludes=True)
    if is_number(strict_high):
        found = found.below(strict_high, excludes=True)
    if found.low is not None and found.low <= -LARGEST_DOUBLE:
        found = replace(found, low=None, excludes_low=False)
    if found.high is not None and found.high >= LARGEST_DOUBLE:
        found = replace(found, high=None, excludes_high=False)
    return found


def _is_native(value: object) -> bool:
    """Whether llguidance spells all numbers of a constant."""
    if isinstance(value, list):
        return all(map(_is_native, value))
    if isinstance(value, dict):
        return all(map(_is_native, value.values()))
    return not is_number(value) or is_native_constant(value)


def _said(schema: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {brief(schema[key])}" for key in _BOUNDS if key in schema)


def _in_pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _depth(value: object) -> int:
    """Levels of a value, up to one more than are allowed."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [each for one in level if isinstance(one, dict | list) for each in _values(one)]
    return depth


def _values(value: dict[str, Any] | list[Any]) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else value
