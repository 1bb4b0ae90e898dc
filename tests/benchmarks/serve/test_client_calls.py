"""Client libraries get what they ask of a live server; one that is not installed is skipped with the reason.

INGOT_CLIENTS is a folder of virtual environments that have them, INGOT_CLIENTS_NPM the folder of the npm packages.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.serve.client_calls.table import (
    NPM_PACKAGES,
    PAGE,
    RESULTS,
    Chats,
    chat_server,
    clients,
    environment_of,
    npm_client,
    python_client,
    table,
)

from tests.conftest import BuildArtifact

CLIENTS = clients()
ENVIRONMENTS = os.environ.get("INGOT_CLIENTS")
NPM = os.environ.get("INGOT_CLIENTS_NPM")


@pytest.fixture(scope="module")
def server(build_unmeasured: BuildArtifact, two_layers: Path) -> Iterator[Chats]:
    pytest.importorskip("llguidance")
    with chat_server(str(build_unmeasured("int8-cpu", two_layers).path)) as started:
        yield started


def require_all(found: dict[str, Any]) -> None:
    """Skip a client that is missing; fail with its calls that did not work."""
    if "missing" in found:
        pytest.skip(found["missing"])
    failed = {name: outcome for name, outcome in found.get("calls", {}).items() if outcome != "ok"}
    assert "calls" in found, found
    assert not failed, failed


@pytest.mark.parametrize("client", CLIENTS)
def test_a_python_library_gets_what_it_asks_for(client: str, server: Chats) -> None:
    folder = Path(ENVIRONMENTS) if ENVIRONMENTS else None
    require_all(python_client(environment_of(client, CLIENTS[client], folder), client, server))


@pytest.mark.parametrize("package", NPM_PACKAGES)
def test_an_npm_package_gets_what_it_asks_for(package: str, server: Chats) -> None:
    require_all(npm_client(Path(NPM) if NPM else None, package, server))


def test_a_client_runs_in_the_environment_that_has_its_package(tmp_path: Path) -> None:
    for name, package in (("all", "langchain_openai-1.2.0"), ("dspy", "dspy-3.0"), ("a", "dspy-3.0")):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin/python").touch()
        (tmp_path / name / f"lib/python3.11/site-packages/{package}.dist-info").mkdir(parents=True)
    assert environment_of("langchain", "langchain-openai", tmp_path) == tmp_path / "all/bin/python"
    assert environment_of("dspy-proxy", "dspy", tmp_path) == tmp_path / "dspy/bin/python"
    assert tmp_path not in environment_of("other", "other", tmp_path).parents


def test_the_table_of_the_documents_is_that_of_the_results() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))["results"]
    assert {*results} == {*CLIENTS, *(f"{package} (npm)" for package in NPM_PACKAGES)}
    assert table(results) in PAGE.read_text(encoding="utf-8")
    assert table({"x": {"version": "1", "calls": {"chat": "ok", "tools": "Error: no"}}}).endswith(
        "| x | 1 | chat; **tools fails**: Error: no |\n"
    )
