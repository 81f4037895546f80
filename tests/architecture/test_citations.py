"""What the tree cites is in the tree: files, sections, decisions, and the code that notes name."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from architecture.tree_texts import (
    ROOT,
    anchors,
    flat,
    has_number,
    headings,
    prose,
    texts,
    tracked,
)
from fcil_adapters.contract.registry import method_names

DECISIONS = ROOT / "docs" / "decisions"
METHODS = ROOT / "adapters" / "fcil_adapters" / "methods"
PAGES = ROOT / "docs" / "methods"
# What programs write, by the names under which their users find it.
WRITTEN = {"gpu.md", "report.md", "tables.md"}
# Every method has one: a document may speak of all of them.
OF_EACH_METHOD = "NOTES.md"
# Documents whose sections have numbers, and who speak of them without their own name.
NUMBERED = ("protocol/PROTOCOL.md",)

UP = "../"
_FILE = re.compile(r"(?<![\w/.*{<$-])((?:\.\./)*(?:[\w.-]+/)*[\w-][\w.-]*\.(?:md|py))\b(?!\.\w)")
_NUMBER = re.compile(r",?(?: sections?)? (\d+(?:\.\d+)*)\b")
_TITLE = re.compile(r'(?:, ?| \()"([^"]+)"')
_ANCHOR = re.compile(r"#([\w-]+)")
_OWN_SECTION = re.compile(r"(?<!RFC \d{4} \()\bsection (\d+(?:\.\d+)*)\b(?! of RFC)")
_DECISIONS = re.compile(r"\bdecisions? (\d{4}(?:(?:, | and )\d{4})*)", re.IGNORECASE)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_SYMBOL = re.compile(r"`(\w+(?:\.[A-Za-z_]\w*)+)`")


def where(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- files and sections ---------------------------------------------------------------------


@functools.cache
def cited_file(path: Path, name: str) -> Path | None:
    """Return the file that a text means: beside it, in a folder above, or the only one of its end.

    A file in a method's folder may say NOTES.md and mean its own; `../` leads up from the text.
    """
    if name.startswith(UP) and (path.parent / name).is_file():
        return (path.parent / name).resolve()
    name = name.rpartition(UP)[2]
    for folder in (path.parent, *path.parent.parents):
        if (folder / name).is_file():
            return folder / name
        if folder == ROOT:
            break
    found = [file for file in tracked() if where(file).endswith(f"/{name}")]
    return found[0] if len(found) == 1 else None


@functools.cache
def file_citations() -> list[tuple[Path, str, str]]:
    """Return (citing file, cited name, what follows it) over all texts."""
    found = []
    for path, text in texts():
        line = "" if path == Path(__file__) else flat(text)
        for match in _FILE.finditer(line):
            name = match[1]
            plain = name.rpartition(UP)[2]
            code = plain.endswith(".py") and not plain.startswith(("tests/", "scripts/"))
            generic = plain == OF_EACH_METHOD and path.suffix == ".md"
            if not (code or generic or plain in WRITTEN):
                found.append((path, name, line[match.end() : match.end() + 200]))
    return found


def test_every_file_that_is_cited_is_there() -> None:
    assert [f"{where(p)}: {n}" for p, n, _ in file_citations() if not cited_file(p, n)] == []


def missing_section(document: Path, after: str) -> str:
    """Return the section that a citation names and the document lacks; empty: none."""
    if number := _NUMBER.match(after):
        return "" if has_number(document, number[1]) else number[1]
    if title := _TITLE.match(after):
        return "" if title[1] in headings(document) else title[1]
    if anchor := _ANCHOR.match(after):
        return "" if anchor[1] in anchors(document) else anchor[1]
    return ""


def test_every_section_that_is_cited_is_there() -> None:
    broken, checked = [], 0
    for path, name, after in file_citations():
        document = cited_file(path, name)
        if document is None or document.suffix != ".md":
            continue
        checked += any(form.match(after) for form in (_NUMBER, _TITLE, _ANCHOR))
        if missing := missing_section(document, after):
            broken.append(f"{where(path)}: {name}, {missing!r}")
    assert broken == []
    assert checked > 100  # the forms above are those that the tree uses


def test_a_document_has_the_sections_of_its_own_that_it_names() -> None:
    for name in NUMBERED:
        document = ROOT / name
        cited = _OWN_SECTION.findall(flat(document.read_text(encoding="utf-8")))
        assert cited, name
        assert [n for n in cited if not has_number(document, n)] == [], name


# --- links ----------------------------------------------------------------------------------


def links() -> Iterator[tuple[Path, str, Path, str]]:
    """Yield (document, words, target, anchor) for every link within the tree."""
    for path, text in texts(".md"):
        for words, target in _LINK.findall(prose(text)):
            if not re.match(r"[a-z]+:", target):
                name, _, anchor = target.partition("#")
                yield path, flat(words), (path.parent / name).resolve() if name else path, anchor


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for path, words, file, anchor in links():
        known = not anchor or file.suffix != ".md" or (file.exists() and anchor in anchors(file))
        if not file.exists() or not known:
            broken.append(f"{where(path)}: [{words}] leads to {file}#{anchor}")
    assert broken == []


def test_a_link_leads_to_the_section_that_its_words_name() -> None:
    wrong = []
    for path, words, _, anchor in links():
        number = re.search(r"section (\d+(?:\.\d+)*)$", words)
        if number and not anchor.startswith(number[1].replace(".", "") + "-"):
            wrong.append(f"{where(path)}: [{words}] leads to #{anchor}")
    assert wrong == []


# --- decisions ------------------------------------------------------------------------------


def test_every_decision_that_is_cited_is_there() -> None:
    known = {page.name[:4] for page in DECISIONS.glob("*.md")}
    cited = [
        (where(path), number)
        for path, text in texts()
        for numbers in _DECISIONS.findall(flat(text))
        for number in re.findall(r"\d{4}", numbers)
    ]
    assert len(cited) > 30
    assert [c for c in cited if c[1] not in known] == []


def test_a_link_leads_to_the_decision_that_its_words_name() -> None:
    wrong = [
        f"{where(path)}: [{words}] leads to {file.name}"
        for path, words, file, _ in links()
        if (number := re.fullmatch(r"(?:[Dd]ecision )?(\d{4})", words))
        and not (file.parent == DECISIONS and file.name.startswith(number[1]))
    ]
    assert wrong == []


# --- the methods' pages and notes -----------------------------------------------------------


def page_of(method: str) -> tuple[Path, str]:
    """Return the page of a built-in method and the heading of its section there."""
    own = PAGES / f"{method}.md"
    return (own, "") if own.is_file() else (PAGES / "baselines.md", method)


def test_every_methods_notes_lead_to_its_section_and_back() -> None:
    targets = {(path, file, anchor) for path, _, file, anchor in links()}
    missing = []
    for method in method_names():
        notes = METHODS / method / "NOTES.md"
        page, heading = page_of(method)
        # Back from the section itself, not from somewhere on its page.
        back = f"/{method}/NOTES.md)" in section_text(page, heading)
        if (notes, page, heading) not in targets or not back:
            missing.append(method)
    assert missing == []


def section_text(page: Path, heading: str) -> str:
    text = page.read_text(encoding="utf-8")
    return text if not heading else text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@functools.cache
def modules() -> dict[str, tuple[Path, ...]]:
    """Return the modules and rooms of the packages by each end of their dotted name."""
    found: dict[str, tuple[Path, ...]] = {}
    for path in tracked():
        package, *inner = path.relative_to(ROOT).with_suffix("").parts
        if path.suffix == ".py" and package in ("adapters", "client", "protocol", "server"):
            parts = inner[:-1] if inner[-1] == "__init__" else inner
            for start in range(len(parts)):
                name = ".".join(parts[start:])
                found[name] = (*found.get(name, ()), path)
    return found


def defines(path: Path, name: str) -> bool:
    pattern = rf"^\s*(?:(?:async )?def|class) {name}\b|^\s*{name}\b\s*[:=]"
    return re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE) is not None


def named(document: Path, module: str) -> list[Path]:
    """Return the modules that a document may mean: shared ones, and those of its own method."""
    own = document.parent if document.name == OF_EACH_METHOD else METHODS / document.stem
    found = modules().get(module, ())
    if not own.is_dir():  # a page on many methods
        return list(found)
    return [path for path in found if METHODS not in path.parents or own in path.parents]


def missing_name(document: Path, parts: list[str]) -> str | None:
    """Return the first name that the module before it lacks; empty: none; None: no module.

    A room alone is none: `privacy.partial` may be a field of something else.
    """
    for end in range(len(parts), 0, -1):
        files = named(document, ".".join(parts[:end]))
        rooms = all(file.stem == "__init__" for file in files)
        if files and not (rooms and len(parts) == end + 1):
            lacking = (n for n in parts[end:] if not any(defines(file, n) for file in files))
            return next(lacking, "")
    return None


def test_the_code_that_notes_and_pages_name_exists() -> None:
    """A first word that is no module of ours (`method.rho`) names something else."""
    gone, checked = [], 0
    for document in (*PAGES.glob("*.md"), *METHODS.glob("*/NOTES.md")):
        for cited in _SYMBOL.findall(document.read_text(encoding="utf-8")):
            missing = missing_name(document, cited.split("."))
            checked += missing is not None
            if missing:
                gone.append(f"{where(document)}: {cited}")
    assert gone == []
    assert checked > 100
