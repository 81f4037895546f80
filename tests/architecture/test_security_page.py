"""docs/security.md names tests; each of them exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def functions(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda text: text.rpartition("/")[2])
def test_a_test_that_the_page_names_exists(path, name):
    assert name in functions(ROOT / path)


def test_every_claim_in_a_table_is_shown_by_a_test():
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in PAGE.splitlines()
        if line.startswith("|") and not line.startswith("|--")
    ]
    assert {len(row) for row in rows} == {2, 3}, (
        "the assets' table has two columns, the others three"
    )
    claims = [row for row in rows if len(row) == 3 and row[0] != "attempt"]
    assert len(claims) > 15
    for attempt, protection, shown in claims:
        assert protection, attempt
        assert "::test_" in shown, attempt
