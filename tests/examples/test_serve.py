"""The examples of clients run against a server."""

import shutil
import subprocess
from collections.abc import Iterator

import pytest
from examples.serve import client

from tests.data_paths import ROOT
from tests.runtime.engines import text_engine
from tests.runtime.server.servers import Running, running


@pytest.fixture
def server() -> Iterator[Running]:
    with running(text_engine()) as started:
        yield started
        started.require_nothing_left()


def test_the_python_client_prints_answers(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    client.main(f"{server.url}/v1")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(client.PROMPT)
    assert any(line.endswith(" tokens") for line in lines)
    prompts = ("class ", "for ", "with open(")
    assert all(line[1:].startswith(prompt) for line, prompt in zip(lines[-3:], prompts, strict=True))


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_requests_of_the_shell_are_answered(server: Running) -> None:
    script = ROOT / "examples" / "serve" / "requests.sh"
    done = subprocess.run(["sh", script, server.url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "data: [DONE]" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("vllm:generation_tokens_total")
