"""What is recorded of a request: numbers and names, with times that fit together, and no texts."""

import errno
import io
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from typing import Any

import httpx2
import pytest

from ingot.runtime.server.http.access import ApiKeys
from ingot.runtime.server.http.rate_limits import Holder, KeyLimits
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.server.watch.request_log import Record, RequestLog
from tests.runtime.engines import text_engine
from tests.runtime.server.models.test_admission import gated_engine
from tests.runtime.server.servers import SECONDS, Running, running

SECRET = "def read_secret"


class Log(io.RawIOBase):
    """A file that takes a few bytes at a time, on a disk that may be full."""

    def __init__(self) -> None:
        self.text = ""
        self.is_full = False

    def write(self, data: Any, /) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.text += data[:100].decode()
        return len(data[:100])


def serve_one(server: Running, *, stream: bool) -> None:
    with server.client() as client:
        answer = client.completions.create(
            model="fake",
            prompt=SECRET,
            max_tokens=5,
            n=2,
            stream=stream,
            temperature=0.5,
            extra_body={"ignore_eos": True},
            extra_headers={
                "x-request-id": "mine",
                "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            },
        )
        if stream:
            assert list(answer)


@pytest.mark.parametrize("stream", [False, True])
def test_a_served_request_is_a_line_of_json_without_texts(stream: bool) -> None:
    written = Log()
    started = time.time()
    with running(text_engine()) as server:
        server.service.observers.append(RequestLog(written))
        serve_one(server, stream=stream)
        server.until(lambda: written.text.endswith("\n"))
    (line,) = written.text.splitlines()
    found = json.loads(line)
    assert (found["request_id"], found["operation"], found["model"], found["key"]) == (
        "mine", "text_completion", "fake", "",
    )  # fmt: skip
    assert (found["output_tokens"], found["finish_reasons"], found["preemptions"]) == (10, ["length", "length"], 0)
    assert (found["status"], found["error"]) == (200, None)
    assert 0 <= found["queue_seconds"] <= found["ttft_seconds"] <= found["e2e_seconds"] < time.time() - started
    assert "read_secret" not in line


def post(server: Running, key: str = "none", **request: Any) -> httpx2.Response:
    headers = {"x-request-id": "mine", "Authorization": f"Bearer {key}"}
    body = {"prompt": [1, 2, 3], "ignore_eos": True, **request}
    return httpx2.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=SECONDS)


def facts(found: Record) -> tuple[object, ...]:
    return found.model, found.status, found.error, found.prompt_tokens, found.output_tokens, len(found.results)


def test_a_refused_request_is_recorded_with_its_status_and_code() -> None:
    holder = Holder("group", KeyLimits(tokens_per_minute=3))
    records: list[Record] = []
    with running(text_engine(), keys=ApiKeys({"some-key-1": holder})) as server:
        server.service.observers.append(records.append)
        for request in ({"max_tokens": 0}, {"prompt": 5}, {"model": "other"}, {"prompt": [1] * 600}, {}, {}):
            post(server, "some-key-1", max_tokens=request.pop("max_tokens", 2), **request)
        server.until(lambda: len(records) == 6)
    assert [facts(each) for each in records] == [
        ("fake", 400, "invalid_value", None, 0, 0),
        (None, 400, "invalid_type", None, 0, 0),
        (None, 404, "model_not_found", None, 0, 0),
        ("fake", 400, "context_length_exceeded", None, 0, 0),
        ("fake", 200, None, 3, 2, 1),
        (None, 429, "rate_limit_exceeded", None, 0, 0),
    ]
    assert {(each.group, each.request_id, each.operation) for each in records} == {("group", "mine", "text_completion")}
    line = json.loads(json.dumps(records[0].as_json()))
    assert (line["status"], line["error"], line["finish_reasons"], line["ttft_seconds"]) == (
        400, "invalid_value", [], None,
    )  # fmt: skip
    assert line["e2e_seconds"] >= 0


def test_a_log_that_cannot_be_written_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    written = Log()
    log = RequestLog(written)
    records: list[Record] = []
    with running(text_engine()) as server:
        server.service.observers += [log, records.append]
        for number, is_full in enumerate((True, True, False, True), 1):
            written.is_full = is_full
            assert post(server, max_tokens=0 if number == 3 else 2, echo=number == 3).status_code == 200
            server.until(lambda number=number: len(records) == number and not log.num_waiting)
    (line,) = map(json.loads, written.text.splitlines())
    assert (line["status"], line["output_tokens"], line["prompt_tokens"]) == (200, 0, 3), "an echo without an output"
    assert caplog.text.count("requests cannot be logged: [Errno 28] No space left on device") == 2
    assert "Traceback" not in caplog.text


def test_a_log_that_is_not_read_stops_no_request(caplog: pytest.LogCaptureFixture) -> None:
    record = Record(
        request_id="a" * 1000, operation="chat", model="m", group="", headers={}, status=200, error=None, results=(),
        prompt_tokens=1, output_tokens=1, started_unix=0.0, ended_unix=1.0, ended_seconds=1.0,
    )  # fmt: skip
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as read, ThreadPoolExecutor(1) as threads:
        with FileIO(writer, "w") as written:
            log = RequestLog(written)
            # The pipe holds fewer than 200 of them.
            for _ in range(10_200):
                log(record)
            assert caplog.text.count("requests cannot be logged: 10000 lines wait") == 1
            lines = threads.submit(read.readlines)
            log.close()
            assert log.num_waiting == 1, "no line but the one that ends it"
        found = lines.result()
    assert 10_000 <= len(found) < 10_200
    assert {json.loads(line)["request_id"] for line in found} == {record.request_id}


def test_a_request_with_a_wrong_key_is_recorded_under_none(caplog: pytest.LogCaptureFixture) -> None:
    records: list[Record] = []
    with running(text_engine(), keys=ApiKeys({"some-key-1": Holder("group", KeyLimits())})) as server:
        server.service.observers.append(records.append)
        answer = post(server, "wrong-key-1")
        assert (answer.status_code, answer.headers["x-request-id"]) == (401, "mine")
        server.until(lambda: len(records) == 1)
    assert facts(records[0]) == (None, 401, "invalid_api_key", None, 0, 0)
    assert (records[0].group, records[0].request_id) == ("", "mine")
    assert "wrong-key-1" not in caplog.text + json.dumps(records[0].as_json())


def test_a_stream_that_fails_and_one_whose_client_leaves_are_recorded() -> None:
    records: list[Record] = []
    engine, executor = gated_engine()
    with running(engine, ServerOptions(stream_seconds=0)) as server:
        server.service.observers.append(records.append)
        request = {"prompt": [1, 2], "max_tokens": 450, "ignore_eos": True, "stream": True}
        for fails in (False, True):
            with httpx2.stream("POST", f"{server.url}/v1/completions", json=request, timeout=SECONDS) as answer:
                events = answer.iter_lines()
                next(events)
                executor.gate.clear()
                executor.fails = fails
                if fails:
                    executor.gate.set()
                    list(events)
            executor.gate.set()
            server.until(lambda: len(records) == 1 + fails)  # noqa: B023 (it is called now)
    left, failed = records
    for record, error in ((left, "client_closed_request"), (failed, "engine_unavailable")):
        assert facts(record)[:4] == ("fake", 200, error, 2)
        assert 0 < record.output_tokens < 450


def test_an_observer_that_fails_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    def fail(record: Record) -> None:
        raise OSError("no space left")

    with running(text_engine()) as server:
        server.service.observers.append(fail)
        assert post(server, max_tokens=2).status_code == 200
        server.until(lambda: "no space left" in caplog.text)


def test_spans_of_refused_requests_have_their_error() -> None:
    tracing, exporter = tracing_in_memory()
    with running(text_engine()) as server:
        server.service.observers.append(tracing)
        post(server, prompt=5)
        server.until(exporter.get_finished_spans)
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.status.is_ok) == ("text_completion", False)
    assert span.attributes["error.type"] == "invalid_type"
    assert span.attributes["http.response.status_code"] == 400
    assert "gen_ai.request.model" not in span.attributes
    assert span.start_time <= span.end_time
    tracing.close()


def tracing_in_memory() -> tuple[Any, Any]:
    pytest.importorskip("opentelemetry.sdk", reason="spans need the extra trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from ingot.runtime.server.watch.tracing import Tracing

    exporter = InMemorySpanExporter()
    return Tracing("1.2.3", SimpleSpanProcessor(exporter)), exporter


def test_spans_that_wait_are_sent_at_the_end() -> None:
    _, exporter = tracing_in_memory()
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from ingot.runtime.server.watch.tracing import Tracing

    tracing = Tracing("1.2.3", BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000))
    with running(text_engine()) as server:
        records: list[Record] = []
        server.service.observers += [tracing, records.append]
        post(server, prompt=5)
        server.until(lambda: records)
    assert exporter.get_finished_spans() == ()
    tracing.close()
    assert [span.name for span in exporter.get_finished_spans()] == ["text_completion"]


def test_spans_have_the_request_and_its_phases_under_the_parent_of_the_client() -> None:
    tracing, exporter = tracing_in_memory()
    records: list[Record] = []
    with running(text_engine()) as server:
        server.service.observers += [tracing, records.append]
        serve_one(server, stream=False)
        server.until(lambda: records)
    spans: dict[str, Any] = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"text_completion fake", "queue", "prefill", "decode"}
    whole = spans["text_completion fake"]
    assert format(whole.parent.span_id, "016x") == "b7ad6b7169203331"
    assert whole.attributes["gen_ai.usage.output_tokens"] == 10
    assert whole.attributes["gen_ai.response.id"] == "mine"
    assert whole.start_time == spans["queue"].start_time
    assert spans["queue"].end_time == spans["prefill"].start_time
    assert spans["prefill"].end_time == spans["decode"].start_time
    assert spans["decode"].end_time <= whole.end_time
    assert all(span.parent.span_id == whole.context.span_id for name, span in spans.items() if span is not whole)
    assert not any("read_secret" in str(span.attributes) for span in spans.values())
    tracing.close()
