"""One round as one trace: the server's spans and those of a client, from real processes."""

import socket

import pytest

from fcil_server.lab.local.federation import LocalFederation
from otlp_collector import Collector, collector
from system.kit import open_ledger, settings, write_client

__all__ = ["collector"]  # a fixture
pytestmark = [pytest.mark.processes, pytest.mark.full]  # the extra is not among the quick tests'


NAMES = ["antelope", "beetle", "cougar", "dolphin"]


def test_a_client_adds_its_spans_to_the_servers_trace(tmp_path, collector: Collector):
    sink = ("-c", f'sinks.otlp.endpoint="{collector.endpoint}"', "-c", "sinks.otlp.logs=true")
    with socket.socket() as deaf, LocalFederation(tmp_path) as federation:
        deaf.bind(("127.0.0.1", 0))  # and does not listen: b's collector is away
        away = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        federation.serve(*settings(tasks__classes=[NAMES[:2], NAMES[2:]]), *sink)
        for name, more in (("a", ("--otlp", collector.endpoint)), ("b", ("--otlp", away))):
            federation.join(name, write_client(tmp_path / name, range(4), names=NAMES), *more)
        federation.until("run_done")
        daemons = list(federation.clients.values())
        federation.stop()
    assert [daemon.returncode for daemon in daemons] == [0, 0]  # none had to be killed
    words = federation.log("b").read_text()
    assert words.count("did not take the spans") <= 1  # none, if the run was over before
    assert "Traceback" not in words
    assert "Transient error" not in words  # the library's own lines, for each try
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest().run_id
        rounds = ledger.rounds.all(run)
        assert all(len(ledger.updates.accepted(row.key)) == 2 for row in rounds)
        ids = {c.name[-1]: c.client_id for c in ledger.clients.all()}
    spans = collector.spans()
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    roots = {s.trace_id: s for s in spans if not s.parent_span_id}
    assert len(roots) == len(rounds) == 4
    mine = [s for s in spans if s.name in ("fetch", "work", "send")]
    assert sorted(s.name for s in mine) == sorted(["fetch", "work", "send"] * 4)
    for span in mine:
        assert span.status.code == 0
        parent = by_id[span.parent_span_id]
        assert (parent.name, parent.trace_id) == ("client", span.trace_id)
        said = {a.key: a.value.string_value for a in parent.attributes}
        assert said["fcil.client"] == ids["a"]
        assert by_id[parent.parent_span_id] is roots[span.trace_id]
        assert roots[span.trace_id].start_time_unix_nano <= span.end_time_unix_nano
    of_rounds: dict[str, set[bytes]] = {}
    for record in collector.records():
        if record.trace_id:
            assert record.span_id == roots[record.trace_id].span_id
        code = next(a.value.string_value for a in record.attributes if a.key == "fcil.code")
        of_rounds.setdefault(code, set()).add(record.trace_id)
    assert of_rounds["round_opened"] == of_rounds["update"] == set(roots)
    assert of_rounds["task_opened"] == of_rounds["run_done"] == {b""}
    everything = b"".join(body for path, body in collector.bodies if path != "/v1/logs")
    secrets = (str(tmp_path), ":a", *NAMES)
    assert not [text for text in secrets if text.encode() in everything]
