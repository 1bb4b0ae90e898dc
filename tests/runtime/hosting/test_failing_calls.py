"""Whatever call on a socket fails, and whatever thread does not start: requests are answered or end with an error."""

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ingot.artifact import open_artifact
from ingot.errors import IngotError
from ingot.runtime import AsyncEngine, Completion, Constraint, SamplingParams
from ingot.runtime.hosting.engine_process_messages import Cancel, Connection
from ingot.runtime.server.event_loop import event_loop
from tests.conftest import BuildArtifact
from tests.simulators.failing_calls import EVERY_CALL, FailingCalls, Failure, Scenario, fail_each_call

MESSAGES = [Cancel(text) for text in ("a", "b" * 600_000, "c", "d" * 70_000, "")]  # type: ignore[arg-type]
PROMPT = "def read_file(path):"
_ARTIFACT = "FAILING_ARTIFACT"
_MOST_CHILD_CALLS, _MOST_CHILD_THREADS = 60, 20
_RIGHT: list[str] = []
FAILURES = [Failure(error, False) for error in (0, errno.ENOBUFS, errno.ENOMEM, errno.EPIPE, errno.EAGAIN)]


def exchange(folder: Path, calls: FailingCalls) -> None:
    """Send messages in both directions at once."""
    ends: list[Connection] = []
    received: list[list[object]] = [[], []]
    with calls.on("socket:"):
        try:
            ends = [Connection(each) for each in socket.socketpair()]
        except OSError:
            return
        threads = [threading.Thread(target=receive, args=each) for each in zip(ends, received, strict=True)]
        for thread in threads:
            thread.start()
        for message in MESSAGES:
            for end in ends:
                end.send(message)
        for thread in threads:
            thread.join()
    for found in received:
        assert found == MESSAGES[: len(found)], "whole messages, in order"
    arrived = all(len(found) == len(MESSAGES) for found in received)
    may_fail = calls.has_failed and calls.failure.error
    assert arrived or may_fail
    if not arrived and calls.failure.error != errno.EPIPE:
        assert any(end.failure for end in ends), "the reason is known"
    for end in ends:
        end.close()


def receive(end: Connection, received: list[object]) -> None:
    """Receive all messages, as far as they arrive."""
    try:
        for _ in MESSAGES:
            received.append(end.receive())
    except EOFError:
        end.fail(BrokenPipeError())


def test_each_call_on_a_connection_may_fail(tmp_path: Path) -> None:
    counts = fail_each_call(exchange, tmp_path, FAILURES)
    assert min(counts.values()) > 20


async def answers(engine: AsyncEngine) -> list[str]:
    """Use an engine: texts, or the Ingot errors with which requests end."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    constrained = replace(params, constraint=Constraint("regex", "[a-c]{3}"))
    each = [params, constrained, replace(params, stop=("a" * 300_000,))]
    found = await asyncio.gather(*(engine.generate(PROMPT, every) for every in each), return_exceptions=True)
    await engine.refresh_metrics(5.0)
    return [text_of(answer) for answer in found]


def text_of(answer: Completion | BaseException) -> str:
    """What a request ended with."""
    if isinstance(answer, Completion):
        return answer.text
    if not isinstance(answer, IngotError):
        raise answer
    return f"error: {answer}"


def use(
    calls: FailingCalls, main: Callable[[], Coroutine[Any, Any, list[str]]], where: AbstractContextManager[Any]
) -> None:
    """Run `main` while a call fails: its requests end with the right text or an error, or it raises one."""
    try:
        with asyncio.Runner(loop_factory=event_loop) as runner:
            runner.run(asyncio.sleep(0))  # what fails in starting the loop is not Ingot's
            found = runner.run(failing(main, where))
    except IngotError as error:
        found = [f"error: {error}"]
    if not calls.number:
        _RIGHT[:] = found
    assert all(text.startswith("error: ") or text == right for text, right in zip(found, _RIGHT, strict=False))


async def failing(main: Callable[[], Coroutine[Any, Any, list[str]]], where: AbstractContextManager[Any]) -> list[str]:
    """What `main` returns; calls that the loop makes at its begin and end do not fail."""
    with where:
        return await main()


def use_process(calls: FailingCalls, where: AbstractContextManager[Any]) -> None:
    """Load the engine in a process, use it and close it."""

    async def main() -> list[str]:
        async with AsyncEngine.load_in_process(artifact) as engine:
            assert engine.process
            engine.process.read_in(asyncio.get_running_loop())
            return await answers(engine)

    artifact = open_artifact(os.environ[_ARTIFACT], verify=False)
    use(calls, main, where)


def fail_here(folder: Path, calls: FailingCalls) -> None:
    """A call on a socket of this process fails."""
    use_process(calls, calls.on("socket:"))


def fail_there(folder: Path, calls: FailingCalls) -> None:
    """A call on a socket of the engine's process fails."""
    use_process(calls, mock.patch.dict(os.environ, calls.of_children("socket:")))
    # calls of the other process are not counted here
    calls.num_calls = min(calls.number, _MOST_CHILD_CALLS)


def fail_threads_here(folder: Path, calls: FailingCalls) -> None:
    """A thread of this process does not start."""
    use_process(calls, calls.on("thread:"))


def fail_threads_there(folder: Path, calls: FailingCalls) -> None:
    """A thread of the engine's process does not start."""
    use_process(calls, mock.patch.dict(os.environ, calls.of_children("thread:")))
    calls.num_calls = min(calls.number, _MOST_CHILD_THREADS)


def fail_threads_of_local_engine(folder: Path, calls: FailingCalls) -> None:
    """A thread of an engine of this process, which keeps blocks on disk, does not start."""

    async def main() -> list[str]:
        async with AsyncEngine.load(artifact, kv_host_bytes=1 << 22, kv_disk_bytes=1 << 24, kv_disk_path=folder) as it:
            return await answers(it)

    artifact = open_artifact(os.environ[_ARTIFACT], verify=False)
    use(calls, main, calls.on("thread:"))


@pytest.fixture
def _artifact(build_unmeasured: BuildArtifact, two_layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_ARTIFACT, str(build_unmeasured("int8-cpu", two_layers).path))


@pytest.mark.usefixtures("_artifact")
@pytest.mark.parametrize(
    ("scenario", "error", "step"),
    [
        (fail_here, errno.ENOBUFS, 7),
        (fail_there, errno.ENOMEM, 13),
        (fail_threads_here, errno.EAGAIN, 2),
        (fail_threads_there, errno.EAGAIN, 5),
        (fail_threads_of_local_engine, errno.EAGAIN, 3),
    ],
)
def test_each_call_of_an_engine_in_use_may_fail(tmp_path: Path, scenario: Scenario, error: int, step: int) -> None:
    if scenario in (fail_there, fail_threads_there) and not any(EVERY_CALL):
        pytest.skip("each call takes a process and seconds: pytest --every-call")
    counts = fail_each_call(scenario, tmp_path, [Failure(error, False)], step=step)
    assert min(counts.values()) > 1
