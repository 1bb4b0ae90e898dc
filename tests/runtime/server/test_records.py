"""What is recorded of a request: numbers and names, with times that fit together, and no texts."""

import io
import json
import time
from typing import Any

import pytest

from ingot.runtime.server.records import Record, RequestLog
from tests.runtime.engines import text_engine
from tests.runtime.server.servers import Running, running

SECRET = "def read_secret"


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
    written = io.StringIO()
    started = time.time()
    with running(text_engine()) as server:
        server.service.observers.append(RequestLog(written))
        serve_one(server, stream=stream)
        server.until(lambda: written.getvalue().endswith("\n"))
    (line,) = written.getvalue().splitlines()
    found = json.loads(line)
    assert (found["request_id"], found["operation"], found["model"], found["key"]) == (
        "mine", "text_completion", "fake", "",
    )  # fmt: skip
    assert (found["output_tokens"], found["finish_reasons"], found["preemptions"]) == (10, ["length", "length"], 0)
    assert 0 <= found["queue_seconds"] <= found["ttft_seconds"] <= found["e2e_seconds"] < time.time() - started
    assert "read_secret" not in line


def test_spans_have_the_request_and_its_phases_under_the_parent_of_the_client() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="spans need the extra trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from ingot.runtime.server.tracing import Tracing

    exporter, records = InMemorySpanExporter(), list[Record]()
    tracing = Tracing("1.2.3", SimpleSpanProcessor(exporter))
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
