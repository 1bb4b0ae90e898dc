"""Masks against brute force on a small vocabulary: every token is tried, and no text of the language is left out.

A schema with few values is turned into a regular expression for all its texts, with JSON's white space, by the code
below alone; the `regex` package says by partial matching whether a text with one more token can still become one.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

import regex
from tests.runtime.constraints.grammars import END, allowed, matcher, spelled
from tests.runtime.engines import demo_tokenizer

from ingot.runtime.constraints import Constraint

_SPACE = r"[ \n\r\t]*"
_STEPS = 40


@dataclass
class Compared:
    """Tokens compared; those that a mask forbids although a text continues with them, and the opposite."""

    masks: int = 0
    tokens: int = 0
    wrongly_forbidden: int = 0
    wrongly_allowed: int = 0


def compare(num_schemas: int, seed: int = 0) -> Compared:
    """Walk through random texts of random small schemas, and compare the mask at each token."""
    rng, compared = random.Random(seed), Compared()
    for _ in range(num_schemas):
        schema = _small_schema(rng, 2)
        _walk(schema, regex.compile(_pattern(schema)), rng, compared)
    return compared


def _walk(schema: dict[str, Any], pattern: "regex.Pattern[str]", rng: random.Random, compared: Compared) -> None:
    state, text = matcher(Constraint.json_schema(schema, whitespace="flexible")), b""
    for _ in range(_STEPS):
        found = set(allowed(state.mask()))
        compared.masks += 1
        for token in range(demo_tokenizer().vocab_size):
            expected = _continues(pattern, text, token)
            if expected is not None:
                compared.tokens += 1
                compared.wrongly_forbidden += expected and token not in found
                compared.wrongly_allowed += not expected and token in found
        following = sorted(found - {END})
        if not following:
            return
        token = min(rng.sample(following, min(4, len(following))), key=lambda each: not spelled(each).strip())
        state.consume(token)
        text += spelled(token)
        if state.is_complete:
            return


def _continues(pattern: "regex.Pattern[str]", text: bytes, token: int) -> bool | None:
    """Whether a text with a token can become one of the language; None where that is the middle of a character."""
    try:
        whole = (text + spelled(token)).decode()
    except UnicodeDecodeError:
        return None
    if token == END:
        return bool(pattern.fullmatch(whole))
    return bool(spelled(token)) and bool(pattern.fullmatch(whole, partial=True))


def _small_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.randrange(5) if depth else rng.randrange(3)
    if kind == 0:
        return {"enum": rng.sample(["ab", "abc", "def", 12, 1, None, True], rng.randrange(1, 4))}
    if kind == 1:
        return {"type": "boolean"}
    if kind == 2:
        return {"const": rng.choice(["self", 120, "a b"])}
    if kind == 3:
        low = rng.randrange(2)
        return {"type": "array", "items": _small_schema(rng, depth - 1), "minItems": low, "maxItems": low + 2}
    names = rng.sample(["name", "na", "self", "x"], rng.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: _small_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


def _pattern(schema: dict[str, Any]) -> str:
    """All texts of a small schema; properties are in its order."""
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return f"(?:{'|'.join(regex.escape(json.dumps(value)) for value in values)})"
    if schema["type"] == "boolean":
        return "(?:true|false)"
    if schema["type"] == "array":
        item, low, high = _pattern(schema["items"]), schema["minItems"], schema["maxItems"]
        more = f"(?:{_SPACE},{_SPACE}{item}){{{max(0, low - 1)},{high - 1}}}"
        some = f"{item}{more}"
        return rf"\[{_SPACE}(?:{some}){'' if low else '?'}{_SPACE}\]"
    return rf"\{{{_SPACE}{_members(list(schema['properties'].items()), schema['required'], first=True)}{_SPACE}\}}"


def _members(members: list[tuple[str, dict[str, Any]]], required: list[str], *, first: bool) -> str:
    """Members in order, optional ones left out or not; a comma before all but the first."""
    if not members:
        return ""
    (name, schema), *others = members
    comma = "" if first else f"{_SPACE},{_SPACE}"
    this = f"{comma}{regex.escape(json.dumps(name))}{_SPACE}:{_SPACE}{_pattern(schema)}"
    with_this = this + _members(others, required, first=False)
    if name in required:
        return with_this
    return f"(?:{with_this}|{_members(others, required, first=first)})"
