"""Random JSON schemas of the kinds of JSONSchemaBench (Geng et al., 2025): flat records, nested ones, lists, unions.

Its sources are function signatures, Kubernetes, GitHub's API, article forms of the Washington Post and so on; what they
use most is here: typed properties, required and optional, enums and constants, bounds of numbers, lengths, patterns and
formats of texts, lists with lengths, `anyOf`, `$defs` with `$ref`, `additionalProperties`.
"""

import random
from typing import Any

WORDS = (
    "name",
    "size",
    "kind",
    "labels",
    "spec",
    "value",
    "url",
    "items",
    "owner",
    "state",
    "count",
    "é",
    'a "b"',
    "x/y",
)
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
PATTERNS = (r"^[a-z]{2,5}$", r"^\d{3}-\d{4}$", r"^v\d+\.\d+$", r"^(GET|PUT) /[a-z]*$")
Schema = dict[str, Any]


def random_schema(rng: random.Random) -> Schema:
    """A schema whose values are objects."""
    definitions = {f"part{number}": _record(rng, 1, {}) for number in range(rng.randrange(3))}
    schema = _record(rng, rng.randrange(1, 4), definitions)
    return {**schema, "$defs": definitions} if definitions else schema


def _record(rng: random.Random, depth: int, definitions: dict[str, Schema]) -> Schema:
    names = rng.sample(WORDS, rng.randrange(1, 5))
    schema: Schema = {
        "type": "object",
        "properties": {name: _value(rng, depth - 1, definitions) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
        "additionalProperties": False,
    }
    if rng.random() < 0.1:
        schema["additionalProperties"] = {"type": "boolean"}
    return schema


def _value(rng: random.Random, depth: int, definitions: dict[str, Schema]) -> Schema:
    if depth > 0 and rng.random() < 0.6:
        kind = rng.randrange(4)
        if kind == 0:
            return _record(rng, depth, definitions)
        if kind == 1:
            low = rng.randrange(3)
            return {"type": "array", "items": _value(rng, depth - 1, definitions), "minItems": low, "maxItems": low + 2}
        if kind == 2 and definitions:
            return {"$ref": f"#/$defs/{rng.choice([*definitions])}"}
        return {"anyOf": [_value(rng, depth - 1, definitions), {"type": "null"}]}
    return _scalar(rng)


def _scalar(rng: random.Random) -> Schema:
    low = rng.randrange(-50, 50)
    scalars: list[Schema] = [
        {"type": "string", "minLength": 1, "maxLength": rng.randrange(1, 20)},
        {"type": "string", "pattern": rng.choice(PATTERNS)},
        {"type": "string", "format": rng.choice(FORMATS)},
        {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 1000)},
        {"type": "number", "minimum": low, "maximum": low + 10},
        {"type": "boolean"},
        {"enum": ["a", "bc", 1, None, True][: rng.randrange(1, 6)]},
        {"const": rng.choice(["fixed", 7, "two words"])},
        {"type": ["string", "null"], "maxLength": 4},
    ]
    return rng.choice(scalars)
