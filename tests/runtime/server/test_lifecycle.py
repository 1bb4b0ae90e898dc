"""Start, readiness, drain and end; failures of the engine's thread; a process under load that gets SIGTERM."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from ingot.artifact import Artifact
from ingot.errors import UsageError
from ingot.runtime.engine.engine import Engine
from ingot.runtime.hosting.async_engine import AsyncEngine
from ingot.runtime.server import lifecycle
from ingot.runtime.server.models.served_models import Models, ServedModel
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.server.service import Service
from tests.conftest import BuildArtifact
from tests.processes import children_of
from tests.runtime.engines import text_engine, token_engine
from tests.runtime.server.models.test_admission import gated_engine
from tests.runtime.server.servers import SECONDS, Running, running

ENDLESS: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 450, "ignore_eos": True}


def get(server: Running, path: str) -> tuple[int, Any]:
    answer = httpx2.get(server.url + path)
    return answer.status_code, answer.json()


def events(text: str) -> list[Any]:
    """The events of a stream; the end is a text."""
    found = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    return [event if event == "[DONE]" else json.loads(event) for event in found]


def post(server: Running, **request: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/completions", json={**ENDLESS, **request}, timeout=SECONDS)


def test_probes_are_answered_while_a_model_loads() -> None:
    engine = text_engine()
    may_load, started = threading.Event(), threading.Event()
    service, listening = Service(ServerOptions()), lifecycle.listen("127.0.0.1", 0)
    url = lifecycle.address_of(listening)

    def load() -> Models:
        assert may_load.wait(SECONDS)
        return Models([ServedModel("fake", AsyncEngine(engine), service.options)])

    async def main() -> None:
        stop = asyncio.Event()
        serving = asyncio.create_task(
            lifecycle.run(service, listening, load, stop=stop, on_ready=lambda models: started.set())
        )
        async with httpx2.AsyncClient(base_url=url) as client:
            assert (await client.get("/health")).json() == {"status": "alive", "problems": []}
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()["status"]) == (503, "starting")
            refused = await client.post("/v1/completions", json=ENDLESS)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "starting")
            assert refused.headers["retry-after"] == "1"
            for path in ("/v1/models", "/v1/models/fake"):
                assert (await client.get(path)).status_code == 503
            for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
                assert (await client.post(path, json=body)).status_code == 503
            may_load.set()
            while not started.is_set():
                await asyncio.sleep(0.001)
            assert (await client.get("/ready")).status_code == 200
            assert engine.metrics().num_finished == 1, "it was warmed up"
            stop.set()
            await serving
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(url)

    asyncio.run(main())


def test_a_model_whose_pool_is_smaller_than_a_step_is_warmed_up_too() -> None:
    with running(text_engine(num_blocks=2, block_tokens=4)) as server:
        assert post(server, prompt=[1], max_tokens=3).json()["usage"]["completion_tokens"] == 3


def test_what_loading_raises_ends_the_server() -> None:
    def load() -> Models:
        raise UsageError("no such artifact")

    with pytest.raises(UsageError, match="no such artifact"):
        asyncio.run(lifecycle.run(Service(ServerOptions()), lifecycle.listen("127.0.0.1", 0), load))


def test_a_model_that_cannot_be_served_is_refused() -> None:
    with pytest.raises(UsageError, match="fake has no tokenizer"), running(token_engine()):
        pass
    with pytest.raises(UsageError, match="alias gpt: unknown model 'nothing'"):
        with running(text_engine(), aliases={"gpt": "nothing"}):
            pass
    with pytest.raises(UsageError, match="alias fake: a model has this name; choose another alias"):
        with running(text_engine(), aliases={"fake": "fake"}):
            pass


def test_an_address_that_cannot_be_used_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1, port {port}: .*; choose another"):
            lifecycle.listen("127.0.0.1", port)
    with pytest.raises(UsageError, match=r"cannot listen on nowhere\.invalid, port 1"):
        lifecycle.listen("nowhere.invalid", 1)


def test_draining_serves_open_requests_and_refuses_others() -> None:
    engine, executor = gated_engine()
    with running(engine) as server, ThreadPoolExecutor(2) as threads:
        executor.gate.clear()
        whole = threads.submit(post, server)
        streamed = threads.submit(post, server, stream=True)
        server.until(lambda: server.service.num_open == 2)
        server.stop()
        server.until(lambda: server.service.state == "draining")
        assert get(server, "/ready")[0] == 503
        assert get(server, "/health")[0] == 200
        refused = post(server)
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "the server is shutting down")
        executor.gate.set()
        assert whole.result().json()["usage"]["completion_tokens"] == 450
        assert events(streamed.result().text)[-1] == "[DONE]"
        server.join()


def test_requests_that_are_open_after_the_drain_end_with_an_error() -> None:
    engine, executor = gated_engine()
    with running(engine, ServerOptions(drain_seconds=0.01, stream_seconds=0)) as server, ThreadPoolExecutor(3) as pool:
        first = threading.Event()

        def read() -> list[Any]:
            request = {**ENDLESS, "stream": True}
            with httpx2.stream("POST", f"{server.url}/v1/completions", json=request, timeout=SECONDS) as answer:
                text = ""
                for piece in answer.iter_text():
                    text += piece
                    first.set()
                return events(text)

        streamed = pool.submit(read)
        assert first.wait(SECONDS)
        executor.gate.clear()
        waiting = [pool.submit(post, server), pool.submit(post, server, stream=True)]
        server.until(lambda: server.service.num_open == 3)
        server.stop()
        server.until(lambda: not server.service.models.all[0].engine.is_healthy)  # it is to end
        executor.gate.set()
        *texts, last = streamed.result()
        assert all(event["choices"][0]["finish_reason"] is None for event in texts)
        assert last["error"]["code"] == "aborted"
        for future in waiting:
            answer = future.result()
            assert answer.status_code == 503
            assert "shut" in answer.json()["error"]["message"] or "closed" in answer.json()["error"]["message"]
        server.join()


def test_a_broken_engine_fails_liveness_and_every_request(caplog: pytest.LogCaptureFixture) -> None:
    engine, executor = gated_engine()
    with running(engine) as server, ThreadPoolExecutor(3) as threads:
        executor.gate.clear()
        open_requests = [threads.submit(post, server, stream=number == 0) for number in range(3)]
        server.until(lambda: server.service.num_open == 3)
        assert get(server, "/health")[0] == 200
        executor.fails = True
        executor.gate.set()
        for future in open_requests:
            answer = future.result()
            assert answer.status_code == 503
            assert "the device is gone" in answer.json()["error"]["message"]
        status, body = get(server, "/health")
        assert (status, body["status"]) == (503, "failed")
        assert "fake: the engine failed and takes no more requests: the device is gone" in body["problems"][0]
        assert get(server, "/ready")[0] == 503
        later = post(server)
        assert (later.status_code, later.json()["error"]["code"]) == (503, "engine_unavailable")
    (logged,) = [record for record in caplog.records if record.message == "the engine failed"]
    assert logged.exc_info, "the log has a traceback"


def test_an_engine_that_makes_no_step_fails_liveness_and_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    engine, executor = gated_engine()
    options = ServerOptions(stall_seconds=0.05, drain_seconds=0.0)
    with running(engine, options) as server, ThreadPoolExecutor(1) as threads:
        executor.gate.clear()
        stuck = threads.submit(post, server)
        answer = stuck.result()  # although no step ever ends
        assert answer.status_code == 503
        assert "the engine has made no step for" in answer.json()["error"]["message"]
        assert get(server, "/health")[0] == 503
        executor.gate.set()
        server.until(lambda: get(server, "/health")[0] == 200)
    assert "has made no step" in caplog.text


@pytest.fixture(scope="module")
def artifact(build_unmeasured: BuildArtifact, two_layers: Any) -> Artifact:
    return build_unmeasured("int8-cpu", two_layers)


WITHOUT_PAUSES = (
    "import sys; from ingot.runtime.server.models import swap; swap._PAUSES_SECONDS = (0.0,) * 4;"
    " from ingot.__main__ import main; main()"
)


@contextmanager
def process(path: Path, *options: str, before: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`ingot serve` in a process of its own, which does not pause before it loads an engine again, and its URL.

    `before` is code that runs before Ingot is imported.
    """
    command = [sys.executable, "-c", before + WITHOUT_PAUSES, "serve", str(path), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        lines: list[str] = []
        while "ready on " not in (lines[-1] if lines else ""):
            lines.append(child.stderr.readline())
            assert lines[-1], "".join(lines)
        try:
            yield child, lines[-1].split()[-1]
        finally:
            child.kill()


def test_sigterm_under_load_breaks_no_stream(artifact: Artifact) -> None:
    async def main(child: subprocess.Popen[str], url: str) -> list[int]:
        begun = asyncio.Event()
        refused = 0

        async def client_of(client: openai.AsyncOpenAI, number: int) -> list[int]:
            """Streams one after the other until the server refuses; the tokens of each."""
            nonlocal refused
            lengths: list[int] = []
            while True:
                try:
                    stream = await client.completions.create(
                        model=artifact.manifest.name, prompt=[number + 1, 2, 3], max_tokens=60, stream=True,
                        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
                    )  # fmt: skip
                except (openai.InternalServerError, openai.APIConnectionError):
                    refused += 1
                    return lengths
                chunks = [chunk async for chunk in stream]  # raises for a stream that breaks
                assert chunks[-1].usage is not None
                lengths.append(chunks[-1].usage.completion_tokens)
                begun.set()

        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=SECONDS) as client:
            tasks = [asyncio.create_task(client_of(client, number)) for number in range(16)]
            await begun.wait()
            child.send_signal(signal.SIGTERM)
            lengths = [length for each in await asyncio.gather(*tasks) for length in each]
        assert refused == 16
        return lengths

    with process(artifact.path) as (child, url):
        lengths = asyncio.run(main(child, url))
        assert child.wait(SECONDS) == 0
        assert child.stderr is not None
        assert child.stderr.read() == ""
    assert len(lengths) >= 16
    assert set(lengths) == {60}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_an_engine_process_that_dies_or_hangs_is_started_again(artifact: Artifact, number: signal.Signals) -> None:
    with process(artifact.path, "--stall-seconds", "1") as (child, url):
        (before,) = children_of(child.pid)
        body = {**ENDLESS, "max_tokens": 1000, "n": 50, "stream": True}
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=SECONDS) as answer:
            events = answer.iter_lines()
            next(events)
            os.kill(before, number)
            errors = [json.loads(line[6:])["error"] for line in events if line.startswith('data: {"error"')]
        assert len(errors) == 1, "the stream ends, with an error"
        assert ("SIGKILL" if number == signal.SIGKILL else "no step for") in errors[0]["message"]
        wait_until(lambda: httpx2.get(f"{url}/ready").status_code == 200)
        (after,) = children_of(child.pid)
        assert after != before
        answer = httpx2.post(f"{url}/v1/completions", json={"prompt": [1, 2], "max_tokens": 3}, timeout=SECONDS)
        assert answer.status_code == 200
        metrics = httpx2.get(f"{url}/metrics").text
        assert f'ingot_failed_requests_total{{model_name="{artifact.manifest.name}"}} 1.0' in metrics
        assert "ingot_engine_resident_bytes{" in metrics
        cores = os.sched_getaffinity(0)
        assert f"ingot_usable_cores {len(cores):.1f}" in metrics
        weights = sum(file.stat().st_size for file in (artifact.path / "program").rglob("*"))
        (size,) = (line for line in metrics.splitlines() if line.startswith("ingot_program_bytes{"))
        assert float(size.split()[-1]) == weights
        threads = [int(task.name) for task in Path(f"/proc/{child.pid}/task").iterdir()]
        (shared,) = {frozenset(os.sched_getaffinity(thread)) for thread in threads}
        assert len(shared) == max(1, len(cores) - 1), "the server's threads keep off the core of the engine's"
        assert os.sched_getaffinity(after) == cores
        child.send_signal(signal.SIGTERM)
        assert child.wait(SECONDS) == 0
        assert not Path(f"/proc/{after}").exists()


def test_a_process_whose_engine_cannot_be_started_again_ends_with_an_error(artifact: Artifact, tmp_path: Path) -> None:
    """So that systemd and Docker, which look at the process alone, start it anew."""
    copied = Path(shutil.copytree(artifact.path, tmp_path / "artifact"))
    with process(copied) as (child, _):
        (engine,) = children_of(child.pid)
        with (copied / "program" / "weights.safetensors").open("r+b") as weights:
            # In place: the file that is held open is damaged, too.
            weights.seek(-1, os.SEEK_END)
            last = weights.read(1)[0]
            weights.seek(-1, os.SEEK_END)
            weights.write(bytes([last ^ 1]))
        os.kill(engine, signal.SIGKILL)
        assert child.wait(SECONDS) == 1
        assert child.stderr is not None
        text = child.stderr.read()
    assert text.count("and is not any more") == 1
    assert "SIGKILL" in text
    assert "what was served is not there any more" in text
    assert "weights.safetensors" in text
    assert text.splitlines()[-1].startswith("error: no engine serves, and none is loaded again")


@contextmanager
def linked(artifact: Artifact, folder: Path, *options: str) -> Iterator[tuple[Path, subprocess.Popen[str], str]]:
    """A server of a link to an artifact, which an administrator may reload."""
    link, keys = folder / "served", folder / "keys"
    link.symlink_to(artifact.path)
    keys.write_text(f"{ADMIN_KEY}\n")
    with process(link, "--admin-keys", str(keys), "--probation-seconds", "0.1", *options) as (child, url):
        yield link, child, url


ADMIN_KEY = "sk-administrator"


def relinked(link: Path, path: Path) -> None:
    other = link.with_suffix(".new")
    other.symlink_to(path)
    other.replace(link)


def reload_outcome(url: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    answer = httpx2.post(f"{url}/admin/reload?wait=true", headers=headers, timeout=SECONDS)
    found: dict[str, Any] = answer.json()["models"][0]
    return found


def identity(url: str) -> str:
    (line,) = (
        each for each in httpx2.get(f"{url}/metrics").text.splitlines() if each.startswith("ingot_artifact_info{")
    )
    return line.partition('identity="')[2].partition('"')[0]


def killed_engine(child: subprocess.Popen[str], url: str) -> None:
    """Kill the engine's process and wait until another one serves."""
    (before,) = children_of(child.pid)
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: children_of(child.pid) not in ([], [before]))
    wait_until(lambda: httpx2.get(f"{url}/ready").status_code == 200)


def damaged_copy(artifact: Artifact, folder: Path) -> Path:
    """An artifact with a bit of its weights changed."""
    copied = Path(shutil.copytree(artifact.path, folder / "damaged"))
    weights = copied / "program" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    return copied


@pytest.fixture(scope="module")
def other_artifact(build_unmeasured: BuildArtifact, two_layers: Any) -> Artifact:
    return build_unmeasured("int8-cpu", two_layers, "cpu.attention=bfloat16")


def test_after_a_refused_reload_a_crash_brings_back_what_was_served(
    artifact: Artifact, other_artifact: Artifact, tmp_path: Path
) -> None:
    with linked(artifact, tmp_path) as (link, child, url):
        served = identity(url)
        relinked(link, damaged_copy(artifact, tmp_path))
        assert reload_outcome(url)["state"] == "refused"
        killed_engine(child, url)
        assert identity(url) == served
        relinked(link, other_artifact.path)
        assert other_artifact.manifest.identity != served
        killed_engine(child, url)
        assert identity(url) == served, "only a reload takes what is in the folder by now"


def test_what_was_served_comes_back_after_its_folder_was_replaced_and_deleted(
    artifact: Artifact, other_artifact: Artifact, tmp_path: Path
) -> None:
    served_from, draft = (Path(shutil.copytree(artifact.path, tmp_path / name)) for name in ("served", "draft"))
    with process(served_from, "--speculate", str(draft)) as (child, url):
        served = identity(url)
        shutil.rmtree(served_from)
        shutil.copytree(other_artifact.path, served_from)
        for _ in range(2):
            killed_engine(child, url)
            assert identity(url) == served
            shutil.rmtree(served_from, ignore_errors=True)
            shutil.rmtree(draft, ignore_errors=True)
        body = {"prompt": [1, 2], "max_tokens": 3}
        assert httpx2.post(f"{url}/v1/completions", json=body, timeout=SECONDS).status_code == 200


def test_an_idle_model_comes_back_as_what_was_served_and_a_reload_changes_it(
    artifact: Artifact, other_artifact: Artifact, tmp_path: Path
) -> None:
    body = {"prompt": [1, 2], "max_tokens": 3}
    with linked(artifact, tmp_path, "--idle-unload", "1", "--no-verify") as (link, child, url):
        served = identity(url)
        wait_until(lambda: not children_of(child.pid))
        relinked(link, other_artifact.path)
        assert httpx2.post(f"{url}/v1/completions", json=body, timeout=SECONDS).status_code == 200
        assert identity(url) == served
        wait_until(lambda: not children_of(child.pid))
        found = reload_outcome(url)
        assert found["state"] in ("probation", "kept"), found
        assert identity(url) == other_artifact.manifest.identity
        assert httpx2.post(f"{url}/v1/completions", json=body, timeout=SECONDS).status_code == 200


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


FAR_CLOCK = """
import pathlib, time
def far(read):
    def read_or_raise():
        moment = pathlib.Path({file!r}).read_text()
        if moment == "2311":
            raise OverflowError("timestamp too large to convert to C _PyTime_t")
        return -3786825600 if moment == "1850" else read()
    return read_or_raise
time.time, time.time_ns = far(time.time), far(time.time_ns)
"""


def test_a_clock_that_is_centuries_off_ends_no_server(artifact: Artifact, tmp_path: Path) -> None:
    """Python raises at a time after 2262: in every record of the log, and where the head of an answer has the date."""
    clock, keys = tmp_path / "clock", tmp_path / "keys"
    clock.write_text("2026")
    keys.write_text(f"{ADMIN_KEY}\n")
    options = ("--log-requests", "--admin-keys", str(keys), "--no-verify", "--probation-seconds", "0")
    with process(artifact.path, *options, before=FAR_CLOCK.format(file=str(clock))) as (child, url):
        for moment, created in (("2311", 9_214_646_400), ("1850", 0)):
            clock.write_text(moment)
            answer = httpx2.post(f"{url}/v1/completions", json={"prompt": [1, 2], "max_tokens": 3}, timeout=SECONDS)
            assert (answer.status_code, answer.json()["created"]) == (200, created)
            assert reload_outcome(url)["started"] == created
            wait_until(lambda: len(children_of(child.pid)) == 1)
            killed_engine(child, url)
            assert httpx2.get(f"{url}/metrics").status_code == 200
        child.terminate()
        assert child.wait(SECONDS) == 0
        assert child.stderr is not None
        log = child.stderr.read()
    assert "2262-01-01T00:00:00.000Z ERROR" in log
    assert "1970-01-01T00:00:00.000Z ERROR" in log
    assert "Traceback" not in log


def test_a_second_sigterm_ends_the_process_at_once(artifact: Artifact) -> None:
    with process(artifact.path) as (child, url):
        body = {**ENDLESS, "max_tokens": 1000, "n": 100, "stream": True}  # much more work than the test waits for
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=SECONDS) as answer:
            pieces = answer.iter_text()
            next(pieces)
            child.send_signal(signal.SIGTERM)
            while httpx2.get(f"{url}/ready").status_code == 200:
                time.sleep(0.005)
            assert child.poll() is None
            child.send_signal(signal.SIGTERM)
            assert child.wait(SECONDS) == -signal.SIGTERM
            with pytest.raises(httpx2.RemoteProtocolError):
                list(pieces)


def test_the_engine_of_a_stopped_server_is_closed() -> None:
    engine: Engine = text_engine()
    with running(engine) as server:
        assert post(server, max_tokens=3).status_code == 200
        model = server.model()
    assert model.engine.error is not None
