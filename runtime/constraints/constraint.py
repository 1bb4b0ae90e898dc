"""`Constraint`: what the text of an output must be. Frozen, and checked when created; `compiler` compiles it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ingot.errors import RequestError, one_of, shown

ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")
JsonWhitespace = Literal["compact", "flexible"]
WHITESPACE: tuple[JsonWhitespace, ...] = ("compact", "flexible")
MAX_CHARS = 1 << 18
MAX_DEPTH = 100  # of a JSON schema; the compiler's own limit is 128
MAX_CHOICES = 10_000
FIELD = "constraint"
MADE_HERE = "// of a reply"
"""The first line of a grammar that no client wrote: errors do not show it, and its rules do not contain themselves."""


@dataclass(frozen=True)
class Constraint:
    """The whole text of an output is in this language. Raises RequestError for a value that cannot be one.

    Make it by `json_schema`, `json_object`, `regex`, `choice` or `grammar`. The output ends where the text is complete
    and the model ends it, and nowhere else; only `max_tokens`, stop strings and timeouts cut it short.

    source      the schema or the list of choices as JSON text, the regular expression, the grammar; "" for any JSON
                object
    whitespace  of JSON: "compact" allows one space after a comma and after a colon, or none, and nothing elsewhere;
                "flexible" allows any white space between values, in which a weak model may loop until `max_tokens`. A
                schema with "x-guidance" (options of llguidance) of its own keeps that.
    """

    kind: ConstraintKind
    source: str = ""
    whitespace: JsonWhitespace = "compact"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise _refusal(f"its kind is {shown(self.kind)}; it must be {one_of(KINDS)}")
        if self.whitespace not in WHITESPACE:
            raise _refusal(f"its whitespace is {shown(self.whitespace)}; it must be {one_of(WHITESPACE)}")
        if not isinstance(self.source, str):
            raise _refusal(f"its source is {shown(self.source)}; it must be a text")
        if len(self.source) > MAX_CHARS:
            raise _refusal(f"the {self.kind} has {len(self.source):,} characters; at most {MAX_CHARS:,} are allowed")
        if self.kind != "json_object" and not self.source:
            raise _refusal(f"the {self.kind} is empty; leave the constraint out to allow any text")
        _require_unicode(self.source, self.kind)
        if self.kind in ("json_schema", "choice"):
            value = _parsed(self.source, self.kind)
            (_check_schema if self.kind == "json_schema" else _check_choices)(value)

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | bool | str, *, whitespace: JsonWhitespace = "compact"
    ) -> "Constraint":
        """A JSON text that is valid by a schema, given as a value or as JSON text. Properties keep its order."""
        return cls("json_schema", schema if isinstance(schema, str) else _dumped(schema, "json_schema"), whitespace)

    @classmethod
    def json_object(cls, *, whitespace: JsonWhitespace = "compact") -> "Constraint":
        """Any JSON object."""
        return cls("json_object", whitespace=whitespace)

    @classmethod
    def regex(cls, pattern: str) -> "Constraint":
        """A text that a regular expression matches as a whole: Rust's syntax, without look-around."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> "Constraint":
        """One of several texts."""
        if isinstance(choices, str) or not isinstance(choices, Sequence):
            raise _refusal(f"choice is {shown(choices)}; it must be a list of texts")
        return cls("choice", _dumped(list(choices), "choice"))

    @property
    def is_clients_grammar(self) -> bool:
        """Whether it is a grammar that a client wrote, and not one for a reply."""
        return self.kind == "grammar" and not self.source.startswith(MADE_HERE)

    @classmethod
    def grammar(cls, grammar: str) -> "Constraint":
        """A context-free grammar in Lark's EBNF, as llguidance reads it; its first rule is `start`."""
        is_alike = isinstance(grammar, str) and grammar.startswith(MADE_HERE)
        return cls("grammar", f"\n{grammar}" if is_alike else grammar)


def checked_constraint(constraint: object) -> Constraint | None:
    """The constraint of a request's parameters, or None; RequestError for anything else, such as a dict."""
    if constraint is not None and not isinstance(constraint, Constraint):
        raise _refusal(f"it is {shown(constraint)}; make one by Constraint.json_schema(...), regex(...) and so on")
    return constraint


def _refusal(found: str) -> RequestError:
    return RequestError(f"the constraint cannot be used: {found}", field=FIELD)


def _dumped(value: object, kind: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(f"the {kind} is not JSON ({error})") from error


def _parsed(source: str, kind: str) -> object:
    try:
        value: object = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"the {kind} is not JSON ({error})") from error
    return value


def _require_unicode(source: str, kind: str) -> None:
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise _refusal(f"the {kind} has half a surrogate pair at character {error.start}") from error


def _check_schema(schema: object) -> None:
    if not isinstance(schema, dict | bool):
        raise _refusal(f"the json_schema is {shown(schema)}; it must be an object, or true")
    level: list[object] = [schema]
    for _ in range(MAX_DEPTH):
        level = [inner for value in level for inner in _children(value)]
        if not level:
            return
    raise _refusal(f"the json_schema is nested more than {MAX_DEPTH} levels deep; move its inner parts to $defs")


def _children(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _check_choices(choices: object) -> None:
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise _refusal(f"choice is {shown(choices)}; it must be a list of texts, none of them empty")
    if len(choices) > MAX_CHOICES:
        raise _refusal(f"choice has {len(choices):,} texts; at most {MAX_CHOICES:,} are allowed")
