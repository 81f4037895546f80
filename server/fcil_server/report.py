"""What a run came to, for people: one self-contained HTML file.

The page makes no request: styles and charts are inline, and its content security policy
forbids everything else. All text that comes from configurations and clients is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from fcil_server.ledger_rows import Cause, Direction, Round
from fcil_server.metrics import FORGETTING, Metrics
from fcil_server.report_charts import accuracy_chart, bytes_chart, cost_chart, seconds_chart
from fcil_server.report_claims import accounts, claimed_round_bytes
from fcil_server.report_page import (
    NOTHING,
    duration,
    folded,
    page,
    percent,
    points,
    section,
    table,
    when,
)
from fcil_server.rundata import Bytes, RunData, format_bytes

_OPEN_ROUNDS = 40  # longer tables start folded

_CAUSES = {
    Cause.UPDATE: "updates",
    Cause.BROADCAST: "broadcasts",
    Cause.CATCH_UP: "catch-up of clients that were away",
    Cause.HANDSHAKE: "handshakes",
    Cause.CONTROL: "control",
    Cause.CONNECTION: "whole connections",
}


def html_report(data: RunData) -> str:
    """Return the report of a run as one HTML document."""
    run = data.run
    title = f"{run.method}: {run.run_id}"
    body = (
        _head(data),
        section("Accuracy", _accuracy(data)),
        section("Bytes", _bytes(data)),
        section("Rounds", _rounds(data)),
        section("Tasks", _tasks(data)),
        section("Clients", _clients(data)),
        section("Configuration", _configuration(data)),
    )
    return page(title, "".join(body))


# --- HTML -----------------------------------------------------------------------------------


def _head(data: RunData) -> str:
    run = data.run
    faa, aia, lost = data.headline
    up, down = data.bytes_of(Direction.UP), data.bytes_of(Direction.DOWN)
    seconds = data.seconds()["total_s"]
    cards = [
        ("FAA", percent(faa), "accuracy after the last task"),
        ("AIA", percent(aia), "mean accuracy over all tasks"),
        ("Forgetting", points(lost), "from the best to the last"),
        ("Up", format_bytes(up.true_wire), "on the wire, all clients"),
        ("Down", format_bytes(down.true_wire), "on the wire, all clients"),
        ("Time", duration(seconds), f"{len(data.rounds)} rounds, {len(data.tasks)} tasks"),
    ]
    boxes = "".join(
        f'<div class="card">{escape(name)}<b>{escape(value)}</b>'
        f'<span class="faint">{escape(note)}</span></div>'
        for name, value, note in cards
    )
    parent = f", forked from {run.parent_run} at state {run.parent_state}" if run.parent_run else ""
    return (
        f"<h1>{escape(run.method)} {escape(run.method_version)}</h1>"
        f'<p class="faint">run <code>{escape(run.run_id)}</code>, {escape(run.status.value)}, '
        f"started {when(run.created_at)}, seed {run.seed}{escape(parent)}</p>"
        f'<div class="cards">{boxes}</div>'
    )


def _accuracy(data: RunData) -> str:
    m = data.metrics
    if m is None:
        return "<p>Nothing has been evaluated yet.</p>"
    whose = "the clients' test images" if data.pooled else "the server's test folder"
    text = (
        f"<p>Measured on {whose}, over all classes seen so far and without a task id; "
        f"the last evaluation used {m.test_images[-1]:,} images"
        f"{f' of {m.evaluators[-1]} clients' if data.pooled else ''} and covered "
        f"{100 * m.coverage[-1]:.0f} % of the seen classes.</p>"
    )
    charts = accuracy_chart(m) + cost_chart([(data.run.method, data)])
    return text + _heat_map(m) + charts + _definitions(data)


def _heat_map(m: Metrics) -> str:
    head = "".join(f"<th>task {i}</th>" for i in range(m.tasks))
    lines = []
    for t, row in enumerate(m.matrix):
        cells = "".join(_heat_cell(v) for v in row) + "<td></td>" * (m.tasks - 1 - t)
        lines.append(
            f"<tr><th>after task {t}</th>{cells}<td><b>{percent(m.task_mean[t])}</b></td></tr>"
        )
    return (
        '<div class="scroll"><table class="heat"><caption class="faint">Accuracy on the classes '
        "of each task, percent</caption>"
        f"<tr><th></th>{head}<th>mean</th></tr>{''.join(lines)}</table></div>"
    )


def _heat_cell(value: float | None) -> str:
    if value is None:
        return f"<td>{NOTHING}</td>"
    alpha = 0.06 + 0.94 * value / 100
    strong = ' class="strong"' if alpha > 0.6 else ""
    return f'<td{strong} style="background:rgb(0 94 148 / {alpha:.2f})">{value:.1f}</td>'


def _definitions(data: RunData) -> str:
    rows: list[Sequence[str]] = []
    for whose, m in (("clients", data.pooled), ("server's folder", data.central)):
        if m is None:
            continue
        rows.append((whose, "task mean (default)", percent(m.faa), percent(m.aia), ""))
        weighted = (percent(m.faa_sample_weighted), percent(m.aia_sample_weighted))
        rows.append((whose, "all images", *weighted, ""))
        rows.append((whose, "mean over classes", percent(m.macro[-1]), "", ""))
        rows += [
            (whose, f"forgetting, {name}", "", "", points(m.forgetting[name]))
            for name in FORGETTING
        ]
        if m.forgetting_matched != m.forgetting:
            matched = points(m.forgetting_matched[FORGETTING[0]])
            rows.append((whose, "forgetting, same clients before and after", "", "", matched))
    head = ("test images", "definition", "FAA", "AIA", "points lost")
    return folded("All definitions", table(head, rows, text=2))


def _bytes(data: RunData) -> str:
    parts = [
        table(
            ("direction", *_LEVELS),
            [(d.value, *_levels(data.bytes_of(d))) for d in Direction],
        ),
        _LEVELS_NOTE,
    ]
    if data.rounds:
        parts.append(bytes_chart(data.rounds, claimed_round_bytes(data)))
        parts.append(_claims(data))
    rows = [
        (d.value, _CAUSES[c], *_levels(data.bytes_of(d, c)))
        for d in Direction
        for c in Cause
        if data.bytes_of(d, c) != Bytes()
    ]
    outside = {d: Bytes.total(f for f in data.outside if f.direction is d) for d in Direction}
    rows += [(d.value, "outside any run", *_levels(b)) for d, b in outside.items() if b != Bytes()]
    for d in Direction:
        total = data.bytes_of(d)
        if total.wire_kernel:
            rest = format_bytes(total.rest)
            nothing = [NOTHING] * 4
            rows.append((d.value, _REST, *nothing, rest, NOTHING, NOTHING))
    parts.append(folded("By cause", table(("direction", "cause", *_LEVELS), rows, text=2)))
    return "".join(parts)


def _claims(data: RunData) -> str:
    claim, ways = accounts(data)

    def cell(size: float | None) -> str:
        return "not told" if size is None else format_bytes(size)

    shown = table(
        ("one client, one round", "up", "down"), [(a.how, cell(a.up), cell(a.down)) for a in ways]
    )
    if claim is None:
        return shown
    note = f"The paper: {claim.said}. Not counted there: {claim.leaves_out}."
    return f'{shown}<p class="faint">{escape(note)}</p>'


def _rounds(data: RunData) -> str:
    chart = seconds_chart(data.rounds) if data.rounds else ""
    return chart + _round_table(data)


def _round_table(data: RunData) -> str:
    rows = []
    for view in data.rounds:
        row = view.round
        away = [
            f"{data.name_of(c)}: {', '.join(filter(None, (a.value, why)))}"
            for c, (a, why) in view.silent.items()
        ]
        away += [f"{data.name_of(c)}: excluded, {why}" for c, why in view.excluded.items()]
        rows.append(
            (
                str(row.seq),
                f"{row.task}",
                f"{row.kind} {row.round}",
                _end(row),
                f"{len(view.counted)} of {len(row.asked)}",
                duration((row.closed_at or row.opened_at) - row.opened_at),
                ", ".join(f"{k.removesuffix('_s')} {v:.2f} s" for k, v in row.phases.items()),
                format_bytes(view.up.true_wire),
                format_bytes(view.down.true_wire),
                "; ".join(away),
            )
        )
    head = ("", "task", "round", "end", "counted", "time", "phases", "up", "down", "without")
    lines = table(head, rows, text=0, wide=(2, 3, 6, 9))
    few = len(rows) <= _OPEN_ROUNDS
    return lines if few else folded(f"{len(rows)} rounds", lines)


def _end(row: Round) -> str:
    how = ", ".join(
        filter(
            None, (row.why.replace("_", " "), f"reopened {row.reopened} x" if row.reopened else "")
        )
    )
    return (row.outcome.value if row.outcome else "") + (f" ({how})" if how else "")


def _tasks(data: RunData) -> str:
    rows = [
        (
            str(t.task),
            ", ".join(data.class_names.get(i, f"#{i}") for i in t.class_ids),
            when(t.opened_at),
            when(t.closed_at),
        )
        for t in data.tasks
    ]
    return table(("task", "classes", "opened", "learned"), rows, text=0, wide=(1,))


def _clients(data: RunData) -> str:
    counted = [c for v in data.rounds for c in v.counted]
    rows = []
    for client in data.clients.values():
        wire = [
            Bytes.total(
                f for f in data.flows if f.client == client.client_id and f.direction is d
            ).true_wire
            for d in Direction
        ]
        times = str(counted.count(client.client_id))
        sizes = [format_bytes(w) for w in wire]
        rows.append((client.name, client.client_id, client.device, times, *sizes))
    head = ("name", "id", "device", "updates counted", "up", "down")
    return table(head, rows, text=3)


def _configuration(data: RunData) -> str:
    run = data.run
    parts = (
        ("Configuration of the run", run.config),
        ("Options of the method", json.dumps(run.hparams, indent=2)),
        ("Backbone", json.dumps(run.backbone, indent=2)),
        ("Environment", json.dumps(run.environment, indent=2)),
    )
    return "".join(folded(title, f"<pre>{escape(text)}</pre>") for title, text in parts)


_LEVELS = (
    "tensors", "sealed", "application", "wire (predicted)", "wire (kernel)",
    "sent again", "Ethernet frames",
)  # fmt: skip
_REST = "heartbeats and the rest: kernel minus predicted"


_LEVELS_NOTE = (
    '<p class="faint">Papers report the tensors alone. Sealed adds names and encryption, '
    "application all messages, wire TCP payload with ZMTP and CURVE. What a message takes is "
    "predicted, and named by its cause; the kernel counts whole connections, where it can be "
    "asked, also what it sent again and all as Ethernet frames. MB = 1,000,000 bytes.</p>"
)


def _levels(b: Bytes) -> tuple[str, ...]:
    exact = (format_bytes(n) for n in (b.tensor, b.sealed, b.application, b.wire))
    if not b.wire_kernel:
        return (*exact, *[NOTHING] * 3)
    return (*exact, *(format_bytes(n) for n in (b.wire_kernel, b.retransmitted, b.link)))
