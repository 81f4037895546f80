"""Spans of this client's part in each round, for a collector of its owner's choice.

`RoundSpans` watches the session's work (no IO); `SpanSender` sends what it finds from a thread, so
that a collector that hangs delays nothing. The ids follow from the round's key and the client's id:
the spans lie below the one that the server sends for this client.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from fcil_client.session.events import Acked, Event, Nacked, PartsReady, Work, WorkDone
from fcil_client.session.machine import ClientSession
from fcil_protocol.errors import AlreadyHave, ConfigError, Unreachable
from fcil_protocol.ids import RoundKey
from fcil_protocol.process.round_spans import (
    PACKAGE,
    SpanExporter,
    TraceSpan,
    Value,
    client_span_id,
    is_address,
    is_installed,
    resource_of,
    span_id,
    trace_id,
)

MOST_SPANS = 1000  # kept while the collector is away; the oldest go first
RETRY_S = (1.0, 5.0, 30.0, 300.0)
END_S = 3.0  # for the last spans when the client ends
_NAMES = {Work.FETCHING: "fetch", Work.WORKING: "work", Work.SENDING: "send"}
_GOOD = (PartsReady, WorkDone, Acked)  # events with which a phase ends as it should


class RoundSpans:
    """Makes a span of each phase of a round's work on this client.

    Args:
        client: its id.
        fetched: returns the bytes of the current order's parts.
    """

    def __init__(self, client: str, fetched: Callable[[], int]) -> None:
        self._client = client
        self._fetched = fetched
        self._phase: tuple[Work, RoundKey] | None = None
        self._began = 0.0

    def after(self, event: Event, session: ClientSession, now: float) -> list[TraceSpan]:
        """Return the spans that ended with an event.

        Args:
            event: the one that was just handled.
            session: in its state after it.
            now: seconds since 1970.
        """
        key = session.key
        phase = None if key is None or session.work not in _NAMES else (session.work, key)
        if phase == self._phase:
            return []
        ended = [] if self._phase is None else [self._span(*self._phase, event, now)]
        self._phase, self._began = phase, now
        return ended

    def _span(self, work: Work, key: RoundKey, event: Event, now: float) -> TraceSpan:
        trace, name = trace_id(key), _NAMES[work]
        attributes: dict[str, Value] = {
            "fcil.client": self._client,
            "fcil.run": key.run,
            "fcil.task": key.task,
            "fcil.kind": key.kind,
            "fcil.round": key.round,
        }
        if work is Work.FETCHING:
            attributes["fcil.parts_bytes"] = self._fetched()
        fault = ""
        if not _is_good(event):
            fault = str(getattr(event, "code", "")) or "interrupted"
        return TraceSpan(
            trace,
            span_id(trace, f"client {self._client} {name} {self._began!r}"),
            client_span_id(trace, self._client),
            name,
            self._began,
            max(now, self._began),
            attributes,
            fault,
        )


def _is_good(event: Event) -> bool:
    """Say whether a phase ends as it should; after a lost Ack the server has the update already."""
    if isinstance(event, Nacked):
        return event.code == AlreadyHave.code
    return isinstance(event, _GOOD)


def check_collector(endpoint: str) -> None:
    """Check that spans can be sent to an address.

    Raises:
        ConfigError: it is not an address, or the packages for it are missing.
    """
    if not is_address(endpoint):
        raise ConfigError(
            f"--otlp: expected an address that begins with http:// or https:// and names a host, "
            f"got {endpoint[:80]!r}.",
            action="Give a collector's address, such as http://127.0.0.1:4318",
        )
    if not is_installed():
        raise ConfigError(
            f"--otlp needs the package {PACKAGE}.",
            action="Install it with: pip install 'fcil[otel]'",
        )


class SpanSender:
    """Sends spans from a thread of its own, later if the collector is away.

    Args:
        endpoint: the collector's address.
        notify: receives a sentence when the collector does not take spans, and when it does again,
            with the number of those lost.
    """

    def __init__(self, endpoint: str, notify: Callable[[str, str], None]) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._notify = notify
        self._lock = threading.Lock()
        self._waiting: deque[TraceSpan] = deque(maxlen=MOST_SPANS)
        self._lost = 0  # since the last sentence about the collector
        self._news, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def put(self, spans: Sequence[TraceSpan]) -> None:
        """Queue spans; if too many wait, the oldest are lost."""
        if spans:
            with self._lock:
                self._lost += max(0, len(self._waiting) + len(spans) - MOST_SPANS)
                self._waiting.extend(spans)
            self._news.set()

    def close(self) -> None:
        """Give the last spans a moment to leave."""
        self._ending.set()
        self._news.set()
        self._thread.join(END_S)

    def _run(self) -> None:
        try:
            self._send_until_end()
        except Exception as error:  # of the library: a wrong certificate, an unknown proxy
            text = f"no more spans are sent: {type(error).__name__}: {error}"
            self._notify("warning", text)

    def _send_until_end(self) -> None:
        exporter = SpanExporter(self._endpoint, resource_of({"service.name": "fcil-client"}))
        # The library would write several lines about each try; `notify` gets one for an outage.
        logging.getLogger(f"{PACKAGE}.trace_exporter").setLevel(logging.CRITICAL)
        failures = 0
        while not self._ending.is_set():
            self._news.wait()
            self._news.clear()
            while not self._flush(exporter, first=failures == 0):
                self._ending.wait(RETRY_S[min(failures, len(RETRY_S) - 1)])
                failures += 1
                if self._ending.is_set():
                    return  # the collector is away: what waits is lost
            if failures:
                with self._lock:
                    lost, self._lost = self._lost, 0
                more = f"; {lost} were lost" if lost else ""
                self._notify("info", f"the OpenTelemetry collector takes spans again{more}")
            failures = 0
        self._flush(exporter, first=False)
        exporter.close()

    def _flush(self, exporter: SpanExporter, *, first: bool) -> bool:
        """Send what waits; False if the collector does not take it."""
        with self._lock:
            sent = list(self._waiting)
        if not sent:
            return True
        try:
            exporter.send(sent)
        except Unreachable as error:
            if first:
                self._notify("warning", f"{error} Spans wait, at most {MOST_SPANS}.")
            return False
        done, left = {id(span) for span in sent}, len(sent)
        with self._lock:
            while self._waiting and id(self._waiting[0]) in done:
                self._waiting.popleft()
                left -= 1
            self._lost -= left  # a full queue dropped them while they were being sent
        return True
