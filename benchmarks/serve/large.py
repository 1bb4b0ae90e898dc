"""Large requests that are valid, and constraints that are hostile: what a server must bear as well as malformed bytes.

A kind is a function from a random generator and the server's limits to a path, a body and the statuses that are right.
Bodies have up to 8 MB, prompts fill the context to its last token, schemas reach the documented limits.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.request import urlopen

Json = dict[str, Any]

_MOST_BODY_BYTES = 8 << 20
_OUTPUT_TOKENS = 4
_REFUSED_LATER = frozenset({"429"})


@dataclass(frozen=True)
class Limits:
    """The context of the model that a server serves, prompt and output together."""

    context_tokens: int

    @classmethod
    def of(cls, url: str) -> "Limits":
        """Read the limits of the first model of a server."""
        with urlopen(f"{url}/v1/models") as answer:
            return cls(json.load(answer)["data"][0]["max_model_len"])


@dataclass(frozen=True)
class LargeRequest:
    """A request and the statuses that are right for it, besides 429."""

    path: str
    body: Json
    right: frozenset[str]

    def is_right(self, status: str) -> bool:
        """Whether a server may answer with this status."""
        return status in self.right or status in _REFUSED_LATER


def _text(rng: random.Random, most: int) -> str:
    """One character or word, repeated: up to `most` bytes as JSON, and at least an eighth of that."""
    length = rng.randint(most // 8, most)
    unit = rng.choice(["a", " ", "def ", "import os\n", "\N{COLLISION SYMBOL}", "\u0000", '"', "}"])
    return unit * (length // (len(json.dumps(unit)) - 2))


def _completion(right: str, **fields: object) -> LargeRequest:
    body: Json = {"prompt": "def read(", "max_tokens": _OUTPUT_TOKENS, **fields}
    return LargeRequest("/v1/completions", body, frozenset(right.split()))


def _chat(right: str, **fields: object) -> LargeRequest:
    body: Json = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": _OUTPUT_TOKENS, **fields}
    return LargeRequest("/v1/chat/completions", body, frozenset(right.split()))


def _whole_context(rng: random.Random, limits: Limits) -> LargeRequest:
    length = limits.context_tokens - _OUTPUT_TOKENS
    prompt = [rng.randrange(1, 250) for _ in range(length)]
    return _completion("200", prompt=prompt, ignore_eos=True, stream=rng.random() < 0.5)


def _over_the_context(rng: random.Random, limits: Limits) -> LargeRequest:
    prompt: object = [1] * (limits.context_tokens + rng.choice([0, 1, 1_000_000]))
    return _completion("400", prompt=prompt if rng.random() < 0.5 else "def " * (_MOST_BODY_BYTES // 5))


def _scored_context(rng: random.Random, limits: Limits) -> LargeRequest:
    prompt = [rng.randrange(1, 250) for _ in range(limits.context_tokens - 1)]
    return _completion("200", prompt=prompt, echo=True, logprobs=5, max_tokens=0)


def _many_prompts(rng: random.Random, limits: Limits) -> LargeRequest:
    return _completion("200", prompt=[[rng.randrange(1, 250)] for _ in range(200)], max_tokens=1)


def _long_prompt(rng: random.Random, limits: Limits) -> LargeRequest:
    return _completion("200 400", prompt=_text(rng, 7 << 20))


def _long_stops(rng: random.Random, limits: Limits) -> LargeRequest:
    number = rng.choice([1, 4, 64])
    return _completion("200", stop=[_text(rng, (7 << 20) // number) or "a" for _ in range(number)], max_tokens=16)


def _unused_fields(rng: random.Random, limits: Limits) -> LargeRequest:
    fields = {"user": _text(rng, 1 << 20), "metadata": {f"key {number}": "x" * 50 for number in range(50_000)}}
    return _completion("200", **fields)


def _long_message(rng: random.Random, limits: Limits) -> LargeRequest:
    return _chat("200 400", messages=[{"role": "user", "content": _text(rng, 7 << 20)}])


def _many_messages(rng: random.Random, limits: Limits) -> LargeRequest:
    roles = ("user", "assistant")
    return _chat("200 400", messages=[{"role": roles[place % 2], "content": "a"} for place in range(100_000)])


def _further_fields(rng: random.Random, limits: Limits) -> LargeRequest:
    message = {"role": "user", "content": "Hello", "note": _text(rng, 7 << 20), "list": [0] * 100_000}
    return _chat("200 400", messages=[message])


def _many_tools(rng: random.Random, limits: Limits) -> LargeRequest:
    properties = {f"key_{n}": {"type": "string", "description": "x" * 100} for n in range(300)}
    schema = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": f"tool_{n}", "parameters": schema}} for n in range(128)]
    return _chat("200 400", tools=tools, tool_choice=rng.choice(["auto", "required", "none"]))


def _response(rng: random.Random, limits: Limits) -> LargeRequest:
    items = [{"role": "user", "content": "a"}] * rng.choice([10, 50_000])
    body = {"input": items, "instructions": _text(rng, 1 << 20), "max_output_tokens": 4}
    return LargeRequest("/v1/responses", body, frozenset({"200", "400"}))


def _message(rng: random.Random, limits: Limits) -> LargeRequest:
    """Anthropic's form: blocks of text, or calls with large inputs and their results."""
    if rng.random() < 0.5:
        blocks: list[Json] = [{"type": "text", "text": "a"}] * rng.choice([10, 50_000])
        turns: list[Json] = [{"role": "user", "content": blocks}]
    else:
        call = {"type": "tool_use", "id": "c", "name": "f", "input": {f"key {n}": "x" * 50 for n in range(20_000)}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": _text(rng, 1 << 20)}
        turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    body: Json = {"messages": turns, "system": _text(rng, 1 << 20), "tools": tools, "max_tokens": _OUTPUT_TOKENS}
    return LargeRequest("/v1/messages", body, frozenset({"200", "400"}))


def _counted_message(rng: random.Random, limits: Limits) -> LargeRequest:
    body = {"messages": [{"role": "user", "content": _text(rng, 7 << 20)}]}
    return LargeRequest("/v1/messages/count_tokens", body, frozenset({"200", "400"}))


def _tokenize(rng: random.Random, limits: Limits) -> LargeRequest:
    return LargeRequest("/tokenize", {"prompt": _text(rng, 7 << 20)}, frozenset({"200", "400"}))


def _detokenize(rng: random.Random, limits: Limits) -> LargeRequest:
    return LargeRequest("/detokenize", {"tokens": [rng.randrange(1, 250)] * 1_000_000}, frozenset({"200", "400"}))


def _large_schema(rng: random.Random, limits: Limits) -> LargeRequest:
    wide = {"type": "object", "properties": {f"key_{n}": {"type": "integer"} for n in range(5000)}}
    names = [f"key_{n}" for n in range(1000)]
    required = {"type": "object", "properties": {name: {"enum": [1, 2]} for name in names}, "required": names}
    deep: Json = {"type": "string"}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    schema = rng.choice([wide, required, deep, {"enum": [f"value {n}" for n in range(9000)]}])
    return _completion("200 400", response_format={"type": "json_schema", "json_schema": {"schema": schema}})


def _choices(rng: random.Random, limits: Limits) -> LargeRequest:
    return _completion("200 400", structured_outputs={"choice": [f"choice {n}" for n in range(9000)]})


def _chained(number: int) -> Json:
    definitions: Json = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(number)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{number}": {"type": "integer"}}}


def hostile_constraints() -> dict[str, LargeRequest]:
    """Requests whose constraints crash or stop a process that compiles them unprotected, by name.

    A server may refuse such a constraint or follow it.
    """
    rules = "\n".join(f"r{n}: r{n + 1}" for n in range(3000))
    optional = {f"key_{n}": {"type": "integer"} for n in range(3000)}
    doubling = {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "array", "items": {"$ref": "#/$defs/a"}}]}
    schemas: dict[str, Json] = {
        "smallest integer": {"const": -(2**63)},
        "smallest integer as a bound": {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 1},
        "references in a chain": _chained(3000),
        "a reference to itself": {"$ref": "#"},
        "references that double": {**doubling, "$defs": {"a": doubling}},
        "optional properties": {"type": "object", "properties": optional},
        "a huge length": {"type": "string", "minLength": 100_000_000},
        "a huge list": {"type": "array", "items": {"type": "integer"}, "minItems": 10_000_000},
        "a pattern": {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"},
    }
    grammars = {
        "rules in a chain": f"start: r0\n{rules}\nr3000: /a/",
        "the smallest integer in a grammar": 'start: %json {"const": -9223372036854775808}',
        "nested groups": f"start: {'(' * 20_000}/a/{')' * 20_000}",
        "an ambiguous grammar": "start: start start | /a/ | ",
        "a long alternative": "start: " + " | ".join(f"/a{{{n}}}b/" for n in range(1, 2000)),
    }
    patterns = {
        "powers": "((a{1000}){1000}){1000}",
        "optional characters": "a?" * 16_000,
        "nested stars": "(" * 5000 + "a" + ")*" * 5000,
        "alternatives that repeat": "((a|b){1,300}c){1,300}",
        "classes": r"[\w\d\p{L}]{1,5000}x" * 20,
    }
    fields = {
        name: {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        for name, schema in schemas.items()
    }
    fields |= {name: {"structured_outputs": {"grammar": grammar}} for name, grammar in grammars.items()}
    fields |= {name: {"structured_outputs": {"regex": pattern}} for name, pattern in patterns.items()}
    return {name: _completion("200 400", **each) for name, each in fields.items()}


KINDS: dict[str, Callable[[random.Random, Limits], LargeRequest]] = {
    "whole context": _whole_context,
    "over the context": _over_the_context,
    "scored context": _scored_context,
    "many prompts": _many_prompts,
    "long prompt": _long_prompt,
    "long stop strings": _long_stops,
    "unused fields": _unused_fields,
    "long message": _long_message,
    "many messages": _many_messages,
    "further fields": _further_fields,
    "many tools": _many_tools,
    "response": _response,
    "message": _message,
    "counted message": _counted_message,
    "tokenize": _tokenize,
    "detokenize": _detokenize,
    "large schema": _large_schema,
    "choices": _choices,
}


def large(rng: random.Random, limits: Limits) -> tuple[str, LargeRequest]:
    """A large request, with its kind."""
    kind = rng.choice(list(KINDS))
    return kind, KINDS[kind](rng, limits)
