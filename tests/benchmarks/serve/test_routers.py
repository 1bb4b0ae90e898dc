"""Public routers in front of servers: the benchmark in small. `make routers` installs them."""

import asyncio
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from benchmarks.serve.fuzz import logged_server
from benchmarks.serve.routers import ROUTERS, expected_of, measure, router
from benchmarks.serve.soak import with_chat_template

from tests.conftest import BuildArtifact
from tests.data_paths import ROOT

ENVIRONMENT = ROOT / ".venv-routers"


@pytest.mark.skipif(not (ENVIRONMENT / "installed").is_file(), reason="public routers are not installed: make routers")
def test_a_router_passes_every_request_and_every_answer(build_unmeasured: BuildArtifact, two_layers: Path) -> None:
    artifact = build_unmeasured("int8-cpu", two_layers, "name=demo").path
    with (
        with_chat_template(artifact) as served,
        TemporaryFile("w+") as first,
        TemporaryFile("w+") as second,
        logged_server(served, first) as (url, _),
        logged_server(served, second) as (other, _),
    ):
        expected = asyncio.run(expected_of(url))
        for command in ROUTERS.values():
            with TemporaryFile("w+") as log, router(ENVIRONMENT, command, (url, other), log) as routed:
                found = asyncio.run(measure(routed, expected, 60))
            assert found["right"] == 60, found["faults"]
