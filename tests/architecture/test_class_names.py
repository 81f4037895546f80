"""No two classes have one name, so that a name can be searched for and spoken of."""

from __future__ import annotations

import ast
from collections import defaultdict

from architecture.tree_texts import ROOT, syntax

PACKAGES = ("fcil_protocol", "fcil_adapters", "fcil_client", "fcil_server")
# A message has the name that PROTOCOL.md gives it, whatever the contract or an error is called.
TWICE = {"Progress", "RoundClosed", "Update"}


def test_no_two_modules_define_a_class_of_one_name() -> None:
    homes = defaultdict(set)
    for package in PACKAGES:
        for path in (ROOT / package.removeprefix("fcil_") / package).rglob("*.py"):
            if "methods" in path.parts:  # its folders have one shape, and so the same names
                continue
            for node in ast.walk(syntax(path)):
                if isinstance(node, ast.ClassDef):
                    homes[node.name].add(str(path.relative_to(ROOT)))
    assert len(homes) > 500
    shared = {name: sorted(paths) for name, paths in homes.items() if len(paths) > 1}
    assert shared.keys() == TWICE, {n: p for n, p in shared.items() if n not in TWICE}
