"""docs/architecture.md names files and calls that exist; docs/README.md leads to every page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from architecture.tree_texts import ROOT

DOCS = ROOT / "docs"
PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")
INDEX = (DOCS / "README.md").read_text(encoding="utf-8")
PACKAGES = ("protocol", "adapters", "client", "server")
# The life of an update says `M` for any method.
ANY_METHOD = "running_mean"


def at(name: str) -> Path:
    """Return where a path of the page leads: from a package's folder, or from the root."""
    first, _, rest = name.partition("/")
    if first in PACKAGES and rest and not rest.startswith("fcil_"):
        return ROOT / first / f"fcil_{first}" / rest
    return ROOT / name


def way() -> list[list[str]]:
    """Return the cells of each row of the life of an update."""
    text = PAGE.partition("\n## The life of an update\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in text.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) == 14
    return rows


def files(cell: str) -> list[Path]:
    """Return the files of a row; one without a package is of the same as the one before."""
    found, package = [], ""
    for name in cell.replace("/M/", f"/{ANY_METHOD}/").split(", "):
        package = name.partition("/")[0] if name.startswith(PACKAGES) else package
        found.append(at(name if name.startswith(package) else f"{package}/{name}"))
    return found


def defined(path: Path) -> set[str]:
    """Return the names of classes and functions in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_every_path_on_the_page_leads_somewhere() -> None:
    before, _, rest = PAGE.partition("<!-- Rooms:")
    written = before + rest.partition("<!-- End of rooms. -->")[2]
    prefixes = (*PACKAGES, "tests", "docs", "scripts")
    names = [n for n in re.findall(r"`([\w./]+/[\w.]*)`", written) if n.startswith(prefixes)]
    assert len(names) > 60
    assert [name for name in names if not at(name).exists()] == []


@pytest.mark.parametrize("row", way(), ids=lambda row: row[0].strip("| "))
def test_a_step_of_an_update_is_in_the_file_that_the_page_names(row: list[str]) -> None:
    names = set[str]().union(*(defined(path) for path in files(row[1])))
    calls = re.findall(r"`([\w.]+)`", row[2])
    assert calls
    assert [call for call in calls if not set(call.split(".")) <= names] == []


def test_the_index_leads_to_every_page() -> None:
    pages = {path.name for path in DOCS.glob("*.md")} - {"README.md"}
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)", INDEX))
    assert linked == pages


def test_the_index_leads_to_every_tutorial() -> None:
    pages = {path.name for path in (DOCS / "tutorials").glob("*.md")}
    assert len(pages) > 1
    assert set(re.findall(r"\]\(tutorials/([\w-]+\.md)", INDEX)) == pages


def test_the_index_of_benchmarks_leads_to_every_page_of_results() -> None:
    pages = {path.name for path in (DOCS / "benchmarks").glob("*.md")}
    assert len(pages) > 10
    for index in (INDEX, (DOCS / "benchmarks.md").read_text(encoding="utf-8")):
        assert set(re.findall(r"\]\(benchmarks/([\w-]+\.md)", index)) == pages


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("dashboard", "page.md"),
        ("metrics", "metrics.md"),
        ("resume", "rounds.md"),
        ("resume", "clients.md"),
        ("retransmitted", "bytes.md"),
        ("backup", "storage.md"),
    ],
)
def test_the_index_has_the_words_that_people_look_for(word: str, page: str) -> None:
    lines = [line.lower() for line in INDEX.splitlines() if f"]({page})" in line]
    assert any(word in line for line in lines)
