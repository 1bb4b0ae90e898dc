"""The replay sends by timestamps, counts every outcome and ends at none, and reports tokens and times."""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner, Result
from examples.load.outcomes import Outcome, report_of, table_of
from examples.load.replay import _wait_seconds, main

from tests.data_paths import ROOT, shared_data
from tests.each_case import each_case
from tests.runtime.engines import text_engine
from tests.runtime.server.servers import running

Answer = tuple[int, dict[str, str], bytes]
_END = b"data: [DONE]\n\n"


def event(**document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


WHOLE = event(choices=[{"text": "a"}]) + event(choices=[{"text": "b"}]) + _END


class _Scripted:
    """A server that gives its answers in turn, the last one again, and keeps what it was sent."""

    def __init__(self, answers: list[Answer]) -> None:
        self.seen: list[tuple[str, str | None, dict[str, Any]]] = []
        self._answers = answers
        self.url = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> Answer:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        self.seen.append((handler.path, handler.headers["authorization"], body))
        return self._answers[min(len(self.seen), len(self._answers)) - 1]


@contextmanager
def scripted(*answers: Answer) -> Iterator[_Scripted]:
    script = _Scripted(list(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, headers, body = script.answer(self)
            self.send_response(status)
            for name, value in {"content-length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    script.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def trace_of(folder: Path, *bodies: dict[str, Any]) -> Path:
    path = folder / "log.jsonl"
    path.write_text(
        "".join(json.dumps({"timestamp": 0.01 * at, "body": each}) + "\n" for at, each in enumerate(bodies))
    )
    return path


def replayed(trace: Path, url: str, *options: str) -> tuple[Result, dict[str, Any]]:
    """The result of the command, and its report."""
    report = trace.with_name("report.json")
    command = [str(trace), "--url", url, "--json", str(report), *options]
    done = CliRunner().invoke(main, command, env={"OPENAI_API_KEY": "", "NO_PROXY": "*"}, catch_exceptions=False)
    return done, json.loads(report.read_text()) if report.is_file() else {}


_KNOWN = ("--model", "m", "--context", "100")  # /v1/models is not read


def test_a_mooncake_trace_shares_prefixes_on_a_live_server(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 0, "input_length": 1024, "output_length": 96, "hash_ids": [0, 1]}]
    rows += [
        {"timestamp": 300 + at, "input_length": 1024, "output_length": 96, "hash_ids": [0, 2 + at]} for at in range(3)
    ]
    trace.write_text("".join(json.dumps(each) + "\n" for each in rows))
    lines = tmp_path / "lines.jsonl"
    with running(text_engine()) as server:
        done, report = replayed(trace, f"{server.url}/v1/", "--scale", "0.03125", "--lines", str(lines))
        server.require_nothing_left()
    assert done.exit_code == 0, done.output
    assert report["requests"] == {"sent": 4, "ok": 4, "refused": 0, "failed": 0, "connection_error": 0, "unfinished": 0}
    assert (report["prompt_tokens"], report["output_tokens"], report["cached_tokens"]) == (4 * 32, 4 * 3, 3 * 16)
    assert report["repeated"] == [48, 128]
    assert "cached: 37.5 % of the prompts' tokens; the trace repeats 37.5 %" in done.output
    for name in ("ttft_seconds", "e2e_seconds", "late_seconds"):
        assert 0 <= report[name]["p50"] <= report[name]["p90"] <= report[name]["p99"]
    due = [json.loads(line)["due_seconds"] for line in lines.read_text().splitlines()]
    assert due == [0.0, 0.3, 0.301, 0.302]


def test_both_public_traces_are_replayed_in_the_context_of_the_model(tmp_path: Path) -> None:
    options = ("--scale", "0.0625", "--limit", "12", "--speed", "20")
    with running(text_engine()) as server:
        for name in ("conversation_trace.jsonl", "azure2023-code.csv"):
            trace = tmp_path / name
            trace.symlink_to(shared_data(f"traces/{name}"))
            done, report = replayed(trace, server.url, *options)
            assert done.exit_code == 0, done.output
            assert report["requests"]["ok"] == 12
    assert report["cut_requests"] == 0


def test_a_log_is_sent_as_it_is_but_streamed(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "model": "own", "stream": False, "top_p": 0.5}
    with scripted((200, {}, WHOLE)) as server:
        done, report = replayed(trace_of(tmp_path, chat), server.url, "--api-key", "secret", *_KNOWN)
    assert done.exit_code == 0, done.output
    ((path, key, body),) = server.seen
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert body == chat | {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
    assert report["output_tokens"] == 2  # the server has no usage
    assert "secret" not in done.output + json.dumps(report)


def test_a_refused_request_returns_when_retry_is_given(tmp_path: Path) -> None:
    refusal = (429, {"retry-after-ms": "5"}, b'{"error": {"code": "overloaded", "message": "later"}}')
    trace = trace_of(tmp_path, {"prompt": "x"})
    with scripted(refusal, refusal, (200, {}, WHOLE)) as server:
        done, report = replayed(trace, server.url, "--retry", "2", *_KNOWN)
    assert (done.exit_code, report["requests"]["ok"], report["retries"], report["reasons"]) == (0, 1, 2, {})
    with scripted(refusal) as server:
        done, report = replayed(trace, server.url, *_KNOWN)
    assert (done.exit_code, report["requests"]["refused"], report["retries"]) == (0, 1, 0)
    assert report["reasons"] == {"429 overloaded": {"count": 1, "message": "later"}}


@each_case(
    ("answer", "reason", "message"),
    [
        ((400, {}, b'{"error": {"code": "invalid", "message": "no"}}'), "400 invalid", "no"),
        ((500, {}, b"<html>"), "500", "<html>"),
        ((200, {}, event(choices=[{"text": "a"}])), "stream without an end", ""),
        ((200, {}, event(error={"message": "lost"}) + _END), "error within the stream", "{'message': 'lost'}"),
        ((200, {}, b"data: {\n\n" + _END), "event that is not of OpenAI's form", ""),
        ((200, {}, event(choices=[7]) + _END), "event that is not of OpenAI's form", ""),
    ],
)
def test_a_failed_request_is_counted_with_its_reason(tmp_path: Path, answer: Answer, reason: str, message: str) -> None:
    with scripted(answer, (200, {}, WHOLE)) as server:
        done, report = replayed(trace_of(tmp_path, {"prompt": "x"}, {"prompt": "y"}), server.url, *_KNOWN)
    assert done.exit_code == 1
    assert (report["requests"]["ok"], report["requests"]["failed"]) == (1, 1)
    assert report["reasons"][reason]["count"] == 1
    assert message in report["reasons"][reason]["message"]
    assert f"1 x {reason}" in done.output


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def test_refused_connections_are_counted(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, {"prompt": "x"}, {"prompt": "y"})
    done, report = replayed(trace, f"http://127.0.0.1:{free_port()}", *_KNOWN)
    assert done.exit_code == 1
    assert (report["requests"]["sent"], report["requests"]["connection_error"]) == (2, 2)
    assert report["reasons"]["ConnectError"]["count"] == 2


def first_bytes(listening: socket.socket, found: list[bytes]) -> None:
    connection, _ = listening.accept()
    with connection:
        found.append(connection.recv(2))


def test_https_is_spoken_to_a_url_of_https(tmp_path: Path) -> None:
    found: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=first_bytes, args=(listening, found))
        thread.start()
        url = f"https://127.0.0.1:{listening.getsockname()[1]}"
        report = replayed(trace_of(tmp_path, {"prompt": "x"}), url, *_KNOWN)[1]
        thread.join()
    assert found == [b"\x16\x03"]  # the handshake of TLS
    assert report["requests"]["connection_error"] == 1


def test_a_request_without_an_answer_is_counted_after_its_timeout(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:  # connects, and never answers
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        done, report = replayed(trace_of(tmp_path, {"prompt": "x"}), url, "--timeout", "0.2", *_KNOWN)
    assert done.exit_code == 1
    assert [*report["reasons"]] == ["no end after 0.2 s"]


def test_an_interrupted_replay_reports_what_was_done(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, {"prompt": "x"}, *[{"prompt": "y"}] * 2)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        command = [sys.executable, "-m", "examples.load.replay", str(trace), "--url", url, "--speed", "0.001", *_KNOWN]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
            connection, _ = listening.accept()
            with connection:
                child.send_signal(signal.SIGINT)
                output = child.communicate(timeout=60)[0]
    assert child.returncode == 0
    assert "1 requests in " in output
    assert "1 unfinished" in output


def test_duration_leaves_out_what_is_due_later(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, *[{"prompt": "x"}] * 10)
    with scripted((200, {}, WHOLE)) as server:
        report = replayed(trace, server.url, "--duration", "0.011", "--speed", "2", *_KNOWN)[1]
    assert report["requests"]["sent"] == 3


@each_case(
    ("options", "message"),
    [
        (("--scale", "0.5", *_KNOWN), "the bodies of a log are sent as they are"),
        (("--url", "ftp://host"), "'ftp://host' must begin with http://HOST or https://HOST"),
        ((), "/v1/models cannot be read: "),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    done = replayed(trace_of(tmp_path, {"prompt": "x"}), f"http://127.0.0.1:{free_port()}", *options)[0]
    assert done.exit_code in (1, 2)
    assert message in " ".join(done.output.split())


def test_a_wrong_line_ends_the_command_with_one_error(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text("hello\n")
    done = replayed(trace, "http://127.0.0.1:1")[0]
    assert done.exit_code == 1
    assert done.output.startswith(f"Error: {trace}:1: not a known trace: 'hello'")


def test_a_model_that_is_not_served_is_refused(tmp_path: Path) -> None:
    with running(text_engine()) as server:
        done = replayed(trace_of(tmp_path, {"prompt": "x"}), server.url, "--model", "other")[0]
    assert "has no model 'other'; it has: fake" in done.output


@each_case(
    ("headers", "within"),
    [
        ({"retry-after-ms": "250", "Retry-After": "9"}, (0.25, 0.25)),
        ({"Retry-After": "2"}, (2, 2)),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, (0, 0)),
        ({"Retry-After": "Wed, 21 Oct 2099 07:28:00 GMT"}, (1e6, 1e11)),
        ({"Retry-After": "soon"}, (1, 1)),
        ({}, (1, 1)),
    ],
)
def test_the_time_to_wait_is_that_of_the_refusal(headers: dict[str, str], within: tuple[float, float]) -> None:
    assert within[0] <= _wait_seconds(httpx2.Headers(headers)) <= within[1]


def test_a_late_sender_is_reported() -> None:
    late = [Outcome(0.0, 0.5, "ok", first_seconds=0.1, end_seconds=0.3, output_tokens=3, gap_seconds=[0.2])]
    report = report_of(late, 2.0)
    assert report["tpot_seconds"]["p50"] == pytest.approx(0.1)
    assert report["output_tokens_per_second"] == 1.5
    assert "The sender was late" in table_of(report)
    assert "The sender was late" not in table_of(report_of([Outcome(0.0, 0.001, "ok")], 2.0))


def test_a_replay_of_nothing_has_a_report() -> None:
    assert "0 requests in 0.0 s" in table_of(report_of([], 0.0))
