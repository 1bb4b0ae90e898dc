"""The recipe's JSON Schema, by which editors complete and check recipes: what load.py accepts in one file.

It is of draft 7, which the YAML language server reads. Sections and gates may be null and incomplete, because a recipe
that extends another changes, completes or removes them. Contradictions between keys are left to load.py.

recipes/recipe.schema.json is its text; `python -m ingot.pipeline.recipe.json_schema` prints it.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from ingot.artifact.metrics import METRICS, MetricFacts
from ingot.options import Option, Range, options_of
from ingot.passes.base import Pass
from ingot.passes.registry import load_pass_class, pass_names
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.recipe.sections import GateLimit
from ingot.pipeline.targets.table import TARGETS
from ingot.planning.service_levels import service_levels

Schema = dict[str, Any]

_NULL: Schema = {"type": "null"}
_SCALARS: Mapping[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    NoneType: _NULL,
    object: {},
}
_LEVEL_NAME: Schema = {"enum": list(service_levels()), "description": "service level of `ingot plan`, with its numbers"}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def recipe_json_schema() -> Schema:
    """Return the JSON Schema of a recipe, with the options of every registered pass and the limits of every metric."""
    generated = Recipe.model_json_schema(mode="validation")
    properties = _inlined(generated["properties"], generated.get("$defs", {}))
    extends = {"type": "string", "description": "recipe that this one changes: the name of one that ships, or a path"}
    properties["target"] |= {"enum": list(TARGETS)}
    properties["passes"] |= {"type": ["array", "null"], "items": _pass_items()}
    properties["gates"] = _gates(properties["gates"]["description"])
    _latency_keys(properties["latency"])["slo"]["anyOf"].append(_LEVEL_NAME)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Ingot recipe",
        "description": Recipe.__doc__,
        "type": "object",
        "properties": {"extends": extends, **properties},
        "additionalProperties": False,
    }


def _latency_keys(section: Schema) -> Schema:
    """The keys of a section that may be null."""
    keys: Schema = next(each["properties"] for each in section["anyOf"] if "properties" in each)
    return keys


def schema_text() -> str:
    """Return the text of recipes/recipe.schema.json."""
    return f"{json.dumps(recipe_json_schema(), indent=1, ensure_ascii=False)}\n"


def _inlined(value: Any, definitions: Mapping[str, Any]) -> Any:
    """Replace references by what they refer to, and drop titles and the list of required keys."""
    if isinstance(value, list):
        return [_inlined(item, definitions) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        value = {**definitions[value["$ref"].rpartition("/")[2]], **{k: v for k, v in value.items() if k != "$ref"}}
    dropped = ("title", "required") if isinstance(value.get("title"), str) else ()
    return {key: _inlined(item, definitions) for key, item in value.items() if key not in dropped}


def _pass_items() -> Schema:
    """A pass: its name, or {name: {option: value}}."""
    classes = [load_pass_class(name) for name in pass_names()]
    names = [{"const": made.name, "description": made.summary} for made in classes]
    with_options = {
        "type": "object",
        "properties": {made.name: _options(made) for made in classes},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    return {"anyOf": [*names, with_options]}


def _options(pass_class: type[Pass]) -> Schema:
    """The options of a pass; null: none."""
    properties = {name: _option(option) for name, option in options_of(pass_class).items()}
    return {
        "description": pass_class.summary,
        "type": ["object", "null"],
        "properties": properties,
        "additionalProperties": False,
    }


def _option(option: Option) -> Schema:
    described = {"description": option.doc.text} if option.doc.text else {}
    default = {} if option.default is MISSING else {"default": option.plain_default}
    return {**_of(option.annotation), **described, **default}


def _of(annotation: Any) -> Schema:
    """The JSON Schema of an option's annotation."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _of(args[0]) | _range(args[1])
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, UnionType):
        return {"anyOf": [_of(member) for member in args]}
    if origin is tuple:
        return {"type": "array", "items": _of(args[0])}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _of(args[1])}
    return dict(_SCALARS.get(annotation, {}))  # a type of a third party: any value


def _range(bounds: Range) -> Schema:
    return {name: limit for key, name in _BOUNDS.items() if (limit := getattr(bounds, key)) is not None}


def _gates(description: str) -> Schema:
    """Limits by metric; those of latency may be at one concurrency, metric@level."""
    patterned = {f"^{name}@[1-9][0-9]*$": _gate(facts) for name, facts in METRICS.items() if facts.section == "latency"}
    return {
        "description": description,
        "type": ["object", "null"],
        "properties": {name: _gate(facts) for name, facts in METRICS.items()},
        "patternProperties": patterned,
        "additionalProperties": False,
    }


def _gate(facts: MetricFacts) -> Schema:
    """A gate on the side where the metric is worse; null removes that of the extended recipe."""
    bound = "max" if facts.better == "lower" else "min"
    limit = {
        "type": "number",
        "minimum": facts.least,
        "maximum": facts.most,
        "description": GateLimit.model_fields[bound].description,
    }
    flags = {
        name: {"type": "boolean", "default": False, "description": GateLimit.model_fields[name].description}
        for name in ("advisory", "if_measured")
    }
    gate = {
        "type": ["object", "null", *(["boolean"] if facts.section == "verify" else [])],
        "properties": {bound: limit, **flags},
        "additionalProperties": False,
    }
    forms = {"anyOf": [gate, _LEVEL_NAME]} if facts.name == "slo" else gate
    return {"description": facts.definition, **forms}


if __name__ == "__main__":
    print(schema_text(), end="")
