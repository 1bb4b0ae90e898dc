"""Types, by the tool's schema, for arguments that a format spells as text, such as <parameter=days>7</parameter>."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from ingot.runtime.constraints.schema_rules import pointed
from ingot.runtime.replies.json_scanner import dumped

_MOST_SCHEMAS = 1000


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a tool, which has its name and parameters."""
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def typed_arguments(name: str, arguments: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The arguments of a call with the types of its tool's schema, where a text spells a value of such a type."""
    schema = _schema(name, tools)
    return {
        key: _typed(value, schema.types(key)) if isinstance(value, str) else value for key, value in arguments.items()
    }


def argument_text(name: str, key: str, text: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """One argument of a call as JSON, with the type of its tool's schema."""
    return dumped(typed_arguments(name, {key: text}, tools)[key])


def parameter_names(name: str, tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Names of a function's parameters."""
    return frozenset(each for each in _schema(name, tools).properties if isinstance(each, str))


def is_only_text(name: str, key: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an argument is a text whatever it spells."""
    return not any(kind in _IS_OF for kind in _schema(name, tools).types(key))


@dataclass(frozen=True)
class _Schema:
    """The parameters of a function: a schema from a client, of which any part may be something else than it should."""

    root: Any

    @property
    def properties(self) -> Mapping[str, Any]:
        found = self.root.get("properties") if isinstance(self.root, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def types(self, key: str) -> list[str]:
        """Types that the schema of a parameter allows, in its order."""
        found: list[str] = []
        left, num_seen = [self.properties.get(key)], 0
        while left and num_seen < _MOST_SCHEMAS:
            schema = left.pop(0)
            num_seen += 1
            if isinstance(schema, Mapping):
                found += _own_types(schema)
                left = [*self._parts(schema), *left]
        return list(dict.fromkeys(found))

    def _parts(self, schema: Mapping[str, Any]) -> list[Any]:
        """Schemas of the same value that a schema refers to or is made of."""
        unions = (schema.get(name) for name in ("allOf", "anyOf", "oneOf"))
        parts = [each for union in unions if isinstance(union, list) for each in union]
        return [pointed(self.root, schema["$ref"]), *parts] if "$ref" in schema else parts


def _schema(name: str, tools: Sequence[Mapping[str, Any]]) -> _Schema:
    function = next((each for tool in tools if (each := function_of(tool)).get("name") == name), {})
    return _Schema(function.get("parameters"))


def _own_types(schema: Mapping[str, Any]) -> list[str]:
    """Types that a schema names, or that its values or its other keywords have."""
    declared = schema.get("type")
    found = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []
    types = [one for one in found if isinstance(one, str)]
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [*values, schema["const"]] if "const" in schema else values
    if not types:
        types = [kind for value in values[:_MOST_SCHEMAS] for kind, is_of in _KINDS.items() if is_of(value)]
    if not types and not values:
        types = [kind for kind, keywords in _KEYWORDS.items() if not keywords.isdisjoint(schema)]
    return [*types, "null"] if schema.get("nullable") is True else types


def _typed(text: str, types: Sequence[str]) -> Any:
    """The value that a text spells, of the first type that fits; the text itself where only a string does."""
    for kind in types:
        try:
            value = json.loads({"None": "null", "True": "true", "False": "false"}.get(text.strip(), text))
            # Not where it holds what JSON has no word for: NaN, or a number beyond those of 64 bits.
            json.dumps(value, allow_nan=False)
        except (ValueError, RecursionError):
            continue
        if _IS_OF.get(kind, _no)(value):
            return int(value) if kind == "integer" else value
    return text


def _no(value: Any) -> bool:
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


_IS_OF: dict[str, Callable[[Any], bool]] = {
    "integer": lambda value: _is_number(value) and float(value).is_integer(),
    "number": _is_number,
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
}
_KINDS = {"string": lambda value: isinstance(value, str), **_IS_OF}
_KEYWORDS = {
    "object": {"properties", "required", "additionalProperties", "patternProperties"},
    "array": {"items", "prefixItems", "contains", "minItems", "maxItems", "uniqueItems"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
