"""What a run came to, for people: one self-contained HTML file, and tables for terminals.

The page makes no request: styles and charts are inline, and its content security policy
forbids everything else. All text that comes from configurations and clients is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from fcil_protocol.ids import RunId
from fcil_server.ledger import Ledger
from fcil_server.ledger_rows import Cause, Direction
from fcil_server.metrics import FORGETTING, Metrics
from fcil_server.report_charts import STYLE, accuracy_chart, bytes_chart
from fcil_server.rundata import Bytes, RunData, collect, format_bytes, sum_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_NOTHING = "-"  # what is undefined
_OPEN_ROUNDS = 40  # longer tables start folded, or are summed

_WIDE_TASKS = 8  # with more tasks the terminal's matrix has whole percents and no lines

_CAUSES = {
    Cause.UPDATE: "updates",
    Cause.BROADCAST: "broadcasts",
    Cause.CATCH_UP: "catch-up of clients that were away",
    Cause.HANDSHAKE: "handshakes",
    Cause.CONTROL: "control and heartbeats",
    Cause.CONNECTION: "whole connections",
}


def html_report(data: RunData) -> str:
    """Return the report of a run as one HTML document."""
    run = data.run
    title = f"{run.method}: {run.run_id}"
    body = (
        _head(data),
        _section("Accuracy", _accuracy(data)),
        _section("Bytes", _bytes(data)),
        _section("Rounds", _rounds(data)),
        _section("Tasks", _tasks(data)),
        _section("Clients", _clients(data)),
        _section("Configuration", _configuration(data)),
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def summary_tables(ledger: Ledger, run: RunId) -> list[RenderableType]:
    """Return what `fcil-server report` and the demo print: matrix, headline numbers, bytes."""
    data = collect(ledger, run)
    return [*_matrix_table(data), _headline_table(data), _bytes_table(data)]


# --- HTML -----------------------------------------------------------------------------------


def _head(data: RunData) -> str:
    run = data.run
    faa, aia, lost = data.headline
    up, down = data.bytes_of(Direction.UP), data.bytes_of(Direction.DOWN)
    seconds = data.seconds()["total_s"]
    cards = [
        ("FAA", _percent(faa), "accuracy after the last task"),
        ("AIA", _percent(aia), "mean accuracy over all tasks"),
        ("Forgetting", _points(lost), "from the best to the last"),
        ("Up", format_bytes(up.wire), "on the wire, all clients"),
        ("Down", format_bytes(down.wire), "on the wire, all clients"),
        ("Time", _duration(seconds), f"{len(data.rounds)} rounds, {len(data.tasks)} tasks"),
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
        f"started {_when(run.created_at)}, seed {run.seed}{escape(parent)}</p>"
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
    return text + _heat_map(m) + accuracy_chart(m) + _definitions(data)


def _heat_map(m: Metrics) -> str:
    head = "".join(f"<th>task {i}</th>" for i in range(m.tasks))
    lines = []
    for t, row in enumerate(m.matrix):
        cells = "".join(_heat_cell(v) for v in row) + "<td></td>" * (m.tasks - 1 - t)
        lines.append(
            f"<tr><th>after task {t}</th>{cells}<td><b>{_percent(m.task_mean[t])}</b></td></tr>"
        )
    return (
        '<div class="scroll"><table class="heat"><caption class="faint">Accuracy on the classes '
        "of each task, percent</caption>"
        f"<tr><th></th>{head}<th>mean</th></tr>{''.join(lines)}</table></div>"
    )


def _heat_cell(value: float | None) -> str:
    if value is None:
        return f"<td>{_NOTHING}</td>"
    alpha = 0.06 + 0.94 * value / 100
    strong = ' class="strong"' if alpha > 0.6 else ""
    return f'<td{strong} style="background:rgb(0 94 148 / {alpha:.2f})">{value:.1f}</td>'


def _definitions(data: RunData) -> str:
    rows: list[Sequence[str]] = []
    for whose, m in (("clients", data.pooled), ("server's folder", data.central)):
        if m is None:
            continue
        rows.append((whose, "task mean (default)", _percent(m.faa), _percent(m.aia), ""))
        weighted = (_percent(m.faa_sample_weighted), _percent(m.aia_sample_weighted))
        rows.append((whose, "all images", *weighted, ""))
        rows.append((whose, "mean over classes", _percent(m.macro[-1]), "", ""))
        rows += [
            (whose, f"forgetting, {name}", "", "", _points(m.forgetting[name]))
            for name in FORGETTING
        ]
        if m.forgetting_matched != m.forgetting:
            matched = _points(m.forgetting_matched[FORGETTING[0]])
            rows.append((whose, "forgetting, same clients before and after", "", "", matched))
    head = ("test images", "definition", "FAA", "AIA", "points lost")
    return _folded("All definitions", _table(head, rows, text=2))


def _bytes(data: RunData) -> str:
    parts = [
        _table(
            ("direction", *_LEVELS),
            [(d.value, *_levels(data.bytes_of(d))) for d in Direction],
        ),
        _LEVELS_NOTE,
    ]
    if data.rounds:
        parts.append(bytes_chart(data.rounds))
    rows = [
        (d.value, _CAUSES[c], *_levels(data.bytes_of(d, c)))
        for d in Direction
        for c in Cause
        if data.bytes_of(d, c) != Bytes()
    ]
    outside = {d: Bytes.total(f for f in data.outside if f.direction is d) for d in Direction}
    rows += [(d.value, "outside any run", *_levels(b)) for d, b in outside.items() if b != Bytes()]
    parts.append(_folded("By cause", _table(("direction", "cause", *_LEVELS), rows, text=2)))
    return "".join(parts)


def _rounds(data: RunData) -> str:
    rows = []
    for view in data.rounds:
        row = view.round
        away = [f"{data.name_of(c)}: {a.value}, {why}" for c, (a, why) in view.silent.items()]
        away += [f"{data.name_of(c)}: excluded, {why}" for c, why in view.excluded.items()]
        rows.append(
            (
                str(row.seq),
                f"{row.task}",
                f"{row.kind} {row.round}",
                row.outcome.value if row.outcome else "",
                f"{len(view.counted)} of {len(row.asked)}",
                _duration((row.closed_at or row.opened_at) - row.opened_at),
                ", ".join(f"{k.removesuffix('_s')} {v:.2f} s" for k, v in row.phases.items()),
                format_bytes(view.up.wire),
                format_bytes(view.down.wire),
                "; ".join(away),
            )
        )
    head = ("", "task", "round", "end", "counted", "time", "phases", "up", "down", "without")
    table = _table(head, rows, text=0, wide=(2, 3, 6, 9))
    few = len(rows) <= _OPEN_ROUNDS
    return table if few else _folded(f"{len(rows)} rounds", table)


def _tasks(data: RunData) -> str:
    rows = [
        (
            str(t.task),
            ", ".join(data.class_names.get(i, f"#{i}") for i in t.class_ids),
            _when(t.opened_at),
            _when(t.closed_at),
        )
        for t in data.tasks
    ]
    return _table(("task", "classes", "opened", "learned"), rows, text=0, wide=(1,))


def _clients(data: RunData) -> str:
    counted = [c for v in data.rounds for c in v.counted]
    rows = []
    for client in data.clients.values():
        wire = [
            Bytes.total(
                f for f in data.flows if f.client == client.client_id and f.direction is d
            ).wire
            for d in Direction
        ]
        times = str(counted.count(client.client_id))
        sizes = [format_bytes(w) for w in wire]
        rows.append((client.name, client.client_id, client.device, times, *sizes))
    head = ("name", "id", "device", "updates counted", "up", "down")
    return _table(head, rows, text=3)


def _configuration(data: RunData) -> str:
    run = data.run
    parts = (
        ("Configuration of the run", run.config),
        ("Options of the method", json.dumps(run.hparams, indent=2)),
        ("Backbone", json.dumps(run.backbone, indent=2)),
        ("Environment", json.dumps(run.environment, indent=2)),
    )
    return "".join(_folded(title, f"<pre>{escape(text)}</pre>") for title, text in parts)


_LEVELS = ("tensors", "sealed", "application", "wire (predicted)", "wire (kernel)")


_LEVELS_NOTE = (
    '<p class="faint">Papers report the tensors alone. Sealed adds names and encryption, '
    "application all messages, wire TCP payload with ZMTP and CURVE; the kernel counts whole "
    "connections, where it can be asked. MB = 1,000,000 bytes.</p>"
)


def _levels(b: Bytes) -> tuple[str, ...]:
    exact = (format_bytes(n) for n in (b.tensor, b.sealed, b.application, b.wire))
    return (*exact, format_bytes(b.wire_kernel) if b.wire_kernel else _NOTHING)


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text: int = 1,
    wide: Sequence[int] = (),
) -> str:
    """Make a table; the first ``text`` columns and those in ``wide`` are aligned left."""

    def line(cells: Sequence[str], tag: str) -> str:
        left = [' class="text"' if i < text or i in wide else "" for i in range(len(cells))]
        inside = "".join(
            f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, left, strict=True)
        )
        return f"<tr>{inside}</tr>"

    lines = "".join(line(row, "td") for row in rows)
    if not lines:
        return "<p>None yet.</p>"
    return f'<div class="scroll"><table>{line(head, "th")}{lines}</table></div>'


# --- terminal -------------------------------------------------------------------------------


def _matrix_table(data: RunData) -> list[RenderableType]:
    from rich import box
    from rich.table import Table

    m = data.metrics
    if m is None:
        return []
    few = m.tasks <= _WIDE_TASKS
    table = Table(
        title="Accuracy [%] on the classes of each task",
        title_justify="left",
        box=box.HEAVY_HEAD if few else None,
        padding=(0, 1) if few else (0, 1, 0, 0),
    )
    table.add_column("after", no_wrap=True)
    for i in range(m.tasks):
        table.add_column(f"task {i}" if few else str(i), justify="right", no_wrap=True)
    table.add_column("mean", justify="right", style="bold", no_wrap=True)
    for t, row in enumerate(m.matrix):
        cells = [_NOTHING if v is None else f"{v:.{1 if few else 0}f}" for v in row]
        mean = m.task_mean[t]
        last = _NOTHING if mean is None else f"{mean:.1f}"
        table.add_row(f"task {t}", *cells, *[""] * (m.tasks - 1 - t), last)
    return [table]


def _headline_table(data: RunData) -> RenderableType:
    from rich.table import Table

    faa, aia, lost = data.headline
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    table.add_row("FAA", _percent(faa), "accuracy after the last task")
    table.add_row("AIA", _percent(aia), "mean accuracy over all tasks")
    table.add_row("forgetting", _points(lost), "from each task's best accuracy to its last")
    time = _duration(data.seconds()["total_s"])
    table.add_row("time", time, f"{len(data.rounds)} rounds, {len(data.tasks)} tasks")
    return table


def _bytes_table(data: RunData) -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table(title="Bytes, all clients", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("task", "round"):
        table.add_column(name, no_wrap=True)
    table.add_column("counted", justify="right", no_wrap=True)
    for way in ("up", "down"):
        table.add_column(f"{way}: tensors", justify="right")
        table.add_column(f"{way}: wire", justify="right", style="bold")
    for task, name, counted, up, down in _byte_rows(data):
        sizes = [format_bytes(n) for b in (up, down) for n in (b.tensor, b.wire)]
        table.add_row(str(task), name, counted, *sizes)
    table.add_section()
    totals = [data.bytes_of(d) for d in Direction]
    table.add_row("run", "", "", *(format_bytes(n) for b in totals for n in (b.tensor, b.wire)))
    if any(b.wire_kernel for b in totals):
        kernel = [format_bytes(b.wire_kernel) for b in totals]
        table.add_row("", "kernel", "", "", kernel[0], "", kernel[1])
    return table


def _byte_rows(data: RunData) -> Iterator[tuple[int, str, str, Bytes, Bytes]]:
    """Yield (task, round, who counted, up, down); many rounds are summed by task and kind."""
    one_by_one = len(data.rounds) <= _OPEN_ROUNDS
    for (task, kind), group in groupby(data.rounds, key=lambda v: (v.round.task, v.round.kind)):
        views = list(group)
        if one_by_one:
            for v in views:
                counted = f"{len(v.counted)} of {len(v.round.asked)}"
                yield task, f"{kind} {v.round.round}", counted, v.up, v.down
            continue
        counted = (
            f"{sum(len(v.counted) for v in views)} of {sum(len(v.round.asked) for v in views)}"
        )
        up, down = sum_bytes(v.up for v in views), sum_bytes(v.down for v in views)
        yield task, f"{kind} x {len(views)}", counted, up, down


def _percent(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.1f} %"


def _points(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.1f} pp"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def _when(moment: float | None) -> str:
    return "" if moment is None else f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S} UTC"
