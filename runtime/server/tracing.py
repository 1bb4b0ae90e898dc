"""Spans of OpenTelemetry for served requests: the request, and in it queue, prefill and decode of each prompt.

Names and attributes are those of the semantic conventions for generative AI; texts are not recorded. The parent is that
of the request's `traceparent`. The environment says where spans go (OTEL_EXPORTER_OTLP_ENDPOINT).
Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from ingot.runtime.outputs import RequestMetrics
from ingot.runtime.server.records import Record

_NANOSECONDS = 1e9


class Tracing:
    """An observer of requests. A thread sends the spans to an OTLP endpoint, unless another processor is given."""

    def __init__(self, version: str, processor: SpanProcessor | None = None) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "ingot", "service.version": version}))
        self._provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("ingot", version)

    def __call__(self, record: Record) -> None:
        """Make the spans of a request that has ended."""
        facts, first = record.as_json(), record.results[0].metrics
        span = self._tracer.start_span(
            f"{record.operation} {record.model}",
            context=propagate.extract(record.headers),
            kind=trace.SpanKind.SERVER,
            start_time=_nanoseconds(record, first.arrival_seconds),
            attributes={
                "gen_ai.operation.name": record.operation,
                "gen_ai.provider.name": "ingot",
                "gen_ai.request.model": record.model,
                "gen_ai.response.id": record.request_id,
                "gen_ai.response.finish_reasons": [str(reason) for reason in _list(facts["finish_reasons"])],
                "gen_ai.usage.input_tokens": int(str(facts["prompt_tokens"])),
                "gen_ai.usage.output_tokens": int(str(facts["output_tokens"])),
                "ingot.cached_tokens": int(str(facts["cached_tokens"])),
                "ingot.preemptions": int(str(facts["preemptions"])),
            },
        )
        inside = trace.set_span_in_context(span)
        ends = []
        for result in record.results:
            for name, start, end in _phases(result.metrics):
                phase = self._tracer.start_span(name, context=inside, start_time=_nanoseconds(record, start))
                phase.end(_nanoseconds(record, end))
            ends += [choice.metrics.finish_seconds for choice in result.choices]
        span.end(_nanoseconds(record, max(ends)))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _phases(times: RequestMetrics) -> list[tuple[str, float, float]]:
    """Names, starts and ends of what happened; a request that ended early has fewer."""
    moments = [times.arrival_seconds, times.first_scheduled_seconds, times.first_token_seconds, times.finish_seconds]
    found = []
    for name, start, end in zip(("queue", "prefill", "decode"), moments, moments[1:], strict=False):
        if start is None:
            break
        found.append((name, start, times.finish_seconds if end is None else end))
    return found


def _nanoseconds(record: Record, seconds: float) -> int:
    return int(record.unix(seconds) * _NANOSECONDS)


def _list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value
