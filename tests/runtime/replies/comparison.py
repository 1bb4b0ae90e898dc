"""A generated reply, read by `ReplyParser` at every split, and by the slow reader."""

import json
from collections.abc import Iterable
from functools import cache

from ingot.runtime.replies import FORMATS, ReplyDelta, ReplyParser, ReplyTemplate
from tests.runtime.replies import reference
from tests.runtime.replies.samples import TOOLS

PROMPT = "<|im_start|>assistant\n"


def parser(name: str) -> ReplyParser:
    return ReplyParser(_template(name), PROMPT, TOOLS)


@cache
def _template(name: str) -> ReplyTemplate:
    return FORMATS[name].template


def read(name: str, pieces: Iterable[str]) -> tuple[ReplyDelta, bool]:
    """The message of a reply that arrives in pieces, and whether a call in it is cut."""
    reader, found = parser(name), ReplyDelta()
    for piece in pieces:
        found += reader.feed(piece)
    return found + reader.finish(), reader.is_cut


def problems(name: str, text: str) -> list[str]:
    """What is wrong with how a reply is read: one line for each kind."""
    whole, is_cut = expected = read(name, [text])
    found = []
    if reference.read(name, text, TOOLS) != expected:
        found.append(f"{name}: not as the slow reader reads it: {text!r}")
    splits = [[text[:at], text[at:]] for at in range(1, len(text))]
    if any(read(name, split) != expected for split in [*splits, list(text)]):
        found.append(f"{name}: a split changes what is read: {text!r}")
    if not is_cut and not all(is_strict_json(call.arguments) for call in whole.calls):
        found.append(f"{name}: the arguments of a complete call are not JSON: {text!r}")
    return found


def is_strict_json(text: str) -> bool:
    """Whether a text is a JSON object that every reader takes: of finite numbers and whole characters."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return False
    return isinstance(value, dict)


def _refuse(constant: str) -> None:
    raise ValueError(constant)
