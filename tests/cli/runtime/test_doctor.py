"""`ingot doctor` and `ingot top`: from a server, from files, and what cannot be read."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from ingot.cli.main import run
from ingot.cli.runtime.top import facts_of
from ingot.runtime.doctor import Scrape, ScrapeWindow
from ingot.runtime.engine.engine import Engine
from ingot.runtime.engine.metrics_export import prometheus_text
from ingot.runtime.server.options import ServerOptions
from tests.runtime.doctor.test_diagnosis import healthy
from tests.runtime.engines import text_engine
from tests.runtime.server.servers import Running, running
from tests.simulators.fake_executor import FakeExecutor

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(text_engine()) as started:
        yield started


def test_a_file_is_diagnosed_with_cause_action_and_numbers(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "metrics.txt"
    file.write_text(healthy(3) + "ingot_prompt_pieces_total 500\ningot_repeated_prompt_pieces_total 400\n")
    assert run(["doctor", str(file)]) == 3
    shown = capsys.readouterr().out
    assert shown.startswith(
        "1. 80 % of the prompts' text was seen before, after what was not, and the prefix cache has 0 %"
        "  [prefix-differs]"
    )
    for word in ("cause:", "action:", "numbers: repeated_share 0.8, prefix_hit_rate"):
        assert word in shown


def test_of_two_files_what_was_counted_in_between_is_diagnosed(tmp_path: Path, capsys: Captured) -> None:
    before, after = tmp_path / "before.txt", tmp_path / "after.txt"
    failed = healthy(1).replace("ingot_failed_requests_total 0", "ingot_failed_requests_total 7")
    before.write_text(failed)
    after.write_text(failed)
    assert run(["doctor", str(after)]) == 3
    assert "7 requests ended with an error" in capsys.readouterr().out
    assert run(["doctor", str(before), str(after), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "machine": {"findings": [], "time": [], "traffic": [], "changed": []}
    }


def test_a_server_is_diagnosed_and_watched(server: Running, capsys: Captured) -> None:
    with server.client() as client:
        client.completions.create(model="fake", prompt="def read", max_tokens=7)
    run(["doctor", server.url, "--seconds", "0.2", "--json"])  # the machine of the test may be busy
    assert list(json.loads(capsys.readouterr().out)) == ["fake"]
    assert run(["top", server.url, "--seconds", "0.1", "--once", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["model"], row["running"], row["tokens_per_second"]) == ("fake", 0.0, 0.0)
    assert run(["top", server.url, "--seconds", "0.1", "--once"]) == 0
    assert "fake" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "http://127.0.0.1:1"], "http://127.0.0.1:1/metrics cannot be read"),
        (["doctor", "nowhere.txt"], "nowhere.txt cannot be read as metrics: No such file or directory"),
        (["doctor", "a.txt", "b.txt", "c.txt"], "give one server, one file, or two files of one server"),
        (["doctor", "--preflight", "http://x"], "--preflight looks at this machine alone"),
        (
            ["doctor", "--preflight", "--max-requests", "-5"],
            "--max-requests is -5; it must be a whole number from 1",
        ),
        (
            ["doctor", "--preflight", "--kv-disk-path", __file__],
            "test_doctor.py is not a folder; name that of",
        ),
        (
            ["doctor", "http://localhost:99999"],
            "http://localhost:99999 is not the URL of a server; give http://HOST:PORT",
        ),
        (["doctor", "http://"], "http:// is not the URL of a server; give"),
        (["top", "http://127.0.0.1:1"], "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused(arguments: list[str], message: str, capsys: Captured) -> None:
    assert run(arguments) in (1, 2)
    assert message in capsys.readouterr().err


NOT_METRICS = {
    "words": b"hello\n",
    "one-metric": b"vllm:foo 1\n",
    "accounts": b"root:x:0:0:root:/root:/bin/bash\npostgres:x:101:104:A secret,,,:/var/lib:/bin/bash\n",
    "bytes": b"\xff\xfe\x00vllm:num_requests_running 1\n",
}


@pytest.mark.parametrize("command", [["doctor"], ["top", "--once", "--seconds", "0.1"]])
@pytest.mark.parametrize("content", NOT_METRICS.values(), ids=NOT_METRICS)
def test_what_has_no_metrics_of_ingot_is_refused_and_not_quoted(
    command: list[str], content: bytes, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "other.txt").write_bytes(content)
    with answering(content) as url:
        for source in (str(tmp_path / "other.txt"), url):
            assert run([*command, source]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"error: no metrics of Ingot at {source}")
            assert "secret" not in line


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("vllm:num_requests_running many", "vllm:num_requests_running has the value 'many', which is not a number"),
        ('vllm:x_bucket{le="foo"} 3', "vllm:x_bucket has a bucket up to le='foo', which is not a number"),
        ('vllm:x_bucket{le="nan"} 3', "vllm:x_bucket has a bucket up to le='nan'"),
        ("vllm:x_bucket 3", "vllm:x_bucket has a bucket up to le=''"),
    ],
)
def test_damaged_metrics_are_refused(line: str, message: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "metrics.txt").write_text(f"{healthy(1)}{line}\n")
    for command in (["doctor"], ["top", "--once", "--seconds", "0.1"]):
        assert run([*command, str(tmp_path / "metrics.txt")]) == 2
        assert message in capsys.readouterr().err


def test_a_server_that_starts_has_no_model_yet(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "metrics.txt").write_text("ingot_ready 0.0\nprocess_open_fds 12\n")
    assert run(["doctor", str(tmp_path / "metrics.txt")]) == 2
    assert "has no model yet; try again once its /ready answers 200" in capsys.readouterr().err


def test_an_answer_that_is_not_http_is_an_error(capsys: Captured) -> None:
    with answering(None) as url:
        assert run(["doctor", url]) == 1
    assert f"{url}/metrics cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "1e300"])
def test_times_that_cannot_be_waited_for_are_refused(seconds: str, capsys: Captured) -> None:
    for command in (["doctor", "--preflight"], ["top"]):
        assert run([*command, "--seconds", seconds]) == 2
        assert f"--seconds is {float(seconds):g}; it must be from" in capsys.readouterr().err
    assert run(["top", "--price", "nan"]) == 2
    assert "--price is nan; it must be a number" in capsys.readouterr().err


def test_what_started_anew_or_served_nothing_is_said(tmp_path: Path, capsys: Captured) -> None:
    before, after = tmp_path / "before.txt", tmp_path / "after.txt"
    before.write_text(healthy(1))
    after.write_text(prometheus_text(Engine(FakeExecutor()).metrics()))
    assert run(["doctor", str(before), str(after)]) == 0
    said = capsys.readouterr().err
    assert "started anew between the two looks" in said
    assert "nothing was served in this time" in said


def test_an_engine_without_a_name_is_watched(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "metrics.txt").write_text(healthy(1))
    assert run(["top", "--once", "--seconds", "0.1", str(tmp_path / "metrics.txt")]) == 0
    assert "engine" in capsys.readouterr().out


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--once"], 130)])
def test_an_interrupt_ends_the_watching_quietly(
    options: list[str], code: int, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    (tmp_path / "metrics.txt").write_text(healthy(1))
    monkeypatch.setattr("ingot.cli.runtime.top.time.sleep", interrupted)
    assert run(["top", str(tmp_path / "metrics.txt"), *options]) == code
    assert capsys.readouterr().err.strip() == ("" if code == 0 else "error: interrupted")


@contextmanager
def answering(content: bytes | None) -> Iterator[str]:
    """A server whose every answer has this content; None: it does not speak HTTP."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if content is None:
                self.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def test_the_price_of_a_server_is_counted_and_becomes_a_cost_of_tokens() -> None:
    def cost_of(scrapes: list[str], seconds: float, price: float | None = None) -> Any:
        before, after = (Scrape.parse(text, "a file") for text in scrapes)
        window = ScrapeWindow(before, after, seconds)
        return facts_of(window, price)["cost_per_1000_tokens"]

    with running(text_engine(), ServerOptions(price_per_hour=3600.0)) as server, server.client() as client:
        texts, times = [], []
        for _ in range(2):
            times.append(time.monotonic())
            texts.append(httpx2.get(f"{server.url}/metrics").text)
            times.append(time.monotonic())
            client.completions.create(model="fake", prompt="def read", max_tokens=7, extra_body={"ignore_eos": True})
    cost = cost_of(texts, 10.0)  # one unit a second, for the seven tokens of the first request
    assert 1000 * (times[2] - times[1]) / 7 <= cost <= 1000 * (times[3] - times[0]) / 7
    assert cost_of(texts, 10.0, price=7.2) == pytest.approx(1000 * 7.2 * 10 / 3600 / 7)
    assert cost_of([text.replace("ingot_cost", "ingot_other") for text in texts], 10.0) is None
