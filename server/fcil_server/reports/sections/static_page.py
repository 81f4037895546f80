"""The dashboard of a run as one static file: for a mail, a paper, a folder.

It has the sections of the live dashboard without those about the present, and sends no requests:
style and scripts are in it, and its policy allows only them, by their hashes. Without scripts
everything is readable; they only let charts be zoomed.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
from collections.abc import Iterable, Sequence
from html import escape

from markupsafe import Markup

from fcil_server.reports.charts import assets
from fcil_server.reports.charts.history import frozen
from fcil_server.reports.charts.render import template
from fcil_server.reports.results.run_data import RunData
from fcil_server.reports.sections.sections import SECTIONS as ALL_SECTIONS
from fcil_server.reports.sections.sections import section

SECTIONS = tuple(name for name in ALL_SECTIONS if name != "now")  # nothing about the present


def report(data: RunData) -> str:
    """Return the report of a run as one HTML document."""
    history = frozen(data)
    css, scripts, policy = _inside()
    html = template(
        "report.html",
        title=": ".join(filter(None, (history.federation, data.run.method, data.run.run_id))),
        csp=policy,
        css=css,
        scripts=scripts,
        sections={name: section(name, history, None) for name in SECTIONS},
        version=importlib.metadata.version("fcil"),
    )
    return f"{html}\n"


def plain(title: str, body: str) -> str:
    """Return a document without scripts around a body of escaped HTML."""
    css = _whole("page.css")
    policy = f"default-src 'none'; style-src {_hash(css)}"
    inside = Markup(body)  # noqa: S704 - escaped by who wrote it
    return f"{template('plain.html', title=title, csp=policy, css=css, body=inside)}\n"


def table(
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


@functools.cache
def _inside() -> tuple[Markup, list[Markup], str]:
    """Return the style, the scripts, and the policy that allows only these."""
    css = _whole(*assets.STYLES)
    scripts = [_whole(name) for name in assets.FROZEN_SCRIPTS]
    hashes = " ".join(map(_hash, scripts))
    policy = (
        f"default-src 'none'; style-src {_hash(css)}; script-src {hashes}; "
        "base-uri 'none'; form-action 'none'"
    )
    return css, scripts, policy


def _whole(*names: str) -> Markup:
    text = "\n".join(map(assets.text, names)).replace("\r\n", "\n")
    assert "</script" not in text.lower(), "an asset would end its own element"
    assert "</style" not in text.lower(), "an asset would end its own element"
    return Markup(text)  # noqa: S704 - comes with the package


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
