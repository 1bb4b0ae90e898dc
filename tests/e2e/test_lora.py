"""LoRA adapters from PEFT's folder to tokens: on the native engine, here and in a process of its own, and verified."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest

from ingot.artifact import Artifact
from ingot.artifact.programs.cpu_program_checks import read_operations
from ingot.cli.main import run
from ingot.errors import AdapterError, EngineError
from ingot.runtime import AsyncEngine, Engine, RequestOptions, SamplingParams
from ingot.validation.verify import VerifyOptions, open_subject, verify
from tests.conftest import BuildArtifact
from tests.processes import children_of
from tests.runtime.server.test_lifecycle import process as server_process
from tests.runtime.server.test_lifecycle import wait_until
from tests.simulators.peft_folders import write_adapter

SECONDS = 120
PROMPT = "def read_file(path):"
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
CELLS = ("adapter-mates", "prefix-hit+adapter-mates", "preemption+adapter-mates")


@pytest.fixture(scope="module")
def artifact(build_unmeasured: BuildArtifact, two_layers: Any) -> Artifact:
    return build_unmeasured("int8-cpu", two_layers)


@pytest.fixture(scope="module")
def folders(artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters that change every linear layer."""
    root, projections = tmp_path_factory.mktemp("adapters"), read_operations(artifact).projections
    return {
        name: write_adapter(root / name, seed=number, projections=projections, alpha=0.1)
        for number, name in enumerate(("one", "two"))
    }


def named(name: str | None) -> RequestOptions:
    return RequestOptions(adapter=name)


def test_both_kinds_of_engines_compute_adapters_and_load_them_as_they_run(
    artifact: Artifact, folders: dict[str, Path]
) -> None:
    with Engine.load(artifact, adapters=folders) as engine:
        names = [None, "one", "two"]
        expected = [engine.generate(PROMPT, SHORT, options=named(name)).token_ids for name in names]
        together = engine.generate([PROMPT] * 3, SHORT, options=[named(name) for name in names])
    assert [each.token_ids for each in together] == expected
    assert len({*expected}) == 3

    async def remote() -> None:
        async with (
            asyncio.timeout(SECONDS),
            AsyncEngine.load_in_process(artifact, adapters={"one": folders["one"]}) as engine,
        ):
            assert [*engine.adapters] == ["one"]
            facts = await engine.load_adapter("two", folders["two"])
            assert facts == engine.adapters["two"]
            found = await asyncio.gather(*(engine.generate(PROMPT, SHORT, options=named(name)) for name in names))
            assert [each.token_ids for each in found] == expected
            with pytest.raises(AdapterError, match=r"holds no adapter_config\.json"):
                await engine.load_adapter("three", folders["two"].parent)
            await engine.unload_adapter("one")
            with pytest.raises(AdapterError, match="unknown adapter 'one'"):
                await engine.generate(PROMPT, SHORT, options=named("one"))
            assert engine.process
            os.kill(engine.process.pid, signal.SIGSTOP)
            loading = asyncio.create_task(engine.load_adapter("one", folders["one"]))
            await asyncio.sleep(0)
            engine.process.kill()
            with pytest.raises(EngineError, match="SIGKILL"):
                await loading

    asyncio.run(remote())


def test_an_engine_process_that_dies_comes_back_with_its_adapters(
    artifact: Artifact, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Those of the command line and those that were loaded later; what was unloaded stays away."""
    (keys := tmp_path / "keys").write_text("of-adapters\n")
    admin = {"Authorization": "Bearer of-adapters"}
    given = ["--lora-modules", f"one={folders['one']}", "--lora-modules", f"gone={folders['one']}"]
    updates = ["--allow-lora-updates", str(folders["two"].parent), "--admin-keys", str(keys)]

    with server_process(artifact.path, *given, *updates, "--set", "max_adapters=3") as (child, url):

        def post(path: str, **body: object) -> dict[str, Any]:
            answer = httpx2.post(f"{url}/v1/{path}", json=body, headers=admin, timeout=SECONDS)
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        def texts() -> list[str]:
            names = [artifact.manifest.name, "one", "two"]
            body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            return [post("completions", model=name, **body)["choices"][0]["text"] for name in names]

        post("load_lora_adapter", lora_name="two", lora_path="two")
        post("unload_lora_adapter", lora_name="gone")
        before = texts()
        assert len({*before}) == 3
        (engine,) = children_of(child.pid)
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: engine not in children_of(child.pid))
        wait_until(lambda: httpx2.get(f"{url}/ready").status_code == 200)
        assert texts() == before
        models = httpx2.get(f"{url}/v1/models", headers=admin).json()["data"]
        assert [each["id"] for each in models] == [artifact.manifest.name, "one", "two"]


def test_verify_finds_no_difference_with_adapters(artifact: Artifact) -> None:
    result = verify(open_subject(artifact), VerifyOptions(quick=True, only=CELLS))
    assert [(cell.name, cell.verdict) for cell in result.cells] == [(name, "OK") for name in CELLS]


def test_run_takes_an_adapter(artifact: Artifact, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    def token_ids(*arguments: str) -> object:
        assert run(["run", str(artifact.path), PROMPT, "--max-tokens", "12", "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)["token_ids"]

    assert token_ids("--adapter", str(folders["one"])) != token_ids()
    assert run(["run", str(artifact.path), PROMPT, "--adapter", str(folders["one"].parent)]) == 2
    assert "adapter_config.json" in capsys.readouterr().err
