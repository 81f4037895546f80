"""What MkDocs does differently here: formulas as MathML, and the anchors of code hosts."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

# Commands that the converter does not know, in its own words.
_OTHERS = {r"\arg\m": r"\operatorname{arg}\m", r"\_": "_"}
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def slug(text: str, separator: str) -> str:
    """Return a heading's anchor as code hosts make it, so that one link works in both places."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)


def on_page_content(content: str, **_: object) -> str:
    """Turn formulas into MathML, which browsers draw without any script."""

    def drawn(match: re.Match[str]) -> str:
        display = "block" if match[2] == "[" else "inline"
        formula = html.unescape(match[3]).strip()
        for command, other in _OTHERS.items():
            formula = formula.replace(command, other)
        try:
            drawing = str(convert(formula, display=display))
        except Exception as error:
            raise PluginError(f"no MathML can be made of {formula!r} ({error!r})") from error
        if unknown := re.search(r"\\\w+", drawing):
            raise PluginError(f"no MathML can be made of {unknown[0]} in {formula!r}")
        return drawing

    return _FORMULA.sub(drawn, content)
