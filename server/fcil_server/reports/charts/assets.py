"""Static files of the dashboard: style, scripts, and two vendored libraries.

They come with the package and never change while it is installed, so each is read once, and its
address carries a digest: a browser may keep it for good.
"""

from __future__ import annotations

import functools
import hashlib
from importlib.resources import files
from urllib.parse import quote

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

STYLES = ("vendor/uPlot.min.css", "page.css")
# In the order in which they run; each is a separate script that adds to `window.fcil`.
SCRIPTS = (
    "vendor/uPlot.iife.min.js",
    "vendor/idiomorph.min.js",
    "base.js",
    "nav.js",
    "chart_draw.js",
    "chart.js",
    "charts.js",
    "told.js",
    "parts.js",
    "dialogs.js",
    "acts.js",
    "stream.js",
)
ENTER_SCRIPTS = ("enter.js",)
# A frozen page sends no requests: it contains the scripts that make its charts interactive.
FROZEN_SCRIPTS = (
    "vendor/uPlot.iife.min.js",
    "base.js",
    "nav.js",
    "chart_draw.js",
    "chart.js",
    "charts.js",
)
NAMES = frozenset({*STYLES, *SCRIPTS, *ENTER_SCRIPTS, "icon.svg"})


def url(name: str) -> str:
    """Return the address of an asset, with its digest.

    Raises:
        KeyError: there is no such asset.
    """
    content, _ = load(name)
    return f"/assets/{quote(name)}?v={hashlib.sha256(content).hexdigest()[:12]}"


def text(name: str) -> str:
    """Return a style or script, for inclusion in an HTML page.

    Raises:
        KeyError: there is no such asset.
    """
    return load(name)[0].decode()


def load(name: str) -> tuple[bytes, str]:
    """Return an asset's content and media type.

    Raises:
        KeyError: there is no such asset; only names in `NAMES` are looked up.
    """
    if name not in NAMES:
        raise KeyError(name)
    return _read(name)


@functools.cache
def _read(name: str) -> tuple[bytes, str]:
    content = files("fcil_server.reports.charts").joinpath("static", *name.split("/")).read_bytes()
    return content, _TYPES[name[name.rindex(".") :]]
