"""Errors of a request's body name the place in its JSON, the value there and the values that are allowed."""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from pydantic_core import ErrorDetails

from ingot.runtime.server.api import bodies
from ingot.runtime.server.api.bodies import Body, ignored_in, name_ignored, parse
from ingot.runtime.server.api.request_schemas import ChatRequest, CompletionRequest, TokenizeRequest
from ingot.runtime.server.api.responses.schemas import ResponseRequest
from ingot.runtime.server.http.api_error import ApiError
from tests.each_case import each_case
from tests.runtime.engines import HELLO


def refusal(kind: type[Body], body: bytes) -> ApiError:
    with pytest.raises(ApiError) as refused:
        parse(kind, body)
    assert refused.value.status == 400
    return refused.value


SCHEMA = "an object or true or false or a string"
FORMATS = "'text', 'json_object' or 'json_schema'"
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt is null; it must be a string or a list"),
    ({"prompt": True}, "prompt is true; it must be a string or a list"),
    ({"prompt": [["a"]]}, "prompt[0][0] is 'a'; it must be an integer"),
    ({"n": 1.5}, "n is 1.5; it must be an integer"),
    ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
    ({"stream": "yes"}, "stream is 'yes'; it must be true or false"),
    ({"stop": [1]}, "stop[0] is 1; it must be a string"),
    ({"logit_bias": [1]}, "logit_bias is [1]; it must be an object"),
    ({"structured_outputs": {"json": 5}}, f"structured_outputs.json is 5; it must be {SCHEMA}"),
    ({"response_format": {"type": "json"}}, f"response_format.type is 'json'; it must be {FORMATS}"),
    ({"response_format": {}}, "response_format.type is missing"),
    ({"response_format": {"type": "text", "a": 1}}, "response_format has the unknown field 'a': leave it out"),
    ({"stop": "\ud800"}, "stop has half a surrogate pair at character 0; send valid Unicode text"),
    ({"metadata": {"a\udfff": "b"}}, "metadata has a key with half a surrogate pair; send valid Unicode text"),
    ({"user": [1] * 100}, f"user is {json.dumps([1] * 100)[:80]}...; it must be a string"),
]  # fmt: skip


@each_case(("given", "message"), COMPLETIONS)
def test_a_wrong_field_is_named_with_its_value_and_what_it_must_be(given: dict[str, Any], message: str) -> None:
    error = refusal(CompletionRequest, json.dumps({"prompt": "a", **given}).encode())
    assert (str(error), error.param) == (message, next(iter(given)))


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "a", **fields}]}


KINDS = "'message', 'function_call', 'function_call_output' or 'reasoning'"
RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": [5]}, "input[0] is 5; it must be an object"),
    (item(type=5), f"input[0].type is 5; it must be {KINDS}"),
    (item(type="picture"), f"input[0].type is 'picture'; it must be {KINDS}"),
    (item(content=[{"type": "image"}]), "input[0].content[0].type is 'image'; it must be 'input_text' or "),
    (item(content=[{"text": "a"}]), "input[0].content[0].type is missing"),
    (item(content=[{"type": "input_text"}]), "input[0].content[0].text is missing"),
    (item(role="tool"), "input[0].role is 'tool'; it must be 'user', 'assistant', 'system' or 'developer'"),
    ({"input": "a", "instructions": "b\ud800"}, "instructions has half a surrogate pair at character 1"),
    ({"input": "a", "metadata": {"b": "c" * 513}}, "metadata.b is 'ccc"),
    ({"input": "a", "metadata": {str(each): "" for each in range(17)}}, "it must be an object with at most 16 items"),
]  # fmt: skip


@each_case(("given", "message"), RESPONSES)
def test_a_place_within_a_union_is_the_one_that_the_client_wrote(given: dict[str, Any], message: str) -> None:
    assert message in str(refusal(ResponseRequest, json.dumps(given).encode()))


@each_case(
    ("body", "message"),
    [
        (b"", "the body is not JSON: Expecting value"),
        (b'["a"]', "the body is a list; it must be an object"),
        (b"null", "the body is null; it must be an object"),
        (b"1.5", "the body is a number; it must be an object"),
        (b'{"prompt": NaN}', "the body is not JSON: NaN is not a number of JSON"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "it has a number with more than 4,300 digits"),
        (b'{"prompt": "\xff"}', "the body is not JSON: byte 12 is not UTF-8"),
        (b'{"messages": ' + b"[" * 100_000, "it is nested too deep"),
        (b'{"messages": [{"content": "\xed\xa0\x80"}]}', "messages[0].content has half a surrogate pair"),
    ],
)  # fmt: skip
def test_what_is_not_json_is_said_without_pythons_words(body: bytes, message: str) -> None:
    assert message in str(refusal(ChatRequest, body))


def test_whole_surrogate_pairs_are_texts() -> None:
    found = parse(TokenizeRequest, b'{"prompt": "\\ud83d\\ude00"}')
    assert found.prompt == "\N{GRINNING FACE}"


@pytest.mark.parametrize("depth", [100, 300, 900, 3000])
@pytest.mark.parametrize("field", ["metadata", "suffix", "messages", "chat_template_kwargs"])
def test_deep_values_are_refused_or_read(field: str, depth: int) -> None:
    body = {"messages": HELLO, field: "\0"}
    nested = json.dumps(body).replace('"\\u0000"', '{"a":' * depth + '"\\ud800"' + "}" * depth)
    assert refusal(ChatRequest, nested.encode())


@each_case(
    ("given", "ignored"),
    [
        ({"no_stop_trim": False, "return_hidden_states": None, "x": [], "y": {}}, 4),
        ({"separate_reasoning": True, "stream_reasoning": True, "include_reasoning": None}, 3),
        ({"repeat_penalty": 1, "typical_p": 1.0, "cache_prompt": True}, 3),
        ({"stream": True, "stream_options": {"include_usage": True, "hidden": None}}, 1),
        ({"response_format": {"type": "text", "a": False, "json_schema": {"name": "x", "schema": {}, "b": {}}}}, 2),
        ({"top_k": 5, "stop": None}, 0),
    ],
)
def test_an_unknown_field_whose_value_changes_nothing_is_left_out(given: dict[str, Any], ignored: int) -> None:
    body = parse(CompletionRequest, json.dumps({"prompt": "a", **given}).encode())
    assert len(body.ignored) == ignored
    known = {name: value for name, value in given.items() if name in CompletionRequest.model_fields}
    for name in known:
        assert getattr(body, name) is not None or given[name] is None


@each_case(
    "given",
    [
        {"separate_reasoning": False},
        {"repeat_penalty": True},
        {"cache_prompt": []},
        {"no_stop_trim": True},
        {"x": ""},
        {"x": 0},
        {"include_reasoning": 1},
        {"stream": True, "stream_options": {"hidden": True}},
        {"x": [None]},
    ],
)
def test_an_unknown_field_with_another_value_is_refused_unless_the_server_is_lenient(given: dict[str, Any]) -> None:
    text = json.dumps({"prompt": "a", **given}).encode()
    assert refusal(CompletionRequest, text).code == "unknown_parameter"
    assert parse(CompletionRequest, text, is_lenient=True).ignored


MANY = 50_000
MANY_PROBLEMS: list[tuple[type[Body], dict[str, Any], str]] = [
    (CompletionRequest, {"prompt": ["a", 5] * MANY}, "prompt[0] is 'a'; it must be an integer or a list; "),
    (CompletionRequest, {**dict.fromkeys(map(str, range(MANY))), "prompt": "a"}, "unknown field '0'; known: "),
    (
        CompletionRequest,
        {"prompt": [[1]] * MANY + [["a"]] * MANY},
        "the body has more than 4,096 unknown fields and wrong values",
    ),
    (ResponseRequest, {"input": [{"role": "user", "content": "a", "x": None}] * MANY}, "input[0] has the unknown"),
    (ChatRequest, {"messages": HELLO, "stop": [5] * MANY}, "stop[0] is 5; it must be a string; many more "),
]


@each_case(("kind", "given", "message"), MANY_PROBLEMS)
def test_of_many_problems_only_the_first_are_described(
    kind: type[Body], given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[int] = []

    def note(problems: Sequence[ErrorDetails], *rest: Any) -> ApiError:
        described.append(len(problems))
        return refuse(problems, *rest)

    refuse = bodies._refusal
    monkeypatch.setattr(bodies, "_refusal", note)
    assert str(refusal(kind, json.dumps(given).encode())).startswith(message)
    assert all(count <= bodies._MOST_PROBLEMS for count in described)


def test_only_fields_that_no_form_of_an_object_has_are_left_out() -> None:
    choice = {"type": "function", "function": {"name": "f"}, "x": None}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}, "y": False}]
    body = parse(ChatRequest, json.dumps({"messages": HELLO, "tools": tools, "tool_choice": choice}).encode())
    assert sorted(body.ignored) == ["tool_choice.x", "tools[0].y"]
    assert body.chat.must_call
    wrong = {"type": "function", "allowed_tools": None}
    refusal(ChatRequest, json.dumps({"messages": HELLO, "tools": tools, "tool_choice": wrong}).encode())


def test_names_of_fields_that_a_client_chose_are_safe_in_a_header_and_in_a_metric() -> None:
    given = {"prompt": "a", "no_stop_trim": False, "a\r\nSet-Cookie: b": None, "x" * 5000: None, "\u00e9": None}
    given |= {f"field_{number}": None for number in range(40)}
    scope: dict[str, Any] = {}
    name_ignored(scope, parse(CompletionRequest, json.dumps(given).encode()))
    labels, header = ignored_in(scope)
    assert sorted({*labels}) == ["no_stop_trim", "other"]
    assert len(labels) == 44
    assert re.fullmatch(r"[A-Za-z0-9_.\[\]?, -]+", header)
    assert len(header) < 1500
    assert header.endswith(", ...")
    assert ignored_in({}) == ([], "")


MANY = 250_001


@each_case(
    "value",
    [
        "[" + "[]," * MANY + "[]]",
        "[" + "{}," * MANY + "{}]",
        "[" + ",".join('{"a": 1}' for _ in range(MANY // 2 + 1)) + "]",
        "{" + ",".join(f'"{n}": ""' for n in range(MANY)) + "}",
        "[" + '["a[{:", "\\\\"],' * MANY + "1]",
        "[" + '"\\"",[],' * MANY + "1]",
    ],
)
def test_a_body_of_too_many_objects_is_refused_before_they_are_made(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "loads", lambda *given, **options: pytest.fail("it was parsed"))
    error = refusal(CompletionRequest, f'{{"prompt": "a", "user": {value}}}'.encode())
    assert str(error) == "the body has more than 250,000 lists, objects and keys; send less in one request"


@each_case(
    "text", ["[{:" * MANY, '"[",' * MANY, '\\"{' * MANY, "\\" * 6 + '":[' * MANY, '["' * MANY, "[", '"[{:' * 2 * MANY]
)
def test_brackets_within_strings_do_not_count(text: str) -> None:
    body = json.dumps({"prompt": text, "stop": [text[:7]]}).encode()
    assert parse(CompletionRequest, body).prompt == text


def test_the_count_agrees_with_one_that_reads_character_by_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_MOST_PARTS", 3)
    rng = random.Random(0)
    for _ in range(2000):
        text = json.dumps(_value(rng, 4)).encode()
        assert (bodies._num_parts(text) > 3) == (_counted(text) > 3), text


def _value(rng: random.Random, depth: int) -> object:
    kind = rng.randrange(6) if depth else 0
    if kind < 2:
        return rng.choice(["a[", "\\", '\\"', '"[{:"', 1, None, "", '"'])
    values = [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return values if kind < 4 else dict(zip(['"', '\\"[', "a:"], values, strict=False))


def _counted(text: bytes) -> int:
    count, is_string, place = 0, False, 0
    while place < len(text):
        each = text[place : place + 1]
        if is_string and each == b"\\":
            place += 1
        elif each == b'"':
            is_string = not is_string
        elif not is_string:
            count += each in b"[{:"
        place += 1
    return count


def test_text_that_is_not_utf8_is_not_json() -> None:
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        error = refusal(CompletionRequest, '{"prompt": "a"}'.encode(encoding))
        assert str(error).startswith("the body is not JSON: ")
    assert parse(CompletionRequest, '{"prompt": "a"}'.encode("utf-8-sig")).prompt == "a"


@each_case(
    ("value", "said"),
    [
        ([1.5] * 100_000, f"[{'1.5, ' * 15}1.5,..."),
        ([{"a": [1, {"b": "é"}], "c": None}], '[{"a": [1, {"b": "é"}], "c": None}]'.replace("None", "null")),
        (["a" * 100_000, 5], f'["{"a" * 78}...'),
        ({"a" * 100_000: 5}, f'{{"{"a" * 78}...'),
    ],
)
def test_a_long_wrong_value_is_shown_without_writing_it_as_a_whole(
    value: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps({"prompt": "a", "user": value}).encode()
    monkeypatch.setattr(bodies, "_pieces", partial(_counted_pieces, bodies._pieces))
    assert str(refusal(CompletionRequest, body)) == f"user is {said}; it must be a string"


def _counted_pieces(pieces: Callable[[object], Iterator[str]], value: object) -> Iterator[str]:
    for place, piece in enumerate(pieces(value)):
        assert place < 300
        assert len(piece) < 300
        yield piece
