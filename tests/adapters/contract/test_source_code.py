"""Digests of the code that makes a result: they change with it, and with nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import fcil_adapters
import fcil_client
from fcil_adapters.contract import source_code
from fcil_adapters.contract.registry import load_method, method_names, module_of
from fcil_server.lab.plan import WORKERS

ROOT = Path(fcil_adapters.__file__).parent
CLIENT = Path(fcil_client.__file__).parent


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """Return a copy of the package that the digests are taken of; to be changed at will."""
    target = tmp_path / "fcil_adapters"
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns("__pycache__", "data"))
    real = source_code._root
    monkeypatch.setattr(
        source_code, "_root", lambda package: target if package == ROOT.name else real(package)
    )
    return target


def digest(name: str = "pilora", callers: Sequence[str] = ()) -> str:
    source_code._imports.cache_clear()
    return source_code.method_digest(load_method(name), module_of(name), callers)


def change(path: Path) -> None:
    path.write_text(path.read_text() + "\n# another line\n")


@pytest.mark.parametrize(
    "module",
    [
        "methods/pilora/learner.py",  # its halves
        "methods/pilora/aggregator.py",
        "methods/pilora/__init__.py",  # its manifest
        "toolkit/prototypes/reweighting.py",  # what they import
        "toolkit/prototypes/__init__.py",
        "toolkit/training/augment.py",  # what that imports
        "backbones/torch_imports.py",
    ],
)
def test_a_methods_digest_changes_with_what_it_computes_with(copy, module):
    before = digest()
    change(copy / module)
    assert digest() != before


@pytest.mark.parametrize(
    "module", ["methods/hgp/learner.py", "toolkit/gaussians/mixture.py", "export/trace.py"]
)
def test_and_not_with_what_it_never_imports(copy, module):
    before = digest()
    change(copy / module)
    assert digest() == before


def test_imports_within_functions_count(copy):
    path = copy / "methods" / "pilora" / "learner.py"
    path.write_text(
        path.read_text() + "\ndef late():\n    from fcil_adapters.export import trace\n"
    )
    before = digest()
    change(copy / "export" / "trace.py")
    assert digest() != before


def test_relative_imports_count(copy):
    path = copy / "methods" / "pilora" / "learner.py"
    path.write_text(path.read_text() + "\nfrom ..hgp import head\n")
    before = digest()
    change(copy / "methods" / "hgp" / "head.py")
    assert digest() != before


@pytest.mark.parametrize(
    "module",
    [
        "worker/evaluation.py",
        "images/decoding.py",
        "backbones/engines.py",
        "numerics/outliers.py",
        "numerics/relay_sums.py",
    ],
)
def test_the_code_of_a_cell_is_also_what_calls_the_method(copy, module):
    alone, called = digest(), digest(callers=WORKERS)
    change(copy / module)
    assert digest(callers=WORKERS) != called
    assert digest() == alone


def test_a_callers_own_package_counts(monkeypatch, tmp_path):
    target = tmp_path / "fcil_client"
    shutil.copytree(CLIENT, target, ignore=shutil.ignore_patterns("__pycache__"))
    real = source_code._root
    monkeypatch.setattr(
        source_code, "_root", lambda package: target if package == CLIENT.name else real(package)
    )
    before = digest(callers=WORKERS)
    change(target / "cli" / "show_status.py")
    assert digest(callers=WORKERS) == before, "no result follows from it"
    change(target / "data" / "split.py")
    assert digest(callers=WORKERS) != before


@pytest.mark.full
def test_every_installed_method_has_one_of_its_own():
    digests = {name: digest(name) for name in method_names()}
    assert len(set(digests.values())) == len(digests)


def test_a_method_of_another_package_counts_with_its_own_modules(tmp_path, monkeypatch):
    package = tmp_path / "elsewhere"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "halves.py").write_text("from elsewhere import tools\n")
    (package / "tools.py").write_text("ONE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    half = "elsewhere.halves:Half"
    method = replace(load_method("fedncm"), learner=half, aggregator=half, model=half)
    before = source_code.method_digest(method, "elsewhere")
    (package / "tools.py").write_text("ONE = 2\n")
    source_code._imports.cache_clear()
    assert source_code.method_digest(method, "elsewhere") != before


def test_the_digest_of_the_tree_changes_with_any_module(copy):
    before = source_code.tree_digest()
    assert before == source_code.tree_digest()
    change(copy / "export" / "trace.py")
    assert source_code.tree_digest() != before
