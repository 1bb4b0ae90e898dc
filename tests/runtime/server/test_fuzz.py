"""The fuzzing benchmark in small: nothing is left of malformed requests, slow clients and clients that leave."""

import asyncio
from pathlib import Path

import pytest
from benchmarks.serve import fuzz
from benchmarks.serve.large import hostile_constraints

from ingot.runtime.server.options import ServerOptions
from tests.runtime.engines import chat_engine
from tests.runtime.server.servers import SECONDS, running


def test_the_server_survives_what_clients_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "_BODY_SECONDS", 0.2)
    options = ServerOptions(body_seconds=0.2, drain_seconds=SECONDS)
    with running(chat_engine(tmp_path), options) as server:
        outcome, _ = asyncio.run(fuzz.fuzz(server.url, requests=800, large=0, slow=8, disconnects=60, seed=1))
        assert outcome.faults == []
        assert sum(outcome.answers.values()) == 800 + len(hostile_constraints()) + 8 + 60
        statuses = {status for _, status in outcome.answers}
        assert {"200", "400", "408", "closed"} <= statuses
        server.require_nothing_left()
