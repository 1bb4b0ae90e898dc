"""Reads YAML with places: every value of a recipe comes with the file, line and column of its key.

Only plain data is read (the safe loader); duplicate keys, keys that are not strings and endless aliases are refused.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from ingot.errors import Problem, shown

# Aliases repeat parts of the file; this bounds the size that a file can expand to (the "billion laughs" attack).
_MAX_VALUES = 20_000
_LONGEST_MESSAGE = 200  # the parser repeats names of the file
_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass(frozen=True)
class Located:
    """A value, the place of its key (or list item), and the folder that its paths are relative to.

    `value` is a dict[str, Located], a tuple[Located, ...], or a scalar.
    """

    value: object
    file: str
    line: int
    folder: Path
    column: int = 0

    def problem(self, message: str) -> Problem:
        """A mistake at this place."""
        return Problem(self.file, self.line, message, self.column)

    @property
    def entries(self) -> "dict[str, Located]":
        """The mapping's entries; empty for anything else."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def items(self) -> "tuple[Located, ...]":
        """The list's items; empty for anything else."""
        return self.value if isinstance(self.value, tuple) else ()

    def plain(self) -> object:
        """The value without places, as dicts, tuples and scalars."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.entries.items()}
        return tuple(item.plain() for item in self.items) if isinstance(self.value, tuple) else self.value

    def at(self, path: tuple[int | str, ...]) -> "Located":
        """The innermost value on the path that exists."""
        if not path:
            return self
        if isinstance(path[0], int):
            return self.items[path[0]].at(path[1:]) if path[0] < len(self.items) else self
        return self.entries[path[0]].at(path[1:]) if path[0] in self.entries else self


class _Loader(yaml.SafeLoader):
    """The safe loader, extended to read 1e-3 and 1.5e3 as numbers, as in YAML 1.2."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def read_located(text: str, file: str, folder: Path, problems: list[Problem]) -> Located | None:
    """Read one YAML document. Appends every mistake to `problems`; None for text that is not YAML."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return Located(None, file, 0, folder)
        return _Reader(loader, file, folder, problems).located(node, node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        problems.append(Problem(file, line, _syntax_message(error), column))
    except yaml.YAMLError as error:
        problems.append(Problem(file, 0, f"invalid YAML: {str(error).splitlines()[0]}"))
    except (RecursionError, ValueError) as error:  # ValueError: a date such as 2026-13-01
        reason = "values are nested too deeply" if isinstance(error, RecursionError) else str(error)
        problems.append(Problem(file, 0, f"invalid recipe: {reason}"))
    return None


def _syntax_message(error: yaml.MarkedYAMLError) -> str:
    if "'\\t'" in str(error.problem):
        return "tab in the indentation; YAML requires spaces"
    message = ", ".join(part for part in (error.context, error.problem) if part)
    return f"invalid YAML: {message if len(message) <= _LONGEST_MESSAGE else f'{message[:_LONGEST_MESSAGE]}...'}"


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _column(node: yaml.Node) -> int:
    return int(node.start_mark.column) + 1


class _Reader:
    """Turns the nodes of one document into Located values."""

    def __init__(self, loader: _Loader, file: str, folder: Path, problems: list[Problem]) -> None:
        self._loader = loader
        self._file = file
        self._folder = folder
        self._problems = problems
        self._open: set[int] = set()  # nodes on the way down, to detect an alias that contains itself
        self._num_values = 0

    def located(self, node: yaml.Node, place: yaml.Node) -> Located:
        """The node's value; `place` is its key, or the node itself."""
        self._num_values += 1
        value = None
        if self._num_values > _MAX_VALUES:
            if self._num_values == _MAX_VALUES + 1:
                self._report(place, f"more than {_MAX_VALUES:,} values, those of aliases included; write fewer")
        elif id(node) in self._open:
            self._report(place, "aliases repeat without end; write the values out")
        else:
            self._open.add(id(node))
            value = self._value(node)
            self._open.remove(id(node))
        return Located(value, self._file, _line(place), self._folder, _column(place))

    def _value(self, node: yaml.Node) -> object:
        if isinstance(node, yaml.CollectionNode) and node.tag not in _PLAIN_TAGS:
            self._report(node, f"the tag {shown(node.tag)} is not allowed; write plain lists and mappings")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node)
        if isinstance(node, yaml.SequenceNode):
            return tuple(self.located(item, item) for item in node.value)
        return self._loader.construct_object(node)

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Located]:
        merged: dict[str, Located] = {}
        own: dict[str, Located] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                merged = {**self._merged(value_node, key_node), **merged}
                continue
            key = key_node.value
            if key_node.tag != "tag:yaml.org,2002:str" or not isinstance(key, str):
                named = f"the key {shown(key)} is not a string; put it in quotes"
                self._report(key_node, named if isinstance(key, str) else "a key must be a string")
            elif key in own:
                self._report(key_node, f"duplicate key {shown(key)} (first in line {own[key].line}); keep one")
            else:
                own[key] = self.located(value_node, key_node)
        return {**merged, **own}

    def _merged(self, node: yaml.Node, place: yaml.Node) -> dict[str, Located]:
        """Entries of `<<: *alias` or `<<: [*first, *second]`; the first wins."""
        sources: Iterator[yaml.Node] = iter(node.value if isinstance(node, yaml.SequenceNode) else [node])
        merged: dict[str, Located] = {}
        for source in sources:
            found = self.located(source, place)
            if not isinstance(found.value, dict):
                self._report(place, "<< merges mappings only; give it the alias of a mapping")
            merged = {**found.entries, **merged}
        return merged

    def _report(self, place: yaml.Node, message: str) -> None:
        self._problems.append(Problem(self._file, _line(place), message, _column(place)))
