"""Structural damage to JSON documents: one value or key is replaced by another that its reader may not expect.

    for damage in damages(document, seed=0, count=200):
        damage.text             the damaged document
        str(damage)             where, and what is there now

Most damaged documents are still JSON, with right digests if the caller seals them again: a check of their content must
refuse them. `Raw` is a text that json.dumps cannot make, such as a key twice or 100,000 arrays in one another.
"""

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]

DEEP = 100_000


@dataclass(frozen=True)
class Raw:
    """A value by its text in the document."""

    text: str

    def __repr__(self) -> str:
        return f"Raw({self.text[:30]!r})"


_ANYTHING: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**30, 0.5, 1e308, -1e-308,
    "", "0", "x", "../x", "/etc/passwd", "a\0b", "\ud800", "x" * 5000, "\u202e\N{PILE OF POO}",
    [], [0], [[]], ["x", None], {}, {"x": 1}, {"": {}}, Raw("NaN"), Raw("Infinity"), Raw("-Infinity"),
    Raw("1e999"), Raw("1" * 5000), Raw("[" * DEEP + "]" * DEEP), Raw('{"a":' * DEEP + "1" + "}" * DEEP),
    Raw('{"x": 1, "x": 2}'),
)  # fmt: skip


@dataclass(frozen=True)
class Damage:
    """A damaged document; `what` describes the damage at `path`."""

    path: Path
    what: str
    text: str

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path)) or 'the document'}: {self.what}"


def damages(document: Any, seed: int, count: int) -> Iterator[Damage]:
    """Yield `count` random damages of the document; the same seed gives the same ones."""
    random_ = random.Random(seed)
    places = list(_paths(document))
    for _ in range(count):
        yield damaged(document, random_.choice(places), random_)


def damaged(document: Any, path: Path, random_: random.Random) -> Damage:
    """Return the document with one damage at the path."""
    value = _at(document, path)
    kinds = ["replace", "replace", "near", "remove", "rename", "twice", "append", "swap"]
    match random_.choice(kinds):
        case "near" if type(value) is int:
            new: Any = random_.choice(
                [value + 1, value - 1, -value, value * 1000, value * 10**6, float(value), str(value)]
            )
        case "near" if isinstance(value, str) and value:
            new = random_.choice([value[:-1], value + "x", value.upper(), f"../{value}", value + "\0", value * 200])
        case "remove" if path:
            return Damage(path, "removed", _text(_without(document, path)))
        case "rename" if path and isinstance(path[-1], str):
            name = random_.choice(["", "x", path[-1] + "x", "\ud800", "a\0", path[-1] * 300])
            copy = _without(document, path)
            _at(copy, path[:-1])[name] = value
            return Damage(path, f"renamed to {name[:40]!r}", _text(copy))
        case "twice" if isinstance(value, dict) and value:
            key = random_.choice(list(value))
            inner = ", ".join(f"{json.dumps(k)}: {_text(v)}" for k, v in [*value.items(), (key, value[key])])
            new = Raw(f"{{{inner}}}")
        case "append" if isinstance(value, list) and value:
            new = [*value, random_.choice([*value, *_ANYTHING])]
        case "swap":
            new = deepcopy(_at(document, random_.choice(list(_paths(document)))))
        case _:
            new = random_.choice(_ANYTHING)
    return Damage(path, f"is now {_shown(new)}", _text(_with(document, path, new)))


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _paths(inner, (*path, key))


def _at(document: Any, path: Path) -> Any:
    for key in path:
        document = document[key]
    return document


def _with(document: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    copy = deepcopy(document)
    _at(copy, path[:-1])[path[-1]] = new
    return copy


def _without(document: Any, path: Path) -> Any:
    copy = deepcopy(document)
    del _at(copy, path[:-1])[path[-1]]
    return copy


def _text(value: Any) -> str:
    """The JSON text, with each Raw as its own text."""
    raws: list[str] = []

    def mark(raw: Any) -> str:
        assert isinstance(raw, Raw)
        raws.append(raw.text)
        return f"\ue000{len(raws) - 1}\ue000"

    text = json.dumps(value, default=mark)
    for number, raw in enumerate(raws):
        text = text.replace(json.dumps(f"\ue000{number}\ue000"), raw)
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
