"""The face of the contract: what a method's author imports, and where built-in methods import it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fcil_adapters.contract
from fcil_adapters.contract.registry import load_half, load_method, method_names

METHODS = Path(fcil_adapters.contract.__file__).parents[1] / "methods"
FILES = sorted(METHODS.rglob("*.py"))
BEHIND = ("fcil_adapters.contract.", "fcil_protocol.payloads")


def test_there_are_methods_to_look_at():
    assert len(FILES) > 100


def test_methods_import_the_contract_by_its_face_alone():
    found = [
        f"{path.relative_to(METHODS)}: {node.module}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(BEHIND)
    ]
    assert found == []


def test_no_method_has_a_class_with_nothing_in_it():
    """A manifest names the shared half instead."""
    found = [
        f"{path.relative_to(METHODS)}: {node.name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and all(isinstance(line, ast.Expr | ast.Pass) for line in node.body)
    ]
    assert found == []


def test_every_name_on_the_face_is_there():
    missing = [n for n in fcil_adapters.contract.__all__ if not hasattr(fcil_adapters.contract, n)]
    assert missing == []


@pytest.mark.parametrize("name", method_names())
def test_every_manifest_names_halves_that_are_there(name):
    method = load_method(name)
    for path, call in (
        (method.learner, "run"),
        (method.aggregator, "broadcast"),
        (method.model, "compose"),
    ):
        assert callable(getattr(load_half(path), call))
