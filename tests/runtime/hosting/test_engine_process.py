"""An engine in a process of its own: the outputs, errors and logs of one in a thread, and what happens when it dies."""

import asyncio
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.artifact import Artifact, open_artifact
from ingot.errors import ArtifactError, EngineError, Overloaded, RequestError
from ingot.runtime import AsyncEngine, BeamParams, Completion, Constraint, RequestOptions, SamplingParams
from ingot.runtime.thread_scheduling import current_core
from tests.conftest import BuildArtifact
from tests.processes import children_of

SECONDS = 60
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
READERS = pytest.mark.parametrize("reader", ["thread", "loop"])
PROMPT = "def read_file(path):"


@pytest.fixture(scope="module")
def artifact(build_unmeasured: BuildArtifact, two_layers: Any) -> Artifact:
    return build_unmeasured("int8-cpu", two_layers)


@asynccontextmanager
async def read_by(reader: str, artifact: Artifact) -> AsyncIterator[AsyncEngine]:
    """An engine in a process of its own, whose messages its thread reads, or this event loop."""
    async with AsyncEngine.load_in_process(artifact) as engine:
        if reader == "loop":
            assert engine.process
            engine.process.read_in(asyncio.get_running_loop())
        yield engine


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run with a time limit, so that a lost message fails instead of hanging."""

    async def limited() -> None:
        async with asyncio.timeout(SECONDS):
            await main

    asyncio.run(limited())


def comparable(found: Completion) -> tuple[object, ...]:
    logits = None if found.logits is None else found.logits.tobytes()
    return found.text, found.token_ids, found.finish_reason, found.logprobs, found.mean_logprob, found.score, logits


async def completions_of(engine: AsyncEngine) -> list[tuple[object, ...]]:
    """Completions with every kind of parameters."""
    each = [
        SamplingParams(max_tokens=24, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=0.9, seed=7, n=3, best_of=4),
        SamplingParams(max_tokens=12, logprobs=3),
        SamplingParams(max_tokens=24, constraint=Constraint("regex", "[a-c]{5}")),
    ]
    found = list(await asyncio.gather(*(engine.generate(PROMPT, params) for params in each)))
    found.append(await engine.beam_search(PROMPT, BeamParams(width=3, max_tokens=8)))
    found.append(await engine.generate([5, 6], SamplingParams(max_tokens=2), keep_logits=True))
    return [comparable(choice) for completion in found for choice in completion.choices]


@READERS
def test_completions_are_those_of_an_engine_in_a_thread(artifact: Artifact, reader: str) -> None:
    async def main() -> None:
        async with AsyncEngine.load(artifact) as local, read_by(reader, artifact) as remote:
            assert await completions_of(remote) == await completions_of(local)
            await remote.refresh_metrics()
            assert remote.metrics().output_tokens == local.metrics().output_tokens

    run(main())


@pytest.mark.skipif(current_core() is None, reason="this system does not say on which core a thread runs")
def test_the_core_of_the_engines_thread_is_reported_when_it_changes(artifact: Artifact) -> None:
    cores: list[int] = []

    async def main() -> None:
        async with AsyncEngine.load_in_process(artifact) as engine:
            assert engine.process
            engine.process.on_move = cores.append
            await engine.generate([1, 2, 3], LONG)
            assert engine.process.core == cores[-1]

    run(main())
    assert set(cores) <= os.sched_getaffinity(0)
    assert all(core != after for core, after in pairwise(cores))


@READERS
def test_a_stream_has_the_same_text_and_scored_tokens(artifact: Artifact, reader: str) -> None:
    async def read(engine: AsyncEngine) -> tuple[str, list[object]]:
        outputs = [output async for output in engine.stream([1, 2, 3], SamplingParams(max_tokens=20, logprobs=1))]
        return "".join(output.text for output in outputs), [token for output in outputs for token in output.tokens]

    async def main() -> None:
        async with AsyncEngine.load(artifact) as local, read_by(reader, artifact) as remote:
            assert await read(remote) == await read(local)

    run(main())


@READERS
def test_joined_streams_have_every_token(artifact: Artifact, reader: str) -> None:
    async def tokens_of(engine: AsyncEngine, number: int) -> list[int]:
        found = []
        async for outputs in engine.stream_joined([number + 1], LONG, interval_seconds=0.005):
            found += [token for output in outputs for token in output.token_ids]
        return found

    async def main() -> None:
        async with AsyncEngine.load(artifact) as local, read_by(reader, artifact) as remote:
            found = await asyncio.gather(*(tokens_of(remote, number) for number in range(6)))
            assert found == [await tokens_of(local, number) for number in range(6)]

    run(main())


def test_errors_are_raised_here_as_they_are_raised_there(artifact: Artifact, tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncEngine.load_in_process(artifact, max_requests=1) as engine:
            with pytest.raises(RequestError) as wrong:
                await engine.generate("x", SamplingParams(constraint=Constraint("regex", "[a")))
            assert wrong.value.field == "constraint"
            with pytest.raises(RequestError, match="context"):
                await engine.generate([1] * 10**6, SamplingParams())
            async with asyncio.TaskGroup() as tasks:
                first = tasks.create_task(engine.generate([1], LONG))
                await asyncio.sleep(0)
                with pytest.raises(Overloaded) as refused:
                    await engine.generate([2], LONG)
                assert 0 < refused.value.retry_after_seconds <= 600
            assert len(first.result().token_ids) == 400
            await engine.refresh_metrics()
            assert engine.metrics().num_refused == 1

    run(main())
    with pytest.raises(EngineError, match="block"):
        AsyncEngine.load_in_process(artifact, kv_blocks=10**12)
    copied = open_artifact(shutil.copytree(artifact.path, tmp_path / "copy"))
    next(copied.path.rglob("*.safetensors")).touch()
    with pytest.raises(ArtifactError, match="replaced or written to"):
        AsyncEngine.load_in_process(copied)


@READERS
def test_a_process_that_dies_fails_its_requests_and_no_more_are_taken(artifact: Artifact, reader: str) -> None:
    async def main() -> None:
        async with read_by(reader, artifact) as engine:
            assert engine.process
            tasks = [asyncio.create_task(engine.generate([number], LONG)) for number in range(3)]
            await asyncio.sleep(0.05)
            os.kill(engine.process.pid, signal.SIGKILL)
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, EngineError)
                assert "ended by signal 9 (SIGKILL)" in str(result)
            assert not engine.is_healthy
            with pytest.raises(EngineError, match="SIGKILL"):
                await engine.generate([1])
            await engine.refresh_metrics()  # returns, although there is no answer

    run(main())


def test_a_process_whose_loop_is_closed_is_read_by_its_thread_again(artifact: Artifact) -> None:
    engine = AsyncEngine.load_in_process(artifact)

    async def read_here() -> int:
        assert engine.process
        engine.process.read_in(asyncio.get_running_loop())
        first = await engine.generate([1], SamplingParams(max_tokens=3, ignore_eos=True))
        engine.stream([1], LONG)  # never read
        return len(first.token_ids)

    assert asyncio.run(read_here()) == 3
    assert asyncio.run(read_here()) == 3
    run(engine.close())
    assert engine.process
    assert engine.process.ended == "the engine is closed; load it again to continue"


def test_signals_of_the_group_do_not_end_it(artifact: Artifact) -> None:
    async def main() -> None:
        async with AsyncEngine.load_in_process(artifact) as engine:
            assert engine.process
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(engine.process.pid, number)
            assert len((await engine.generate([1], LONG)).token_ids) == 400

    run(main())


def in_loop(kind: str, main: Coroutine[Any, Any, None]) -> None:
    """Run in an event loop of this library, with a time limit."""
    factory = pytest.importorskip("uvloop").new_event_loop if kind == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(asyncio.wait_for(main, SECONDS))


LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


@LOOPS
def test_requests_of_megabytes_are_served(artifact: Artifact, loop: str) -> None:
    async def main() -> None:
        async with read_by("loop", artifact) as engine:
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            await engine.refresh_metrics()
            expected = (await engine.generate(PROMPT, params)).text
            for size in (300_000, 8_000_000):
                found = await engine.generate(PROMPT, replace(params, stop=("a" * size,)))
                assert found.text == expected
            with pytest.raises(RequestError):
                await engine.generate(np.ones(1_000_000, np.int64), params)
            assert (await engine.generate(PROMPT, params)).text == expected

    in_loop(loop, main())


@LOOPS
def test_requests_that_arrive_while_the_process_pauses_are_served_after_it(artifact: Artifact, loop: str) -> None:
    async def main() -> None:
        async with read_by("loop", artifact) as engine:
            assert engine.process
            await engine.refresh_metrics()
            params = SamplingParams(max_tokens=2, ignore_eos=True, stop=("a" * 8_000,))
            prompts = [[number % 40] * 10 for number in range(100)]
            os.kill(engine.process.pid, signal.SIGSTOP)
            tasks = [asyncio.create_task(engine.generate(prompt, params)) for prompt in prompts]
            await asyncio.sleep(0.5)
            os.kill(engine.process.pid, signal.SIGCONT)
            assert [len(completion.token_ids) for completion in await asyncio.gather(*tasks)] == [2] * len(prompts)

    in_loop(loop, main())


@READERS
def test_a_connection_that_fails_ends_the_requests_and_says_why(
    artifact: Artifact, reader: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with read_by(reader, artifact) as engine:
            assert engine.process
            await engine.refresh_metrics()
            task = asyncio.create_task(engine.generate(PROMPT, LONG))
            await asyncio.sleep(0.05)
            monkeypatch.setattr(engine.process, "_deliver", refuse)
            with pytest.raises(EngineError, match=r"the connection to the engine.s process \d+ failed: no memory"):
                await task
            with pytest.raises(EngineError, match="load it again"):
                await engine.generate(PROMPT, LONG)

    def refuse(items: object) -> None:
        raise MemoryError("no memory")

    run(main())
    assert "the connection to the engine's process" in caplog.text


@READERS
def test_a_cancelled_reader_frees_its_blocks_there(artifact: Artifact, reader: str) -> None:
    async def main() -> None:
        async with read_by(reader, artifact) as engine:
            stream = engine.stream([1], LONG, options=RequestOptions(prefix_cache=False))
            await anext(stream)
            await stream.aclose()
            while True:
                await engine.refresh_metrics()
                metrics = engine.metrics()
                if not metrics.num_running:
                    break
            assert (metrics.blocks_in_use, metrics.num_waiting) == (0, 0)

    run(main())


@pytest.mark.parametrize("reader", ["none", "thread", "loop"])
def test_the_result_of_a_request_comes_also_when_its_reader_has_left(artifact: Artifact, reader: str) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        opened = AsyncEngine.load(artifact) if reader == "none" else read_by(reader, artifact)
        async with opened as engine:
            for params in (LONG, replace(LONG, n=3), replace(LONG, best_of=3)):
                for interval in (0.0, 0.02, math.inf):
                    left: asyncio.Future[Completion] = loop.create_future()
                    reading = asyncio.create_task(read(engine, params, interval, left))
                    is_running = 0
                    while not is_running:
                        await asyncio.sleep(0.002)
                        await engine.refresh_metrics()
                        is_running = engine.metrics().num_running
                    reading.cancel()
                    result = await left
                    assert {choice.finish_reason for choice in result.choices} == {"abort"}
                    assert len(result.choices) == params.n
                    whole: asyncio.Future[Completion] = loop.create_future()
                    await read(engine, replace(params, max_tokens=5), interval, whole)
                    assert whole.result().generated_tokens == 5 * max(params.n, params.best_of or 1)
            refused: asyncio.Future[Completion] = loop.create_future()
            with pytest.raises(RequestError):
                await read(engine, LONG, 0.0, refused, token=-1)
            assert refused.cancelled()
            lost: asyncio.Future[Completion] = loop.create_future()
            reading = asyncio.create_task(read(engine, LONG, math.inf, lost))
            await asyncio.sleep(0)
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await lost
        if engine.process:
            assert not engine.process._open
            assert not engine.process._cancelled

    async def read(engine: AsyncEngine, params: SamplingParams, interval: float, ended: Any, token: int = 1) -> None:
        async for _ in engine.stream_joined([token], params, interval_seconds=interval, ended=ended):
            pass

    run(main())


@READERS
def test_closing_aborts_open_requests_and_drains_if_told_to(artifact: Artifact, reader: str) -> None:
    async def main() -> None:
        for drain, reason in ((False, "abort"), (True, "length")):
            async with read_by(reader, artifact) as engine:
                stream = engine.stream([1], LONG)
                await anext(stream)
                closing = asyncio.create_task(engine.close(drain=drain))
                last = [output async for output in stream][-1]
                assert last.result
                assert last.result.finish_reason == reason
                await closing
                assert engine.process
                assert not Path(f"/proc/{engine.process.pid}").exists()

    run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_its_threads_and_stages_give_way(artifact: Artifact) -> None:
    async def main() -> None:
        async with AsyncEngine.load_in_process(artifact, stages=2) as engine:
            assert engine.process
            own = os.getpriority(os.PRIO_PROCESS, 0)
            engine.process.give_way(3)
            await engine.generate([1], LONG)  # starts more threads
            tasks = [int(each.name) for each in Path(f"/proc/{engine.process.pid}/task").iterdir()]
            assert len(tasks) > 2
            stages = children_of(engine.process.pid)
            assert len(stages) == 2
            tasks += [int(task.name) for stage in stages for task in Path(f"/proc/{stage}/task").iterdir()]
            assert {os.getpriority(os.PRIO_PROCESS, task) for task in tasks} == {min(19, own + 3)}

    run(main())


def test_its_logs_arrive_at_the_same_loggers(artifact: Artifact, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ingot"):
        engine = AsyncEngine.load_in_process(artifact, kv_blocks=64)
        asyncio.run(engine.close())
    assert "KV pool: 64 blocks" in caplog.text


def test_it_does_not_outlive_the_process_that_reads_it(artifact: Artifact) -> None:
    script = (
        "import sys, time, ingot\n"
        "engine = ingot.AsyncEngine.load_in_process(sys.argv[1])\n"
        "print(engine.process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(artifact.path)], stdout=subprocess.PIPE) as reader:
        assert reader.stdout
        pid = int(reader.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        reader.kill()
        end = time.monotonic() + SECONDS
        while Path(f"/proc/{pid}/exe").is_symlink() and time.monotonic() < end:  # a zombie has none
            time.sleep(0.01)
        assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
