"""A method's package for an author to begin with: a template, under the name that it is given.

The templates are packages that run as they are, in the data of `fcil_adapters`; each has a name of
its own, which is replaced in texts and paths.
"""

from __future__ import annotations

import keyword
import re
import shlex
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fcil_protocol.errors import UsageError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_LONGEST = 40


class MethodKind(StrEnum):
    """Building blocks of a new method."""

    LORA = "lora"  # LoRA and a linear head, with a loss of its own
    FROZEN = "frozen"  # statistics of frozen features, with a head of its own
    PROMPT = "prompt"  # pools of prompts and a linear head, with a loss of its own


class _Template(NamedTuple):
    """A template.

    Attributes:
        name: of its method.
        first: the module that an author changes first.
        idea: what that module holds.
    """

    name: str
    first: str
    idea: str


_TEMPLATES = {
    MethodKind.LORA: _Template("my_loss", "learner.py", "loss"),
    MethodKind.FROZEN: _Template("my_head", "model.py", "head"),
    MethodKind.PROMPT: _Template("my_prompts", "learner.py", "loss"),
}


def write_method(name: str, kind: MethodKind, folder: Path | None = None) -> dict[str, Any]:
    """Write a method's package: manifest, halves, notes and a test.

    Args:
        name: of the method and of its Python package.
        kind: what it is made of.
        folder: where; None: a folder of the method's name here.

    Returns:
        What was written, and the commands that come next, as JSON-ready fields.

    Raises:
        UsageError: the name is none, or taken; the folder holds something.
        StorageError: the folder cannot be written.
    """
    from importlib.resources import files

    from fcil_protocol.storage.atomic_files import storage_errors

    _check_name(name)
    folder = Path(name) if folder is None else folder
    _check_folder(folder)
    template = _TEMPLATES[kind]
    texts = dict(_texts(files("fcil_adapters") / "data" / "methods" / kind.value))
    texts = {renamed(p, template.name, name): renamed(t, template.name, name)
             for p, t in texts.items()} | _entry_point(name)  # fmt: skip
    for path, text in texts.items():
        place = folder / path
        with storage_errors("write", place):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
    where = shlex.quote(str(folder) if folder.is_absolute() else f"./{folder}")
    return {
        "name": name,
        "kind": kind.value,
        "folder": str(folder),
        "files": sorted(texts),
        "first": f"{name}/{template.first}",
        "idea": template.idea,
        "next": [
            f"pip install pytest --editable {where}",
            f"python -m pytest {where}",
            f"fcil-server demo -c method.name={name}",
        ],
    }


def renamed(text: str, old: str, new: str) -> str:
    """Return a template's text or path for another method, whose package it may name too."""
    return text.replace(old, new).replace(old.replace("_", "-"), new.replace("_", "-"))


def _texts(folder: Traversable, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, text) of all files of a template."""
    for item in folder.iterdir():
        if item.is_file():
            yield above + item.name, item.read_text(encoding="utf-8")
        elif item.name != "__pycache__":
            yield from _texts(item, f"{above}{item.name}/")


def _entry_point(name: str) -> dict[str, str]:
    """Return what pip would write beside the package, so that PYTHONPATH alone finds the method."""
    dist = f"fcil-{name.replace('_', '-')}"
    return {
        f"fcil_{name}.egg-info/PKG-INFO": f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n",
        f"fcil_{name}.egg-info/entry_points.txt": f"[fcil.methods]\n{name} = {name}:METHOD\n",
    }


def _check_name(name: str) -> None:
    from importlib.util import find_spec

    from fcil_adapters.contract.registry import method_names, package_of

    if keyword.iskeyword(name):
        raise UsageError(
            f"{name!r} is a keyword of Python, which cannot be the name of a package.",
            action=f"Choose another name, such as {name.lower()}_loss.",
        )
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise UsageError(
            "a method's name has lower-case letters, digits and single underscores, like a "
            f"Python package; got {name[: 2 * _LONGEST]!r}.",
            action=f"Choose a name of at most {_LONGEST} characters, such as my_loss.",
        )
    if name in method_names():
        raise UsageError(
            f"there is a method {name!r} already, from {package_of(name) or 'another package'}.",
            action="Choose another name.",
        )
    spec = find_spec(name)
    if spec is not None and spec.origin is not None:
        raise UsageError(
            f"there is a Python module {name!r} already ({spec.origin}).",
            action="Choose another name: the package would hide it.",
        )


def _check_folder(folder: Path) -> None:
    from fcil_protocol.storage.atomic_files import storage_errors

    with storage_errors("look into", folder):
        if folder.is_dir():
            free = not any(folder.iterdir())
        else:
            free = not (folder.exists() or folder.is_symlink())
    if not free:
        raise UsageError(
            f"{folder} exists already and is not an empty folder.",
            action="Give --dir a folder that is new or empty.",
        )
