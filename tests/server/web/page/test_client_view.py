"""One client in detail: what the ledger and the server know of it, bounded and escaped."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import page_kit
import sample_run
from fcil_protocol.ids import ClientId, RoundKey, RunId
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.reports.charts.history import History
from fcil_server.reports.results.client_history import ClientReader
from fcil_server.web.page import client_view
from fcil_server.web.page.client_view import bytes_chart, client_html
from fcil_server.web.page.reader import HistoryReader
from sample_run import ALICE, BOB, GONE, RUN, Clock


def history_of(path: Path) -> History:
    reader = HistoryReader(path)
    try:
        return reader.read(None)
    finally:
        reader.close()


class Tags(HTMLParser):
    """What a browser makes of some HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.scripts: list[dict[str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "script":
            self.scripts.append(dict(attrs))


class Seen:
    """A federation whose clients are looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.history = history_of(path)

    def html(self, client: str, live: dict[str, Any] | None = None, *, acts: bool = False) -> str:
        found = client_html(self.history, live, self.path, client, acts=acts)
        assert found is not None
        return str(found)

    def text(self, client: str, live: dict[str, Any] | None = None) -> str:
        """Return what is read: without tags, each run of blanks as one."""
        html = re.sub(r"<figure.*?</figure>", "", self.html(client, live), flags=re.DOTALL)
        return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    path = tmp_path_factory.mktemp("small") / LEDGER_NAME
    page_kit.small(path).close()
    return Seen(path)


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    path = tmp_path_factory.mktemp("crowd") / LEDGER_NAME
    page_kit.crowd(path, members=101).close()
    return Seen(path)


def test_what_became_of_it_is_counted_and_told_with_reasons(small: Seen) -> None:
    text = small.text(GONE)
    assert "Asked for 13 rounds" in text
    assert "counted 10, declined 2, was away 1." in text
    without = small.html(GONE).partition("Rounds without it")[2].partition("</table>")[0]
    assert re.findall("(task [0-9], [a-z]+ [0-9])<", without) == [
        "task 3, train 0",
        "task 1, train 1",
        "task 1, train 0",
    ]
    assert "gone 30 s" in without
    assert "on battery" in without
    left_out = small.text(BOB)
    assert "left out 1" in left_out
    assert "40 times the round" in left_out


def test_what_it_says_of_itself_is_shown_while_it_is_connected(small: Seen) -> None:
    here = small.text(ALICE, page_kit.live())
    assert "ready" in here
    assert "Package 0.1.0" in here
    assert "240 images of 4 classes" in here
    assert "differ by 1.0e-06" in here
    away = small.text(ALICE)
    assert "Package not reported" in away
    assert "Holds not reported" in away
    assert "that of the run, when it last took part" in away


def test_who_was_turned_away_for_its_backbone_is_said_to_have_another(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_NAME
    ledger = Ledger(path, clock=Clock())
    sample_run.add_clients(ledger)
    sample_run.add_run(ledger)
    ledger.refusals.add(ALICE, "backbone_mismatch", "the client's backbone has weights f00d.")
    ledger.close()
    seen = Seen(path)
    assert "weights f00d. (it was refused)" in seen.text(ALICE)
    assert "Use the same weights file" in seen.text(ALICE)
    assert "Backbone not reported (known once it takes part)" in seen.text(BOB)
    assert "has not been asked in any round" in seen.text(BOB)


def test_refusals_come_with_what_to_do(small: Seen) -> None:
    text = small.text(GONE)
    assert "the update's signature does not match" in text.replace("&#39;", "'")
    assert "The bytes were altered, or signed with another key" in text


def test_tasks_in_which_nothing_of_it_counted_are_named(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / LEDGER_NAME
    ledger = sample_run.build(path, clock=clock)
    clock.now += 1
    late = ClientId("dddddddddddddddddddddddddd")
    ledger.clients.add(late, "late", curve=b"l" * 32, signing=b"l", sealing=b"l")
    key = RoundKey(RUN, 2, "train", 7)
    ledger.rounds.open(key, asked=[late], base_state=1, remaining_s=None)
    ledger.close()
    text = Seen(path).text(late)
    assert "in 3 closed tasks: 0 (before it was enrolled), 1 (before it was enrolled)" in text
    assert "was asked 1" in text


def test_an_unknown_client_has_no_view(small: Seen) -> None:
    for client in ("", "alice", "f" * 26, ALICE[:8], "x" * 5000, "' OR 1=1 --"):
        assert client_html(small.history, None, small.path, client, acts=True) is None


def test_the_button_is_there_for_who_may_act_on_a_member(small: Seen, crowd: Seen) -> None:
    assert f'data-act="revoke" data-field-client="{ALICE}"' in small.html(ALICE, acts=True)
    assert "data-act" not in small.html(ALICE)
    revoked = next(m for m in crowd.history.members if m.standing == "revoked")
    assert "data-act" not in crowd.html(revoked.client, acts=True)


def test_names_and_reasons_of_clients_are_text(crowd: Seen) -> None:
    hostile = [m for m in crowd.history.members if m.name in page_kit.HOSTILE_NAMES]
    assert len(hostile) == len(page_kit.HOSTILE_NAMES)
    for member in hostile:
        html = crowd.html(member.client, acts=True)
        parts = Tags(html)
        assert parts.scripts == [{"type": "application/json", "class": "spec"}] * len(parts.scripts)
        assert not {"img", "i", "b", "iframe", "style"} & parts.tags
        assert not {name for name in parts.attributes if name.startswith("on")} | (
            {"style"} & parts.attributes
        )


def test_the_chart_has_its_bytes_up_and_down_as_the_ledger_counts_them(small: Seen) -> None:
    with Ledger(small.path, read_only=True) as ledger:
        rounds = ClientReader(ledger.database).newest_rounds(RUN, ALICE, 200)[::-1]
        counts = [c for c in ledger.bytes.all(RUN) if c.client == ALICE and c.round is not None]
    chart = bytes_chart(rounds)
    for series in chart.series:
        kernel = sum(c.wire for c in counts if c.direction == series.name and c.source == "kernel")
        assert sum(series.values) == kernel > 0
    assert [mark.text for mark in chart.marks] == ["task 1", "task 2", "task 3"]
    spec = re.search(r'class="spec">(.*?)</script>', small.html(ALICE), re.DOTALL)
    assert spec is not None
    assert len(json.loads(spec[1])["series"]) == 2


def test_of_many_rounds_only_the_newest_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_view, "MAX_ROUNDS", 20)
    path = tmp_path / LEDGER_NAME
    page_kit.long(path, rounds=120, tasks=4).close()
    seen = Seen(path)
    client = seen.history.members[0].client
    html = seen.html(client)
    shown = [int(n) for n in re.findall(r'<tr id="client-round-(\d+)"', html)]
    assert len(shown) == 20
    assert shown == sorted(shown, reverse=True)
    with Ledger(path, read_only=True) as ledger:
        reader = ClientReader(ledger.database)
        took_part = [r.round.seq for r in reader.newest_rounds(page_kit.LONG_RUN, client, 999)]
        assert sum(reader.round_results(page_kit.LONG_RUN, client).values()) == len(took_part)
    assert shown == took_part[:20]
    assert f"The newest 20 rounds of {len(took_part)}" in html


def test_before_the_first_run_a_client_can_be_looked_at(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_NAME
    ledger = Ledger(path, clock=Clock())
    sample_run.add_clients(ledger)
    ledger.close()
    assert "There is no run yet" in Seen(path).text(ALICE)


def test_rounds_that_a_fork_copied_are_counted_once(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_NAME
    with page_kit.small(path, running=False) as ledger:
        before = ledger.updates.rounds_by_client()
        newest = ledger.states.newest(RUN)
        assert newest is not None
        with ledger.transaction():
            ledger.forks.begin(RUN, newest.state, RunId("r20260102-040000-f0f0"))
    with Ledger(path, read_only=True) as ledger:
        reader = ClientReader(ledger.database)
        assert {client: reader.counted(client) for client in before} == before
