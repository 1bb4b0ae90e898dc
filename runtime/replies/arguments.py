"""Types, by the tool's schema, for arguments that a format spells as text, such as <parameter=days>7</parameter>."""

import json
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a tool, which has its name and parameters."""
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def typed_arguments(name: str, arguments: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The arguments of a call with the types of its tool's schema, where a text spells a value of such a type."""
    properties = _properties(name, tools)
    return {
        key: _typed(value, _types(properties.get(key))) if isinstance(value, str) else value
        for key, value in arguments.items()
    }


def argument_text(name: str, key: str, text: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """One argument of a call as JSON, with the type of its tool's schema."""
    return json.dumps(typed_arguments(name, {key: text}, tools)[key], ensure_ascii=False)


def is_only_text(name: str, key: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an argument is a text whatever it spells."""
    return not any(kind in _IS_OF for kind in _types(_properties(name, tools).get(key)))


def _properties(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Schemas of a function's parameters."""
    function = next((each for tool in tools if (each := function_of(tool)).get("name") == name), {})
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _types(schema: Any) -> list[str]:
    """Types that a schema allows, in its order."""
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type", [])
    found = [declared] if isinstance(declared, str) else [one for one in declared if isinstance(one, str)]
    for union in ("anyOf", "oneOf"):
        found += [one for choice in schema.get(union) or () for one in _types(choice)]
    return [*found, "null"] if schema.get("nullable") else found


def _typed(text: str, types: Sequence[str]) -> Any:
    """The value that a text spells, of the first type that fits; the text itself where only a string does."""
    for kind in types:
        try:
            value = json.loads({"None": "null", "True": "true", "False": "false"}.get(text.strip(), text))
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
