"""docs/troubleshooting.md: every sentence that it quotes is one that the programs print."""

import ast
import re
from functools import cache

import pytest

from architecture.tree_texts import ROOT, syntax
from fcil_protocol.errors import all_errors

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
PACKAGES = ("protocol", "adapters", "client", "server")
GAP = "…"
QUOTED = [
    line for block in re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]  # fmt: skip


@cache
def printed():
    """Return the strings of the programs in one text, values as gaps; docstrings are none."""
    found = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            tree = syntax(path)
            parts = {
                id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values
            }
            parts |= {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    texts = (v.value if isinstance(v, ast.Constant) else GAP for v in node.values)
                    found.append("".join(texts))
                elif isinstance(node, ast.Constant) and id(node) not in parts:
                    found.append(node.value if isinstance(node.value, str) else "")
    return "\n".join(found)


def is_printed(sentence):
    return sentence in printed()


@pytest.mark.parametrize("sentence", QUOTED)
def test_a_quoted_sentence_is_printed_by_a_program(sentence):
    assert is_printed(sentence)


def test_a_sentence_of_no_program_is_found():
    assert len(QUOTED) > 30
    assert not is_printed("no server at … answered within … hours.")


def test_the_codes_that_pages_for_operators_name_are_codes_of_errors():
    known = {cls.code for cls in all_errors()}
    for name in ("troubleshooting", "upgrades", "choose", "network"):
        text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        assert set(re.findall(r"`(\w+_(?:mismatch|refused|failed|used))`", text)) <= known
