"""A run for OpenTelemetry: a trace of each round, metrics and notes, sent by OTLP over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from fcil_protocol.process.round_spans import (
    DEFAULT,
    PACKAGE,
    SEND_S,
    STANDARD,
    SpanExporter,
    TraceSpan,
    check_taken,
    endpoint_of,
    is_address,
    nanoseconds,
    resource_of,
    round_span_id,
    trace_id,
)
from fcil_server.reports.sinks.contract import Options, RunFacts, RunNote

MOST_SPANS = 2000  # of a request


class OtlpOptions(Options):
    """The table ``[sinks] otlp``."""

    endpoint: str = Field(
        "",
        description="address of a collector, such as http://collector.example:4318; empty: "
        f"{STANDARD}, or {DEFAULT}",
    )
    metrics: bool = Field(
        True, description="send metrics; false for a receiver of traces alone, such as Jaeger"
    )
    logs: bool = Field(
        False,
        description="send the notes for the operator as log records; their sentences name clients "
        "and classes",
    )
    service: str = Field("fcil-server", min_length=1, description="service.name of all spans")

    @field_validator("endpoint")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        if value and not is_address(value):
            raise ValueError(
                "expected an address that begins with http:// or https:// and names a host"
            )
        return value.rstrip("/")


class OtlpWriter:
    """Sends spans and metrics when it is flushed; nothing happens in between."""

    def __init__(self, run: RunFacts, options: OtlpOptions) -> None:
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        base = endpoint_of(options.endpoint)
        self._metrics: Any = None
        if options.metrics:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

            self._metrics = OTLPMetricExporter(f"{base}/v1/metrics", timeout=SEND_S)
        self._resource = resource_of(
            {"service.name": options.service, "fcil.run": run.run, "fcil.method": run.method}
        )
        self._traces = SpanExporter(base, self._resource)
        self._scope: Any = InstrumentationScope("fcil", version("fcil"))
        self._began = run.began
        self.wants_notes = options.logs
        self._logs: Any = None
        self._records: list[Any] = []
        if options.logs:
            from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter

            self._logs = OTLPLogExporter(f"{base}/v1/logs", timeout=SEND_S)
        self._spans: list[TraceSpan] = []
        self._points: dict[str, list[Any]] = {}

    def spans(self, spans: Sequence[TraceSpan]) -> None:
        """Keep the spans of a round until they are flushed."""
        self._spans += spans

    def notes(self, notes: Sequence[RunNote]) -> None:
        """Keep notes until they are flushed."""
        self._records += map(self._record, notes)

    def _record(self, made: RunNote) -> Any:
        from opentelemetry._logs import LogRecord, SeverityNumber
        from opentelemetry.sdk._logs import ReadableLogRecord
        from opentelemetry.trace import TraceFlags

        note, place = made.event, dict[str, Any]()
        if made.round is not None:
            trace = trace_id(made.round)
            place = {
                "trace_id": int.from_bytes(trace),
                "span_id": int.from_bytes(round_span_id(trace)),
                "trace_flags": TraceFlags(1),
            }
        severity = {"info": SeverityNumber.INFO, "warning": SeverityNumber.WARN}
        at = nanoseconds(note.at)
        record = LogRecord(
            timestamp=at,
            observed_timestamp=at,
            severity_text=note.level,
            severity_number=severity.get(note.level, SeverityNumber.ERROR),
            body=note.text,
            attributes={"fcil.code": note.code, "fcil.note": note.id},
            **place,
        )
        return ReadableLogRecord(record, self._resource, self._scope)

    def scalars(self, values: Mapping[str, float], *, step: int, at: float) -> None:
        """Keep metrics until they are flushed."""
        from opentelemetry.sdk.metrics.export import NumberDataPoint

        if self._metrics is None:
            return
        began, now = nanoseconds(self._began), nanoseconds(at)
        for name, value in values.items():
            point = NumberDataPoint({"fcil.step": step}, began, now, value)
            self._points.setdefault(f"fcil.{name.replace('/', '.')}", []).append(point)

    def flush(self) -> None:
        """Send the kept spans and metrics.

        Raises:
            Unreachable: the collector did not take it; it is kept.
        """
        while self._spans:
            sent = self._spans[:MOST_SPANS]
            self._traces.send(sent)
            del self._spans[: len(sent)]
        while self._records:
            records = self._records[:MOST_SPANS]
            check_taken(self._logs.export(records), "log records")
            del self._records[: len(records)]
        if self._points:
            check_taken(self._metrics.export(self._data()), "metrics")
            self._points.clear()

    def _data(self) -> Any:
        from opentelemetry.sdk.metrics.export import (
            Gauge,
            Metric,
            MetricsData,
            ResourceMetrics,
            ScopeMetrics,
        )

        metrics = [Metric(name, "", "", Gauge(points)) for name, points in self._points.items()]
        scope = ScopeMetrics(self._scope, metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def finish(self, files: Sequence[Path]) -> None:
        """Do nothing: traces have no end."""

    def close(self) -> None:
        """Close the connections."""
        self._traces.close()
        for exporter in (self._metrics, self._logs):
            if exporter is not None:
                exporter.shutdown()


class Otlp:
    """The sink ``otlp``."""

    name = "otlp"
    packages = (PACKAGE,)
    extra = "otel"
    Options = OtlpOptions

    def open(self, run: RunFacts, options: OtlpOptions) -> OtlpWriter:
        """Open the exporters."""
        return OtlpWriter(run, options)


SINK = Otlp()
