"""Arguments that are short for --set: CHECKPOINT, --eval, --calibration and --chat-template."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ingot.errors import UsageError

KEYS = {
    "CHECKPOINT": "checkpoint",
    "--eval": "evaluation.text",
    "--calibration": "calibration.text",
    "--chat-template": "chat_template",
}


def with_shorthands(overrides: Sequence[str], shorthands: Mapping[str, Path | None]) -> tuple[str, ...]:
    """Add KEY=VALUE for every shorthand that was given; `shorthands` maps a name of KEYS to its path, or to None.

    Raises UsageError when --set sets the same key, its section, or a key below it.
    """
    given = {name: path for name, path in shorthands.items() if path is not None}
    for name in given:
        for override in _contradicting(KEYS[name], overrides):
            raise UsageError(f"{name} {given[name]} and --set {override} both set {KEYS[name]}; leave one of them out")
    return (*overrides, *(f"{KEYS[name]}={_as_yaml(path)}" for name, path in given.items()))


def _contradicting(key: str, overrides: Sequence[str]) -> Iterator[str]:
    """The overrides of this key, of a section that contains it, or of keys below it."""
    for override in overrides:
        name = override.partition("=")[0].strip()
        if name == key or key.startswith(f"{name}.") or name.startswith(f"{key}."):
            yield override


def _as_yaml(path: Path) -> str:
    """Quote the path: a file name may contain YAML syntax."""
    return json.dumps(str(path), ensure_ascii=False)
