"""What a collector of OpenTelemetry receives, decoded by OpenTelemetry's own messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sample_run
from fcil_protocol.errors import ConfigError, Unreachable
from fcil_protocol.process.round_spans import round_span_id, trace_id
from fcil_server.ledger.ledger import Ledger
from fcil_server.reports.results.run_data import collect
from fcil_server.reports.sinks import registry
from fcil_server.reports.sinks.follower import Follower
from fcil_server.reports.sinks.otlp import OtlpOptions
from otlp_collector import Collector, collector
from sample_run import RUN

__all__ = ["collector"]  # a fixture
pytestmark = pytest.mark.full  # the extra is not among those of the quick tests


@pytest.fixture
def place(tmp_path: Path) -> Path:
    sample_run.build(tmp_path / "ledger.sqlite").close()
    return tmp_path


def follower_of(place: Path, endpoint: str) -> Follower:
    return Follower(place, RUN, registry.choose("otlp", {"endpoint": endpoint}))


def test_each_round_is_a_trace_with_its_phases_and_clients(
    place: Path, collector: Collector
) -> None:
    follower = follower_of(place, collector.endpoint)
    follower.catch_up(last=True)
    follower.close()
    with Ledger(place / "ledger.sqlite", read_only=True) as ledger:
        views = collect(ledger, RUN).rounds
    found = collector.spans()
    roots = {span.trace_id: span for span in found if not span.parent_span_id}
    assert set(roots) == {trace_id(view.round.key) for view in views}
    for view in views:
        root = roots[trace_id(view.round.key)]
        assert root.name == "round"
        assert root.start_time_unix_nano == round(view.round.opened_at * 1e9)
        assert root.end_time_unix_nano == round(view.round.closed_at * 1e9)
        parts = [s for s in found if s.trace_id == root.trace_id and s.parent_span_id]
        assert {s.parent_span_id for s in parts} == {root.span_id}
        clients = {
            a.value.string_value
            for s in parts
            for a in s.attributes
            if s.name == "client" and a.key == "fcil.client"
        }
        assert clients == {*view.senders, *view.silent}


def test_metrics_are_those_of_every_sink_and_no_name_leaves(
    place: Path, collector: Collector
) -> None:
    follower = follower_of(place, collector.endpoint)
    follower.catch_up(last=True)
    follower.close()
    with Ledger(place / "ledger.sqlite", read_only=True) as ledger:
        data = collect(ledger, RUN)
    counted = {view.round.seq: float(len(view.counted)) for view in data.rounds}
    points = collector.points()
    assert points["fcil.round.counted"] == counted
    assert set(points["fcil.clients.accuracy"]) == {0, 1, 2}
    everything = b"".join(body for _, body in collector.bodies)
    names = [row.name for row in data.clients.values()]
    assert names
    assert not [name for name in names if name.encode() in everything]


def test_a_receiver_of_traces_alone_gets_no_metrics(place: Path, collector: Collector) -> None:
    options = {"endpoint": collector.endpoint, "metrics": False}
    follower = Follower(place, RUN, registry.choose("otlp", options))
    follower.catch_up(last=True)
    follower.close()
    assert {path for path, _ in collector.bodies} == {"/v1/traces"}
    assert collector.spans()


def test_a_collector_that_was_away_gets_everything_later_and_once(
    place: Path, collector: Collector
) -> None:
    collector.down = True
    follower = follower_of(place, collector.endpoint)
    with pytest.raises(Unreachable, match="did not take the spans"):
        follower.catch_up(last=True)
    follower.close()
    assert not (place / "runs" / RUN / "sinks" / "otlp.json").exists()
    collector.down = False
    again = follower_of(place, collector.endpoint)
    again.catch_up(last=True)
    again.close()
    ids = [(span.trace_id, span.span_id) for span in collector.spans()]
    assert len(ids) == len(set(ids)) > 0
    taken = json.loads((place / "runs" / RUN / "sinks" / "otlp.json").read_text())
    count = len(collector.bodies)
    third = follower_of(place, collector.endpoint)
    third.catch_up(last=True)
    third.close()
    assert len(collector.bodies) == count
    assert taken["seq"] >= 0


def test_headers_come_from_the_environment(
    place: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=abc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{collector.endpoint}/")
    follower = follower_of(place, "")
    follower.catch_up(last=True)
    follower.close()
    assert {headers.get("x-key") for headers in collector.headers} == {"abc"}


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://x", "/v1", "http://"])
def test_an_address_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="begins with http:// or https://"):
        OtlpOptions(endpoint=endpoint)


def test_without_the_package_one_sentence_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "is_installed", lambda _module: False)
    with pytest.raises(ConfigError, match="needs the packages opentelemetry") as caught:
        registry.choose("otlp", {})
    assert "fcil[otel]" in caught.value.action


def test_notes_are_sent_as_log_records_only_if_asked_for(place: Path, collector: Collector) -> None:
    with Ledger(place / "ledger.sqlite") as ledger:
        for level in ("info", "warning", "error"):
            ledger.events.add(level, f"an_{level}", f"alice holds cats: {level}", run=RUN)
        ledger.events.add("info", "other", "of no run")
        notes = ledger.events.newest(RUN)
    assert len(notes) == 3
    follower = follower_of(place, collector.endpoint)
    follower.catch_up(last=True)
    follower.close()
    assert collector.records() == []
    options = {"endpoint": collector.endpoint, "logs": True}
    for _ in range(2):  # the second one knows that they were taken
        asked = Follower(place, RUN, registry.choose("otlp", options))
        asked.catch_up(last=True)
        asked.close()
    found = collector.records()
    assert [(r.severity_text, r.body.string_value) for r in found] == [
        (note.level, note.text) for note in notes
    ]
    assert [r.time_unix_nano for r in found] == [round(note.at * 1e9) for note in notes]
    codes = [a.value.string_value for r in found for a in r.attributes if a.key == "fcil.code"]
    assert codes == [note.code for note in notes]


def test_a_log_record_is_in_the_trace_of_the_round_in_which_it_was_noted(
    tmp_path: Path, collector: Collector
) -> None:
    clock = sample_run.Clock()
    ledger = sample_run.build(tmp_path / "ledger.sqlite", clock=clock)
    row = ledger.rounds.all(RUN)[5]
    assert row.closed_at is not None
    for at in (row.opened_at + 1, row.opened_at - 1e6):
        clock.now = at
        ledger.events.add("info", "update", "bob", run=RUN)
    ledger.close()
    options = {"endpoint": collector.endpoint, "logs": True}
    follower = Follower(tmp_path, RUN, registry.choose("otlp", options))
    follower.catch_up(last=True)
    follower.close()
    roots = {s.trace_id: s.span_id for s in collector.spans() if not s.parent_span_id}
    inside, before = collector.records()
    trace = trace_id(row.key)
    assert (inside.trace_id, inside.span_id) == (trace, round_span_id(trace))
    assert roots[inside.trace_id] == inside.span_id
    assert (before.trace_id, before.span_id) == (b"", b"")
