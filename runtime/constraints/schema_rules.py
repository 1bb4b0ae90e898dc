"""Rules, in Lark's EBNF, for schemas with numbers that llguidance would change.

Objects, lists, unions, references and constants around such a number are rules here; everything else in the schema
stays `%json`, with the definitions that it refers to. Properties keep the order of the schema, as in llguidance.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeGuard
from urllib.parse import unquote

from ingot.errors import RequestError
from ingot.runtime.constraints.constraint import FIELD, JsonWhitespace
from ingot.runtime.constraints.numbers import NotExpressible, Number, NumberRange, literal

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAPS = frozenset({"patternProperties", "properties"})
DEFINITIONS = frozenset({"$defs", "definitions"})
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
SCHEMAS = frozenset({"additionalItems", "additionalProperties", "items"})
ANNOTATIONS = frozenset(
    {"$anchor", "$comment", "$id", "$schema", "default", "deprecated", "description", "example", "examples", "id"}
    | {"readOnly", "title", "writeOnly"}
)
GUIDANCE = "x-guidance"
"""The key of llguidance's own options in a schema."""
COMPACT: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Natural JSON, such as {"a": 1, "b": [2, 3]}, with or without its spaces."""
_OBJECTS = frozenset({"properties", "required", "additionalProperties"})
_ARRAYS = frozenset({"items", "prefixItems", "additionalItems", "minItems", "maxItems"})
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_STRINGS = frozenset({"minLength", "maxLength", "pattern", "format"})
_LARGE = "a number that is too large or too precise for floats"
_MOST_PREFIX = 64  # items of a list with schemas of their own
MOST_CHARS = 2 << 20
"""Characters of the rules of a schema."""
_BLANK = r"[ \t\r\n]"
_NAME = r'(\\(["\\bfnrt]|u00([01][0-9a-fA-F]|7[fF]))|[^"\\\x00-\x1F\x7F])*'


class Unsatisfiable(RequestError):
    """A place that no value is valid by: a choice or an optional property that is left out, else an error."""


class Rules:
    """Writes the rules of one schema; `lines` are those that its expressions need.

    prefix   of the names of rules
    """

    def __init__(
        self,
        prefix: str,
        ranges: Mapping[int, NumberRange],
        special: set[int],
        places: Mapping[int, str],
        root: Any,
        whitespace: JsonWhitespace,
        kind: str = "json_schema",
    ) -> None:
        self.lines: list[str] = []
        self._prefix = prefix
        self._ranges = ranges
        self._special = special
        self._places = places
        self._root = root
        self._kind = kind
        self._names: dict[object, str] = {}
        self._guidance = self._options(whitespace)
        self._num_chars = 0
        blank = "" if not self._guidance.get("whitespace_flexible", True) else f"{_BLANK}*"
        self._comma = self._terminal(f"{blank}{self._guidance.get('item_separator', ',')}{blank}")
        self._colon = self._terminal(f"{blank}{self._guidance.get('key_separator', ':')}{blank}")
        self._blank = f" {self._terminal(_BLANK + '+')}? " if blank else " "

    def expression(self, schema: Any) -> str:
        """An expression of the texts that are valid by a schema."""
        if id(schema) not in self._special:
            return self._plain(schema)
        if id(schema) not in self._names:
            self._names[id(schema)] = name = self._name()
            try:
                self._add(name, self._special_schema(schema))
            except Unsatisfiable:
                del self._names[id(schema)]
                raise
        return self._names[id(schema)]

    def _options(self, whitespace: JsonWhitespace) -> Mapping[str, Any]:
        own = self._root.get(GUIDANCE)
        if not isinstance(own, dict):
            return COMPACT if whitespace == "compact" else {}
        unknown = own.keys() - {*COMPACT, "coerce_one_of", "lenient"}
        if unknown:
            raise self._refusal(
                self._root, f"the option {min(unknown)} of {GUIDANCE} cannot be combined with {_LARGE}; leave one out"
            )
        return own

    def _special_schema(self, schema: Mapping[str, Any]) -> str:
        keys = schema.keys() - ANNOTATIONS - DEFINITIONS - {GUIDANCE}
        known = {"type", "const", "enum"} | _OBJECTS | _ARRAYS | _NUMBERS | _STRINGS | LISTS | MAPS | {"$ref"}
        keys = {key for key in keys if key in known | {"minProperties", "maxProperties"}}
        for union in ("$ref", "allOf", "anyOf", "oneOf"):
            if union in keys:
                return self._union(schema, union, keys - {union})
        if keys & {"const", "enum"}:
            return self._constants(schema, keys - {"const", "enum"})
        return " | ".join(self._by_type(schema, keys))

    def _union(self, schema: Mapping[str, Any], key: str, others: set[str]) -> str:
        choices = [pointed(self._root, schema[key])] if key == "$ref" else schema[key]
        if key == "allOf" and len(choices) > 1:
            raise self._refusal(schema, f"allOf cannot be combined with {_LARGE}; write it as one schema")
        if others - {"type"}:
            names = ", ".join(sorted(others))
            raise self._refusal(schema, f"{key} next to {names} cannot be combined with {_LARGE}; write one schema")
        if "type" in others and not all(types_of(each) <= types_of(schema) for each in choices):
            raise self._refusal(schema, f"{key} next to another type cannot be combined with {_LARGE}; leave type out")
        if key == "oneOf" and not self._guidance.get("coerce_one_of") and not _are_disjoint(choices):
            raise self._refusal(
                schema,
                f"oneOf cannot be combined with {_LARGE}, unless its types differ; use anyOf, or add"
                f' "{GUIDANCE}": {{"coerce_one_of": true}} to the schema, which takes oneOf for anyOf',
            )
        return " | ".join(one for each in choices if (one := self._possible(each))) or self._never(schema)

    def _possible(self, schema: Any) -> str:
        """The expression of a schema; "" where no value is valid."""
        if schema is False:
            return ""
        try:
            return self.expression(schema)
        except Unsatisfiable:
            return ""

    def _never(self, schema: Any, reason: str = "no value is allowed") -> str:
        raise Unsatisfiable(str(self._refusal(schema, f"{reason}; correct it")), field=FIELD)

    def _constants(self, schema: Mapping[str, Any], others: set[str]) -> str:
        if others - {"type"} - _NUMBERS:
            names = ", ".join(sorted(others - {"type"} - _NUMBERS))
            raise self._refusal(schema, f"const or enum next to {names} cannot be combined with {_LARGE}")
        values = schema.get("enum", [schema.get("const")])
        if "const" in schema and "enum" in schema:
            values = [value for value in values if value == schema["const"]]
        limits = self._ranges.get(id(schema)) or NumberRange()
        kept = [
            value for value in values if _is_of(value, types_of(schema)) and (not is_number(value) or value in limits)
        ]
        return " | ".join(self._constant(value, schema) for value in kept) or self._never(schema)

    def _constant(self, value: Any, schema: Any) -> str:
        if isinstance(value, list):
            return self._wrapped("[", [self._constant(each, schema) for each in value], "]")
        if isinstance(value, dict):
            members = [f"{quoted(key)} {self._colon} {self._constant(each, schema)}" for key, each in value.items()]
            return self._wrapped("{", members, "}")
        if is_number(value):
            try:
                return json.dumps(literal(value))
            except NotExpressible as error:
                raise self._refusal(schema, f"a number cannot be followed: {error}") from error
        return quoted(value)

    def _wrapped(self, opening: str, members: Sequence[str], closing: str) -> str:
        inner = f" {self._comma} ".join(members)
        return f'"{opening}"{self._blank}{inner}{self._blank}"{closing}"'

    def _by_type(self, schema: Mapping[str, Any], keys: set[str]) -> Iterator[str]:
        types, limits = types_of(schema), self._ranges.get(id(schema))
        rest = set(types)
        if limits is not None:
            rest -= {"integer", "number"}
            if not limits.is_empty:
                yield self._number(limits)
            elif not rest:
                self._never(schema, "no number is between its bounds")
        for kind, names, write in (("object", _OBJECTS, self._object), ("array", _ARRAYS, self._array)):
            if kind in types and any(
                id(each) in self._special for key, each in children(schema) if key in names | MAPS
            ):
                rest -= {kind}
                yield write(schema, keys)
        if rest:
            yield self._plain({**schema, "type": [each for each in TYPES if each in rest]})

    def _number(self, limits: NumberRange) -> str:
        if limits not in self._names:
            name = self._names[limits] = self._name().upper()
            self._count(limits.terminals(name))
        return self._names[limits]

    def _object(self, schema: Mapping[str, Any], keys: set[str]) -> str:
        if lacking := keys & {"patternProperties", "minProperties", "maxProperties"}:
            raise self._refusal(schema, f"{min(lacking)} cannot be combined with {_LARGE}; leave it out")
        rest = schema.get("additionalProperties", True)
        required = schema.get("required", [])
        properties = {**schema.get("properties", {})}
        properties |= {name: rest for name in required if name not in properties}
        members = []
        for name, each in properties.items():
            if value := self._possible(each):
                members.append((f"{quoted(name)} {self._colon} {value}", name in required))
            elif name in required:
                self._never(schema, f"the property {json.dumps(name)} is required, and no value of it is allowed")
        others = self._possible(rest)
        more = f"{self._other_name(properties)} {self._colon} {others}" if others else ""
        return f'"{{"{self._blank}{self._members(members, more)}{self._blank}"}}"'

    def _members(self, members: Sequence[tuple[str, bool]], more: str) -> str:
        """Members in order, those that are not required perhaps, and after them any number of others."""
        following = f"({self._comma} {more})*" if more else ""
        alone = [f"({more} {following})?" if more else '""']
        first_required = next((place for place, (_, is_required) in enumerate(members) if is_required), len(members))
        for place in reversed(range(len(members))):
            member, is_required = members[place]
            if place <= first_required:  # the text may begin with it
                following = self._rule(following)
                alone = [f"{member} {following}", *([] if is_required else alone)]
            separated = f"{self._comma} {member}"
            following = f"{separated if is_required else f'({separated})?'} {following}"
        return f"({' | '.join(alone)})"

    def _rule(self, expression: str) -> str:
        """A rule's name for a longer expression, or a short one itself."""
        if len(expression) < 40:
            return expression
        if expression not in self._names:
            name = self._names[expression] = self._name()
            self._add(name, expression)
        return self._names[expression]

    def _other_name(self, taken: Mapping[str, Any]) -> str:
        """A terminal of names other than these."""
        found = f'/"{_NAME}"/'
        if taken:
            names = "|".join(escaped(quoted_text(name)) for name in taken)
            found += f" & ~/({names})/"
        if found not in self._names:
            name = self._names[found] = self._name().upper()
            self._add(name, found)
        return self._names[found]

    def _array(self, schema: Mapping[str, Any], keys: set[str]) -> str:
        items = schema.get("items", True)
        is_old = isinstance(items, list)
        prefix = items if is_old else schema.get("prefixItems", [])
        rest = schema.get("additionalItems", True) if is_old else items
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if rest is False:
            most = len(prefix) if most is None else min(most, len(prefix))
        if most is not None and least > most:
            self._never(schema, f"minItems {least} is greater than the {most} items that are allowed")
        prefix = prefix[:most]
        if len(prefix) > _MOST_PREFIX:
            raise self._refusal(schema, f"more than {_MOST_PREFIX} items of their own cannot be combined with {_LARGE}")
        most_more = None if most is None else most - len(prefix)
        more = ""
        if most_more != 0:
            each = self.expression(rest)
            more = self._items(each, max(0, least - len(prefix)), most_more, is_first=not prefix)
        for place in reversed(range(len(prefix))):
            separator = f"{self._comma} " if place else ""
            more = f"{separator}{self.expression(prefix[place])} {more}"
            more = more if place < least else f"({more})?"
        return f'"["{self._blank}{more}{self._blank}"]"'

    def _items(self, each: str, least: int, most: int | None, *, is_first: bool) -> str:
        """So many items, after others or at the beginning."""
        if not is_first:
            return f"({self._comma} {each}){_times(least, most)}"
        following = ""
        if most != 1:
            following = f"({self._comma} {each}){_times(max(0, least - 1), None if most is None else most - 1)}"
        return f"{each} {following}" if least else f"({each} {following})?"

    def _plain(self, schema: Any) -> str:
        """A schema as llguidance compiles it, with what it refers to."""
        # Places are kept, and so are their identities; schemas that are made here are not.
        is_place = not isinstance(schema, bool) and id(schema) in self._places
        key = ("plain", id(schema) if is_place else dumped(schema))
        if key not in self._names:
            text = dumped(self._self_contained(schema))
            self._require_room(len(text))
            self._names[key] = self._rule(f"%json {text}")
        return self._names[key]

    def _self_contained(self, schema: Any) -> Any:
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        defined: dict[int, tuple[str, Any]] = {}
        found = self._renamed({key: each for key, each in schema.items() if key not in DEFINITIONS}, defined)
        definitions, done = {}, 0
        while done < len(defined):
            name, value = list(defined.values())[done]
            definitions[name] = self._renamed(value, defined)
            done += 1
        head = {GUIDANCE: self._guidance} if self._guidance else {}
        if "$schema" in self._root:
            head["$schema"] = self._root["$schema"]
        return {**head, **found, **({"$defs": definitions} if definitions else {})}

    def _renamed(self, value: Any, defined: dict[int, tuple[str, Any]]) -> Any:
        """A schema whose references are to definitions of its own."""
        if not isinstance(value, dict):
            return value
        found = {}
        for key, each in value.items():
            if key == "$ref" and (target := pointed(self._root, each)) is not None:
                name, _ = defined.setdefault(id(target), (f"d{len(defined)}", target))
                each = f"#/$defs/{name}"
            elif key in MAPS and isinstance(each, dict):
                each = {name: self._renamed(one, defined) for name, one in each.items()}
            elif (key in LISTS or key == "items") and isinstance(each, list):
                each = [self._renamed(one, defined) for one in each]
            elif key in SCHEMAS:
                each = self._renamed(each, defined)
            if key not in DEFINITIONS:
                found[key] = each
        return found

    def _terminal(self, expression: str) -> str:
        if expression not in self._names:
            self._names[expression] = name = self._name().upper()
            self._add(name, f"/{expression}/")
        return self._names[expression]

    def _name(self) -> str:
        return f"{self._prefix}_{len(self._names)}_{len(self.lines)}"

    def _add(self, name: str, expression: str) -> None:
        self._count([f"{name}: {expression}"])

    def _count(self, lines: list[str]) -> None:
        self.lines += lines
        self._require_room(sum(map(len, lines)))

    def _require_room(self, num_chars: int) -> None:
        self._num_chars += num_chars
        if self._num_chars > MOST_CHARS:
            raise self._refusal(self._root, f"it takes too many rules to follow with {_LARGE}; make it simpler")

    def _refusal(self, schema: Any, reason: str) -> RequestError:
        return refusal(self._kind, self._places.get(id(schema), "#"), reason)


def refusal(kind: str, place: str, reason: str) -> RequestError:
    """The error for a place of a schema that cannot be followed."""
    return RequestError(f"the {kind} cannot be compiled: at {place} {reason}", field=FIELD)


def pointed(root: Any, reference: object) -> Any:
    """The value that a reference within a schema points to; None without one."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    value = root
    for name in reference.removeprefix("#").split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and name.isdecimal() and len(name) < 10 and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            return None
    return value


def children(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas that apply where this one does, or to parts of its values, with their keywords."""
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            yield from ((key, each) for each in value.values())
        elif (key in LISTS or key == "items") and isinstance(value, list):
            yield from ((key, each) for each in value)
        elif key in SCHEMAS:
            yield key, value


def is_number(value: object) -> TypeGuard[Number]:
    """Whether a value of JSON is a number."""
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def dumped(value: Any) -> str:
    """The JSON text of a value whose numbers are integers and Decimals."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted_text(key)}: {dumped(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(dumped, value)) + "]"
    return str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False)


def brief(value: Any) -> str:
    """The JSON text of a value, without its middle where it is long."""
    text = dumped(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text):,} characters)"


def quoted_text(text: str) -> str:
    """A text as JSON."""
    return json.dumps(text, ensure_ascii=False)


def quoted(value: Any) -> str:
    """A value's JSON text as a string of Lark."""
    return json.dumps(dumped(value), ensure_ascii=False)


def escaped(text: str) -> str:
    """A regular expression for a text: other escapes than these differ between dialects."""
    return "".join(each if each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text)


def _times(least: int, most: int | None) -> str:
    if (least, most) == (0, None):
        return "*"
    return f"{{{least},{'' if most is None else most}}}"


def types_of(schema: Any) -> set[str]:
    """Types that a schema allows by its own keywords."""
    declared = schema.get("type", TYPES) if isinstance(schema, dict) else TYPES
    found = {declared} if isinstance(declared, str) else {*declared}
    return found | {"integer"} if "number" in found else found


def _is_of(value: Any, types: set[str]) -> bool:
    """Whether a value has one of these types."""
    if is_number(value):
        return bool(types & ({"number", "integer"} if Fraction(value).denominator == 1 else {"number"}))
    names = {type(None): "null", bool: "boolean", str: "string", list: "array", dict: "object"}
    return names[type(value)] in types


def _are_disjoint(choices: Sequence[Any]) -> bool:
    seen: set[str] = set()
    for each in choices:
        types = types_of(each)
        if types & seen:
            return False
        seen |= types
    return True
