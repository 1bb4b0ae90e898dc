"""A stream says the same whether its chunks go past the layers of ASGI or through them."""

from typing import Any

import pytest

from ingot.runtime.server import connection
from ingot.runtime.server.options import ServerOptions
from tests.runtime.engines import text_engine
from tests.runtime.server.servers import Running, running


def streamed(server: Running) -> str:
    chunks = server.client().completions.create(
        model="fake", prompt="def", max_tokens=24, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def test_chunks_take_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    write, outcomes = connection._write_chunk, []

    def direct(cycle: Any, data: bytes) -> bool:
        outcomes.append(write(cycle, data))
        return outcomes[-1]

    with running(text_engine(), ServerOptions(stream_seconds=0)) as server:
        whole = server.client().completions.create(
            model="fake", prompt="def", max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
        )
        monkeypatch.setattr(connection, "_write_chunk", direct)
        assert streamed(server) == whole.choices[0].text
        assert outcomes
        assert all(outcomes)
        monkeypatch.setattr(connection, "_write_chunk", lambda cycle, data: False)
        assert streamed(server) == whole.choices[0].text


class Flow:
    write_paused = True


class Cycle:
    """A connection whose client does not read."""

    flow = Flow()
    disconnected = response_complete = False
    chunked_encoding = True


def test_nothing_is_written_to_a_client_that_does_not_read() -> None:
    assert not connection._write_chunk(Cycle(), b"data: x\n\n")  # it has no transport to write to
