"""Many coroutines on one engine: equal tokens, cancellation, slow readers, failure, close."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from ingot.errors import EngineError, RequestError
from ingot.runtime.async_engine import AsyncEngine
from ingot.runtime.batch import FloatArray, ForwardBatch
from ingot.runtime.engine import Engine
from ingot.runtime.outputs import Completion
from ingot.runtime.sampling import SamplingParams
from tests.runtime.engines import random_requests, text_engine, token_engine
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.pipelined_executor import FakePipelinedExecutor

LONG = SamplingParams(max_tokens=400)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run with a time limit, so that a lost wake-up fails instead of hanging."""

    async def limited() -> None:
        async with asyncio.timeout(60):
            await main

    asyncio.run(limited())


class GatedExecutor(FakeExecutor):
    """Waits before every step until the gate is open; fails when `fails` is set."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False

    def forward(self, batch: ForwardBatch) -> FloatArray:
        assert self.gate.wait(60)
        if self.fails:
            raise EngineError("the device is gone")
        return super().forward(batch)


async def until_idle(engine: AsyncEngine) -> None:
    while engine.metrics().num_running or engine.metrics().num_waiting:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("executor", [FakeExecutor, FakePipelinedExecutor])
def test_64_concurrent_streams_get_what_each_gets_alone(executor: type[FakeExecutor]) -> None:
    requests = random_requests(64, repetition_penalties=(1.0,))  # a device can sample these
    with token_engine(num_blocks=64) as plain:
        expected = [plain.generate(prompt, params).token_ids for prompt, params in requests]

    async def main() -> None:
        small = executor(num_blocks=30, block_tokens=4, max_batch_tokens=16)
        async with AsyncEngine(Engine(small)) as engine:
            completions = await asyncio.gather(*(engine.generate(*request) for request in requests))
            assert [completion.token_ids for completion in completions] == expected
            assert engine.metrics().num_preemptions > 0
            assert engine.metrics().blocks_in_use == 0

    run(main())


def test_outputs_of_a_stream_concatenate_to_its_completion() -> None:
    async def main() -> None:
        async with AsyncEngine(text_engine()) as engine:
            outputs = [output async for output in engine.stream("def read", SamplingParams(max_tokens=20))]
            completion = outputs[-1].completion
            assert completion is not None
            assert "".join(output.text for output in outputs) == completion.text
            assert not any(output.finished for output in outputs[:-1])

    run(main())


def test_an_idle_engine_reads_the_step_in_flight() -> None:
    with token_engine() as plain:
        end = plain.generate([1], SamplingParams(max_tokens=8)).token_ids[-1]

    async def main() -> None:
        executor = FakePipelinedExecutor(eos_token_ids=(end,))
        async with AsyncEngine(Engine(executor)) as engine:
            for _ in range(3):
                await engine.generate([1], LONG)
                while engine.engine.has_unfinished():
                    await asyncio.sleep(0)
            metrics = engine.metrics()
            assert (metrics.output_tokens, metrics.discarded_tokens) == (24, 3)
            task = asyncio.create_task(engine.generate([2], LONG))
            while engine.metrics().output_tokens == 24:
                await asyncio.sleep(0)
        assert (await task).finish_reason == "abort"
        assert executor.closed

    run(main())


def test_a_cancelled_reader_aborts_its_request_and_frees_its_blocks() -> None:
    async def main() -> None:
        async with AsyncEngine(token_engine()) as engine:
            task = asyncio.create_task(engine.generate([1, 2, 3], LONG))
            other = asyncio.create_task(engine.generate([4], SamplingParams(max_tokens=30)))
            while not engine.metrics().output_tokens:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len((await other).token_ids) == 30
            await until_idle(engine)
            assert engine.metrics().blocks_in_use == 0
            assert engine.metrics().output_tokens < 400

    run(main())


def test_leaving_a_stream_early_aborts_it() -> None:
    async def main() -> None:
        executor = GatedExecutor()
        async with AsyncEngine(Engine(executor)) as engine:
            stream = engine.stream([1, 2, 3], LONG)
            await anext(stream)
            executor.gate.clear()
            await stream.aclose()  # type: ignore[attr-defined]
            executor.gate.set()
            await until_idle(engine)
            assert engine.metrics().output_tokens < 400

    run(main())


def test_a_slow_reader_does_not_delay_others() -> None:
    async def main() -> None:
        async with AsyncEngine(token_engine()) as engine:
            slow = engine.stream([1], SamplingParams(max_tokens=50))
            await anext(slow)
            assert len((await engine.generate([2], SamplingParams(max_tokens=100))).token_ids) == 100
            await until_idle(engine)
            assert len([output async for output in slow]) == 49

    run(main())


def test_a_bad_request_raises_for_its_own_reader_only() -> None:
    async def main() -> None:
        async with AsyncEngine(token_engine(num_blocks=4)) as engine:
            good = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=20)))
            with pytest.raises(RequestError, match="the pool has 4"):
                await engine.generate([1], LONG)
            with pytest.raises(RequestError, match="must be SamplingParams"):
                await engine.generate([1], {"max_tokens": 3})  # type: ignore[arg-type]
            with pytest.raises(RequestError, match="no tokenizer"):
                await engine.generate("text")
            assert len((await good).token_ids) == 20

    run(main())


def test_a_failing_step_reaches_every_reader_and_later_ones() -> None:
    async def main() -> None:
        executor = GatedExecutor(max_batch_tokens=4)
        engine = AsyncEngine(Engine(executor))
        tasks = [asyncio.create_task(engine.generate([number], LONG)) for number in range(8)]
        while not engine.metrics().output_tokens:
            await asyncio.sleep(0)
        executor.fails = True
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineError) and "device is gone" in str(result) for result in results)
        with pytest.raises(EngineError, match="takes no more requests: the device is gone"):
            await engine.generate([1])
        await engine.close()
        assert executor.closed

    run(main())


def test_closing_ends_open_streams_and_is_idempotent() -> None:
    async def main() -> None:
        engine = AsyncEngine(token_engine())
        tasks = [asyncio.create_task(engine.generate([number], LONG)) for number in range(3)]
        while not engine.metrics().output_tokens:
            await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        completions: list[Completion] = await asyncio.gather(*tasks)
        assert {completion.finish_reason for completion in completions} == {"abort"}
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([1])

    run(main())


def test_readers_in_several_event_loops_share_the_engine() -> None:
    engine = AsyncEngine(token_engine())
    results: list[Completion] = []

    async def read(number: int) -> None:
        results.append(await engine.generate([number], SamplingParams(max_tokens=20)))

    threads = [threading.Thread(target=asyncio.run, args=(read(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    asyncio.run(engine.close())
    assert [len(result.token_ids) for result in results] == [20] * 4
