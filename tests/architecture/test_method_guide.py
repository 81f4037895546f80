"""The method guide shows the method that the tests run: all of it, and to the letter."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

from fcil_protocol.payloads.payload import WIRE_DTYPES
from fcil_protocol.payloads.schema import Kind

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "method-guide.md").read_text(encoding="utf-8")
SOURCE = ROOT / "tests" / "system" / "third_party"
BLOCKS = re.findall(r"^```(?:python|toml)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
LANGUAGES = set(re.findall(r"^```(\w+)$", GUIDE, re.MULTILINE))


def method_files() -> list[Path]:
    """Return what becomes of the package, without its tests."""
    return [SOURCE / "pyproject.toml", *sorted((SOURCE / "thumbnail_lda").glob("*.py"))]


def test_every_code_block_stands_in_a_file() -> None:
    files = [*method_files(), *SOURCE.glob("test_*.py")]
    texts = ["\n" + path.read_text(encoding="utf-8") for path in files]
    strange = [block for block in BLOCKS if not any("\n" + block in text for text in texts)]
    assert len(BLOCKS) > 10
    assert strange == []


def test_only_commands_are_shown_that_no_file_holds() -> None:
    assert not LANGUAGES - {"python", "toml", "bash"}


def test_the_whole_method_is_shown() -> None:
    for path in method_files():
        rest = path.read_text(encoding="utf-8")
        for block in BLOCKS:
            rest = rest.replace(block, "")
        assert rest.strip() == "", path.name


def test_every_kind_and_dtype_is_named() -> None:
    assert [word for word in (*Kind, *WIRE_DTYPES) if f"`{word}`" not in GUIDE] == []


def test_the_method_is_as_small_as_the_guide_says() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in method_files())
    assert 200 < lines < 250


def test_the_method_is_nowhere_installed_but_where_a_test_installs_it() -> None:
    """Otherwise the tests of a client that lacks it would prove nothing."""
    assert "thumbnail_lda" not in entry_points(group="fcil.methods").names
