"""Two holders of keys: neither learns of the other's requests, and neither takes the other's share."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx2
import pytest

from ingot.runtime.server.options import ServerOptions
from tests.runtime.engines import text_engine
from tests.runtime.server.http.test_access import keys_of, timeless
from tests.runtime.server.models.test_admission import gated_engine
from tests.runtime.server.servers import SECONDS, Running, running

_KEYS = "first-key-1\nsecond-key-2\n"
_PROMPT = list(range(1, 200))


def post(server: Running, path: str, key: str, **body: Any) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx2.post(server.url + path, headers=headers, json=body, timeout=SECONDS)


def cached(server: Running, key: str, **body: Any) -> int:
    answer = post(server, "/v1/completions", key, **{"prompt": _PROMPT, "max_tokens": 1, **body})
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(text_engine(), keys=keys_of(tmp_path, _KEYS)) as server:
        yield server


def test_cached_tokens_tell_a_key_nothing_of_the_prompts_of_another(server: Running) -> None:
    assert cached(server, "first-key-1") == 0
    assert cached(server, "first-key-1") > 0, "its own prompts are cached"
    assert cached(server, "second-key-2") == 0
    assert cached(server, "first-key-1", cache_salt="a") == 0
    assert cached(server, "second-key-2", cache_salt="a") == 0, "nor under a salt that both choose"
    assert cached(server, "first-key-1", cache_salt="a") > 0


def test_no_salt_reaches_the_prompts_of_another_key(server: Running) -> None:
    assert cached(server, "first-key-1") == 0
    group = sha256(b"first-key-1").hexdigest()[:16]
    for salt in (group, f"{group}:{sha256(b'').hexdigest()}"):
        assert cached(server, "second-key-2", cache_salt=salt) == 0


def test_keys_may_share_the_cache(tmp_path: Path) -> None:
    options = ServerOptions(share_prefix_cache=True, drain_seconds=SECONDS)
    with running(text_engine(), options, keys=keys_of(tmp_path, _KEYS)) as server:
        assert cached(server, "first-key-1") == 0
        assert cached(server, "second-key-2") > 0
        assert cached(server, "second-key-2", cache_salt="a") == 0


def test_metrics_tell_nothing_of_repeated_prompts_of_different_keys(server: Running) -> None:
    prompt = [(7 * number) % 251 for number in range(220)]
    for _ in range(4):  # one prompt in four is looked at
        cached(server, "first-key-1", prompt=prompt)
    before = server.model().pieces.num_repeated
    cached(server, "second-key-2", prompt=prompt)
    assert server.model().pieces.num_pieces > 0
    assert server.model().pieces.num_repeated == before


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_tokenizing_counts_towards_the_limits_of_a_key(path: str) -> None:
    keys, _ = timeless(requests_per_minute=3, tokens_per_minute=1000)
    body: dict[str, Any] = {"prompt": "import os"} if path == "/tokenize" else {"tokens": [1, 2, 3]}
    with running(text_engine(), keys=keys) as server:
        answers = [post(server, path, "some-key-1", **body) for _ in range(4)]
    assert [each.status_code for each in answers] == [200, 200, 200, 429]
    number = len(answers[0].json().get("tokens", body.get("tokens")))
    left = [each.headers["x-ratelimit-remaining-tokens"] for each in answers[:2]]
    assert left == [str(1000 - number), str(1000 - 2 * number)]
    assert answers[3].json()["error"]["code"] == "rate_limit_exceeded"
    assert int(answers[3].headers["retry-after"]) > 0


def test_tokenizing_takes_a_place_as_generating_does() -> None:
    engine, executor = gated_engine()
    with running(engine, ServerOptions(max_requests=2)) as server, ThreadPoolExecutor(2) as threads:
        executor.gate.clear()
        opened = [
            threads.submit(post, server, "/v1/completions", "none", prompt=[each], max_tokens=1) for each in (1, 2)
        ]
        server.until(lambda: server.model().gate.num_open == 2)
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            refused = post(server, path, "none", **body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        executor.gate.set()
        assert [each.result().status_code for each in opened] == [200, 200]
        assert post(server, "/tokenize", "none", prompt="x").status_code == 200
        server.require_nothing_left()
