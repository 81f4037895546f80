"""Sections of the page: the numbers of the ledger, hostile words as words, bounded in size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import page_kit
import sample_run
from fcil_protocol.errors import UsageError
from fcil_protocol.formats import format_bytes
from fcil_protocol.ids import ClientId
from fcil_server.federation.sections import FederationSection
from fcil_server.ledger.enums import Direction, RunStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import ClassRow, Event, TaskRow
from fcil_server.reports.charts.history import History, RunName
from fcil_server.reports.run_directory import summary
from fcil_server.reports.sections.accuracy import forgotten
from fcil_server.reports.sections.params import Params
from fcil_server.reports.sections.sections import SECTIONS, section
from fcil_server.web.page.reader import HistoryReader
from markup import Page
from sample_run import ALICE, BOB, GONE, RUN

BOUND = 300_000  # characters of a section


def read(ledger: Ledger) -> History:
    with HistoryReader(ledger.path) as reader:
        return reader.read()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    with page_kit.small(tmp_path_factory.mktemp("small") / "ledger.sqlite") as opened:
        yield opened


@pytest.fixture(scope="module")
def history(small: Ledger) -> History:
    return read(small)


def shown(name: str, history: History, live: dict | None = None, **params: object) -> str:
    return str(section(name, history, live, Params(**params), acts=True))


def words(html: str) -> str:
    return " ".join(Page(html).text.split())


def test_every_section_is_one_well_formed_element_with_its_name(history: History) -> None:
    ids = []
    for live in (None, page_kit.live()):
        for name in SECTIONS:
            page = Page(shown(name, history, live))
            assert page.open == []
            (tag, attrs), *_ = page.tags
            assert (tag, attrs["id"], attrs["aria-labelledby"]) == (
                "section",
                name,
                f"{name}-title",
            )
            assert f"{name}-title" in page.ids
            ids += page.ids if live else []
            names = {a for _, attributes in page.tags for a in attributes}
            assert "style" not in names  # the page's policy forbids it
            assert not any(a.startswith("on") for a in names)
    assert len(ids) == len(set(ids))


def test_the_head_has_the_headlines_of_the_summary(small: Ledger, history: History) -> None:
    from fcil_server.reports.results.run_data import collect

    data = summary(collect(small, RUN))["data"]
    text = words(shown("head", history))
    for value in (data["faa"], data["aia"]):
        assert f"{value:.1f} %" in text
    assert f"{data['forgetting']:.1f} pp" in text
    for way in ("up", "down"):
        assert format_bytes(data["bytes"][way]["true_wire"]) in text
    assert f"{data['rounds']} rounds, {len(data['tasks'])} tasks" in text


@pytest.mark.parametrize("status", RunStatus)
def test_an_accuracy_is_final_when_the_run_is_over(history: History, status: RunStatus) -> None:
    assert history.run is not None
    text = words(shown("head", replace(history, run=replace(history.run, status=status))))
    assert ("Final accuracy" in text) == (status is not RunStatus.RUNNING)
    assert ("Latest accuracy" in text) == (status is RunStatus.RUNNING)


def test_the_heat_map_has_the_matrix_in_its_cells_and_tenths_as_their_looks(
    history: History,
) -> None:
    html = shown("accuracy", history)
    cells = re.findall(r'<td class="(h\d+)">([\d.]+)</td>', html)
    numbers = [v for row in sample_run.MATRIX for v in row]
    assert cells == [(f"h{int(v // 10)}", f"{v:.1f}") for v in numbers]


def test_what_was_forgotten_of_each_task_adds_up_to_the_headline(history: History) -> None:
    lost = [forgotten(history.metrics, i) for i in range(3)]
    assert [(one.best, one.last, one.lost) for one in lost] == [
        (90, 60, 30), (80, 85, -5), (None, 95, None),
    ]  # fmt: skip
    drops = [one.lost for one in lost if one.lost is not None]
    assert sum(drops) / 2 == pytest.approx(history.headline[2])
    text = words(shown("accuracy", history))
    assert "30.0 pp" in text
    assert "-5.0 pp" in text


def test_the_round_in_progress_says_who_is_at_work_and_how_far(history: History) -> None:
    live = page_kit.live()
    html = shown("now", history, live)
    text = words(html)
    for expected in (
        "Task 3, train round 0 (the last is 1) : collecting updates", "1 of 3, 1 declined",
        "sends its update", "has answered", "declined: on battery", "250 kB of 604 kB",
        "854 kB of 1.21 MB", "all asked; at the deadline with 2",
    ):  # fmt: skip
        assert expected.replace(" :", ":") in text
    bars = {a["aria-label"]: (a["value"], a["max"]) for a in Page(html).all("progress")}
    assert bars["Update of bob"] == ("250000", "604000")
    live["round"]["until"] = 1_767_323_455
    (left,) = (a for a in Page(shown("now", history, live)).all("span") if "data-until" in a)
    assert left["data-until"] == "1767323455"


def test_the_bar_of_a_round_is_filled_by_what_clients_report(history: History) -> None:
    live = page_kit.live()
    bob, alice, _ = live["round"]["clients"]

    def filled(**fields: object) -> str | None:
        live["round"]["clients"] = [{**bob, "expected": None, "received": 0, **fields}, alice]
        page = Page(shown("now", history, live))
        return next(a["value"] for a in page.all("progress") if "round" in a["aria-label"])

    # Of two that may answer, alice has.
    assert filled(progress=["train", 30, 100]) == "65"
    assert filled(progress=["train", 0, 0]) == "50"
    assert filled(progress=["fetching", 90, 100]) == "50"  # comes before the work
    assert filled(progress=None) == "50"
    assert filled(expected=604_000) == "100"  # sends what it has made
    assert filled(answer="lost", progress=["train", 30, 100]) == "50"


def test_a_device_is_two_words_with_the_rest_in_its_title(history: History) -> None:
    device = "cpu (x86_64, 2 threads, torch 2.13.0+cpu)"
    members = (replace(history.members[0], device=device),)
    html = shown("clients", replace(history, members=members))
    assert f'<span title="{device}">CPU, 2 threads</span>' in html


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ('[federation]\nname = "<wards>"\n', "<wards>"),
        (f'[federation]\nname = "{FederationSection().name}"\n', ""),  # without a name
        ("[federation]\nname = 3\n", ""),
        ("federation = 3", ""),
        ("[method]\n", ""),
        ("no TOML", ""),
    ],
)
def test_a_federation_has_the_name_of_its_configuration(
    history: History, config: str, name: str
) -> None:
    run = replace(history.run, config=config)
    assert replace(history, run=run).federation == name


def test_a_lost_client_is_said_aloud_and_one_that_works_is_not(history: History) -> None:
    live = page_kit.live()
    bob = live["round"]["clients"][0]
    assert not any("data-say" in a for _, a in Page(shown("now", history, live)).tags)
    live["round"]["clients"][0] = {**bob, "here": False, "expected": None}
    said = [a["data-say"] for _, a in Page(shown("now", history, live)).tags if "data-say" in a]
    assert said == ["bob is away"]


@pytest.mark.parametrize(
    ("mode", "words_"), [("paused", "no further round"), ("draining", "stops")]
)
def test_an_order_of_the_operator_stands_where_it_is_seen(
    history: History, mode: str, words_: str
) -> None:
    live = {**page_kit.live(), "mode": mode}
    assert words_ in words(shown("now", history, live))
    assert mode in words(shown("head", history, live))


def test_without_the_server_the_page_says_what_the_ledger_knows_and_what_to_do(
    history: History,
) -> None:
    text = words(shown("now", history))
    assert "fcil-server serve" in text
    assert "train round 0 is open since" in text
    assert "3 asked, 1 update is on disk" in text
    assert "is not known" in words(shown("clients", history))
    assert "connected" not in words(shown("clients", history)).replace("is connected is not", "")


def test_an_older_run_names_the_one_under_way(history: History) -> None:
    live = {**page_kit.live(), "run": "r20990101-000000-0000"}
    html = shown("now", history, live)
    assert [a["href"] for a in Page(html).all("a")] == ["/?run=r20990101-000000-0000"]


def test_clients_have_state_bytes_and_the_newest_refusal(small: Ledger, history: History) -> None:
    html = shown("clients", history, page_kit.live())
    rows = {a["id"]: a for a in Page(html).all("tr") if "id" in a}
    assert set(rows) == {f"client-{c}" for c in (ALICE, BOB, GONE)}
    text = words(html)
    for expected in ("ready", "resting", "on battery", "got (9, 192)", "does not match"):
        assert expected in text
    by_client = {m.client: m for m in history.members}
    data = [f for f in small.bytes.all(RUN) if f.client == ALICE and f.source == "kernel"]
    up = sum(f.wire for f in data if f.direction is Direction.UP)
    assert by_client[ALICE].up == up
    assert format_bytes(up) in text


def test_who_took_part_and_is_away_is_seen_and_who_is_revoked_comes_last(
    history: History,
) -> None:
    live = page_kit.live()
    live["peers"] = {BOB: live["peers"][BOB]}
    alice, bob, gone = history.members
    people = (replace(alice, standing="revoked"), replace(gone, recent=False), bob)
    html = shown("clients", replace(history, members=people), live)
    rows = [i for i in Page(html).ids if i.startswith("client-")]
    assert rows == [f"client-{c}" for c in (BOB, GONE, ALICE)]
    assert "2 enrolled, 1 former, 1 connected." in words(html)
    missed = shown("clients", replace(history, members=(bob, gone)), {**live, "peers": {}})
    assert "2 away that took part in the last rounds" in words(missed)
    assert missed.count('<span class="badge warn">away') == 2


def test_tickets_are_seen_while_they_are_open(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger, HistoryReader(ledger.path) as reader:
        ledger.tickets.add("over", curve=b"a" * 32, signing=b"s", expires_at=page_kit.NOW)
        later = ledger.now + 3600
        ledger.tickets.add("<b>van</b>", curve=b"b" * 32, signing=b"s", expires_at=later)
        open_one = reader.read()
        assert "Open tickets: <b>van</b> (valid until" in words(shown("clients", open_one))
        ledger.tickets.withdraw("<b>van</b>")
        assert reader.read().changed(open_one.version) == {"clients"}
        assert reader.read().tickets == ()


def test_nobody_who_may_not_act_sees_a_button(history: History) -> None:
    live = page_kit.live()
    for name in SECTIONS:
        html = str(section(name, history, live, acts=False))
        assert not Page(html).all("button")
        assert "data-act" not in html
    ids = [a.get("id", "") for a in Page(shown("clients", history, live)).all("button")]
    assert sum(i.startswith("revoke-") for i in ids) == 3


def test_clients_are_found_by_name_state_and_device_and_leafed_through(tmp_path: Path) -> None:
    with page_kit.crowd(tmp_path / "l", members=130) as ledger:
        crowd = read(ledger)
    first, last = (shown("clients", crowd, page=p) for p in (1, 99))
    assert "page 1 of 3" in words(first)
    assert "page 3 of 3" in words(last)
    ids = [i for p in (1, 2, 3) for i in Page(shown("clients", crowd, page=p)).ids]
    assert sum(i.startswith("client-") for i in ids) == 130
    name = crowd.members[77].name
    found = Page(shown("clients", crowd, find=name.upper()))
    assert f"client-{crowd.members[77].client}" in found.ids
    assert sum(i.startswith("client-") for i in found.ids) < 20
    assert "No client matches" in words(shown("clients", crowd, find="no such name"))
    assert "revoked" in words(shown("clients", crowd, find="revoked"))


def test_classes_stand_with_who_brought_them_and_those_that_wait_come_first(
    history: History,
) -> None:
    html = shown("tasks", history)
    text = words(html)
    assert text.index("<b>walrus</b>") < text.index("All classes")
    assert "waits for a task" in text
    assert "8 in tasks, 1 waiting" in text
    said = [a["data-say"] for _, a in Page(html).tags if "data-say" in a]
    assert said == ["New class <b>walrus</b>"]
    assert "bob" in text[text.index("owl") :]


@pytest.mark.parametrize(("planned", "listed"), [(None, False), (0, True)])
def test_what_an_erased_member_brought_is_not_said_to_be_the_configurations(
    history: History, planned: int | None, listed: bool
) -> None:
    classes = tuple(replace(c, first_seen_by=None, planned_task=planned) for c in history.classes)
    text = words(shown("tasks", replace(history, classes=classes)))
    assert ("the configuration" in text) is listed


def test_events_say_how_bad_they_are_and_what_to_do(history: History) -> None:
    event = replace(history.events[0], code="disk_full", text="no space is left.", level="error")
    text = words(shown("events", replace(history, events=(event, *history.events))))
    assert "error" in text
    assert "Free space" in text  # from the catalogue of errors
    newest, oldest = (text.index(t) for t in ("It is started again", "task 2 is learned"))
    assert newest < oldest


def test_hostile_names_are_text_everywhere(history: History) -> None:
    for name in page_kit.HOSTILE_NAMES:
        members = tuple(replace(m, name=name, refusal=name, device=name) for m in history.members)
        classes = tuple(replace(c, name=name) for c in history.classes)
        events = tuple(replace(e, text=name) for e in history.events)
        rounds = tuple(
            replace(r, without=tuple(replace(a, name=name, why=name) for a in r.without))
            for r in history.rounds
        )
        run = replace(history.run, method=name, config=name)
        bad = replace(
            history, members=members, classes=classes, events=events, rounds=rounds, run=run
        )
        live = page_kit.live()
        live["waiting_for"] = name
        live["round"]["clients"] = [
            {**one, "name": name, "reason": name} for one in live["round"]["clients"]
        ]
        good = [Page(shown(s, history, page_kit.live())) for s in SECTIONS]
        for clean, one in zip(good, SECTIONS, strict=True):
            page = Page(shown(one, bad, live))
            assert page.open == []
            assert {t for t, _ in page.tags} <= {t for t, _ in clean.tags} | {"p"}
            assert not any(a.startswith("on") for _, attrs in page.tags for a in attrs)
            links = {a.get("href", "").partition(":")[0] for a in page.all("a")}
            assert "javascript" not in links


def test_a_long_run_of_many_clients_stays_bounded(tmp_path: Path) -> None:
    """5,000 rounds, 1,000 clients, 1,000 tasks and classes, 2,000 events with long words."""
    with page_kit.small(tmp_path / "l") as ledger:
        base = read(ledger)
    line, member, task = base.rounds[5], base.members[2], base.tasks[0]
    assert line.without
    long = "w" * 200
    rounds = tuple(
        replace(line, seq=i, key=line.key._replace(task=i // 5), without=line.without * 12)
        for i in range(5000)
    )
    members = tuple(
        replace(member, client=ClientId(f"{i:026}"), name=long, device=long, refusal=long * 10)
        for i in range(1000)
    )
    classes = tuple(_class(i, long) for i in range(1000))
    tasks = tuple(TaskRow(task.run, i, tuple(range(1000)), 1.0, 2.0) for i in range(1000))
    event = base.events[0]
    events = tuple(Event(i, event.at, "error", RUN, None, "x", long * 10) for i in range(2000))
    peers = {m.client: {"state": "refused", "why": long * 10} for m in members}
    runs = tuple(RunName(f"r{i}", "m", "done") for i in range(100))
    big = replace(
        base, rounds=rounds, members=members, classes=classes, tasks=tasks, events=events, runs=runs
    )
    live = page_kit.live()
    live["peers"] = peers
    live["round"]["clients"] = [{**c, "name": long} for c in live["round"]["clients"]] * 20
    sizes = {
        (name, last): len(shown(name, big, live, last=last))
        for name in SECTIONS
        for last in ("50", "200", "all")
    }
    assert max(sizes.values()) < BOUND, max(sizes, key=lambda k: sizes[k])


def _class(i: int, name: str) -> ClassRow:
    return ClassRow(RUN, f"k{i}", name, i, None, i, BOB, 1.0, hidden=False, admitted=True)


def test_many_tasks_show_the_newest_part_of_the_matrix(tmp_path: Path) -> None:
    with page_kit.long(tmp_path / "l", rounds=240, tasks=60) as ledger:
        long = read(ledger)
    html = shown("accuracy", long)
    assert len(re.findall(r'<td class="h\d+">', html)) == 20 * 21 // 2
    assert "the first 39 tasks are left out here" in words(html)
    assert (
        len(re.findall(r'<td class="h\d+">', shown("accuracy", long, last="all"))) == 59 * 60 // 2
    )


def test_while_older_rounds_are_not_read_sums_are_said_to_grow(history: History) -> None:
    partial = replace(history, unread=1234)
    assert "1,234 older rounds are still being read" in words(shown("head", partial))
    assert "still being read" not in words(shown("head", history))
    assert "chart-cost" in shown("accuracy", history)
    assert "chart-cost" not in shown("accuracy", partial)  # early tasks would seem to cost nothing


@pytest.mark.parametrize(
    "query",
    [
        {"last": "5"}, {"last": ""}, {"page": "0"}, {"page": "-1"}, {"page": "9" * 50},
        {"page": "1.5"}, {"page": "\N{ARABIC-INDIC DIGIT TWO}"}, {"find": "x" * 101},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_a_sentence(query: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="expected"):
        Params.parse(query)


def test_what_is_asked_for_is_read() -> None:
    parsed = Params.parse({"last": "all", "page": "3", "find": "bob", "run": "r1"})
    assert parsed == Params("all", 3, "bob")
    assert Params.parse({}) == Params()


def test_before_the_first_run_every_section_says_so(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l") as ledger:
        ledger.events.add("info", "started", "the server started")
        nothing = read(ledger)
    assert nothing.run is None
    assert [e.text for e in nothing.events] == ["the server started"]
    for name in SECTIONS:
        for live in (None, {**page_kit.live(), "run": None, "round": None}):
            assert Page(shown(name, nothing, live)).open == []
