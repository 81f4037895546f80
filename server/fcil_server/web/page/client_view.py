"""One client in detail: its identity, its newest rounds, its refused messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fcil_protocol.ids import ClientId
from fcil_server.ledger.labels import ANSWERS
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import ClientRow, RefusalRow, RunRow, TaskRow
from fcil_server.reports.charts.charts import figure
from fcil_server.reports.charts.history import History
from fcil_server.reports.charts.render import template
from fcil_server.reports.charts.spec import Chart, Mark, Series, X, Y
from fcil_server.reports.results.client_history import ClientReader, ClientRound
from fcil_server.reports.sections.clients import ClientLine, row_of
from fcil_server.reports.sections.events import advice_for

MAX_ROUNDS = 200
MAX_WITHOUT = 20  # of these, those in which no update of it counted
MAX_REFUSALS = 20
MAX_EVENTS = 20
MAX_NAMES = 200

# A client's result in a round, in words, and its rating.
_BECAME = {
    "counted": ("counted", "good"),
    "accepted": ("has answered", "good"),
    "excluded": ("left out", "bad"),
    "declined": (ANSWERS["declined"], "warn"),
    "straggler": (ANSWERS["straggler"], "bad"),
    "lost": (ANSWERS["lost"], "bad"),
    "surplus": (ANSWERS["surplus"], "quiet"),
    "asked": ("was asked", "quiet"),
}
_WELL = frozenset({"counted", "accepted", "asked"})


@dataclass(frozen=True)
class ClientFact:
    """A fact about a client; empty: unknown."""

    title: str
    text: str
    note: str = ""


@dataclass(frozen=True)
class ClientRoundRow:
    """A round, the client's result in it, and its rating."""

    one: ClientRound
    words: str
    look: str


def client_html(
    history: History,
    live: Mapping[str, Any] | None,
    ledger: Path,
    client: str,
    *,
    acts: bool,
) -> Markup | None:
    """Return the detail view of one client of a run; None: there is no such client.

    Args:
        history: of the run.
        live: the server's answer about itself; None: it does not answer.
        ledger: its path.
        client: its id.
        acts: True if the visitor may act: then there is a button.

    Raises:
        FcilError: the ledger cannot be read.
    """
    member = next((m for m in history.members if m.client == client), None)
    with Ledger(ledger, read_only=True) as opened:
        known = opened.clients.get(ClientId(client))
        if member is None or known is None:
            return None
        row = row_of(member, live)
        peer = (live or {}).get("peers", {}).get(client, {})
        refusals = opened.refusals.of_client(known.client_id, limit=MAX_REFUSALS)
        context = (
            _in_run(ClientReader(opened.database), history, known) if history.run else _NOTHING
        )
    became = context["became"]
    return template(
        "client.html",
        row=row,
        m=member,
        client=known,
        run=history.run,
        newer=history.newer,
        facts=_facts(history.run, row, peer, became, refusals),
        refusals=[(r, advice_for(r.code, r.reason)) for r in refusals],
        events=[e for e in history.events if e.client == client][:MAX_EVENTS],
        acts=acts and row.may_be_revoked,
        **context,
    )


_NOTHING: dict[str, Any] = {
    "became": {},
    "sums": [],
    "asked": 0,
    "rounds": [],
    "without": [],
    "chart": "",
    "brought": [],
    "missed": [],
}


def _in_run(reader: ClientReader, history: History, known: ClientRow) -> dict[str, Any]:
    """Return the client's part in the run."""
    assert history.run is not None, "there is a run"
    run, client = history.run.run_id, known.client_id
    became = reader.round_results(run, client)
    newest = reader.newest_rounds(run, client, MAX_ROUNDS)
    if newest and newest[0].became == "asked":
        became = {"asked": 1, **became}
    rows = [ClientRoundRow(one, *_in_words(one.became)) for one in newest]
    took_part = reader.counted_tasks_of(run, client)
    return {
        "became": became,
        "sums": [(*_in_words(word), n) for word, n in became.items()],
        "asked": sum(became.values()),
        "rounds": rows,
        "without": [row for row in rows if row.one.became not in _WELL][:MAX_WITHOUT],
        "chart": figure(bytes_chart(newest[::-1])) if newest else "",
        "brought": [c.name for c in reader.first_brought_classes(run, client, MAX_NAMES)],
        "missed": [_missed(t, known) for t in history.tasks if _is_missed(t, took_part)],
    }


def _in_words(became: str) -> tuple[str, str]:
    return _BECAME.get(became, (became, "quiet"))


def _is_missed(task: TaskRow, took_part: set[int]) -> bool:
    return task.closed_at is not None and task.task not in took_part


def _missed(task: TaskRow, known: ClientRow) -> str:
    assert task.closed_at is not None, "only a closed one is missed"
    later = task.closed_at < known.enrolled_at
    return f"{task.task} (before it was enrolled)" if later else str(task.task)


def _facts(
    run: RunRow | None,
    row: ClientLine,
    peer: Mapping[str, Any],
    became: Mapping[str, int],
    refusals: Sequence[RefusalRow],
) -> list[ClientFact]:
    images, classes = peer.get("images"), peer.get("classes")
    holds = "" if images is None else f"{images:,} images of {classes:,} classes"
    while_away = "" if row.here else "known while it is connected"
    return [
        ClientFact("Device", row.device),
        ClientFact("Package", str(peer.get("package") or ""), while_away),
        ClientFact("Holds", holds, while_away),
        _backbone(run, peer, became, refusals),
    ]


def _backbone(
    run: RunRow | None,
    peer: Mapping[str, Any],
    became: Mapping[str, int],
    refusals: Sequence[RefusalRow],
) -> ClientFact:
    """Return the known facts about its backbone; a client with another one is refused."""
    title = "Backbone"
    ours = _ours(run)
    if not ours:
        return ClientFact(title, "", "the method needs none, or the run has not said which")
    if peer.get("state") in ("ready", "resting"):
        agreement = peer.get("agreement")
        if agreement is None:
            return ClientFact(title, ours, "that of the run")
        return ClientFact(
            title,
            ours,
            f"that of the run; its features of the probe images differ by {agreement:.1e}",
        )
    if became.get("counted"):
        return ClientFact(title, ours, "that of the run, when it last took part")
    other = next((r.reason for r in refusals if r.code == "backbone_mismatch"), "")
    return ClientFact(title, other, "it was refused" if other else "known once it takes part")


def _ours(run: RunRow | None) -> str:
    backbone = run.backbone if run else {}
    digest = str(backbone.get("digest") or "")
    return f"{backbone.get('name', '')} {digest[:12]}".strip() if digest else ""


def bytes_chart(rounds: Sequence[ClientRound]) -> Chart:
    """Return the chart of one client's wire bytes, up and down, in some of its rounds, in order."""
    up = Series("up", "a", tuple(r.up.true_wire for r in rounds), "up")
    down = Series("down", "b", tuple(r.down.true_wire for r in rounds), "down")
    keys = [r.round for r in rounds]
    names = tuple(f"task {k.task}, {k.kind} {k.round}" for k in keys)
    starts = [i for i, k in enumerate(keys) if i and k.task != keys[i - 1].task]
    return Chart(
        "client-bytes",
        "bars",
        "Its bytes on the wire per round: up (left bars) and down (right bars)",
        X("round", tuple(str(k.seq) for k in keys), names),
        Y("B"),
        (up, down),
        None,
        tuple(Mark(i, f"task {keys[i].task}") for i in starts),
    )
