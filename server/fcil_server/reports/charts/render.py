"""HTML of the dashboard and the reports: Jinja2 templates, with all outside text escaped.

Only this module uses Jinja2. A template trusts only HTML made here or by the drawing code
(`Markup`); a name that a template needs and does not get is a defect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fcil_protocol.formats import NOTHING, duration, format_bytes, percent, points
from fcil_server.reports.charts import assets


def template(name: str, **context: Any) -> Markup:
    """Fill in a template of ``templates``, such as ``sections/head.html``."""
    return Markup(_environment().get_template(name).render(context))  # noqa: S704 - autoescaped


def moment(at: float | None) -> Markup:
    """Return a unix time as an HTML element that scripts turn into local time."""
    if at is None:
        return Markup("")
    try:
        told = datetime.fromtimestamp(at, UTC)
    except (ValueError, OverflowError, OSError):  # a damaged ledger, or a clock far off
        return Markup.escape(NOTHING)
    mark = Markup('<time datetime="{}">{} UTC</time>')
    return mark.format(f"{told:%Y-%m-%dT%H:%M:%SZ}", f"{told:%Y-%m-%d %H:%M:%S}")


def _known(write: Callable[[float], str]) -> Callable[[float | None], str]:
    """Extend a number format to unknown values."""

    def written(value: float | None) -> str:
        return NOTHING if value is None else write(value)

    return written


@functools.cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("fcil_server.reports.charts"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {
        "bytes": _known(format_bytes),
        "percent": percent,
        "points": points,
        "duration": _known(duration),
        "moment": moment,
    }
    made.globals |= {
        "asset": assets.url,
        "styles": assets.STYLES,
        "scripts": assets.SCRIPTS,
        "enter_scripts": assets.ENTER_SCRIPTS,
    }
    return made
