"""The texts of the tree, the headings of its documents, and the syntax of its modules."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def tracked() -> tuple[Path, ...]:
    """Return the files that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if result.returncode != 0:
        pytest.skip("this is no git checkout")
    names = result.stdout.decode().split("\0")
    return tuple(path for name in names if name and (path := ROOT / name).is_file())


def texts(suffix: str = "") -> Iterator[tuple[Path, str]]:
    """Yield the files whose name ends so, with what is in them; images and weights are left out."""
    for path in tracked():
        if path.name.endswith(suffix):
            try:
                yield path, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


@functools.cache
def syntax(path: Path) -> ast.Module:
    """Return a module's syntax tree: parsed once for all tests of a process, and not changed."""
    return ast.parse(path.read_text(encoding="utf-8"))


def prose(text: str) -> str:
    """Return a document without its code blocks and comments."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)


def flat(text: str) -> str:
    """Return a text in one line, without the leaders of comments."""
    return re.sub(r"\s*\n\s*(?:(?:#|//|--)\s+)?", " ", text)


@functools.cache
def headings(document: Path) -> tuple[str, ...]:
    """Return a document's headings as they are written."""
    text = document.read_text(encoding="utf-8")
    return tuple(re.findall(r"^#+ (.+)$", text, re.MULTILINE))


def anchors(document: Path) -> set[str]:
    """Return what a link to a heading of a document may end in."""
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings(document)}


def has_number(document: Path, number: str) -> bool:
    """Say whether a document has a section of this number, such as 8 or 8.2."""
    return any(re.match(rf"{re.escape(number)}\.? ", heading) for heading in headings(document))
