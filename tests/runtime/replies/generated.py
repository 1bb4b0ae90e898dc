"""Replies from a seed, in each format: well-formed, mutated, cut, with several calls and delimiters in strings."""

import json
import random
from typing import Any

from ingot.runtime.replies import FORMATS

DELIMITERS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
    *("<function=f>", "</function>", "<parameter=days>", "<parameter=x>", "</parameter>", "<|python_tag|>"),
    *('{"name": "g", "arguments": {}}', "[TOOL_CALLS]wipe[ARGS]{}", "</function>\n</tool_call>", "[{", "}]"),
    *("{", "}", "[", "]", '"', "\\", ",", ":", ";", "<", "\n", " ", "\\ud83d\\ude00", "\\ud800", "\\u00", "1e999"),
    *("NaN", "flase", "True", "é漢😀", "-", "0", "null", "\t"),
]
_WORDS = ["so", "let me see", "é漢😀", "a < b", "[1]", "x;", "{so}", "1, 2", "\n", " ", "tool_call", '"quoted"']


def reply(name: str, rng: random.Random) -> str:
    """One reply in a format."""
    parts: list[str] = []
    for _ in range(rng.randrange(1, 4)):
        parts.append(rng.choice([_text, _reasoning, call, call, call])(name, rng))
    text = "".join(parts)
    for _ in range(rng.choice([0, 0, 1, 1, 2, 4])):
        text = _mutated(text, rng)
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.25 else text


def _text(name: str, rng: random.Random) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randrange(4)))


def _reasoning(name: str, rng: random.Random) -> str:
    opening, closing = FORMATS[name].reasoning
    return opening + _text(name, rng) + rng.choice(["", rng.choice(DELIMITERS)]) + closing


def _string(rng: random.Random) -> str:
    return "".join(rng.choice([rng.choice(DELIMITERS), rng.choice(_WORDS)]) for _ in range(rng.randrange(3)))


def _value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 3 else 4)
    if kind < 2:
        return _string(rng)
    if kind < 4:
        return rng.choice([0, -1, 1.5, 7, True, False, None])
    if kind == 4:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return _object(rng, depth + 1)


def _object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    keys = ["days", "on", "note", "x", "name", "arguments", "é"]
    return {key: _value(rng, depth) for key in rng.sample(keys, rng.randrange(3))}


def _spelled(value: Any, rng: random.Random) -> str:
    return json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 1]))


def call(name: str, rng: random.Random) -> str:
    """A call, or a list of calls, in a format; text where it has no calls."""
    if name == "reasoning":
        return _text(name, rng)
    called, arguments = rng.choice(["f", "g", "wipe"]), _object(rng)
    items: list[tuple[str, Any]] = [("name", called), (rng.choice(["arguments", "parameters"]), arguments)]
    if rng.random() < 0.2:
        items.append(("id", _value(rng)))
    if rng.random() < 0.2 and name != "llama-json":
        rng.shuffle(items)
    item, blank = _spelled(dict(items), rng), rng.choice(["", " ", "\n"])
    if name == "qwen-xml":
        tags = (
            f"<parameter={key}>{blank}{each if isinstance(each, str) else _spelled(each, rng)}{blank}</parameter>"
            for key, each in arguments.items()
        )
        return f"<tool_call>{blank}<function={called}>{blank}{blank.join(tags)}{blank}</function>{blank}</tool_call>"
    if name == "mistral-args":
        return f"[TOOL_CALLS]{called}{rng.choice(['', '[CALL_ID]abc'])}[ARGS]{_spelled(arguments, rng)}{blank}"
    if name in ("mistral", "json-list"):
        opening = "[TOOL_CALLS]" if name == "mistral" else ""
        return f"{opening}{blank}[{', '.join([item] * rng.randrange(1, 3))}]{blank}"
    if name == "llama-json":
        return f"{rng.choice(['', '<|python_tag|>'])}{item}{rng.choice(['; ', chr(10), ''])}"
    return f"<tool_call>{blank}{item}{blank}</tool_call>{blank}"


def _mutated(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    end = min(len(text), at + rng.choice([1, 1, 2, 8]))
    return text[:at] + rng.choice(["", rng.choice(DELIMITERS), text[at:end] * 2]) + text[end:]
