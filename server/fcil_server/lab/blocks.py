"""A report as a list of blocks, the source of both Markdown and HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from fcil_protocol.formats import NOTHING
from fcil_server.reports.charts import charts
from fcil_server.reports.charts.spec import STYLES
from fcil_server.reports.sections import static_page
from fcil_server.reports.sections.accuracy import look_of
from fcil_server.reports.sections.static_page import table


@dataclass(frozen=True)
class Heading:
    """A heading."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Items:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Code:
    """A command or file, shown verbatim."""

    text: str


@dataclass(frozen=True)
class Table:
    """A table; its first ``text`` columns, and those in ``wide``, are text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: int = 1
    wide: Sequence[int] = ()


@dataclass(frozen=True)
class Matrix:
    """S_{t,i} in percent, folded away: as colours in HTML."""

    title: str
    rows: Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class Curves:
    """Accuracy over tasks, a line per (name, values); drawn only in HTML."""

    title: str
    lines: Sequence[tuple[str, Sequence[float | None]]]


Block = Heading | Text | Items | Code | Table | Matrix | Curves


def markdown(title: str, blocks: Iterable[Block]) -> str:
    """Return blocks as Markdown."""
    return "\n\n".join([f"# {title}", *map(_markdown, blocks)]) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case Items(items):
            return "\n".join(f"- {item}" for item in items)
        case Code(text):
            return "\n".join(f"    {line}" for line in text.splitlines())
        case Table(head, rows, text, wide):
            left = [i < text or i in wide for i in range(len(head))]
            rule = ["---" if is_left else "---:" for is_left in left]
            return "\n".join(_line(cells) for cells in (head, rule, *rows))
        case Matrix(title, rows):
            return f"<details><summary>{escape(title)}</summary>\n\n{_triangle(rows)}\n\n</details>"
        case Curves(title, _):
            return f"{title}: drawn in report.html."


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _triangle(rows: Sequence[Sequence[float | None]]) -> str:
    head = ["after", *(f"task {i}" for i in range(len(rows)))]
    lines = [_line(head), _line(["---"] + ["---:"] * len(rows))]
    for t, row in enumerate(rows):
        cells = [NOTHING if v is None else f"{v:.1f}" for v in row]
        lines.append(_line([f"task {t}", *cells, *[""] * (len(rows) - 1 - t)]))
    return "\n".join(lines)


def html(title: str, blocks: Iterable[Block]) -> str:
    """Return blocks as one HTML page that makes no request."""
    return static_page.plain(title, "".join(map(_html, blocks)))


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Items(items):
            return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"
        case Code(text):
            return f"<pre>{escape(text)}</pre>"
        case Table(head, rows, text, wide):
            return table(head, rows, text=text, wide=wide)
        case Matrix(title, rows):
            return _folded(title, _heat(rows))
        case Curves(title, lines):
            return curves(title, lines)


def _heat(rows: Sequence[Sequence[float | None]]) -> str:
    head = "".join(f"<th>task {i}</th>" for i in range(len(rows)))
    lines = [
        f"<tr><th>after task {t}</th>{''.join(map(_heat_cell, row))}"
        f"{'<td></td>' * (len(rows) - 1 - t)}</tr>"
        for t, row in enumerate(rows)
    ]
    table_ = f'<table class="heat"><tr><th></th>{head}</tr>{"".join(lines)}</table>'
    return f'<div class="scroll">{table_}</div>'


def _heat_cell(value: float | None) -> str:
    text = NOTHING if value is None else f"{value:.1f}"
    return f'<td class="{look_of(value)}">{text}</td>'


def curves(title: str, lines: Sequence[tuple[str, Sequence[float | None]]]) -> str:
    """Draw accuracies in percent over tasks, a line each, up to the number of styles."""
    styled = [(name, style, values) for style, (name, values) in zip(STYLES, lines, strict=False)]
    return str(charts.static_html(charts.over_tasks("curves", title, styled)))


def _folded(title: str, content: str) -> str:
    """Fold a piece of HTML away under its title."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"
