"""What MkDocs does differently here: formulas as MathML, and the anchors of code hosts."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def slug(text: str, separator: str) -> str:
    """Return a heading's anchor as code hosts make it, so that one link works in both places."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)


def on_page_content(content: str, **_: object) -> str:
    """Turn formulas into MathML, which browsers draw without any script."""

    def drawn(match: re.Match[str]) -> str:
        display = "block" if match[2] == "[" else "inline"
        formula = html.unescape(match[3]).strip()
        try:
            return str(convert(formula, display=display))
        except Exception as error:
            raise PluginError(f"no MathML can be made of {formula!r} ({error!r})") from error

    return _FORMULA.sub(drawn, content)
