"""What a region of a reply holds: text, JSON and its dialects, XML-like parameters; and the value that is made of it.

The kinds and their options are those of transformers 5.23 (`content`, `content_args`, `transform`). ValueError for a
text that is not of the kind: a model may write anything.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

import regex

ContentKind = Literal["text", "int", "float", "bool", "json", "xml-inline", "kv-lines"]
_PLACEHOLDER = regex.compile(r"\{(\w+(?:\.\w+)*)\}")
_SECONDS = 1.0  # most that a pattern of a template may take on one region


def read_region(
    text: str, kind: ContentKind, args: Mapping[str, Any], transform: Any, captures: Mapping[str, str], each: bool
) -> Any:
    """The value of a region. With `each` the content is a list, and the transform applies to each of its objects."""
    value = _KINDS[kind](text, args)
    if transform is None:
        return value
    if not each:
        return _transformed(transform, {**captures, "content": value})
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("the region does not hold a list of objects")
    return [_transformed(transform, {**captures, **item}) for item in value]


def check_transform(transform: Any) -> None:
    """Raise ValueError for a text with a placeholder and more."""
    for text in _texts(transform):
        if _PLACEHOLDER.search(text) and not _PLACEHOLDER.fullmatch(text):
            raise ValueError(f"the transform {text!r} mixes a placeholder with text")


def _texts(transform: Any) -> list[str]:
    if isinstance(transform, str):
        return [transform]
    inner = transform.values() if isinstance(transform, dict) else transform if isinstance(transform, list) else ()
    return [text for value in inner for text in _texts(value)]


def _transformed(transform: Any, scope: Mapping[str, Any]) -> Any:
    """The transform with values for its placeholders, such as {content.name}."""
    if isinstance(transform, dict):
        return {key: _transformed(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_transformed(value, scope) for value in transform]
    placeholder = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if placeholder is None:
        return transform
    value: Any = scope
    for key in placeholder[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"the region has no {placeholder[1]}")
        value = value[key]
    return value


def _text(text: str, args: Mapping[str, Any]) -> str:
    return text.strip() if args.get("strip", True) else text


def _json(text: str, args: Mapping[str, Any]) -> Any:
    """JSON; `string_delims` are other quotes of strings, `unquoted_keys` allows names as keys."""
    strings: list[str] = []
    plain = text
    for opening, closing in args.get("string_delims", ()):
        pieces = regex.split(f"{regex.escape(opening)}(.*?){regex.escape(closing)}", plain, flags=regex.DOTALL)
        for place in range(1, len(pieces), 2):
            strings.append(pieces[place])
            pieces[place] = f'"\\u0000{len(strings) - 1}"'
        plain = "".join(pieces)
    if args.get("unquoted_keys"):
        plain = regex.sub(r"(?<=[{,]\s*)(\w+)\s*:", r'"\1":', plain)
    try:
        return _restored(json.loads(plain), strings)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deep") from error
    except ValueError:
        if args.get("allow_non_json"):
            return _text(text, args)
        raise


def _restored(value: Any, strings: list[str]) -> Any:
    """The value with the strings that were taken out of it."""
    if isinstance(value, dict):
        return {_restored(key, strings): _restored(item, strings) for key, item in value.items()}
    if isinstance(value, list):
        return [_restored(item, strings) for item in value]
    return strings[int(value[1:])] if isinstance(value, str) and value.startswith("\0") and strings else value


def _xml_inline(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by `tag_pattern`, whose groups are key and value; `merge_duplicates` makes lists of repeated keys."""
    found: dict[str, Any] = {}
    for match in regex.finditer(args["tag_pattern"], text, regex.DOTALL, timeout=_SECONDS):
        key, value = match["key"], _inner(match["value"], args)
        if key in found and args.get("merge_duplicates"):
            found[key] = [*(found[key] if isinstance(found[key], list) else [found[key]]), value]
        else:
            found[key] = value
    return found


def _kv_lines(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Lines of `key: value`."""
    separator = args.get("kv_sep", ":")
    pairs = [line.split(separator, 1) for line in text.split(args.get("line_sep", "\n")) if separator in line]
    return {_text(key, args): _inner(_text(value, args), args) for key, value in pairs}


def _inner(text: str, args: Mapping[str, Any]) -> Any:
    parser = args.get("value_parser")
    return _KINDS[parser.get("name", "text")](text, parser.get("args", {})) if parser else text


_KINDS: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "text": _text,
    "int": lambda text, args: int(_text(text, args)),
    "float": lambda text, args: float(_text(text, args)),
    "bool": lambda text, args: _text(text, args).lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _xml_inline,
    "kv-lines": _kv_lines,
}
