"""Keys and bodies: who may ask, and how much."""

import json
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from benchmarks.serve.malformed import framed

from ingot.errors import UsageError
from ingot.runtime.server.http.access import ApiKeys, BodyRoom, KeyFiles
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.http.rate_limits import Holder, KeyLimits, TokenBucket
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.server.watch.request_log import Record
from tests.each_case import each_case
from tests.runtime.engines import text_engine
from tests.runtime.server.models.test_admission import gated_engine
from tests.runtime.server.servers import SECONDS, running


def keys_of(folder: Path, text: str) -> ApiKeys:
    file = folder / "keys.txt"
    file.write_text(text)
    return ApiKeys.read(file)


def test_a_key_is_required_except_for_probes_and_metrics(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "# ours\nfirst-key-1\n\n  second-key-2  \n")
    with running(text_engine(), keys=keys) as server:
        for key in ("first-key-1", "second-key-2"):
            with server.client(key) as client:
                assert client.completions.create(model="fake", prompt="x", max_tokens=1).choices
        for key in ("first-key-", "first-key-11", "# ours", "ümlaut-ü"):
            answer = httpx2.get(f"{server.url}/v1/models", headers={b"Authorization": f"Bearer {key}".encode()})
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        with server.client("wrong-key") as client, pytest.raises(openai.AuthenticationError, match="key is wrong"):
            client.models.list()
        for headers in ({}, {"Authorization": "Basic first-key-1"}):
            refused = httpx2.post(f"{server.url}/v1/completions", headers=headers, json={"prompt": "x"})
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert httpx2.get(server.url + path).status_code == 200
        for path in ("/tokenize", "/detokenize", "/elsewhere", "//health", "/health/"):
            assert httpx2.post(server.url + path, json={}).status_code == 401


def test_holders_of_keys_are_told_apart_by_a_digest(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "first-key-1\nsecond-key-2\n")
    holders = [keys.holder_of(key) for key in ("first-key-1", "second-key-2")]
    groups = {holder.group for holder in holders if holder}
    assert len(groups) == 2
    assert not any("key" in group for group in groups)
    assert keys.holder_of("third-key-3") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no API key; write one per line"),
        ("# only a remark\n", "has no API key"),
        ("good-key-1\nshort\n", ":2: a key must be at least 8 ASCII characters without spaces"),
        ("a key with spaces\n", ":1: a key must be"),
        ("good-key-1 rpm=5\n", ":1: after a key come words NAME=NUMBER; unknown limit 'rpm'; limits: "),
        ("good-key-1 tokens_per_minute=0\n", ":1: tokens_per_minute is '0'; it must be a whole number from 1 to"),
        ("good-key-1 priority\n", ":1: priority is ''; it must be a whole number"),
        ("good-key-1 priority=1\n\ngood-key-1\n", r":3: the key is the same as that of .*:1; leave one of them out"),
    ],
)
def test_a_file_without_good_keys_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        keys_of(tmp_path, text)


def test_a_key_has_budgets_of_requests_and_of_tokens(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "few-requests requests_per_minute=2\nfew-tokens tokens_per_minute=20 priority=3\n")
    with running(text_engine(), keys=keys) as server:
        with server.client("few-requests") as client:
            for left in ("1", "0"):
                answer = client.completions.with_raw_response.create(model="fake", prompt="x", max_tokens=1)
                assert answer.headers["x-ratelimit-remaining-requests"] == left
            with pytest.raises(openai.RateLimitError, match="has used its 2 requests a minute") as refused:
                client.completions.create(model="fake", prompt="x", max_tokens=1)
            assert 20_000 < float(refused.value.response.headers["retry-after-ms"]) <= 30_000
            assert refused.value.code == "rate_limit_exceeded"
        with server.client("few-tokens") as client:
            client.completions.create(model="fake", prompt=[1] * 18, max_tokens=8, extra_body={"ignore_eos": True})
            with pytest.raises(openai.RateLimitError, match="has used its 20 tokens a minute") as refused:
                client.completions.create(model="fake", prompt="x", max_tokens=1)
            assert 19_000 < float(refused.value.response.headers["retry-after-ms"]) <= 21_000  # 7 tokens
        server.require_nothing_left()


def test_a_byte_order_mark_is_not_part_of_a_key(tmp_path: Path) -> None:
    assert keys_of(tmp_path, "\ufefffirst-key-1\n").holder_of("first-key-1")


def timeless(**limits: int) -> tuple[ApiKeys, Holder]:
    """A key whose budgets are not refilled."""
    holder = Holder("group", KeyLimits(**limits), lambda: 0.0)
    return ApiKeys({"some-key-1": holder}), holder


def test_a_key_pays_for_all_candidates_of_best_of() -> None:
    keys, holder = timeless(tokens_per_minute=500)
    request: dict[str, Any] = {"model": "fake", "prompt": [1, 2], "max_tokens": 10, "extra_body": {"ignore_eos": True}}
    with running(text_engine(), keys=keys) as server, server.client("some-key-1") as client:
        answer = client.completions.with_raw_response.create(**request, best_of=20)
        usage = answer.parse().usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 200, 202)
        assert answer.headers["x-ratelimit-remaining-tokens"] == "298"
        counts: Any = {"include_usage": True, "continuous_usage_stats": True}
        *_, last, whole = client.completions.create(**request, best_of=20, stream=True, stream_options=counts)
        assert [chunk.usage and chunk.usage.completion_tokens for chunk in (last, whole)] == [200, 200]
        assert holder.headers()["x-ratelimit-remaining-tokens"] == "96"


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"best_of": 4}, {"n": 3, "prompt": [[1, 2], [3, 4]]}])
def test_a_key_pays_for_what_was_generated_before_its_client_left(fields: dict[str, Any]) -> None:
    keys, holder = timeless(tokens_per_minute=10_000)
    records: list[Record] = []
    engine, executor = gated_engine()
    body = json.dumps({"prompt": [1, 2], "max_tokens": 450, "ignore_eos": True, **fields}).encode()
    authorized = b"Authorization: Bearer some-key-1\r\n"
    with running(engine, keys=keys) as server:
        server.service.observers.append(records.append)
        at_first = engine.metrics().output_tokens
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(framed(body, "/v1/completions", authorized))
            server.until(lambda: engine.metrics().output_tokens >= at_first + 20)
            executor.gate.clear()
        executor.gate.set()
        server.until(lambda: records)
        server.require_nothing_left()
        generated = engine.metrics().output_tokens - at_first
    (record,) = records
    assert record.error == "client_closed_request"
    assert {choice.finish_reason for choice in record.choices} == {"abort"}
    assert (record.prompt_tokens or 0) > 0
    assert record.output_tokens == generated >= 20
    assert holder.headers()["x-ratelimit-remaining-tokens"] == str(10_000 - (record.prompt_tokens or 0) - generated)


def test_headers_say_what_is_left_after_a_whole_answer_and_on_refusals() -> None:
    keys, _ = timeless(tokens_per_minute=500, requests_per_minute=10)
    request: dict[str, Any] = {"model": "fake", "prompt": [1, 2], "extra_body": {"ignore_eos": True}}
    with running(text_engine(), keys=keys) as server, server.client("some-key-1") as client:
        raw = client.completions.with_raw_response
        stream = raw.create(**request, max_tokens=10, stream=True)
        assert list(stream.parse())
        assert 488 <= int(stream.headers["x-ratelimit-remaining-tokens"]) < 498  # its prompt and the first tokens
        headers = raw.create(**request, max_tokens=500).headers
        assert (headers["x-ratelimit-limit-tokens"], headers["x-ratelimit-remaining-tokens"]) == ("500", "0")
        assert headers["x-ratelimit-reset-tokens"] == "1m1.68s"  # of 514
        with pytest.raises(openai.RateLimitError) as refused:
            raw.create(**request)
        headers = refused.value.response.headers
        assert (headers["x-ratelimit-remaining-tokens"], headers["x-ratelimit-remaining-requests"]) == ("0", "8")
        assert (headers["x-ratelimit-reset-tokens"], headers["x-ratelimit-reset-requests"]) == ("1m1.68s", "12s")


@each_case(
    ("used", "reset"),
    [(0, "0s"), (0.12, "120ms"), (1, "1s"), (8.64, "8.64s"), (86.4, "1m26.4s"), (360, "6m0s"), (0.0001, "1ms")],
)
def test_the_time_of_a_reset_is_written_as_openai_writes_it(used: float, reset: str) -> None:
    holder = Holder("one", KeyLimits(tokens_per_minute=60), lambda: 0.0)
    holder.take_tokens(used)  # type: ignore[arg-type]  # one a second
    assert holder.headers()["x-ratelimit-reset-tokens"] == reset


def test_a_key_sets_the_most_urgent_priority_of_its_requests(tmp_path: Path) -> None:
    holder = Holder("one", KeyLimits(priority=3))
    assert [holder.priority(asked) for asked in (0, -5, 3, 7)] == [3, 3, 3, 7]
    assert Holder("two", KeyLimits()).priority(-5) == -5
    keys = keys_of(tmp_path, "first-key-1\nurgent-key-2 priority=-9\n")
    found = [keys.holder_of(key) for key in ("first-key-1", "urgent-key-2")]
    assert [holder.priority(-2147483647) for holder in found if holder] == [0, -9]


def test_files_of_keys_are_read_again_and_budgets_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    users, administrators = tmp_path / "users", tmp_path / "administrators"
    users.write_text("first-key-1 tokens_per_minute=20\nstays-key-2 tokens_per_minute=100\n")
    administrators.write_text("admin-key-1\n")
    files = KeyFiles(users, administrators)
    keys = files.users
    assert keys
    assert files.administrators
    with running(text_engine(), keys=keys, admin_keys=files.administrators) as server:
        server.service.key_files = files

        def status(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx2.post(f"{server.url}/v1/completions", headers=headers, json={"prompt": "x"}).status_code

        def reload(first: str, second: str) -> None:
            users.write_text(first)
            administrators.write_text(second)
            read_again = threading.Event()
            server.loop.call_soon_threadsafe(server.service.reload)
            server.loop.call_soon_threadsafe(read_again.set)
            assert read_again.wait(SECONDS)

        stays = keys.holder_of("stays-key-2")
        assert stays
        stays.take_tokens(90)
        reload("stays-key-2 tokens_per_minute=200 priority=5\nthird-key-3\n", "admin-key-2\n")
        assert [status(key) for key in ("first-key-1", "stays-key-2", "third-key-3")] == [401, 200, 200]
        assert keys.holder_of("stays-key-2") is stays
        assert 80 <= int(stays.headers()["x-ratelimit-remaining-tokens"]) < 190  # a new budget has 200
        assert stays.priority(0) == 5
        assert not files.administrators.holder_of("admin-key-1")
        assert files.administrators.holder_of("admin-key-2")
        assert "the API keys were read again" in caplog.text
        reload("fourth-key-4\n", "short\n")
        assert f"the API keys stay as they were: {administrators}:1: a key must be" in caplog.text
        assert [status(key) for key in ("third-key-3", "fourth-key-4")] == [200, 401]
        users.unlink()
        administrators.unlink()
        files.reload()
        assert "No such file" in caplog.text
        assert status("third-key-3") == 200


def test_a_bucket_is_refilled_with_time_and_may_be_overdrawn() -> None:
    now = [0.0]
    bucket = TokenBucket(60, lambda: now[0])
    bucket.take(70)
    assert (bucket.level, bucket.seconds_until(1)) == (-10, 11)
    now[0] += 11
    assert bucket.level == 1
    now[0] += 1000
    assert bucket.level == 60


def test_bodies_that_are_too_long_too_slow_or_compressed_are_refused() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    announced = head + b"Content-Length: 99999999\r\n\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n" + (b"100\r\n" + b"a" * 256 + b"\r\n") * 8
    slow = head + b"Content-Length: 10\r\n\r\n{"
    zipped = head + b"Connection: close\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}"
    options = ServerOptions(max_body_bytes=1000, body_seconds=0.05)
    with running(text_engine(), options) as server:
        for request, status, message in (
            (announced, b"413", b"the body has 99999999 bytes, more than allowed; max_body_bytes is 1000"),
            (chunked, b"413", b"the body has more bytes than allowed"),
            (slow, b"408", b"the body did not arrive within 0.05 s"),
            (zipped, b"415", b"the body has the Content-Encoding 'gzip'; send it without one"),
        ):
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
                connection.sendall(request)
                answer = b"".join(iter(partial(connection.recv, 4096), b""))
            assert answer.startswith(b"HTTP/1.1 " + status)
            assert message in answer
        server.require_nothing_left()


@each_case("body", [b"", b"{", b"\xff", b"[" * 100_000, b"5", b"null", b'{"prompt": "\\ud800"}'])
def test_what_is_not_a_request_is_refused(body: bytes) -> None:
    with running(text_engine()) as server:
        answer = httpx2.post(f"{server.url}/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_bodies_of_open_requests_have_a_bound_together_and_a_key_half_of_it() -> None:
    room = BodyRoom(ServerOptions(max_body_bytes=100, held_body_bytes=400))
    with room.body("a") as first, room.body("a") as second, room.body("b") as third, room.body("") as fourth:
        for _ in range(2):
            first.take(60)
            third.take(60)
        second.take(80)
        for held, whose, others in ((second, "this key's open requests", 0), (fourth, "open requests", 80)):
            fourth.take(others)
            with pytest.raises(ApiError, match=f"the bodies of {whose} have as many bytes .* allowed") as refused:
                held.take(1)
            assert (refused.value.status, refused.value.retry_after_seconds) == (429, 1.0)
        assert room.num_bytes == 400
    assert room.num_bytes == 0
    with room.body("a") as held:
        held.take(200)


def test_a_longest_body_alone_always_has_room() -> None:
    room = BodyRoom(ServerOptions(max_body_bytes=1000, held_body_bytes=1))
    with room.body("a") as held:
        held.take(1000)


def test_the_bodies_of_slow_clients_have_a_bound_and_leave_it_with_them() -> None:
    head = b"POST /%b HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    with running(text_engine(), ServerOptions(max_body_bytes=1000, held_body_bytes=1500)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as slow:
            slow.sendall(head % b"v1/completions" + b" " * 900)
            while server.service.bodies.num_bytes < 900:
                time.sleep(0.01)
            for path in ("v1/completions", "tokenize", "detokenize"):
                answer = httpx2.post(f"{server.url}/{path}", content=b" " * 800)
                assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
                assert answer.json()["error"]["message"].startswith("the bodies of open requests have as many bytes")
        while server.service.bodies.num_bytes:
            time.sleep(0.01)
        body = {"prompt": "a" * 500, "max_tokens": 1}
        assert httpx2.post(f"{server.url}/v1/completions", json=body).status_code == 200
        server.require_nothing_left()
        assert server.service.bodies.num_bytes == 0
