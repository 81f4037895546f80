"""Spans of a round's trace, and their sending by OTLP over HTTP.

Ids follow from the round's key (docs/decisions/0076): the server and each client that sends spans
derive the same trace, and no message carries it. Spans hold ids, counts, sizes and codes, and no
name of a client or a class.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from fcil_protocol.errors import Unreachable
from fcil_protocol.ids import RoundKey

Value = str | int | float | bool
PACKAGE = "opentelemetry.exporter.otlp.proto.http"  # of the extra `otel`
STANDARD = "OTEL_EXPORTER_OTLP_ENDPOINT"
DEFAULT = "http://localhost:4318"
SEND_S = 10.0  # of a request with its repetitions


@dataclass(frozen=True)
class TraceSpan:
    """One piece of work.

    Attributes:
        trace: id of the round's trace, 16 bytes.
        id: 8 bytes, unique in the trace.
        parent: the span that it is a part of; None: the round itself.
        began, ended: in seconds since 1970.
        fault: why it failed; empty: it did not.
    """

    trace: bytes
    id: bytes
    parent: bytes | None
    name: str
    began: float
    ended: float
    attributes: Mapping[str, Value]
    fault: str = ""


def trace_id(key: RoundKey) -> bytes:
    """Return the id of a round's trace, 16 bytes."""
    return _digest(f"fcil/trace/1 {key.run} {key.task} {key.kind} {key.round}", 16)


def span_id(trace: bytes, name: str) -> bytes:
    """Return the id of a span by its name, 8 bytes."""
    return _digest(f"{trace.hex()} {name}", 8)


def client_span_id(trace: bytes, client: str) -> bytes:
    """Return the id of a client's span in a round: the parent of what the client itself sends."""
    return span_id(trace, f"client {client}")


def round_span_id(trace: bytes) -> bytes:
    """Return the id of the span of a whole round."""
    return span_id(trace, "round")


def is_address(text: str) -> bool:
    """Return True if a text can be a collector's address: a scheme and a host, at least."""
    if not text.startswith(("http://", "https://")) or not text.isprintable() or " " in text:
        return False
    try:
        parts = urlsplit(text)
        _ = parts.port  # out of range: ValueError
    except ValueError:
        return False
    return all((parts.hostname or "").removesuffix(".").split("."))


def is_installed(module: str = PACKAGE) -> bool:
    """Return True if a package is there, without loading it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def endpoint_of(given: str) -> str:
    """Return a collector's address: the given one, or that of the environment, or the usual one."""
    return (given or os.environ.get(STANDARD) or DEFAULT).rstrip("/")


def resource_of(attributes: Mapping[str, Value]) -> Any:
    """Return OpenTelemetry's description of what sends: this version of fcil, and attributes."""
    from opentelemetry.sdk.resources import Resource

    return Resource({"service.version": version("fcil"), **attributes})


class SpanExporter:
    """Sends spans to a collector, with OpenTelemetry's own exporter.

    Args:
        endpoint: address of the collector, without a path.
        resource: of `resource_of`.
    """

    def __init__(self, endpoint: str, resource: Any) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._exporter: Any = OTLPSpanExporter(f"{endpoint}/v1/traces", timeout=SEND_S)
        self._resource = resource
        self._scope: Any = InstrumentationScope("fcil", version("fcil"))

    def send(self, spans: Sequence[TraceSpan]) -> None:
        """Send spans.

        Raises:
            Unreachable: the collector did not take them.
        """
        check_taken(self._exporter.export([self._readable(span) for span in spans]), "spans")

    def _readable(self, span: TraceSpan) -> Any:
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
            start_time=nanoseconds(span.began),
            end_time=nanoseconds(span.ended),
            instrumentation_scope=self._scope,
        )

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()


def check_taken(result: Any, what: str) -> None:
    """Check the result of an exporter.

    Raises:
        Unreachable: the collector did not take it.
    """
    if result.name != "SUCCESS":
        raise Unreachable(
            f"the OpenTelemetry collector did not take the {what}.",
            action="Check its address (sinks.otlp.endpoint, join --otlp), and the collector's log.",
        )


def nanoseconds(seconds: float) -> int:
    """Return seconds as whole nanoseconds."""
    return round(seconds * 1e9)


def _digest(text: str, size: int) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:size]
