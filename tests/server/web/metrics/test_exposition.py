"""Figures for Prometheus: those of the ledger, by the rules, and only ever growing."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from byte_counts import add_bytes
from fcil_protocol.errors import StorageError
from fcil_protocol.ids import RoundKey, RunId
from fcil_server.ledger.enums import Cause, CountSource, Direction, UpdateStatus
from fcil_server.ledger.events import RefusalTable
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import RoundRow
from fcil_server.web.metrics.exposition import CATALOGUE, PHASES, Snapshot, Usage, render
from fcil_server.web.metrics.totals import SETTLED_S, TotalsReader
from sample_run import ALICE, BOB, HTML_NAME, LIVE, MATRIX, RUN, TASKS, Clock, build

DOCUMENT = Path(__file__).parents[4] / "docs" / "metrics.md"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / "ledger.sqlite"
    build(path).close()
    return path


@pytest.fixture
def ledger(built: Path, tmp_path: Path):
    with Ledger(Path(shutil.copy(built, tmp_path)), clock=Clock()) as ledger:
        yield ledger


def snapshot(ledger: Ledger, *, clients: int = 0, live=LIVE) -> Snapshot:
    with TotalsReader(ledger.path, clients=clients) as reader:
        totals = reader.read()
    usage = {"server": Usage(80_000_000, 1.5, 30), "metrics": Usage(50_000_000, 0.3, 12)}
    return Snapshot("0.1.0", totals, live, usage, (10, 100), 5, 0.01)


def figures(text: bytes) -> dict[tuple[str, ...], float]:
    """Return (name, label=value ...) -> value, as Prometheus' own parser reads them."""
    return {
        (s.name, *sorted(f"{k}={v}" for k, v in s.labels.items())): s.value
        for family in text_string_to_metric_families(text.decode())
        for s in family.samples
    }


def told(ledger: Ledger, **given) -> dict[tuple[str, ...], float]:
    return figures(render(snapshot(ledger, **given))[0])


def test_bytes_are_those_of_the_ledger_by_direction_cause_and_level(ledger: Ledger) -> None:
    found = told(ledger)
    flows = [*ledger.bytes.all(RUN), *ledger.bytes.all(None)]
    levels = {
        "tensor": "tensor",
        "sealed": "sealed",
        "application": "application",
        "predicted_wire": "wire",
    }
    for direction, cause in ((Direction.UP, Cause.UPDATE), (Direction.DOWN, Cause.BROADCAST)):
        mine = [f for f in flows if (f.direction, f.cause) == (direction, cause)]
        for name, level in levels.items():
            key = (
                f"fcil_{name}_bytes_total",
                f"cause={cause.value}",
                f"direction={direction.value}",
            )
            assert found[key] == sum(getattr(f, level) for f in mine) > 0
    for name, level in (("wire", "wire"), ("link", "link"), ("retransmitted", "retransmitted")):
        key = (f"fcil_kernel_{name}_bytes_total", "direction=down")
        mine = [
            f for f in flows if f.source is CountSource.KERNEL and f.direction is Direction.DOWN
        ]
        assert found[key] == sum(getattr(f, level) for f in mine) > 0
    outside = ("fcil_predicted_wire_bytes_total", "cause=handshake", "direction=up")
    assert found[outside] == 900  # what belongs to no run counts, too
    assert found["fcil_wire_source_info", "source=kernel"] == 1
    assert ("fcil_wire_source_info", "source=predicted") not in found


def test_rounds_and_updates_are_those_of_the_ledger(ledger: Ledger) -> None:
    found = told(ledger)
    rounds = ledger.rounds.all(RUN)
    for kind in ("prepare", "train", "evaluate"):
        mine = [r for r in rounds if r.kind == kind]
        assert found["fcil_rounds_total", f"kind={kind}", "outcome=done"] == len(mine) > 0
        assert found["fcil_rounds_total", f"kind={kind}", "outcome=short"] == 0
        updates = [u for r in mine for u in ledger.updates.of_round(r.key)]
        assert found["fcil_updates_accepted_total", f"kind={kind}"] == len(updates)
        for status in (UpdateStatus.COUNTED, UpdateStatus.EXCLUDED):
            count = sum(u.status is status for u in updates)
            assert found[f"fcil_updates_{status.value}_total", f"kind={kind}"] == count
        for phase in ("collect", "aggregate"):
            key = ("fcil_round_phase_seconds_total", f"kind={kind}", f"phase={phase}")
            assert found[key] == sum(r.phases[f"{phase}_s"] for r in mine)
    assert found["fcil_updates_excluded_total", "kind=train"] == 1
    assert found["fcil_clients_silent_total", "answer=declined"] == 1
    assert found["fcil_clients_silent_total", "answer=lost"] == 1
    assert found["fcil_clients_silent_total", "answer=straggler"] == 0


def test_accuracy_is_that_of_the_reports(ledger: Ledger) -> None:
    found = told(ledger)
    for task, percent in enumerate(MATRIX[-1]):
        assert found["fcil_accuracy_ratio", f"task={task}"] == pytest.approx(percent / 100)
    assert found[("fcil_accuracy_final_ratio",)] == pytest.approx(0.8)
    assert found[("fcil_forgetting_ratio",)] == pytest.approx(0.125)


def test_what_the_server_says_is_shown_and_its_phase_is_one_of_all(ledger: Ledger) -> None:
    found = told(ledger)
    assert found[("fcil_up",)] == 1
    assert found["fcil_round_number", "kind=train"] == 1
    assert found[("fcil_round_asked",)] == 3
    assert found[("fcil_round_answered",)] == 2
    assert found[("fcil_worker_deaths_total",)] == 1
    assert found["fcil_loop_lag_seconds", "of=max"] == 0.05
    assert found["fcil_intake_connections", "process=intake 1"] == 2
    assert found["fcil_intake_updates_total", "process=intake 2"] == 1
    shown = {k[1]: v for k, v in found.items() if k[0] == "fcil_round_phase"}
    assert shown == {f"phase={p}": p == "collecting" for p in PHASES}


def test_a_server_that_does_not_answer_is_down_and_its_ledger_is_still_shown(
    ledger: Ledger,
) -> None:
    found = told(ledger, live=None)
    assert found[("fcil_up",)] == 0
    assert found["fcil_updates_counted_total", "kind=train"] > 0
    assert ("fcil_clients_connected",) not in found


def test_nothing_but_build_and_members_is_said_of_a_federation_without_a_run(
    tmp_path: Path,
) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        found = told(ledger, live=None)
    assert found["fcil_members", "role=client"] == 0
    assert not any(name.startswith(("fcil_run", "fcil_rounds")) for name, *_ in found)


def test_clients_are_named_only_up_to_the_number_that_was_asked_for(ledger: Ledger) -> None:
    assert not any("client=" in label for key in told(ledger) for label in key[1:])
    found = told(ledger, clients=2)
    names = {k[1] for k in found if k[0] == "fcil_client_updates_counted_total"}
    assert names == {"client=alice", "client=bob"}
    assert found["fcil_client_connected", "client=alice"] == 1
    assert found["fcil_client_connected", "client=bob"] == 0
    later = told(ledger, clients=50, live={**LIVE, "here": {ALICE: True}})  # bob was not asked for
    assert ("fcil_client_connected", "client=bob") not in later
    assert (
        found["fcil_client_updates_counted_total", "client=bob"]
        == (ledger.updates.rounds_by_client()[BOB])
    )
    up, down = ledger.bytes.by_client()[ALICE]
    wire = "fcil_client_predicted_wire_bytes_total"
    assert found[wire, "client=alice", "direction=up"] == up
    assert found[wire, "client=alice", "direction=down"] == down


def test_class_names_are_nowhere(ledger: Ledger) -> None:
    values = {label.partition("=")[2] for key in told(ledger, clients=10) for label in key[1:]}
    assert "update" in values
    assert values.isdisjoint({HTML_NAME, *(name for names in TASKS for name in names)})


# --- only ever growing ----------------------------------------------------------------------


def counters(found: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    return {key: value for key, value in found.items() if key[0].endswith("_total")}


def test_a_fork_counts_nothing_twice_and_takes_nothing_back(ledger: Ledger) -> None:
    before = counters(told(ledger, clients=3))
    with ledger.transaction():
        ledger.forks.begin(RUN, 3, RunId("r20260103-030405-fork"))
    assert len(ledger.rounds.all(RunId("r20260103-030405-fork"))) > 0
    assert counters(told(ledger, clients=3)) == before


def test_what_is_remembered_of_old_rounds_is_what_is_read_anew(tmp_path: Path) -> None:
    clock = Clock()
    with build(tmp_path / "ledger.sqlite", clock=clock) as ledger:
        with TotalsReader(ledger.path, clients=3) as reader:
            reader.database.clock = clock
            fresh = reader.read().counts
            clock.now += 2 * SETTLED_S
            assert reader.read().counts == fresh  # the time at which all of it is remembered
            key = RoundKey(RUN, 2, "train", 7)
            ledger.rounds.open(key, asked=(ALICE,), base_state=9)
            add_bytes(ledger, Direction.UP, Cause.UPDATE, round_key=key, client=ALICE, wire=11)
            assert _rows_read(reader) == 1
            grown = reader.read().counts
        with TotalsReader(ledger.path, clients=3) as anew:
            assert anew.read().counts == grown
    flow = (Direction.UP, Cause.UPDATE, CountSource.PREDICTED)
    assert grown.flows[flow][3] == fresh.flows[flow][3] + 11
    assert grown.clients[ALICE][1] == fresh.clients[ALICE][1] + 11


def _rows_read(reader: TotalsReader) -> int:
    """Return of how many rounds a reading looks at the bytes again."""
    looked: list[RoundRow] = []
    read = reader._one_round

    def note(row):
        looked.append(row)
        return read(row)

    reader._one_round = note  # type: ignore[method-assign]
    reader.read()
    del reader._one_round
    return len(looked)


def test_a_round_that_has_just_closed_may_still_cost_more(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "ledger.sqlite"
    with build(path, clock=clock) as ledger, TotalsReader(path) as reader:
        reader.database.clock = clock
        reader.read()
        late = ledger.rounds.all(RUN)[-1].key
        add_bytes(ledger, Direction.UP, Cause.CONTROL, round_key=late, client=BOB, wire=7)
        assert (
            reader.read().counts.flows[Direction.UP, Cause.CONTROL, CountSource.PREDICTED][3] == 7
        )


def test_a_round_that_is_never_closed_makes_no_later_one_be_read_again(tmp_path: Path) -> None:
    clock = Clock()
    with build(tmp_path / "ledger.sqlite", clock=clock) as ledger:
        ledger.database.write(
            "UPDATE rounds SET closed_at = NULL, outcome = NULL "
            "WHERE rowid = (SELECT min(rowid) FROM rounds)"
        )
        clock.now += 2 * SETTLED_S
        with TotalsReader(ledger.path, clients=3) as reader:
            reader.database.clock = clock
            first = reader.read().counts
            assert _rows_read(reader) == 1, "the one that was left open"
            assert reader.read().counts == first


def test_a_reading_sees_one_moment_and_leaves_no_lock(ledger: Ledger) -> None:
    with TotalsReader(ledger.path) as reader:
        with reader.database.moment():
            assert RefusalTable(reader.database).counts() == {}
            ledger.refusals.add(ALICE, "stale", "one round late")  # nobody waits for the reader
            assert RefusalTable(reader.database).counts() == {}
        assert reader.read().refusals == {"stale": 1}


def test_the_reader_cannot_write(ledger: Ledger) -> None:
    with TotalsReader(ledger.path) as reader:
        assert reader.database.read_only
        with pytest.raises(StorageError):
            RefusalTable(reader.database).add(ALICE, "stale", "one round late")


# --- the rules of Prometheus ----------------------------------------------------------------

UNITS = ("_seconds", "_bytes", "_ratio")
WRONG_UNITS = r"_(ms|milliseconds|minutes|hours|days|kb|kilobytes|mb|megabytes|percent)(_|$)"


@pytest.mark.parametrize("spec", CATALOGUE, ids=lambda s: s.name)
def test_names_follow_the_rules(spec) -> None:
    assert re.fullmatch(r"fcil_[a-z][a-z0-9_]*[a-z0-9]", spec.name)
    assert not re.search(WRONG_UNITS, spec.name)
    assert not spec.name.endswith(("_count", "_sum", "_bucket", "_gauge", "_counter"))
    assert spec.says.endswith(".")
    for label in spec.labels:
        assert re.fullmatch(r"[a-z][a-z_]*", label)
        assert label not in {"le", "quantile", "job", "instance"}
    stem = spec.name.removesuffix("_total")
    for unit in UNITS:  # a unit stands at the end, before _total
        assert unit not in stem or stem.endswith(unit), unit


def test_types_are_told_by_the_names_and_every_metric_has_help(ledger: Ledger) -> None:
    text = render(snapshot(ledger, clients=3))[0].decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert all((kind == "counter") == name.endswith("_total") for name, kind in types.items())
    assert types.keys() == set(re.findall(r"^# HELP (\S+) \S", text, re.MULTILINE))


def test_the_sample_shows_every_metric_of_the_catalogue(ledger: Ledger) -> None:
    ledger.refusals.add(ALICE, "stale", "one round late")
    add_bytes(ledger, Direction.DOWN, Cause.OBJECT_STORE, source=CountSource.REPORTED, wire=70)
    shown = {name for name, *_ in told(ledger, clients=3)}
    assert shown == {spec.name for spec in CATALOGUE}


def test_openmetrics_is_spoken_to_who_asks_for_it(ledger: Ledger) -> None:
    accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    body, content_type = render(snapshot(ledger), accept)
    assert content_type.startswith("application/openmetrics-text")
    families = {f.name for f in openmetrics.text_string_to_metric_families(body.decode())}
    assert "fcil_rounds" in families


def test_a_value_that_is_no_number_is_left_out(ledger: Ledger) -> None:
    shot = replace(snapshot(ledger), live={**LIVE, "remaining_s": None}, collect_s=float("nan"))
    found = figures(render(shot)[0])
    assert ("fcil_round_remaining_seconds",) not in found
    assert ("fcil_collect_seconds",) not in found


def test_the_document_lists_every_metric_as_it_is() -> None:
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `fcil_")]
    assert lines == [
        f"| `{s.name}` | {', '.join(f'`{label}`' for label in s.labels)} | {s.says} |"
        for s in CATALOGUE
    ]
