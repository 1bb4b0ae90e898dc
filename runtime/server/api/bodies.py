"""From the bytes of a body to a checked request, or ApiError 400 for the first thing in it that is wrong.

Errors speak of the JSON that the client sent: where in it (`messages[2].content`), the value, and what it must be.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError
from pydantic_core import ErrorDetails
from starlette.types import Scope

from ingot.errors import shown, unknown
from ingot.runtime.server.api.structured_outputs import REPLACED
from ingot.runtime.server.http.api_error import ApiError

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
_KINDS = {  # of pydantic's errors, and what they ask for
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}
_SHOWN_CHARS = 80
_MOST_PARTS = 250_000  # lists, objects and keys of a body
_ALL_BUT_STRUCTURE = bytes(set(range(256)) - set(b'"[{:'))
FOREIGN: Mapping[str | int, object] = {
    "cache_prompt": True,
    "detokenize": True,
    "include_reasoning": True,
    "no_stop_trim": False,
    "repeat_penalty": 1.0,
    "return_hidden_states": False,
    "return_routed_experts": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "typical_p": 1.0,
}
"""Fields of vLLM, SGLang, llama.cpp and their routers that Ingot does not have, with their documented defaults."""
_IGNORED = "ingot.ignored"  # in a request's scope
_MOST_PROBLEMS = 4096
"""Of a body, unknown fields included; pydantic takes 7 microseconds to describe one, in the event loop."""
_PART = 16
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_MOST_NAMED = 16
_Path = tuple[str | int, ...]


class Body(BaseModel):
    """A JSON object.

    `LACKING` are OpenAI's or vLLM's fields that are refused, with values that change nothing. `HINTS` are such fields
    with further values, which may be left out, and which the answer names in a header. `FIELDS` says where
    parameters of the engine are that are not in the field of their name, `PROMPT_FIELD` where the prompt is.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    LACKING: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    HINTS: ClassVar[Mapping[str, Callable[[Any], bool]]] = {}
    FIELDS: ClassVar[Mapping[str, str]] = {}
    PROMPT_FIELD: ClassVar[str]

    model: str | None = None

    _ignored: tuple[str, ...] = PrivateAttr(())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Unknown fields that were left out, by their places."""
        return self._ignored

    def field_of(self, parameter: str) -> str:
        """The field that a parameter of the engine comes from."""
        return self.FIELDS.get(parameter, parameter)


_Body = TypeVar("_Body", bound=Body)


def parse(kind: type[_Body], text: bytes, *, is_lenient: bool = False) -> _Body:
    """The request in a body. `is_lenient`: unknown fields are left out whatever their value is."""
    given = _object(text)
    try:
        return _checked(kind, given, may_have_surrogates=_may_have_surrogates(text), is_lenient=is_lenient)
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deep", code="invalid_json") from error


def _checked(kind: type[_Body], given: dict[str, Any], *, may_have_surrogates: bool, is_lenient: bool) -> _Body:
    hints = [name for name in given if name in kind.HINTS and kind.HINTS[name](given[name])]
    for name in (given.keys() & kind.LACKING.keys()) - {*hints}:
        if json.dumps(given[name]) not in map(json.dumps, kind.LACKING[name]):  # as numbers 0 and false are equal
            raise ApiError(400, f"{name} is not supported: leave it out", param=name, code="unsupported_parameter")
    for name in given.keys() & REPLACED.keys():
        if given[name] is not None:
            message = f"{name} is not supported: use {REPLACED[name]}"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    if may_have_surrogates:
        _require_unicode(given)
    harmless = {*hints} | kind.LACKING.keys() | REPLACED.keys()
    left: dict[str, Any] = {name: value for name, value in given.items() if name not in harmless}
    ignored: list[_Path] = []
    while True:
        try:
            body = kind.model_validate(left)
        except ValidationError as error:
            if error.error_count() > _MOST_PROBLEMS:
                raise _refusal_of_many(left, kind) from None
            problems = error.errors(include_url=False)
            unknown_fields = _to_ignore(problems, left, is_lenient=is_lenient)
            if not unknown_fields:
                raise _refusal(problems, left, kind) from error
            left = _without(left, unknown_fields)
            ignored += unknown_fields
        else:
            body._ignored = (*hints, *map(_spelled, ignored))
            return body


def _to_ignore(problems: Sequence[ErrorDetails], given: Any, *, is_lenient: bool) -> list[_Path]:
    """Unknown fields that may be left out: those whose value changes nothing, or all of them.

    Of an object that may have one of several forms, only a field that no form has is unknown.
    """
    forms: dict[_Path, set[_Path]] = defaultdict(set)  # of an object: the places of its forms that have problems
    unknown_in: dict[_Path, set[_Path]] = defaultdict(set)
    for problem in problems:
        path, form = _path(problem, given), problem["loc"][:-1]
        forms[path[:-1]].add(form)
        if problem["type"] == "extra_forbidden":
            unknown_in[path].add(form)
    return [
        path
        for path, found in unknown_in.items()
        if found == forms[path[:-1]] and (is_lenient or _changes_nothing(path[-1], _at(given, path)))
    ]


def _changes_nothing(name: str | int, value: object) -> bool:
    """Whether an unknown field has its documented default or, where that is not known, a value that says nothing.

    False is not such a value where the default is true: a client that turns a feature off must hear that it stays on.
    """
    default = FOREIGN.get(name)
    if value is None or not default:
        return value is None or value is False or value in ([], {})
    return isinstance(value, bool) is isinstance(default, bool) and value == default


def _without(given: Any, paths: Sequence[_Path]) -> Any:
    """A copy without these fields."""
    if not paths:
        return given
    below: dict[str | int, list[_Path]] = defaultdict(list)
    for step, *rest in paths:
        below[step].append(tuple(rest))
    steps = enumerate(given) if isinstance(given, list) else given.items()
    kept = {step: _without(value, below.get(step, ())) for step, value in steps if () not in below.get(step, ())}
    return [*kept.values()] if isinstance(given, list) else kept


def name_ignored(scope: Scope, body: Body) -> None:
    """Have the answer to a request name the fields that were left out (`ignored_in`)."""
    if body.ignored:
        scope[_IGNORED] = body.ignored


def ignored_in(scope: Scope) -> tuple[Sequence[str], str]:
    """The fields that were left out of a request, as labels of a metric and as the value of a header.

    Clients choose the names: labels are those of fields that routers add, and "other"; the header has a few of them.
    """
    fields: Sequence[str] = scope.get(_IGNORED, ())
    labels = [field if field in FOREIGN else "other" for field in fields]
    names = [_UNSAFE.sub("?", field)[:_SHOWN_CHARS] for field in fields[:_MOST_NAMED]]
    more = ["..."] if len(fields) > _MOST_NAMED else []
    return labels, ", ".join([*names, *more])


def _may_have_surrogates(text: bytes) -> bool:
    """Whether a body spells one, half of a pair or not. Most bodies have neither beginning, which is quick to see."""
    return (b"\\u" in text or b"\xed" in text) and _SURROGATE.search(text) is not None


def _object(text: bytes) -> dict[str, Any]:
    """The object that a body is."""
    if _num_parts(text) > _MOST_PARTS:
        message = f"the body has more than {_MOST_PARTS:,} lists, objects and keys; send less in one request"
        raise ApiError(400, message, code="invalid_value")
    try:
        given = json.loads(text.decode("utf-8-sig", "surrogatepass"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {_reason(error)}", code="invalid_json") from error
    if not isinstance(given, dict):
        found = _NAMES.get(type(given), "a number")
        raise ApiError(400, f"the body is {found}; it must be an object", code="invalid_type")
    return given


def _num_parts(text: bytes) -> int:
    """Number of lists, objects and keys of a JSON text; of a long text at least whether it has too many.

    8 MB of `[],[],` would become 2,800,000 objects of Python. Strings may have as many brackets as they like: quotation
    marks that begin and end them are paired after all else, and their escapes, is left out.
    """
    most = text.count(b"[") + text.count(b"{") + text.count(b":")
    if most <= _MOST_PARTS:
        return most
    marks = text.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _ALL_BUT_STRUCTURE)
    # Two strings, or the ends of one, with nothing that counts between them.
    marks = marks.replace(b'""', b"")
    return sum(map(len, marks.split(b'"', 2 * _MOST_PARTS + 2)[::2]))


def _no_constant(name: str) -> None:
    raise ApiError(400, f"the body is not JSON: {name} is not a number of JSON", code="invalid_json")


def _reason(error: ValueError | RecursionError) -> str:
    match error:
        case json.JSONDecodeError():
            return str(error)
        case UnicodeDecodeError():
            return f"byte {error.start} is not {error.encoding.upper()}"
        case RecursionError():
            return "it is nested too deep"
    return "it has a number with more than 4,300 digits"  # which Python does not read


def _require_unicode(given: Mapping[str, Any]) -> None:
    """Raise ApiError for half a surrogate pair, which JSON can spell and no tokenizer reads."""
    left: list[tuple[_Path, object]] = [((), given)]
    while left:
        path, value = left.pop()
        match value:
            case str() if found := _HALF_PAIR.search(value):
                problem = f"half a surrogate pair at character {found.start()}"
            case dict() if any(map(_HALF_PAIR.search, value)):
                problem = "a key with half a surrogate pair"
            case dict() | list():
                items = value.items() if isinstance(value, dict) else enumerate(value)
                left += [((*path, step), item) for step, item in items]
                continue
            case _:
                continue
        message = f"{_spelled(path) or 'the body'} has {problem}; send valid Unicode text"
        raise ApiError(400, message, param=str(path[0]) if path else None, code="invalid_value")


def _refusal(problems: Sequence[ErrorDetails], given: Mapping[str, Any], kind: type[Body]) -> ApiError:
    """The error for the first wrong field. Of a union's branches, the one that validated deepest is reported."""
    name = str(problems[0]["loc"][0])
    if problems[0]["type"] == "extra_forbidden" and len(problems[0]["loc"]) == 1:
        return ApiError(400, unknown("field", name, kind.model_fields), param=name, code="unknown_parameter")
    found = [(_path(problem, given), problem) for problem in problems if problem["loc"][0] == name]
    path, first = max(found, key=lambda each: len(each[0]))  # the first of the longest
    where = _spelled(path)
    if first["type"] in ("missing", "union_tag_not_found"):
        return ApiError(400, f"{where} is missing", param=name, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        message = f"{_spelled(path[:-1])} has the unknown field {shown(path[-1])}: leave it out"
        return ApiError(400, message, param=name, code="unknown_parameter")
    allowed = dict.fromkeys(_allowed(problem) for place, problem in found if place == path)
    value = _said(_at(given, path))
    return ApiError(400, f"{where} is {value}; it must be {' or '.join(allowed)}", param=name, code="invalid_type")


def _refusal_of_many(given: Mapping[str, Any], kind: type[Body]) -> ApiError:
    """The error for more problems than there is time to describe: the first one in a part of the body."""
    try:
        kind.model_validate(_part(given, kind.model_fields))
    except ValidationError as error:
        first = _refusal(error.errors(include_url=False), given, kind)
        message = f"{str(first).rstrip('.')}; many more fields or values are wrong"
        return ApiError(400, message, param=first.param, code=first.code)
    message = f"the body has more than {_MOST_PROBLEMS:,} unknown fields and wrong values; send one without them"
    return ApiError(400, message, code="invalid_value")


def _part(value: Any, known: Iterable[str] = ()) -> Any:
    """A value with the first items of each list and object, and the known fields."""
    if isinstance(value, list):
        return [_part(item) for item in value[:_PART]]
    if not isinstance(value, dict):
        return value
    names = dict.fromkeys([*(name for name in known if name in value), *islice(value, _PART)])
    return {name: _part(value[name]) for name in names}


def _path(problem: ErrorDetails, given: object) -> _Path:
    """Where in the body the problem is. pydantic's place has the names of forms too, which the body does not."""
    path: list[str | int] = []
    for step in problem["loc"]:
        if _has(given, step):
            given = given[step]  # type: ignore[index]
            path.append(step)
    match problem["type"]:
        case "missing":
            path.append(problem["loc"][-1])
        case "union_tag_invalid" | "union_tag_not_found":  # all unions with tags have them there
            path.append("type")
    return tuple(path)


def _has(value: object, step: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(step, int) and step < len(value)
    return isinstance(value, dict) and step in value


def _at(value: Any, path: _Path) -> object:
    for step in path:
        value = value.get(step) if isinstance(value, dict) else value[step]
    return value


def _spelled(path: _Path) -> str:
    """The path as JavaScript has it, without the parts of names that are long."""
    names = (f"[{step}]" if isinstance(step, int) else f".{step[:80]}" for step in path)
    return "".join(names).removeprefix(".")


def _allowed(problem: ErrorDetails) -> str:
    """The values that one of pydantic's problems allows."""
    context = problem.get("ctx", {})
    match problem["type"]:
        case "literal_error":
            return str(context["expected"]).replace("False", "false").replace("True", "true")
        case "union_tag_invalid":
            return " or ".join(str(context["expected_tags"]).rsplit(", ", 1))
        case "too_short":
            return f"a list with at least {context['min_length']} item"
        case "too_long":
            what = "a list" if context["field_type"] == "List" else "an object"
            return f"{what} with at most {context['max_length']} items"
        case "string_too_short":
            return f"a string of at least {context['min_length']} character"
        case "string_too_long":
            return f"a string of at most {context['max_length']} characters"
        case kind:
            return _KINDS.get(kind) or problem["msg"][0].lower() + problem["msg"][1:]


def _said(value: object) -> str:
    """A value as JSON, or cut as `shown` cuts it."""
    if isinstance(value, str):
        return shown(value)
    text = ""
    for piece in _pieces(value):  # a long value is not written as a whole
        text += piece
        if len(text) > _SHOWN_CHARS:
            return f"{text[:_SHOWN_CHARS]}..."
    return text


def _pieces(value: object) -> Iterator[str]:
    """A value as JSON, piece by piece; strings only as far as they are shown."""
    match value:
        case list() | dict():
            is_object = isinstance(value, dict)
            yield "{" if is_object else "["
            for place, item in enumerate(value):
                yield ", " if place else ""
                yield from _pieces(item)
                if is_object:
                    yield ": "
                    yield from _pieces(value[item])
            yield "}" if is_object else "]"
        case _:
            yield json.dumps(value[: _SHOWN_CHARS + 1] if isinstance(value, str) else value, ensure_ascii=False)
