"""A client's spans: what each phase of a round becomes, and how they reach a collector."""

from __future__ import annotations

import logging
import socket
import threading

import pytest

from client.session.test_machine import D1, KEY, OTHER, order, session
from fcil_client.daemon import tracing
from fcil_client.daemon.tracing import MOST_SPANS, RoundSpans, SpanSender, check_collector
from fcil_client.session.events import (
    Acked,
    LinkDown,
    Nacked,
    PartsReady,
    RoundOpened,
    RoundOver,
    WorkDone,
    WorkFailed,
)
from fcil_protocol.errors import ConfigError, Unreachable
from fcil_protocol.process import round_spans
from fcil_protocol.process.round_spans import TraceSpan, client_span_id, trace_id


class Clock:
    """Feeds events to a session, ten seconds apart."""

    def __init__(self) -> None:
        self.session, self.now, self.found = session(), 100.0, []
        self.spans = RoundSpans("c" * 32, lambda: 4096)

    def feed(self, *events):
        for event in events:
            self.now += 10
            self.session.handle(event)
            self.found += self.spans.after(event, self.session, self.now)
        return self.found


def shown(spans):
    return [(s.name, s.began, s.ended, s.fault) for s in spans]


def test_a_round_has_three_spans_below_the_servers_span_of_this_client():
    found = Clock().feed(
        RoundOpened(order()), LinkDown(), PartsReady(KEY), WorkDone(KEY, D1), Acked(D1)
    )
    assert shown(found) == [
        ("fetch", 110, 130, ""), ("work", 130, 140, ""), ("send", 140, 150, ""),
    ]  # fmt: skip
    trace = trace_id(KEY)
    assert {s.trace for s in found} == {trace}
    assert {s.parent for s in found} == {client_span_id(trace, "c" * 32)}
    assert len({s.id for s in found}) == 3
    assert found[0].attributes == {
        "fcil.client": "c" * 32, "fcil.run": KEY.run, "fcil.task": KEY.task,
        "fcil.kind": KEY.kind, "fcil.round": KEY.round, "fcil.parts_bytes": 4096,
    }  # fmt: skip


def test_a_failure_has_its_code_and_no_sentence():
    clock = Clock()
    clock.feed(RoundOpened(order()), PartsReady(KEY), WorkFailed(KEY, "worker_died", "of cat.jpg"))
    assert shown(clock.found)[-1] == ("work", 120, 130, "worker_died")
    assert "cat" not in repr(clock.found)


def test_a_round_that_is_over_or_gives_way_to_another_is_interrupted():
    clock = Clock()
    clock.feed(RoundOpened(order()), RoundOver(KEY))
    assert shown(clock.found) == [("fetch", 110, 120, "interrupted")]
    clock.feed(RoundOpened(order()), PartsReady(KEY), RoundOpened(order(1)))
    assert shown(clock.found)[-1] == ("work", 140, 150, "interrupted")
    assert clock.found[-1].trace == trace_id(KEY)
    clock.feed(RoundOver(OTHER))
    assert clock.found[-1].trace == trace_id(OTHER) != trace_id(KEY)


def test_an_update_that_the_server_has_already_is_sent_and_a_refused_one_is_not():
    for code, fault in (("already_have", ""), ("not_asked", "not_asked")):
        found = Clock().feed(
            RoundOpened(order()), PartsReady(KEY), WorkDone(KEY, D1), Nacked(D1, code)
        )
        assert shown(found)[-1] == ("send", 130, 140, fault)


# --- sending --------------------------------------------------------------------------------


def span(number: int) -> TraceSpan:
    return TraceSpan(b"t" * 16, number.to_bytes(8), None, "work", 1.0, 2.0, {})


class Exporter:
    """Stands in for OpenTelemetry's; takes nothing while `down`."""

    def __init__(self) -> None:
        self.taken, self.tries = [], 0
        self.down, self.tried, self.took = False, threading.Event(), threading.Event()
        self.closed = threading.Event()

    def send(self, spans) -> None:
        self.tries += 1
        self.tried.set()
        if self.down:
            raise Unreachable("the collector did not take the spans.")
        self.taken += spans
        self.took.set()

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def exporter(monkeypatch):
    made = Exporter()
    monkeypatch.setattr(tracing, "SpanExporter", lambda *_: made)
    monkeypatch.setattr(tracing, "resource_of", lambda _: None)
    monkeypatch.setattr(tracing, "RETRY_S", (0.01,))
    return made


def test_spans_are_sent_and_the_last_ones_before_the_end(exporter):
    sender = SpanSender("http://x/", lambda *_: None)
    sender.put([span(1)])
    assert exporter.took.wait(60)
    sender.put([span(2), span(3)])
    sender.close()
    assert [int.from_bytes(s.id) for s in exporter.taken] == [1, 2, 3]
    assert exporter.closed.is_set()


def test_a_fault_of_the_library_ends_the_sending_with_a_sentence(exporter, monkeypatch):
    def broken(*_):
        raise RuntimeError("unknown credential provider")

    monkeypatch.setattr(tracing, "SpanExporter", broken)
    notes, said = [], threading.Event()

    def notify(level, text):
        notes.append((level, text))
        said.set()

    sender = SpanSender("http://x", notify)
    sender.put([span(1)])
    assert said.wait(60)
    sender.close()
    text = "no more spans are sent: RuntimeError: unknown credential provider"
    assert notes == [("warning", text)]


def test_a_collector_that_is_away_gets_the_newest_later_and_is_named_once(exporter):
    exporter.down, notes, again = True, [], threading.Event()

    def notify(level, text):
        notes.append((level, text))
        if level == "info":
            again.set()

    sender = SpanSender("http://x", notify)
    sender.put([span(i) for i in range(10)])
    assert exporter.tried.wait(60)
    sender.put([span(i) for i in range(10, MOST_SPANS + 10)])
    exporter.down = False
    assert again.wait(60)
    sender.close()
    numbers = [int.from_bytes(s.id) for s in exporter.taken]
    assert numbers[-MOST_SPANS:] == list(range(10, MOST_SPANS + 10))
    assert len(numbers) == len(set(numbers))
    assert [level for level, _ in notes] == ["warning", "info"]
    lost = MOST_SPANS + 10 - len(numbers)  # none, if the first ten had left by then
    assert notes[-1][1].endswith(f"again; {lost} were lost" if lost else "again")


def test_spans_that_a_full_queue_drops_are_counted_once_unless_they_were_on_their_way(exporter):
    exporter.down, notes, again = True, [], threading.Event()

    def notify(level, text):
        notes.append(text)
        if level == "info":
            again.set()

    sender = SpanSender("http://x", notify)
    sender.put([span(i) for i in range(MOST_SPANS)])
    assert exporter.tried.wait(60)
    sender.put([span(i) for i in range(MOST_SPANS, MOST_SPANS + 7)])
    retake = exporter.send

    def send(spans):  # two more spans push out two that are being sent
        exporter.send = retake
        sender.put([span(-1 % 2**63), span(-2 % 2**63)])
        exporter.down = False
        retake(spans)

    exporter.send = send
    assert again.wait(60)
    sender.close()
    assert len(exporter.taken) == len({s.id for s in exporter.taken}) == MOST_SPANS + 2
    assert notes[-1].endswith("takes spans again; 7 were lost")


def test_a_collector_that_never_answers_does_not_hold_the_end(exporter):
    exporter.down = True
    sender = SpanSender("http://x", lambda *_: None)
    sender.put([span(1)])
    assert exporter.tried.wait(60)
    sender.close()
    assert not sender._thread.is_alive()
    assert exporter.taken == []


@pytest.mark.parametrize("address", ["http://", "https://:4318", "http://[::1", "http://x:99999",
    "http://a..b", "http://.x", "http://x y", "http:/x"])  # fmt: skip
def test_an_address_without_a_host_is_refused_at_the_start(address):
    with pytest.raises(ConfigError, match="and names a host, got"):
        check_collector(address)


@pytest.mark.full  # the extra is not among the quick tests'
def test_the_library_adds_no_lines_of_its_own_about_a_collector_that_is_away(caplog, monkeypatch):
    pytest.importorskip(round_spans.PACKAGE)
    monkeypatch.setattr(round_spans, "SEND_S", 0.5)
    logging.getLogger(f"{round_spans.PACKAGE}.trace_exporter").setLevel(logging.NOTSET)
    said = threading.Event()
    with socket.socket() as deaf, caplog.at_level(logging.WARNING):
        deaf.bind(("127.0.0.1", 0))  # and does not listen
        sender = SpanSender(f"http://127.0.0.1:{deaf.getsockname()[1]}", lambda *_: said.set())
        sender.put([span(1)])
        assert said.wait(60)
        sender.close()
    assert [r for r in caplog.records if r.name.startswith("opentelemetry")] == []


def test_an_address_or_a_package_that_is_missing_is_named(monkeypatch):
    with pytest.raises(ConfigError, match="and names a host, got 'collector:4318'"):
        check_collector("collector:4318")
    monkeypatch.setattr(tracing, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match="--otlp needs the package opentelemetry") as caught:
        check_collector("http://127.0.0.1:4318")
    assert "fcil[otel]" in caught.value.action
