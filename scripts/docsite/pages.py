"""Which documents the site has, where its navigation names them, and where their links lead.

The site has the tree of the repository: a link from page to page is the same in both. What the
site lacks is rewritten: a link to a folder of pages leads to a list of them, and one to a source
file to the code host, if one is named.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOME, INDEX = Path("README.md"), Path("docs/README.md")
COPIED = {".png", ".svg", ".ipynb"}

_FENCE = re.compile(r"(^ *```.*?^ *```$|<!--.*?-->)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[((?:[^\[\]`]|`[^`]*`)*)\]\(([^)\s]+)\)")
_CELLS = re.compile(r"^\|.*$", re.MULTILINE)
_CODE = re.compile(r"`[^`\n]+`")
_DOOR = re.compile(r"^## (.+)\n((?:(?!## ).*\n?)*)", re.MULTILINE)


def resolved(page: Path, target: str) -> Path | None:
    """Return where a link of a page leads, from the root; None: out of the repository."""
    name = target.partition("#")[0]
    if re.match(r"[a-z]+:", target) or not name:
        return None
    path = Path(os.path.normpath(page.parent / name))
    return path if (ROOT / path).exists() else None


def links(page: Path, text: str) -> Iterator[tuple[str, Path]]:
    """Yield (words, target) of every link that stays in the repository."""
    for words, target in _LINK.findall(_FENCE.sub("", text)):
        if path := resolved(page, target):
            yield words, path


def in_folder(folder: Path) -> list[Path]:
    """Return the pages of a folder of docs/ that has no README of its own, in order."""
    if INDEX.parent not in folder.parents or (ROOT / folder / "README.md").exists():
        return []
    return sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.md"))


def reached() -> dict[Path, str]:
    """Return every page that links lead to from the first two, and folders' lists of pages."""
    found: dict[Path, str] = {}
    waiting = [HOME, INDEX]
    while waiting:
        page = waiting.pop()
        if page in found:
            continue
        found[page] = (ROOT / page).read_text(encoding="utf-8")
        for _, target in links(page, found[page]):
            if target.suffix == ".md":
                waiting.append(target)
            elif inside := in_folder(target):
                found[target / "README.md"] = listed(target, inside)
                waiting += inside
    return found


def listed(folder: Path, inside: list[Path]) -> str:
    """Return a page that lists the pages of a folder by their titles."""
    rows = (f"- [{title(path)}]({path.relative_to(folder)})\n" for path in inside)
    return f"# {folder.name.capitalize()}\n\n{''.join(rows)}"


def title(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def navigation() -> list[dict[str, Any]]:
    """Return MkDocs' `nav`: the headings of docs/README.md, and under each the links below it."""
    doors: list[dict[str, Any]] = [{"Home": [{"fcil": str(HOME)}, {"Documents": str(INDEX)}]}]
    for heading, block in _DOOR.findall((ROOT / INDEX).read_text(encoding="utf-8")):
        entries: list[Any] = []
        for words, target in links(INDEX, block):
            if inside := in_folder(target):
                entries += [{title(path): str(path)} for path in inside]
            elif target.suffix == ".md" and target != HOME:
                plain = words.replace("\n", " ").replace("`", "")
                if plain != target.stem:  # the name of a method stays as it is
                    plain = plain[:1].upper() + plain[1:]
                entries.append({plain: str(target)})
        doors.append({heading: entries})
    return doors


def rewriter(page: Path, pages: dict[Path, str], source: str) -> Callable[[re.Match[str]], str]:
    """Return what replaces a link of a page; ``source`` is the code host's address, or empty."""

    def replaced(match: re.Match[str]) -> str:
        words, target = match.groups()
        path = resolved(page, target)
        if path is None or path in pages or path.suffix in COPIED:
            return match[0]
        if path / "README.md" in pages:
            return f"[{words}]({target.rstrip('/')}/README.md)"
        if source:
            return f"[{words}]({source.rstrip('/')}/{path})"
        return f'<span title="{path}">{words}</span>'

    return replaced


def for_site(page: Path, pages: dict[Path, str], source: str = "") -> str:
    """Return a page's text with the links that it has on the site."""
    parts = _FENCE.split(pages[page])  # every second part is a block of code, or a comment
    replace = rewriter(page, pages, source)
    parts[::2] = [_CELLS.sub(unescaped, _LINK.sub(replace, part)) for part in parts[::2]]
    return "".join(parts)


def unescaped(row: re.Match[str]) -> str:
    """Return a row of a table for MkDocs, which shows the backslash of a bar in code."""
    return _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0])


def stage(folder: Path, source: str = "") -> None:
    """Write the site's pages, pictures and notebooks into an empty folder."""
    pages = reached()
    for page, text in pages.items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(for_site(page, pages, source), encoding="utf-8")
        for _, target in links(page, text):
            if target.suffix in COPIED:
                (folder / target).parent.mkdir(parents=True, exist_ok=True)
                (folder / target).write_bytes((ROOT / target).read_bytes())
