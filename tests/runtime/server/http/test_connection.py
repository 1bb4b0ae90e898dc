"""A stream says the same whether its chunks go past the layers of ASGI or through them."""

from collections import Counter
from typing import Any

import openai
import pytest

from ingot.runtime.server.api.answers import ChoicesAnswer
from ingot.runtime.server.http.connection import ChunkWriter
from ingot.runtime.server.options import ServerOptions
from tests.runtime.engines import text_engine
from tests.runtime.server.servers import Running, running


def streamed(server: Running) -> str:
    chunks = server.client().completions.create(
        model="fake", prompt="def", max_tokens=24, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def test_chunks_take_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = ChunkWriter.write, []

    def direct(self: ChunkWriter, data: bytes) -> None:
        written.append(data)
        write(self, data)

    with running(text_engine(), ServerOptions(stream_seconds=0)) as server:
        whole = server.client().completions.create(
            model="fake", prompt="def", max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
        )
        monkeypatch.setattr(ChunkWriter, "write", direct)
        assert streamed(server) == whole.choices[0].text
        assert written
        written.clear()
        monkeypatch.setattr(ChunkWriter, "is_free", False)
        assert streamed(server) == whole.choices[0].text
        assert not written


def test_a_stream_whose_events_cannot_be_made_fails_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = ChoicesAnswer.event, Counter[str]()

    def failing(self: ChoicesAnswer, *arguments: Any) -> bytes:
        made[self.id] += 1
        if made[self.id] == 3 and len(made) == 1:  # neither the first of the stream nor the last
            raise ValueError("no event")
        return make(self, *arguments)

    with running(text_engine(), ServerOptions(stream_seconds=0)) as server:
        expected = streamed(server)
        monkeypatch.setattr(ChoicesAnswer, "event", failing)
        with pytest.raises(openai.APIError, match="ValueError"):
            streamed(server)
        assert streamed(server) == expected
        assert server.model().engine.metrics().num_running == 0


class Flow:
    write_paused = True


class Cycle:
    """A connection whose client does not read."""

    flow = Flow()
    disconnected = response_complete = False
    chunked_encoding = True


def test_nothing_is_written_to_a_client_that_does_not_read() -> None:
    assert not ChunkWriter(Cycle()).is_free
