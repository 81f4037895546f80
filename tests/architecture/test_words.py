"""Docstrings are in plain English: they name things, and begin with what the thing is or does."""

import ast
import re
from collections.abc import Iterator

import pytest

from architecture.tree_texts import ROOT

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
CODE = re.compile(
    r"``[^`]*``|`[^`]*`|^\s*\w+(?:, \w+)*: ", re.MULTILINE
)  # names in backticks, arguments


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield (place, docstring) of the four packages."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                text = ast.get_docstring(node) if isinstance(node, DEFINITIONS) else None
                if text:
                    yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


def test_no_docstring_begins_with_a_relative_clause():
    assert [place for place, text in docstrings() if BEGINNING.match(text)] == []


def test_no_docstring_has_a_banned_word():
    found = [
        f"{place}: {word[0]!r}"
        for place, text in docstrings()
        if (word := BANNED.search(CODE.sub("", text)))
    ]
    assert found == []


@pytest.mark.parametrize("text", ["Nobody is told.", "Write it anew.", "so many rounds"])
def test_a_banned_word_is_found(text):
    assert BANNED.search(CODE.sub("", text))


def test_code_and_names_of_arguments_are_no_prose():
    assert not BANNED.search(CODE.sub("", "Return `told.nobody`.\n\nArgs:\n    told: the facts."))
