"""Adapters of an AsyncEngine: loaded and unloaded between steps, by any coroutine."""

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import AdapterError, EngineError
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.hosting.async_engine import AsyncEngine
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.peft_folders import write_adapter

LONG = SamplingParams(max_tokens=200)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run with a time limit, so that a lost call fails instead of hanging."""

    async def limited() -> None:
        async with asyncio.timeout(60):
            await main

    asyncio.run(limited())


def async_engine() -> AsyncEngine:
    return AsyncEngine(Engine(FakeExecutor(max_adapters=2, context_tokens=512)))


def test_adapters_come_and_go_while_requests_run(tmp_path: Path) -> None:
    async def main() -> None:
        folder = write_adapter(tmp_path / "one")
        async with async_engine() as engine:
            plain = await engine.generate([1, 2], LONG)
            other = asyncio.create_task(engine.generate([1, 2], LONG))
            facts = await engine.load_adapter("one", folder)
            assert engine.adapters == {"one": facts}
            options = RequestOptions(adapter="one")
            adapted = await engine.generate([1, 2], LONG, options=options)
            assert (await other).token_ids == plain.token_ids != adapted.token_ids
            async with asyncio.TaskGroup() as tasks:
                first = asyncio.Event()
                running = tasks.create_task(_read(engine, options, first))
                await first.wait()
                await engine.unload_adapter("one")
                with pytest.raises(AdapterError, match="unknown adapter 'one'"):
                    await engine.generate([1, 2], LONG, options=options)
            assert running.result() == adapted.token_ids
            assert not engine.adapters

    run(main())


async def _read(engine: AsyncEngine, options: RequestOptions, first: asyncio.Event) -> tuple[int, ...]:
    found: list[int] = []
    async for output in engine.stream([1, 2], LONG, options=options):
        found += output.token_ids
        first.set()
    return tuple(found)


def test_what_cannot_be_loaded_is_raised_to_its_caller_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with async_engine() as engine:
            with pytest.raises(AdapterError, match=r"holds no adapter_config\.json"):
                await engine.load_adapter("one", tmp_path)
            with pytest.raises(AdapterError, match="unknown adapter 'one'"):
                await engine.unload_adapter("one")
            await engine.load_adapter("one", write_adapter(tmp_path / "a", seed=1))
            with pytest.raises(AdapterError, match="unload it first, or replace it"):
                await engine.load_adapter("one", write_adapter(tmp_path / "b", seed=2))
            assert (await engine.generate([1], SamplingParams(max_tokens=2))).token_ids
        with pytest.raises(EngineError, match="closed"):
            await engine.unload_adapter("one")

    run(main())


def test_matrices_beyond_max_host_adapters_are_read_again_and_must_not_have_changed(tmp_path: Path) -> None:
    folders = {name: write_adapter(tmp_path / name, seed=number) for number, name in enumerate("ab")}
    engine = Engine(FakeExecutor(max_adapters=1), max_host_adapters=1)
    for name, folder in folders.items():
        engine.load_adapter(name, folder)
    found = {name: engine.generate([1, 2], LONG, options=RequestOptions(adapter=name)) for name in "abab"}
    assert found["a"].token_ids != found["b"].token_ids
    for file in folders["b"].iterdir():
        (folders["a"] / file.name).write_bytes(file.read_bytes())
    with pytest.raises(AdapterError, match=r"'a' has changed in .* since it was loaded; load it again"):
        engine.generate([1, 2], LONG, options=RequestOptions(adapter="a"))


def test_callers_that_are_cancelled_leave_the_engine_as_it_is_and_let_it_close(tmp_path: Path) -> None:
    entered, goes_on = threading.Event(), threading.Event()

    class Waiting(FakeExecutor):
        """Its first step waits, and with it all calls."""

        def forward(self, batch: ForwardBatch) -> FloatArray:
            entered.set()
            assert goes_on.wait(60)
            return super().forward(batch)

    async def main() -> None:
        folder = write_adapter(tmp_path / "one")
        engine = AsyncEngine(Engine(Waiting(max_adapters=2, context_tokens=512)))
        running = asyncio.create_task(engine.generate([1, 2], LONG))
        await asyncio.to_thread(entered.wait, 60)
        calls = [asyncio.create_task(engine.unload_adapter("one")) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        goes_on.set()
        assert len((await running).token_ids) == 200
        await engine.load_adapter("one", folder)
        assert engine.error is None
        await engine.close()
        assert isinstance(engine.engine, Engine)
        with pytest.raises(EngineError, match="closed"):
            engine.engine.generate([1])

    run(main())
