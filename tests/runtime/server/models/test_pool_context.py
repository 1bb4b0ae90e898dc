"""A KV pool that holds less than the model's context bounds what the server announces and what answers may be."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from ingot.runtime.engine.engine import Engine
from tests.runtime.engines import HELLO, chat_tokenizer, text_engine
from tests.runtime.server.servers import Running, running
from tests.simulators.fake_executor import FakeExecutor


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server whose pool has 4 blocks."""
    with running(text_engine(num_blocks=4)) as started:
        yield started


def test_the_announced_context_is_that_of_the_pool(server: Running) -> None:
    engine = server.model().engine
    metrics = engine.metrics()
    most = metrics.blocks_total * metrics.block_tokens
    assert most < engine.model.context_tokens
    assert httpx2.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"] == most


@pytest.mark.parametrize("given", [{}, {"max_tokens": 100_000}])
def test_an_answer_ends_where_the_pool_does(given: dict[str, int], tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    engine = Engine(FakeExecutor(vocab_size=tokenizer.vocab_size, num_blocks=4), tokenizer)
    with running(engine) as server:
        body = {"messages": HELLO, "ignore_eos": True, **given}
        usage = httpx2.post(f"{server.url}/v1/chat/completions", json=body).json()["usage"]
        assert usage["total_tokens"] == server.model().context_tokens


def test_a_prompt_that_the_pool_cannot_hold_is_refused(server: Running) -> None:
    body = {"prompt": [5] * server.model().context_tokens, "max_tokens": 1}
    answer = httpx2.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
