"""The method guide shows what `fcil-server methods --new` writes: all of it, and to the letter."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from fcil_protocol.payloads.payload import WIRE_DTYPES
from fcil_protocol.payloads.schema import Kind
from fcil_server.cli.new_method import MethodKind, write_method

ROOT = Path(__file__).resolve().parents[2]
HALVES = ("method-guide.md", "method-rules.md")
GUIDE = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in HALVES)
BLOCKS = re.findall(r"^```(?:python|toml)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
LANGUAGES = set(re.findall(r"^```(\w+)$", GUIDE, re.MULTILINE))
SHOWN = {"my_loss": MethodKind.LORA, "my_head": MethodKind.FROZEN}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Path]:
    """Return the packages as the command writes them."""
    folders = {name: tmp_path_factory.mktemp(name) for name in SHOWN}
    for name, kind in SHOWN.items():
        write_method(name, kind, folders[name])
    return folders


def test_every_code_block_stands_in_a_file(written: dict[str, Path]) -> None:
    files = [path for folder in written.values() for path in folder.rglob("*.*") if path.is_file()]
    texts = ["\n" + path.read_text(encoding="utf-8") for path in files]
    strange = [block for block in BLOCKS if not any("\n" + block in text for text in texts)]
    assert len(BLOCKS) > 10
    assert strange == []


def test_only_commands_are_shown_that_no_file_holds() -> None:
    assert not LANGUAGES - {"python", "toml", "bash"}


@pytest.mark.parametrize("name", SHOWN)
def test_the_whole_method_is_shown(name: str, written: dict[str, Path]) -> None:
    files = sorted((written[name] / name).glob("*.py"))
    assert len(files) > 1
    for path in files:
        rest = path.read_text(encoding="utf-8")
        for block in BLOCKS:
            rest = rest.replace(block, "")
        assert rest.strip() == "", path.name


def test_every_kind_and_dtype_is_named() -> None:
    assert [word for word in (*Kind, *WIRE_DTYPES) if f"`{word}`" not in GUIDE] == []


@pytest.mark.parametrize(("name", "least", "most"), [("my_loss", 55, 75), ("my_head", 220, 240)])
def test_a_method_is_as_small_as_the_guide_says(
    name: str, least: int, most: int, written: dict[str, Path]
) -> None:
    files = (written[name] / name).glob("*.py")
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert least < lines < most
    assert f"in about {(least + most) // 2} lines" in GUIDE or f"about {lines} lines" in GUIDE


def test_the_method_is_nowhere_installed_but_where_a_test_installs_it() -> None:
    """Otherwise the tests of a client that lacks it would prove nothing."""
    assert "thumbnail_lda" not in entry_points(group="fcil.methods").names
