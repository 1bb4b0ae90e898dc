"""Malformed HTTP requests, by kind: what a client, a proxy or an attacker may send by mistake or on purpose.

A request is bytes. Some are valid by chance; none may crash the server, keep a block or get an answer of 500 or above.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Fields = Mapping[str, Sequence[str]]
"""Names of the fields of a body by path."""

_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def read(", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/tokenize": {"prompt": "def read("},
    "/detokenize": {"tokens": [1, 2, 3]},
}
_LEFT_OUT = {"/admin/reload"}
"""Replaces the model that the other requests ask."""

_METHODS = (b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"TRACE", b"CONNECT", b"BREW", b"post", b"")
_PATHS = (*_BODIES, "/health", "/metrics", "/v1/models", "/v1/responses/x", "/v1/responses/x/cancel", "/../etc", "//")
_ENDS = (b"\r\n", b"\n", b"\r", b"", b"\0", b"\r\n\r\n")
_LENGTHS = (
    b"-1",
    b"+5",
    b"0x10",
    b"1e3",
    b"99999999999999999999",
    b"",
    b" ",
    b"5, 5",
    b"5, 6",
    b"\xff",
    b"3.0",
    b"nan",
)
_CHUNKS = (
    b"5\r\nabc\r\n",
    b"-1\r\n",
    b"FFFFFFFFFFFFFFFFF\r\n",
    b"zz\r\n",
    b"0;a=b\r\nX: y\r\n\r\n",
    b"1\r\n{",
    b"5\n{\n",
)
_DAMAGE = (
    *(b"NaN", b"1e999", b"\xed\xa0\x80", b"\\ud800", b"\\u0000", b"9" * 5000, b"-", b"//", b"'", b"\xef\xbb\xbf"),
)
_STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308, "", "x", "\0", "\ud800", "a" * 5000,
    "💥" * 50, [], [[]], [None], [0] * 5000, {}, {"": None}, {"a": {"b": [1, "c"]}}, ["x", 1], [-1], [2**40], "1",
    {"type": "function"}, {"type": "json_schema"}, {"role": "user"}, [{"role": "user"}], [{"role": 5, "content": []}],
    [{"type": "message"}], [{"role": "user", "content": {"a": 1}}], {"include_usage": 1}, {"$ref": "#"}, {"1": "x"},
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "image", "source": 1}]}],
    [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {"c": [{}]}}]}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text"}]}]}],
    [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}], [{"role": "system", "content": "x"}],
    [{"name": "f", "input_schema": {"type": 5}}], [{"name": "\ud800", "input_schema": {}}], {"type": "tool"},
    {"type": "enabled", "budget_tokens": -1}, [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
)  # fmt: skip


def framed(body: bytes, path: str, extra: bytes = b"") -> bytes:
    """A request with a body of its announced length."""
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%bContent-Length: %d\r\n\r\n"
    return head % (path.encode(), extra, len(body)) + body


def _request_line(rng: random.Random, fields: Fields) -> bytes:
    target = rng.choice(
        [*(path.encode() for path in _PATHS), b"", b"*", b"http://", b"/" + b"a" * 9000, rng.randbytes(20)]
    )
    version = rng.choice([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"http/1.1", b"", b"HTTP/1.1 x", b"\xff"])
    line = rng.choice([b" ", b"  ", b"\t", b""]).join([rng.choice(_METHODS), target, version])
    return line + rng.choice(_ENDS) + b"Host: x" + rng.choice(_ENDS) + rng.choice(_ENDS)


def _headers(rng: random.Random, fields: Fields) -> bytes:
    path = rng.choice(_PATHS)
    lines = [
        rng.choice(
            [
                *(b"Host: x", b"Host: y", b"NoColon", b": empty", b"Bad Name: 1", b"X: " + rng.randbytes(8)),
                *(
                    b"X: " + b"a" * 70_000,
                    b" folded",
                    b"Expect: 100-continue",
                    b"Upgrade: websocket",
                    b"Connection: upgrade",
                ),
                *(b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked, chunked", b"Content-Encoding: br"),
                *(b"Authorization: Bearer " + rng.randbytes(5), b"X-Request-Id: \xe9", b"Traceparent: 00-x"),
                b"Content-Length: " + rng.choice(_LENGTHS),
            ]
        )
        for _ in range(rng.randint(1, 6))
    ]
    return b"POST %b HTTP/1.1\r\n" % path.encode() + rng.choice(_ENDS).join(lines) + b"\r\n\r\n" + rng.randbytes(5)


def _chunked(rng: random.Random, fields: Fields) -> bytes:
    path, body = rng.choice([*_BODIES.items()])
    text = json.dumps(body).encode()
    pieces = [b"%x\r\n%b\r\n" % (len(text), text)] if rng.random() < 0.5 else []
    pieces += [rng.choice(_CHUNKS) for _ in range(rng.randint(1, 3))]
    rng.shuffle(pieces)
    end = rng.choice([b"0\r\n\r\n", b"", b"0\r\n", b"0\r\nA: b\r\n\r\nGET / HTTP/1.1\r\n\r\n"])
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode()
    return head + b"".join(pieces) + end


def _length(rng: random.Random, fields: Fields) -> bytes:
    path, body = rng.choice([*_BODIES.items()])
    text = json.dumps(body).encode()
    length = rng.choice([len(text) - 3, len(text) + 3, 0, 1, 2**31, 2**62, 9 << 20])
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), length) + text


def _damaged_json(rng: random.Random, fields: Fields) -> bytes:
    path, body = rng.choice([*_BODIES.items()])
    text = bytearray(json.dumps(body).encode())
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(text))
        match rng.randrange(5):
            case 0:
                text[place] = rng.randrange(256)
            case 1:
                del text[place : place + rng.randint(1, 5)]
            case 2:
                text[place:place] = rng.randbytes(rng.randint(1, 4))
            case 3:
                text[place:place] = rng.choice(
                    [
                        b"NaN",
                        b"1e999",
                        b"\xed\xa0\x80",
                        b"\\ud800",
                        b"\\u0000",
                        b"9" * 5000,
                        b"-",
                        b"//",
                        b"'",
                        b"\xef\xbb\xbf",
                    ]
                )
            case _:
                text = text[: max(1, place)]
        text = text or bytearray(b" ")
    return framed(bytes(text), path)


def _nested_json(rng: random.Random, fields: Fields) -> bytes:
    path = rng.choice([*_BODIES])
    name, depth = rng.choice(fields[path]), rng.choice([50, 900, 20_000])
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    value = opening * depth + b"1" + closing * rng.choice([depth, depth - 1, 0])
    return framed(b'{"%b":%b}' % (name.encode(), value), path)


def _other_json(rng: random.Random, fields: Fields) -> bytes:
    texts = [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"5",
        b"{}",
        b"{",
        b"[{}]",
        b"true",
        b"\xff\xfe{\0}\0",
        b"{}{}",
        b'{"a":1,}',
        b" " * 99,
    ]
    return framed(rng.choice(texts), rng.choice([*_BODIES]))


def _strange_fields(rng: random.Random, fields: Fields) -> bytes:
    path, body = rng.choice([*_BODIES.items()])
    names = rng.choices(fields[path], k=rng.randint(1, 3))
    changed = {**body, **{name: rng.choice(_STRANGE) for name in names}}
    if rng.random() < 0.2:
        changed[rng.choice(["unknown", "", "\ud800", "__class__", "x" * 3000])] = rng.choice(_STRANGE)
    return framed(json.dumps(changed).encode(), path)


KINDS: dict[str, Callable[[random.Random, Fields], bytes]] = {
    "request line": _request_line,
    "headers": _headers,
    "chunked body": _chunked,
    "length": _length,
    "damaged JSON": _damaged_json,
    "deep nesting": _nested_json,
    "other JSON": _other_json,
    "strange fields": _strange_fields,
}
_WEIGHTS = (2, 2, 2, 1, 4, 1, 1, 6)


def malformed(rng: random.Random, fields: Fields) -> tuple[str, bytes]:
    """A request, with its kind."""
    (kind,) = rng.choices([*KINDS], _WEIGHTS)
    return kind, KINDS[kind](rng, fields)


def fields_of(document: Mapping[str, Any]) -> dict[str, list[str]]:
    """Fields of each path's body in an OpenAPI document. AssertionError for a path that _BODIES lacks."""
    found = {}
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if content and path not in _LEFT_OUT:
            name = content["schema"]["$ref"].rpartition("/")[2]
            found[path] = sorted(document["components"]["schemas"][name]["properties"])
    assert found.keys() == _BODIES.keys(), found.keys() ^ _BODIES.keys()
    return found
