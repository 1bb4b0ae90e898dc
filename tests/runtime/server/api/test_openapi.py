"""The OpenAPI document: what is committed is what is served, and the server keeps to it."""

import json
from collections.abc import Iterator

import httpx2
import pytest
from benchmarks.serve.schema import check

import ingot
from ingot.runtime.server.api.openapi import document_text, openapi
from ingot.runtime.server.app import make_app
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.server.service import Service
from tests.data_paths import ROOT
from tests.runtime.engines import chat_engine
from tests.runtime.server.servers import SECONDS, Running, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    options = ServerOptions(request_seconds=1.0, drain_seconds=SECONDS)
    with running(chat_engine(tmp_path_factory.mktemp("chat")), options) as started:
        yield started
        started.require_nothing_left()


def test_the_committed_document_is_that_of_this_version() -> None:
    committed = (ROOT / "docs/openapi.json").read_text(encoding="utf-8")
    message = "python -m ingot.runtime.server.api.openapi > docs/openapi.json"
    assert committed == document_text(ingot.__version__), message


def test_the_document_has_every_path_of_the_server(server: Running) -> None:
    routes = make_app(Service(ServerOptions())).routes
    paths = {route.path.replace(":path", "") for route in routes}  # type: ignore[attr-defined]
    assert {*openapi("1.2.3")["paths"], "/openapi.json"} == paths
    assert httpx2.get(f"{server.url}/openapi.json").json() == json.loads(document_text("1.2.3"))


def test_every_field_of_a_request_that_the_document_has_is_read() -> None:
    for name, schema in openapi("1.2.3")["components"]["schemas"].items():
        if name.endswith("Request"):
            assert schema["additionalProperties"] is False, name


def test_schemathesis_finds_no_violation(server: Running) -> None:
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    code, report = check(server.url, 6, "--phases", "fuzzing,stateful")
    assert code == 0, report
    operations = sum(len(path.keys() & {"get", "post", "delete"}) for path in openapi("1.2.3")["paths"].values())
    assert f"Tested: {operations}" in report, report
