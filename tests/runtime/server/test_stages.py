"""A server whose engine has its stages in processes: one that dies or hangs under load costs time, and no answer."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from ingot.artifact import Artifact
from tests.conftest import BuildArtifact
from tests.processes import children_of
from tests.runtime.cpu.native.kernel_cases import needs_library
from tests.runtime.server.servers import SECONDS
from tests.runtime.server.test_lifecycle import process

pytestmark = needs_library
CLIENTS = 6


@pytest.fixture(scope="module")
def artifact(build_unmeasured: BuildArtifact, two_layers: Any) -> Artifact:
    return build_unmeasured("int8-cpu", two_layers)


def texts(url: str) -> list[str]:
    """Return what each of some clients gets at the same time."""

    def ask(number: int) -> str:
        body = {"prompt": [number + 1, 2, 3], "max_tokens": 150, "ignore_eos": True, "seed": 1, "temperature": 0.7}
        answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=SECONDS)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(CLIENTS) as threads:
        return list(threads.map(ask, range(CLIENTS)))


def metric(url: str, name: str) -> float:
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_stage_that_dies_or_hangs_under_load_changes_no_answer(artifact: Artifact, number: signal.Signals) -> None:
    with process(artifact.path) as (_, url):
        expected = texts(url)
    with process(artifact.path, "--stages", "2") as (child, url):
        assert texts(url) == expected
        (engine,) = children_of(child.pid)
        stages = children_of(engine)
        assert len(stages) == metric(url, "ingot_stages") == 2
        with ThreadPoolExecutor(1) as threads:
            before = metric(url, "ingot_steps_total")
            answers = threads.submit(texts, url)
            while metric(url, "ingot_steps_total") < before + 20:
                time.sleep(0.02)
            os.kill(stages[1], number)
            assert answers.result() == expected
        assert metric(url, "ingot_stage_restarts_total") == 1
        assert metric(url, "ingot_failed_requests_total") == 0
        assert httpx2.get(f"{url}/ready").status_code == 200
        assert httpx2.get(f"{url}/health").json() == {"status": "alive", "problems": []}
        (same,) = children_of(child.pid)
        assert same == engine
        assert not {*stages} & {*children_of(engine)}
        child.send_signal(signal.SIGTERM)
        assert child.wait(SECONDS) == 0
        assert child.stderr is not None
        logged = child.stderr.read()
    words = "was killed (SIGKILL)" if number == signal.SIGKILL else "is stopped by a signal (SIGSTOP)"
    assert f"stage 1 of 2 (process {stages[1]}) {words}" in logged
    assert not any(os.path.exists(f"/proc/{each}") for each in stages)
