"""A run for OpenTelemetry: a trace of each round, and metrics, sent by OTLP over HTTP."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from fcil_protocol.errors import Unreachable
from fcil_server.reports.sinks.contract import Options, RunFacts
from fcil_server.reports.sinks.spans import TraceSpan

STANDARD = "OTEL_EXPORTER_OTLP_ENDPOINT"
DEFAULT = "http://localhost:4318"
SEND_S = 10.0  # of a request with its repetitions; after a failure we retry ourselves
MOST_SPANS = 2000  # of a request


class OtlpOptions(Options):
    """The table ``[sinks] otlp``."""

    endpoint: str = Field(
        "",
        description="address of a collector, such as http://collector.example:4318; empty: "
        f"{STANDARD}, or {DEFAULT}",
    )
    service: str = Field("fcil-server", min_length=1, description="service.name of all spans")

    @field_validator("endpoint")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("expected an address that begins with http:// or https://")
        return value.rstrip("/")


class OtlpWriter:
    """Sends spans and metrics when it is flushed; nothing happens in between."""

    def __init__(self, run: RunFacts, options: OtlpOptions) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        base = options.endpoint or (os.environ.get(STANDARD) or DEFAULT).rstrip("/")
        self._traces: Any = OTLPSpanExporter(f"{base}/v1/traces", timeout=SEND_S)
        self._metrics: Any = OTLPMetricExporter(f"{base}/v1/metrics", timeout=SEND_S)
        self._resource: Any = Resource(
            {
                "service.name": options.service,
                "service.version": version("fcil"),
                "fcil.run": run.run,
                "fcil.method": run.method,
            }
        )
        self._scope: Any = InstrumentationScope("fcil", version("fcil"))
        self._began = run.began
        self._spans: list[Any] = []
        self._points: dict[str, list[Any]] = {}

    def spans(self, spans: Sequence[TraceSpan]) -> None:
        """Keep the spans of a round until they are flushed."""
        self._spans += map(self._span, spans)

    def _span(self, span: TraceSpan) -> Any:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, TraceFlags
        from opentelemetry.trace.status import Status, StatusCode

        def context(own: bytes) -> SpanContext:
            trace, number = int.from_bytes(span.trace), int.from_bytes(own)
            return SpanContext(trace, number, is_remote=False, trace_flags=TraceFlags(1))

        return ReadableSpan(
            span.name,
            context=context(span.id),
            parent=None if span.parent is None else context(span.parent),
            resource=self._resource,
            attributes=dict(span.attributes),
            status=Status(StatusCode.ERROR, span.fault) if span.fault else Status(StatusCode.UNSET),
            start_time=_nanoseconds(span.began),
            end_time=_nanoseconds(span.ended),
            instrumentation_scope=self._scope,
        )

    def scalars(self, values: Mapping[str, float], *, step: int, at: float) -> None:
        """Keep metrics until they are flushed."""
        from opentelemetry.sdk.metrics.export import NumberDataPoint

        began, now = _nanoseconds(self._began), _nanoseconds(at)
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
            _check(self._traces.export(sent), "spans")
            del self._spans[: len(sent)]
        if self._points:
            _check(self._metrics.export(self._data()), "metrics")
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
        self._traces.shutdown()
        self._metrics.shutdown()


def _check(result: Any, what: str) -> None:
    if result.name != "SUCCESS":
        raise Unreachable(
            f"the OpenTelemetry collector did not take the {what}.",
            action="Check sinks.otlp.endpoint, and the collector's log.",
        )


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class Otlp:
    """The sink ``otlp``."""

    name = "otlp"
    packages = ("opentelemetry.exporter.otlp.proto.http",)
    extra = "otel"
    Options = OtlpOptions

    def open(self, run: RunFacts, options: OtlpOptions) -> OtlpWriter:
        """Open the exporters."""
        return OtlpWriter(run, options)


SINK = Otlp()
