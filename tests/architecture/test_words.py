"""Prose is in plain English: it names things, and begins with what the thing is or does."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from architecture.tree_texts import ROOT, syntax

PACKAGES = ("protocol", "adapters", "client", "server")
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# A relative clause in place of a noun: "What is kept" is "The files".
BEGINNING = re.compile(r"(?:What|Who|Whom|Whose|How|Whether|That|Where|When|Which)\b")
# The thing has a name: which client, which process, how many, what is reported to whom.
BANNED = re.compile(
    r"\b(?:told|nobody|somebody|anew|so many|so much|whoever|whatever|what is|what has|who has"
    r"|whether it)\b",
    re.IGNORECASE,
)
# The project's own idiom, where readers expect: no client, a person, again, anyone, continue,
# resume, permanently, skipped, idle, sign in, admit, check, available, on its own.
IDIOM = re.compile(
    r"\b(?:nobody|somebody|anybody|everybody|anew|whoever|for ever|(?:go|goes|going|went) on"
    r"|(?:comes?|came) up short|passed over|stands? still|lets? in|looked at|to be had"
    r"|(?:is|are|was|were) told|tried again by itself|is no more|needs? it no more"
    r"|as it (?:came|was begun)|nothing of it was used|does not stand|is gone;|what it lacks)\b",
    re.IGNORECASE,
)
CODE = re.compile(
    r"``[^`]*``|`[^`]*`|^\s*\w+(?:, \w+)*: ", re.MULTILINE
)  # names in backticks, arguments
QUOTED = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL)  # in a document
MARKED = re.compile(r"\{[%{#].*?[%}#]\}|<[^>]*>", re.DOTALL)  # in a template
PAGES = sorted(
    path
    for folder in ("", "docs", "protocol", "deploy", "experiments", "adapters", "tests/vectors")
    for path in (ROOT / folder).glob("**/*.md" if folder else "*.md")
    if "results" not in path.parts
)
TEMPLATES = sorted((ROOT / "server").rglob("templates/**/*.html"))


@functools.cache
def docstrings() -> list[tuple[str, str]]:
    """Return (place, docstring) of the four packages."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(syntax(path)):
                text = ast.get_docstring(node) if isinstance(node, DEFINITIONS) else None
                if text:
                    place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                    found.append((place, text))
    return found


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the strings with more than one word that are no docstring."""
    own = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, DEFINITIONS) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Constant) and id(child) not in own:
                text = child.value
                if isinstance(text, str) and " " in text.strip() and "CREATE TABLE" not in text:
                    yield child.lineno, text


def sentences(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a document without code, links and headings."""
    text = QUOTED.sub(lambda found: "\n" * found[0].count("\n"), page.read_text(encoding="utf-8"))
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith(("#", "    ")):
            yield number, line


def test_no_docstring_begins_with_a_relative_clause():
    assert [place for place, text in docstrings() if BEGINNING.match(text)] == []


def test_no_docstring_has_a_banned_word():
    found = [
        f"{place}: {word[0]!r}"
        for place, text in docstrings()
        if (word := BANNED.search(CODE.sub("", text)))
    ]
    assert found == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_message_has_the_projects_own_idiom(package):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {idiom[0]!r}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in messages(syntax(path))
        if (idiom := IDIOM.search(text))
    ]
    assert found == []


def test_no_page_has_the_projects_own_idiom():
    assert len(PAGES) > 90
    found = [
        f"{page.relative_to(ROOT)}:{line}: {idiom[0]!r}"
        for page in PAGES
        for line, text in sentences(page)
        if (idiom := IDIOM.search(text))
    ]
    assert found == []


def test_no_template_has_the_projects_own_idiom():
    assert len(TEMPLATES) > 20
    found = [
        f"{path.relative_to(ROOT)}: {idiom[0]!r}"
        for path in TEMPLATES
        if (idiom := IDIOM.search(MARKED.sub(" ", path.read_text(encoding="utf-8"))))
    ]
    assert found == []


@pytest.mark.parametrize("text", ["Nobody is told.", "Write it anew.", "so many rounds"])
def test_a_banned_word_is_found(text):
    assert BANNED.search(CODE.sub("", text))


@pytest.mark.parametrize(
    "text", ["nobody answers at 10.0.0.1; trying again", "the round goes on", "It is made anew."]
)
def test_an_idiom_is_found_in_a_message(text):
    tree = ast.parse(f'"""The run goes on."""\n\n\ndef say():\n    return {text!r}\n')
    assert [(line, bool(IDIOM.search(said))) for line, said in messages(tree)] == [(5, True)]


def test_an_idiom_is_found_on_a_page_and_not_in_its_code_or_headings(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Who goes on\n\n```\nanew\n```\n`anew` [one](#anew)\nIt goes on.\n")
    assert [line for line, text in sentences(page) if IDIOM.search(text)] == [7]


def test_code_and_names_of_arguments_are_no_prose():
    assert not BANNED.search(CODE.sub("", "Return `told.nobody`.\n\nArgs:\n    told: the facts."))
