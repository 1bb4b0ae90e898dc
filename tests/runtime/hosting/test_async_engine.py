"""Many coroutines on one engine: equal tokens, cancellation, slow readers, failure, close."""

import asyncio
import math
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Coroutine
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ingot.errors import EngineError, Overloaded, RequestError, RequestFailed, UsageError
from ingot.runtime.asking.outputs import Completion, RequestOutput
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.hosting.async_engine import AsyncEngine
from ingot.runtime.hosting.engine_thread import LoopOutlet, RequestStream
from ingot.runtime.requests.engine_request import EngineRequest
from ingot.runtime.text.detokenizer import Detokenizer, TextDecoder
from ingot.runtime.text.tokenizer import Tokenizer
from tests.data_paths import ROOT
from tests.runtime.engines import HELLO, chat_engine, random_requests, text_engine, token_engine
from tests.runtime.steps.test_step_loop import Load, alone, engine_of
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.faulty_executors import Faults, FaultyExecutor, FaultyPipelinedExecutor
from tests.simulators.pipelined_executor import FakePipelinedExecutor

LONG = SamplingParams(max_tokens=400)
SHORT = SamplingParams(max_tokens=5)


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
        inner = Engine(executor)
        async with AsyncEngine(inner) as engine:
            for _ in range(3):
                await engine.generate([1], LONG)
                while inner.has_unfinished():
                    await asyncio.sleep(0)
            while engine.metrics().discarded_tokens < 3:  # the thread counts them after it has read the last step
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
            await stream.aclose()
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


def test_a_slow_reader_gets_what_arrived_meanwhile_at_once() -> None:
    params = SamplingParams(max_tokens=40, n=2, temperature=1.0, seed=3)
    with text_engine() as plain:
        expected = [choice.text for choice in plain.generate("def read", params).choices]

    async def main() -> None:
        async with AsyncEngine(text_engine()) as engine:
            texts, calls = ["", ""], 0
            async for outputs in engine.stream_joined("def read", params):
                calls += 1
                for output in outputs:
                    texts[output.index] += output.text
                await until_idle(engine)
            assert texts == expected
            assert calls == 2  # the first output, and all others

    run(main())


@pytest.mark.parametrize("interval_seconds", [0.0, 1e-4, math.inf])
def test_joined_outputs_are_those_of_the_stream_at_any_interval(interval_seconds: float) -> None:
    params = SamplingParams(max_tokens=40, n=3, temperature=1.0, seed=3)
    with text_engine() as plain:
        expected = [choice.text for choice in plain.generate("def read", params).choices]

    async def main() -> None:
        async with AsyncEngine(text_engine()) as engine:
            texts, calls = [""] * 3, 0
            async for outputs in engine.stream_joined("def read", params, interval_seconds=interval_seconds):
                calls += 1
                for output in outputs:
                    texts[output.index] += output.text
            assert texts == expected
            assert calls == 2 or interval_seconds < math.inf

    run(main())


def test_a_reader_that_rests_is_woken_by_a_failure_and_may_be_cancelled() -> None:
    async def main() -> None:
        executor = GatedExecutor()
        async with AsyncEngine(Engine(executor)) as engine:

            async def read() -> None:
                async for _ in engine.stream_joined([1], LONG, interval_seconds=math.inf):
                    pass

            cancelled, failing = asyncio.create_task(read()), asyncio.create_task(read())
            while engine.metrics().output_tokens < 4:
                await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            while engine.metrics().num_running > 1:
                await asyncio.sleep(0)
            executor.fails = True
            with pytest.raises(EngineError, match="the device is gone"):
                await failing

    run(main())


def test_a_slow_reader_gets_the_outputs_before_a_failure_and_then_the_failure() -> None:
    async def main() -> None:
        executor = GatedExecutor()
        async with AsyncEngine(Engine(executor)) as engine:
            num_read = 0
            with pytest.raises(EngineError, match="the device is gone"):
                async for outputs in engine.stream_joined([1], LONG, arrival_seconds=engine.engine.clock()):
                    num_read += sum(len(output.tokens) for output in outputs)
                    while engine.metrics().output_tokens < 5:
                        await asyncio.sleep(0)
                    executor.fails = True
                    while engine.is_healthy:
                        await asyncio.sleep(0)
            assert num_read == engine.metrics().output_tokens >= 5

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


@pytest.mark.parametrize("executor", [FaultyExecutor, FaultyPipelinedExecutor])
def test_one_bad_row_fails_one_of_40_requests_and_later_ones_are_served(executor: type[FaultyExecutor]) -> None:
    prompts = [[number % 8, number // 8] for number in range(40)]
    with Engine(FaultyExecutor()) as plain:
        expected = [plain.generate(prompt).token_ids for prompt in prompts]

    async def main() -> None:
        async with AsyncEngine(Engine(executor(Faults(lost_rows={100})))) as engine:
            results = await asyncio.gather(*map(engine.generate, prompts), return_exceptions=True)
            served = [result for result in results if isinstance(result, Completion)]
            (failed,) = [result for result in results if not isinstance(result, Completion)]
            assert isinstance(failed, RequestFailed)
            assert failed.completions[0].finish_reason == "error"
            assert all(done.token_ids in expected for done in served)
            assert [done.token_ids for done in await asyncio.gather(*map(engine.generate, prompts))] == expected
            assert engine.is_healthy

    run(main())


@pytest.mark.parametrize("executor", [FaultyExecutor, FaultyPipelinedExecutor])
def test_every_reader_ends_under_random_faults_and_cancellations(executor: type[FaultyExecutor]) -> None:
    async def serve(load: Load) -> None:
        plain = engine_of(executor, load.faults, text_fails_at=load.text_fails_at, **load.engine)
        async with AsyncEngine(plain) as engine:
            tasks = [asyncio.create_task(engine.generate(*request)) for request in load.requests]
            for number, ticks in load.aborts.items():
                for _ in range(20 * ticks):
                    await asyncio.sleep(0)
                tasks[number].cancel()
            for task, (prompt, params) in zip(tasks, load.requests, strict=True):
                try:
                    assert (await task).token_ids == alone(tuple(prompt), params).token_ids
                except RequestFailed as error:
                    tokens = error.completions[0].token_ids
                    assert tokens == alone(tuple(prompt), params).token_ids[: len(tokens)]
                except asyncio.CancelledError:
                    assert task in {tasks[number] for number in load.aborts}
            assert engine.is_healthy
            await until_idle(engine)
            assert engine.metrics().blocks_in_use == 0

    for seed in range(200, 210):
        run(serve(Load(seed)))


def test_an_error_that_is_not_ingots_while_a_request_is_added_reaches_its_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with AsyncEngine(token_engine()) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(engine.engine, "submit", {}.__getitem__)
                with pytest.raises(EngineError, match="could not be added: TypeError: "):
                    await engine.generate([1])
            assert len((await engine.generate([1], SamplingParams(max_tokens=3))).token_ids) == 3

    run(main())


FORK = """
import asyncio, os, sys
from ingot.errors import EngineError
from ingot.runtime import AsyncEngine, Engine, SamplingParams
from ingot.runtime.requests.engine_request import EngineRequest
from tests.simulators.fake_executor import FakeExecutor

engine = AsyncEngine(Engine(FakeExecutor()))
child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    done = asyncio.run(engine.generate([1], SamplingParams(max_tokens=3)))
    asyncio.run(engine.close())
    sys.exit(os.waitstatus_to_exitcode(status) or len(done.token_ids) - 3)
try:
    asyncio.run(engine.generate([1]))
except EngineError as error:
    asyncio.run(engine.close())
    print(error, engine.is_healthy)
"""


def test_a_forked_child_is_refused_at_once_and_its_parent_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "was forked from it and has none of its threads: load an engine in each process" in done.stdout
    assert done.stdout.endswith(" False\n")


class BlockedTokenizer:
    """Encodes a text to its length once `released` is set."""

    eos_token_ids: frozenset[int] = frozenset()
    max_chars_per_token = 2

    def __init__(self) -> None:
        self.released = threading.Event()
        self.num_calls = 0

    def encode(self, text: str) -> list[int]:
        self.num_calls += 1
        assert self.released.wait(60)
        return [len(text)]

    def detokenizer(self, prompt_tokens: list[int], *, skip_special_tokens: bool, kept: Collection[str]) -> Detokenizer:
        return Detokenizer(TextDecoder(), lambda token: "")


def test_the_event_loop_and_other_requests_go_on_while_a_prompt_is_encoded() -> None:
    tokenizer = BlockedTokenizer()

    async def main() -> None:
        async with AsyncEngine(Engine(FakeExecutor(), cast(Tokenizer, tokenizer))) as engine:
            blocked = [asyncio.create_task(engine.generate("text")) for _ in range(3)]
            while tokenizer.num_calls < 3:
                await asyncio.sleep(0)
            assert len((await engine.generate([1], SamplingParams(max_tokens=20))).token_ids) == 20
            assert not any(task.done() for task in blocked)
            blocked[0].cancel()
            tokenizer.released.set()
            assert (await blocked[1]).token_ids == (await engine.generate([4])).token_ids
            with pytest.raises(asyncio.CancelledError):
                await blocked[0]
            assert list(await engine.encode("four")) == [4]

    run(main())


def test_a_text_that_cannot_fit_is_refused_without_encoding_it() -> None:
    tokenizer = BlockedTokenizer()

    async def main() -> None:
        async with AsyncEngine(Engine(FakeExecutor(), cast(Tokenizer, tokenizer))) as engine:
            with pytest.raises(
                RequestError, match="2000000 characters, and at most 1024 fit the model's context of 512"
            ):
                await engine.generate("x" * 2_000_000)
        assert tokenizer.num_calls == 0

    run(main())


def test_more_requests_than_max_requests_are_refused_until_one_ends() -> None:
    async def main() -> None:
        executor = GatedExecutor()
        async with AsyncEngine(Engine(executor, max_requests=2)) as engine:
            executor.gate.clear()
            tasks = [asyncio.create_task(engine.generate([number], LONG)) for number in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="2 unfinished requests, as many as max_requests allows"):
                await engine.generate([3])
            assert engine.metrics().num_refused == 1
            tasks[0].cancel()
            await asyncio.wait([tasks[0]])
            executor.gate.set()
            while engine.engine.metrics().num_running + engine.engine.metrics().num_waiting > 1:
                await asyncio.sleep(0)
            assert len((await engine.generate([3], SamplingParams(max_tokens=2))).token_ids) == 2
            assert len((await tasks[1]).token_ids) == 400

    run(main())


def test_draining_serves_open_requests_and_refuses_new_ones() -> None:
    async def main() -> None:
        executor = GatedExecutor()
        engine = AsyncEngine(Engine(executor))
        executor.gate.clear()
        tasks = [asyncio.create_task(engine.generate([number], SamplingParams(max_tokens=40))) for number in range(3)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(engine.close(drain=True))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([4])
        assert (engine.is_healthy, str(engine.error)) == (False, "the engine is closed; load it again to continue")
        executor.gate.set()
        await closing
        assert {(await task).finish_reason for task in tasks} == {"length"}
        assert executor.closed

    run(main())


def test_a_caller_that_stops_waiting_for_the_drain_may_close_at_once() -> None:
    async def main() -> None:
        engine = AsyncEngine(token_engine())
        stream = engine.stream([1], LONG)
        await anext(stream)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await engine.close(drain=True)
        await engine.close()
        assert [output async for output in stream][-1].completion is not None

    run(main())


@pytest.mark.parametrize("seconds", [None, 2.5])
def test_the_limit_for_blocks_on_their_way_to_disk_reaches_the_engine(
    seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, limits = token_engine(), list[float | None]()
    monkeypatch.setattr(inner, "close", lambda *, flush_seconds: limits.append(flush_seconds))

    async def main() -> None:
        engine = AsyncEngine(inner)
        with pytest.raises(UsageError, match="flush_seconds is -1; it must be"):
            await engine.close(flush_seconds=-1)
        assert engine.is_healthy
        await engine.close(flush_seconds=seconds)

    run(main())
    assert limits == [seconds]


def test_conversations_are_encoded_with_tools_and_variables(tmp_path: Path) -> None:
    async def main() -> None:
        plain = chat_engine(tmp_path)
        options: dict[str, Any] = {"tools": [{"name": "f"}], "variables": {"mood": "calm"}}
        expected = plain.generate_chat(HELLO, SHORT, **options)
        assert [output.completion for output in plain.stream_chat(HELLO, SHORT, **options)][-1] is not None
        async with AsyncEngine(plain) as engine:
            assert (await engine.generate_chat(HELLO, SHORT, **options)).token_ids == expected.token_ids
            outputs = [output async for output in engine.stream_chat(HELLO, SHORT, **options)]
            assert "".join(output.text for output in outputs) == expected.text
            assert engine.tokenizer is not None
            assert engine.tokenizer.decode(await engine.encode_chat(HELLO, **options)) == "f calm user: Hello"

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
        while engine.metrics().num_running < len(tasks):
            await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        completions: list[Completion] = await asyncio.gather(*tasks)
        assert {completion.finish_reason for completion in completions} == {"abort"}
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([1])

    run(main())


def test_the_loop_looks_at_its_sockets_between_the_outputs_of_a_step() -> None:
    """What arrives before they are all in their queues is read before the last of them, and they keep their order."""

    def stream_of(outlet: LoopOutlet) -> RequestStream:
        return RequestStream(request=EngineRequest(np.zeros(1, np.int64), SHORT, RequestOptions()), outlet=outlet)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        outlet = LoopOutlet(loop)
        streams = [stream_of(outlet) for _ in range(64)]
        ours, theirs = socket.socketpair()
        num_put_when_read: list[int] = []

        def read() -> None:
            ours.recv(1)
            num_put_when_read.append(sum(len(stream.outputs) for stream in streams))

        loop.add_reader(ours, read)
        for number in range(2):
            assert outlet.post([(stream, RequestOutput(number, "", ())) for stream in streams])
        theirs.send(b"x")
        while sum(len(stream.outputs) for stream in streams) < 128:
            await asyncio.sleep(0)
        assert num_put_when_read
        assert num_put_when_read[0] <= 32
        assert all([output.request_id for output in stream.outputs] == [0, 1] for stream in streams)  # type: ignore[union-attr]
        loop.remove_reader(ours)
        ours.close()
        theirs.close()

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
