"""Digests of the code that makes a result (torch-free).

A digest follows from the modules' names and bytes alone, so it is the same on every machine.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from fcil_adapters.contract.manifest import Method

PACKAGES = ("fcil_protocol", "fcil_adapters", "fcil_client", "fcil_server")
_OURS = "fcil_adapters"


def tree_digest() -> str:
    """Return the SHA-256 over all modules of the installed packages of fcil (hex)."""
    files = {
        f"{package}/{path.relative_to(root).as_posix()}": path
        for package in PACKAGES
        if (root := _root(package)) is not None
        for path in root.rglob("*.py")
    }
    return _digest(files.items())


def package_digest(package: str) -> str:
    """Return the SHA-256 over all modules of a package, such as ``fcil_adapters.backbones``."""
    root = _root(package)
    assert root is not None
    return _digest((path.relative_to(root).as_posix(), path) for path in root.rglob("*.py"))


def method_digest(method: Method, manifest: str) -> str:
    """Return the SHA-256 over a method's modules and all that they import (hex).

    Counted are the modules of the method's own package and of ``fcil_adapters``, imports within
    functions too: what a learner, an aggregator and a model compute follows from them, from the
    options, and from libraries, whose versions a result names apart.

    Args:
        method: the method.
        manifest: the module with its manifest (`registry.module_of`).
    """
    halves = (method.learner, method.aggregator, method.model)
    starts = {manifest, *(half.partition(":")[0] for half in halves)}
    within = {_OURS, *(start.partition(".")[0] for start in starts)}
    found: dict[str, Path] = {}
    pending = [name for start in starts for name in _with_parents(start)]
    while pending:
        name = pending.pop()
        if name in found or name.partition(".")[0] not in within:
            continue
        path = _file(name)
        if path is not None:
            found[name] = path
            pending += [p for n in _imports(name, path) for p in _with_parents(n)]
    return _digest(found.items())


def _digest(named: Iterable[tuple[str, Path]]) -> str:
    sha = hashlib.sha256()
    for name, path in sorted(named):
        content = path.read_bytes()
        sha.update(f"{name} {len(content)}\n".encode() + content)
    return sha.hexdigest()


def _root(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) if places else None


def _file(name: str) -> Path | None:
    """Return the file of a module, without importing it."""
    top, *rest = name.split(".")
    root = _root(top)
    if root is None:
        return None
    place = root.joinpath(*rest)
    module, package = place.with_suffix(".py"), place / "__init__.py"
    return package if package.is_file() else module if rest and module.is_file() else None


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


@lru_cache(maxsize=1024)
def _imports(name: str, path: Path) -> tuple[str, ...]:
    """Return the absolute names that a module imports, and those that may be modules."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                above = parts[: len(parts) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(found)
