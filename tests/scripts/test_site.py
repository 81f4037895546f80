"""scripts/site: its navigation names every document once, and its pages load nothing from elsewhere."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from docsite import pages

ROOT = Path(__file__).resolve().parents[2]
DOORS = ["Home", "Tutorials", "How-to", "Reference", "Explanation", "Results", "Decisions"]
# What a browser fetches by itself when it opens a page.
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href",
           "object": "data", "embed": "src", "video": "src", "audio": "src", "use": "href"}  # fmt: skip


def named(entries):
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [value] if isinstance(value, str) else named(value)


def test_the_navigation_names_every_document_exactly_once():
    counted = Counter(named(pages.navigation()))
    documents = {str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")}
    assert {page for page in counted if page.startswith("docs/")} == documents
    assert [page for page, times in counted.items() if times != 1] == []


def test_the_navigation_has_the_four_doors_the_results_and_the_decisions():
    assert [door for entry in pages.navigation() for door in entry] == DOORS


def test_a_link_to_a_page_stays_and_one_to_a_source_file_becomes_its_path():
    page = Path("docs/rounds.md")
    text = (
        "[a](relay.md#three-steps) [`b`](../server/fcil_server/api.py) [c](decisions/)\n"
        "[d](https://example.org) [e](#own)\n```\n[f](../server/fcil_server/api.py)\n```\n"
    )
    listed = Path("docs/decisions", "README.md")  # made for the site alone
    found = {page: text, Path("docs/relay.md"): "", listed: ""}
    plain, hosted = (pages.for_site(page, found, source) for source in ("", "https://host/tree/"))
    assert plain == text.replace(
        "[`b`](../server/fcil_server/api.py)",
        '<span title="server/fcil_server/api.py">`b`</span>',
    ).replace("(decisions/)", f"({listed.relative_to('docs')})")
    assert "[`b`](https://host/tree/server/fcil_server/api.py)" in hosted


def test_a_bar_in_code_has_its_backslash_in_the_repository_alone():
    page = Path("docs/rounds.md")
    text = "| `a\\|b` | c \\| d |\n`e\\|f`\n"
    assert pages.for_site(page, {page: text}) == "| `a|b` | c \\| d |\n`e\\|f`\n"


def test_the_pages_that_are_linked_beyond_docs_are_on_the_site():
    assert {Path(p) for p in ("README.md", "CONTRIBUTING.md", "protocol/PROTOCOL.md")} <= set(
        pages.reached()
    )


def site(*arguments):
    command = [sys.executable, "-W", "ignore", "-m", "docsite", *map(str, arguments)]
    path = os.pathsep.join([str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The site; MkDocs in strict mode fails for a link or an anchor that leads nowhere."""
    pytest.importorskip("mkdocs")
    out = tmp_path_factory.mktemp("site")
    done = site(out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


class Fetches(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.urls, self.classes, self.policies = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.classes |= set((found.get("class") or "").split())
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policies.append(found["content"])
        for name in {FETCHED.get(tag), "srcset", "poster"} - {None}:
            self.urls += [found[name]] if found.get(name) else []


@pytest.mark.full
def test_every_page_loads_from_its_own_folder_alone(built):
    checked = 0
    for file in built.rglob("*.html"):
        page = Fetches(file.read_text(encoding="utf-8"))
        assert [u for u in page.urls if re.match(r"([a-z]+:)?//", u)] == [], file
        assert page.policies, file
        assert "default-src 'self'" in page.policies[0]
        assert not page.classes & {"mermaid", "md-source"}, f"{file}: the theme would fetch for it"
        checked += 1
    assert checked > 100


@pytest.mark.full
def test_no_style_loads_from_elsewhere(built):
    for file in built.rglob("*.css"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", text), file


@pytest.mark.full
def test_search_knows_every_document(built):
    index = json.loads((built / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    for document in (ROOT / "docs").rglob("*.md"):
        name = str(document.relative_to(ROOT).with_suffix(".html"))
        assert name.replace("README.html", "index.html") in found


@pytest.mark.full
def test_formulas_need_no_script(built):
    text = (built / "docs" / "methods" / "pilora.html").read_text(encoding="utf-8")
    assert "<math" in text
    assert "arithmatex" not in text


def test_a_folder_with_something_else_in_it_stays_as_it_is(tmp_path):
    pytest.importorskip("mkdocs")
    (tmp_path / "mine.txt").write_text("x")
    done = site(tmp_path)
    assert done.returncode == 4
    assert "holds something else than a site" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
