"""Spans of OpenTelemetry: a span for each request, served or not, and in it queue, prefill and decode of each prompt.

Names and attributes are those of the semantic conventions for generative AI; texts are not recorded. The parent is that
of the request's `traceparent`. The environment says where spans go (OTEL_EXPORTER_OTLP_ENDPOINT).
Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.util.types import AttributeValue

from ingot.runtime.asking.outputs import RequestMetrics
from ingot.runtime.server.watch.request_log import Record

_NANOSECONDS = 1e9


class Tracing:
    """An observer of requests. A thread sends the spans to an OTLP endpoint, unless another processor is given."""

    def __init__(self, version: str, processor: SpanProcessor | None = None) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "ingot", "service.version": version}))
        self._provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("ingot", version)

    def __call__(self, record: Record) -> None:
        """Make the spans of a request that has ended."""
        span = self._tracer.start_span(
            f"{record.operation} {record.model}" if record.model else record.operation,
            context=propagate.extract(record.headers),
            kind=trace.SpanKind.SERVER,
            start_time=int(record.arrived_unix * _NANOSECONDS),
            attributes=_attributes(record),
        )
        if record.error:
            span.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(span)
        for result in record.results:
            for name, start, end in _phases(result.metrics):
                phase = self._tracer.start_span(name, context=inside, start_time=_nanoseconds(record, start))
                phase.end(_nanoseconds(record, end))
        span.end(int(record.finished_unix * _NANOSECONDS))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _attributes(record: Record) -> dict[str, AttributeValue]:
    """Those of the conventions, and Ingot's own; what is not known is left out."""
    known = {
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "ingot.cached_tokens": record.cached_tokens,
        "error.type": record.error,
    }
    return {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": "ingot",
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.finish_reasons": [choice.finish_reason for choice in record.choices],
        "gen_ai.usage.output_tokens": record.output_tokens,
        "http.response.status_code": record.status,
        "ingot.preemptions": record.num_preemptions,
        **{name: value for name, value in known.items() if value is not None},
    }


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
