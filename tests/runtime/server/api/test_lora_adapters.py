"""LoRA adapters over HTTP, by the official client: chosen by `model`, listed, loaded and unloaded by an operator."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from ingot.errors import UsageError
from ingot.runtime.engine.engine import Engine
from ingot.runtime.hosting.async_engine import AsyncEngine
from ingot.runtime.server import service
from ingot.runtime.server.http.access import ApiKeys
from ingot.runtime.server.http.rate_limits import Holder, KeyLimits
from ingot.runtime.server.models.served_models import Models, ServedModel
from ingot.runtime.server.options import ServerOptions
from tests.runtime.engines import demo_tokenizer
from tests.runtime.server.servers import SECONDS, Running, running
from tests.simulators.fake_executor import FakeExecutor, fake_adapter
from tests.simulators.peft_folders import write_adapter

KEY = "operator-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
ADMIN = ApiKeys({KEY: Holder("operator", KeyLimits())})


def engine_with(*names: str, max_adapters: int = 2) -> Engine:
    tokenizer = demo_tokenizer()
    engine = Engine(FakeExecutor(vocab_size=tokenizer.vocab_size, max_adapters=max_adapters), tokenizer)
    for number, name in enumerate(names):
        engine.register_adapter(fake_adapter(name, number), Path("adapters") / name)
    return engine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two adapters that operators may load."""
    for number, name in enumerate(("one", "two")):
        write_adapter(tmp_path / "allowed" / name, seed=number)
    return tmp_path / "allowed"


@pytest.fixture
def server(folder: Path) -> Iterator[Running]:
    options = ServerOptions(drain_seconds=SECONDS, lora_folder=folder)
    with running(engine_with("sql", "legal"), options, aliases={"alias": "fake"}, admin_keys=ADMIN) as started:
        yield started


def tokens(server: Running, model: str, **options: Any) -> str:
    with server.client() as client:
        found: openai.types.Completion = client.completions.create(
            model=model, prompt=[1, 2, 3], max_tokens=6, temperature=0, extra_body={"ignore_eos": True}, **options
        )
        return found.choices[0].text


def post(server: Running, path: str, body: Mapping[str, object], key: str | None = KEY) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx2.post(f"{server.url}/v1/{path}", json=dict(body), headers=headers)


def test_an_adapter_is_chosen_by_model(server: Running) -> None:
    texts = {name: tokens(server, name) for name in ("fake", "alias", "sql", "legal")}
    assert texts["fake"] == texts["alias"]
    assert len({*texts.values()}) == 3
    with server.client() as client:
        answer = client.chat.completions.create
        with pytest.raises(openai.NotFoundError, match=r"The model `sqll` does not exist.*'sql'"):
            answer(model="sqll", messages=[{"role": "user", "content": "hi"}])
        stream = client.completions.create(model="sql", prompt=[1, 2, 3], max_tokens=3, stream=True)
        assert {chunk.model for chunk in stream} == {"sql"}


def test_models_lists_adapters_with_their_parent(server: Running) -> None:
    with server.client() as client:
        found = {model.id: model.model_dump() for model in client.models.list()}
        assert [(name, facts["parent"]) for name, facts in found.items()] == [
            ("fake", None), ("sql", "fake"), ("legal", "fake"),
        ]  # fmt: skip
        assert (found["fake"]["aliases"], found["sql"]["aliases"]) == (["alias"], [])
        assert found["sql"]["root"] == "adapters/sql"
        assert client.models.retrieve("legal").model_dump()["parent"] == "fake"


def test_an_operator_loads_replaces_and_unloads_adapters(server: Running, folder: Path) -> None:
    done = post(server, "load_lora_adapter", {"lora_name": "new", "lora_path": "one"})
    assert (done.status_code, done.json()["status"], done.json()["parent"]) == (200, "loaded", "fake")
    first = tokens(server, "new")
    again = post(server, "load_lora_adapter", {"lora_name": "new", "lora_path": str(folder / "two")})
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_path")
    body = {"lora_name": "new", "lora_path": "two", "load_inplace": True}
    assert post(server, "load_lora_adapter", body).json()["digest"] != done.json()["digest"]
    assert tokens(server, "new") != first
    done = post(server, "unload_lora_adapter", {"lora_name": "new", "force": False})
    assert (done.status_code, done.headers["x-ingot-ignored-fields"]) == (200, "force")
    with pytest.raises(openai.NotFoundError):
        tokens(server, "new")
    assert post(server, "unload_lora_adapter", {"lora_name": "new"}).status_code == 404
    server.require_nothing_left()


@pytest.mark.parametrize("path", ["..", "../allowed-not", "/etc", "absent", "link", "one/../..", "a\0b", ""])
def test_adapters_are_read_from_the_operator_s_folder_alone(server: Running, folder: Path, path: str) -> None:
    (folder / "link").symlink_to("/etc")
    shutil.copytree(folder / "one", folder.parent / "allowed-not")
    refused = post(server, "load_lora_adapter", {"lora_name": "new", "lora_path": path})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "lora_path"


@pytest.mark.parametrize("name", ["fake", "alias"])
def test_an_adapter_does_not_take_a_model_s_name(server: Running, name: str) -> None:
    refused = post(server, "load_lora_adapter", {"lora_name": name, "lora_path": "one"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
    assert post(server, "unload_lora_adapter", {"lora_name": name}).status_code == 400
    with pytest.raises(UsageError, match="has the name of a model or of another adapter"):
        Models([ServedModel("sql", AsyncEngine(engine_with("sql")), ServerOptions())])


@pytest.mark.parametrize("path", ["load_lora_adapter", "unload_lora_adapter"])
def test_only_operators_change_adapters_and_only_where_that_is_allowed(server: Running, path: str) -> None:
    body: dict[str, object] = {"lora_name": "new", "lora_path": "one"}
    assert post(server, path, body, key=None).status_code == 401
    assert post(server, path, body, key="another-key").status_code == 401
    with running(engine_with(), admin_keys=ADMIN) as closed:
        refused = post(closed, path, body)
        assert refused.status_code == 404
        assert "--allow-lora-updates" in refused.json()["error"]["message"]


def test_api_keys_do_not_open_what_operators_do(folder: Path) -> None:
    users = ApiKeys({"user-key-1": Holder("user", KeyLimits())})
    options = ServerOptions(drain_seconds=SECONDS, lora_folder=folder)
    with running(engine_with(), options, keys=users, admin_keys=ADMIN) as server:
        body: dict[str, object] = {"lora_name": "new", "lora_path": "one"}
        assert post(server, "load_lora_adapter", body, key="user-key-1").status_code == 401
        assert post(server, "load_lora_adapter", body).status_code == 200


def test_an_adapter_that_does_not_fit_is_named(server: Running, folder: Path) -> None:
    write_adapter(folder / "wide", seed=3, rank=9)
    refused = post(server, "load_lora_adapter", {"lora_name": "wide", "lora_path": "wide"})
    assert refused.status_code == 400
    assert "has the rank 9; max_adapter_rank is 8" in refused.json()["error"]["message"]


def test_metrics_name_the_adapters_of_requests(server: Running) -> None:
    tokens(server, "sql")
    text = httpx2.get(f"{server.url}/metrics").text
    assert 'ingot_adapter_loads_total{model_name="fake"} 1.0' in text
    assert 'vllm:lora_requests_info{max_lora="2",model_name="fake",running_lora_adapters=""' in text


def test_a_reloaded_model_keeps_its_adapters() -> None:
    """The caller of `reload` passes on what the engine before it had; see ingot.cli.runtime.serve."""
    with running(engine_with("sql"), reload=lambda name, is_new: engine_with("sql")) as server:
        before = server.model()
        assert server.service.replacements
        server.loop.call_soon_threadsafe(server.service.replacements.reload_all)
        server.until(lambda: server.model() is not before)
        assert tokens(server, "sql")


def test_an_adapter_of_a_model_that_is_unloaded_for_its_idleness_can_be_unloaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_WATCH_SECONDS", 0.01)
    options = ServerOptions(drain_seconds=SECONDS, lora_folder=folder, idle_unload_seconds=0.2)
    names = ["sql", "legal"]
    with running(
        engine_with(*names), options, admin_keys=ADMIN, reload=lambda name, is_new: engine_with(*names)
    ) as started:
        started.until(lambda: started.model().is_unloaded)
        answer = post(started, "unload_lora_adapter", {"lora_name": "sql"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["status"] == "unloaded"
        names.remove("legal")
        started.until(lambda: started.model().is_unloaded)
        lost = post(started, "unload_lora_adapter", {"lora_name": "legal"})
        assert (lost.status_code, lost.json()["error"]["param"]) == (404, "lora_name")
