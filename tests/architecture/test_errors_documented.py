"""Every error says what happened and what to do, has a code of its own, and is on the page."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter

import pytest

from architecture.tree_texts import ROOT, syntax
from fcil_protocol import errors
from fcil_protocol.errors import FcilError, all_errors, from_code

PAGE = ROOT / "docs" / "errors.md"
SCRIPT = ROOT / "scripts" / "errorlist"
CLASSES = [cls for cls in all_errors() if cls.__module__ == "fcil_protocol.errors"]
each = pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)


@each
def test_an_error_says_what_happened_and_what_to_do(cls: type[FcilError]) -> None:
    paragraphs = inspect.cleandoc(cls.__doc__ or "").split("\n\n")
    assert len(paragraphs) == 2, "two paragraphs: what happened, what to do"
    for paragraph in paragraphs:
        assert paragraph[0].isupper() or paragraph[0] == "`"
        assert paragraph.endswith(".")
    assert cls.default_action() == " ".join(paragraphs[1].split()).replace("``", "`")
    assert cls.__doc__ != FcilError.__doc__ or cls is FcilError


@each
def test_a_code_is_one_lower_case_word_and_its_own(cls: type[FcilError]) -> None:
    """It travels in Nacks and scripts compare it."""
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", cls.code)
    assert "code" in vars(cls), "not inherited from its parent"
    assert Counter(c.code for c in CLASSES)[cls.code] == 1


@each
def test_an_error_is_rebuilt_from_its_code(cls: type[FcilError]) -> None:
    error = from_code(cls.code, "what happened.", "What to do.")
    assert type(error) is cls
    assert (error.message, error.action) == ("what happened.", "What to do.")
    assert str(error) == "what happened. What to do."


def test_an_unknown_code_is_still_an_error() -> None:
    assert type(from_code("of_a_later_version", "x.")) is FcilError


@each
def test_exit_codes_are_the_few_that_are_documented(cls: type[FcilError]) -> None:
    assert cls.exit_code in {1, 2, 3, 4, 5}


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    """Name, code and exit code of each class, under its parent."""
    rows = re.findall(
        r"^ *((?:\| {3})*)\+-- (\w+) +(\w+) +(\d)$", errors.__doc__ or "", re.MULTILINE
    )
    parents: list[str] = ["FcilError"]
    drawn = {}
    for indent, name, code, exit_code in rows:
        depth = len(indent) // 4 + 1
        drawn[name] = (parents[depth - 1], code, int(exit_code))
        parents[depth:] = [name]
    real = {
        cls.__name__: (cls.__mro__[1].__name__, cls.code, cls.exit_code)
        for cls in CLASSES
        if cls is not FcilError
    }
    assert drawn == real


def test_no_error_class_lives_elsewhere() -> None:
    """The page, the tree and `from_code` know only those of errors.py."""
    names = {cls.__name__ for cls in CLASSES}
    for package in ("protocol", "adapters", "client", "server"):
        for path in (ROOT / package).rglob("*.py"):
            if path.name == "errors.py":
                continue
            for node in ast.walk(syntax(path)):
                if isinstance(node, ast.ClassDef):
                    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                    assert not bases & names, f"{path.name}: {node.name}"


@each
def test_an_error_is_on_the_page(cls: type[FcilError]) -> None:
    text = PAGE.read_text("utf-8")
    assert f"## {cls.code}\n" in text
    assert f"`{cls.__name__}`" in text


def test_the_page_is_current() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
