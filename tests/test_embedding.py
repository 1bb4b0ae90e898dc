"""docs/embedding.md is true: its service runs as a process and serves answers, streams, refusals and disconnects."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ingot.artifact import Artifact
from ingot.errors import EngineError, Overloaded, RequestError, RequestFailed
from ingot.runtime import Engine, SamplingParams
from tests.conftest import BuildArtifact
from tests.data_paths import ROOT

TEXT = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
(SOURCE,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
PROMPT = "def read_file(path):"
ENDLESS = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{{ tools[0].name if tools }}{{ after }}"


@dataclass
class Client:
    """Requests to the service, one connection each."""

    process: subprocess.Popen[str]
    port: int
    is_stopping: bool = False

    def stop(self) -> None:
        """Ask the service to shut down. Once: a second SIGTERM, after its event loop ended, would kill it."""
        if not self.is_stopping:
            self.is_stopping = True
            self.process.send_signal(signal.SIGTERM)

    def send(self, method: str, path: str, body: bytes = b"") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read().decode()

    def generate(self, **request: Any) -> tuple[int, Any]:
        status, text = self.send("POST", "/generate", json.dumps(request).encode())
        return status, json.loads(text)

    def metrics(self) -> dict[str, int]:
        """Values without labels, by name without prefix."""
        found = re.findall(r"^(?:ingot_|vllm:)(\w+) (\d+)", self.send("GET", "/metrics")[1], re.MULTILINE)
        return {name: int(value) for name, value in found}

    def open_stream(self, request: dict[str, Any]) -> socket.socket:
        """Start a stream and read its beginning."""
        body = json.dumps(request).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        assert connection.recv(100).startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        return connection


@pytest.fixture(scope="module")
def artifact(build_unmeasured: BuildArtifact, two_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    return build_unmeasured("int8-cpu", two_layers, f"chat_template={template}")


@pytest.fixture
def service(artifact: Artifact, tmp_path: Path) -> Iterator[Client]:
    """The service of the document in a process of its own, on a free port."""
    (tmp_path / "service.py").write_text(SOURCE, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "service.py"), str(artifact.path), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving on port "), process.communicate()[1]
        client = Client(process, int(line.split()[-1]))
        yield client
        client.stop()
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_the_service_answers_streams_and_refuses(service: Client, artifact: Artifact) -> None:
    with Engine.load(artifact) as engine:
        expected = engine.generate(PROMPT, SamplingParams(max_tokens=12))
        sampled = engine.generate(PROMPT, SamplingParams(max_tokens=12, temperature=1.0, seed=3, logit_bias={65: -100}))
    counts = {"finish_reason": "length", "prompt_tokens": expected.prompt_tokens, "output_tokens": 12}
    plain = (200, {"choices": [{"index": 0, "text": expected.text, **counts}]})
    assert service.generate(prompt=PROMPT, max_tokens=12) == plain
    options = {"temperature": 1.0, "seed": 3, "logit_bias": {"65": -100}}
    answer = service.generate(prompt=PROMPT, max_tokens=12, n=2, **options)[1]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["text"] == sampled.text
    messages = [{"role": "user", "content": "def read_"}]
    chat = service.generate(messages=messages, tools=[{"name": "file("}], variables={"after": "path):"}, max_tokens=12)
    assert chat == plain

    status, events = service.send(
        "POST", "/generate", json.dumps({"prompt": PROMPT, "max_tokens": 12, "stream": True}).encode()
    )
    parts = [json.loads(event.removeprefix("data: ")) for event in events.split("\n\n") if event]
    assert (status, len(parts)) == (200, 12)
    assert "".join(part["text"] for part in parts) == expected.text
    assert parts[-1] == {"index": 0, "text": parts[-1]["text"], **counts}

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: service.generate(prompt=PROMPT, max_tokens=12), range(16)))
    assert answers == [plain] * 16
    assert service.send("GET", "/health") == (200, '{"error": null}')
    assert service.metrics()["generation_tokens_total"] == 21 * 12

    refused: list[tuple[dict[str, Any], str]] = [
        ({"prompt": PROMPT, "temperature": -1}, "temperature is -1; it must be a finite number"),
        ({"prompt": PROMPT, "stream": True, "top_p": 2}, "top_p is 2"),
        ({"prompt": PROMPT, "temprature": 1}, "unexpected keyword argument 'temprature'"),
        ({"prompt": "x" * 2_000_000}, "the prompt has 2000000 characters"),
        ({"messages": [{"content": "x"}]}, "message"),
        ({}, "the prompt must be a text or a flat list"),
    ]
    for request, message in refused:
        status, answer = service.generate(**request)
        assert status == 400
        assert message in answer["error"]
    for body in (b"{", b"[1]", b"\xff", b"[" * 100_000):
        status, text = service.send("POST", "/generate", body)
        assert (status, "the body is not a request" in text) == (400, True)
    assert service.send("GET", "/elsewhere")[0] == 404
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n")
        assert b"its body has 99999999 bytes; at most 4194304 are accepted" in connection.recv(1000)


def test_a_client_that_leaves_ends_its_request(service: Client) -> None:
    service.open_stream(ENDLESS).close()
    while service.metrics()["num_requests_running"]:
        time.sleep(0.01)
    assert service.metrics()["generation_tokens_total"] < 900
    assert service.metrics()["kv_blocks_in_use"] == 0
    assert service.generate(prompt=PROMPT, max_tokens=3)[0] == 200


def test_open_streams_are_served_while_the_service_shuts_down(service: Client) -> None:
    with service.open_stream(ENDLESS) as connection:
        service.stop()
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    last = json.loads(received.split(b"\n\n")[-2].removeprefix(b"data: "))
    assert (last["finish_reason"], last["output_tokens"]) == ("length", 900)


def test_the_table_of_exceptions_has_the_codes_of_the_service() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|$", TEXT, re.MULTILINE))
    in_service = dict(re.findall(r"ingot\.(\w+): (\d{3})", SOURCE))
    assert rows == in_service
    assert set(rows) == {kind.__name__ for kind in (RequestError, Overloaded, RequestFailed, EngineError)}
