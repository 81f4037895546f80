"""The code that makes a result: its digests, and the lines of a method's own at fault (torch-free).

A digest follows from the modules' names and bytes alone, so it is the same on every machine.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.util
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from fcil_adapters.contract.manifest import Method
from fcil_protocol.errors import ConfigError, FcilError

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


def method_digest(method: Method, manifest: str, callers: Collection[str] = ()) -> str:
    """Return the SHA-256 over a method's modules, its callers, and all that they import (hex).

    Counted are the modules of the packages of these, and of ``fcil_adapters``, imports within
    functions too: what a learner, an aggregator and a model compute follows from them, from the
    options, and from libraries, whose versions a result names apart.

    Args:
        method: the method.
        manifest: the module with its manifest (`registry.module_of`).
        callers: modules that call the method.
    """
    halves = (method.learner, method.aggregator, method.model)
    starts = {manifest, *callers, *(half.partition(":")[0] for half in halves)}
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


def own_line(method: Method, error: BaseException) -> str:
    """Return the innermost line of a method's own package that an error came through.

    Returns:
        ``file:line``; empty if there is none, as for the methods of fcil: those are its own.
    """
    packages, found = _own_packages(method), ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _top(frame.f_globals.get("__name__") or "") in packages:
            found = f"{frame.f_code.co_filename}:{line}"
    return found


@contextmanager
def blaming(method: Method) -> Iterator[None]:
    """Turn an unexpected exception from the lines of a method's own package into its error.

    Raises:
        ConfigError: names the method and the line; exceptions from elsewhere pass.
    """
    try:
        yield
    except FcilError:
        raise
    except Exception as error:  # the code of a third party may raise anything
        place = own_line(method, error)
        if not place:
            raise
        text = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"the manifest of the method {method.name!r} fails with {type(error).__name__}: "
            f"{text}.",
            action=f"Correct {place} if the method is yours; else install its package again.",
        ) from error


def own_function(method: Method, function: Callable[..., Any]) -> str:
    """Return where a function of a method's own package begins, as ``file:line``; else empty."""
    code = getattr(function, "__code__", None)
    if code is None or _top(function.__module__ or "") not in _own_packages(method):
        return ""
    return f"{code.co_filename}:{code.co_firstlineno}"


def path_fault(path: str) -> str:
    """Return why ``package.module:name`` leads to nothing; empty if it leads to something.

    Nothing is imported: a module, or the package that it lies in, may need torch.
    """
    module, _, name = path.partition(":")
    if not (module and name):
        return f"{path!r} does not have the form package.module:name"
    try:
        spec = _found_module(module)
    except ValueError:  # a module that was run as a program
        return ""
    if spec is None:
        return f"there is no module {module!r}"
    read = getattr(spec.loader, "get_source", None)
    try:
        source = read(module) if read is not None else None
        return "" if source is None else _name_fault(module, name, _bound_names(source))
    except SyntaxError as error:
        return f"{spec.origin}:{error.lineno or 1}: {error.msg}"
    except (ImportError, ValueError):  # its source cannot be read: importing it says why
        return ""


def _found_module(module: str) -> ModuleSpec | None:
    """Find a module without importing the packages that it lies in, as `find_spec` would."""
    first, *rest = module.split(".")
    spec = importlib.util.find_spec(first)
    for last in range(1, len(rest) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = ".".join((first, *rest[:last]))
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec


@lru_cache(256)  # a federation of tests checks the same three halves each time
def _bound_names(source: str) -> frozenset[str]:
    """Return the names that a module binds anywhere; ``*``: further ones that it does not show."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                names.add(node.name)
            case ast.alias():
                names.add(node.asname or node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.Name(id="globals" | "vars" | "setattr" | "exec"):
                names.add("*")
    return frozenset(names)


def _name_fault(module: str, name: str, bound: Collection[str]) -> str:
    if name in bound or "*" in bound or "__getattr__" in bound:
        return ""
    near = difflib.get_close_matches(name, bound, 1)
    return f"{module!r} has no {name!r}" + (f", did you mean {near[0]!r}?" if near else "")


def _own_packages(method: Method) -> set[str]:
    """Return the top packages of a method's manifest and halves, without those of fcil."""
    manifest = (method.hparams, method.exchanges, method.broadcast, method.dims)
    modules = [getattr(part, "__module__", "") or "" for part in manifest]
    halves = [half.partition(":")[0] for half in (method.learner, method.aggregator, method.model)]
    return {_top(name) for name in (*modules, *halves)} - {"", *PACKAGES}


def _top(module: str) -> str:
    return module.partition(".")[0]


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
