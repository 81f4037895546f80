"""Rooms: folders of few modules with one purpose each, and arrows between them that go one way.

A *room* is a folder of a package. An *arrow* is an import, also one under TYPE_CHECKING, within a
function, or by `importlib.import_module`. import-linter keeps the layers of rooms; this test keeps
what it cannot say: sizes, circles of modules, every arrow between two rooms, and that no two
classes have one name, so that a name can be searched for and spoken of.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from architecture.tree_texts import ROOT, syntax

PACKAGES = ("fcil_protocol", "fcil_adapters", "fcil_client", "fcil_server")
MOST_MODULES, FEWEST_LINES = 15, 60
# What `fcil-server methods --new` writes: packages of their own, which nothing imports from there.
TEMPLATES = ROOT / "adapters" / "fcil_adapters" / "data"
# One folder for each method, and one file for each command: shelves of things that are alike.
SHELVES = ("fcil_adapters.methods", "fcil_client.cli", "fcil_server.cli")
# They lie above all rooms of their package, so they may import any, and no room imports them.
ON_TOP = ("__main__", "api", "testing")

# Room -> the rooms of its package that it may import; `.` is the package's own files.
MAY_IMPORT = {
    "fcil_adapters": "",
    "fcil_adapters.backbones": "contract images numerics resources",
    "fcil_adapters.contract": "",
    "fcil_adapters.export": "backbones contract numerics toolkit.closed_form toolkit.gaussians toolkit.heads toolkit.lora",
    "fcil_adapters.images": "contract resources",
    "fcil_adapters.masks": "contract numerics",
    "fcil_adapters.methods": "backbones contract numerics toolkit.closed_form toolkit.gaussians toolkit.heads toolkit.lora toolkit.prompts toolkit.prototypes toolkit.training",
    "fcil_adapters.numerics": "contract",
    "fcil_adapters.resources": "",
    "fcil_adapters.toolkit": "",
    "fcil_adapters.toolkit.closed_form": "backbones contract numerics",
    "fcil_adapters.toolkit.gaussians": "contract numerics",
    "fcil_adapters.toolkit.heads": "contract numerics",
    "fcil_adapters.toolkit.lora": "backbones contract numerics toolkit.heads toolkit.training",
    "fcil_adapters.toolkit.prompts": "backbones contract numerics toolkit.heads toolkit.training",
    "fcil_adapters.toolkit.prototypes": "backbones contract numerics toolkit.heads toolkit.training",
    "fcil_adapters.toolkit.training": "contract numerics",
    "fcil_adapters.worker": "backbones contract resources",
    "fcil_client": "",
    "fcil_client.cli": ". daemon data doctor doctor.checks link membership policy predict rounds state swarm",
    "fcil_client.daemon": ". data link membership policy rounds session state",
    "fcil_client.data": "",
    "fcil_client.doctor": "doctor.checks doctor.probes membership state swarm",
    "fcil_client.doctor.checks": "state",
    "fcil_client.doctor.probes": "data doctor.checks link membership rounds state swarm",
    "fcil_client.link": "state",
    "fcil_client.membership": "data link state",
    "fcil_client.policy": ". session",
    "fcil_client.predict": "data state",
    "fcil_client.rounds": "data link policy state",
    "fcil_client.session": "",
    "fcil_client.state": "",
    "fcil_client.swarm": ". daemon data membership policy rounds session state",
    "fcil_protocol": "",
    "fcil_protocol.envelopes": ". messages storage trust",
    "fcil_protocol.link": ". messages trust",
    "fcil_protocol.messages": ". trust",
    "fcil_protocol.payloads": ".",
    "fcil_protocol.process": ". storage",
    "fcil_protocol.storage": ".",
    "fcil_protocol.trust": ". storage",
    "fcil_server": "",
    "fcil_server.aggregation": "federation ledger sessions sessions.intake_pool",
    "fcil_server.cli": "aggregation daemon federation lab.local ledger ledger.databases reports reports.results reports.traffic rounds runs sessions sessions.relay storage",
    "fcil_server.daemon": ". federation ledger rounds runs sessions sessions.intake_pool web web.page.access",
    "fcil_server.federation": "ledger ledger.databases",
    "fcil_server.lab": "federation lab.local ledger reports reports.charts reports.results reports.sections reports.traffic",
    "fcil_server.lab.local": "federation ledger ledger.databases",
    "fcil_server.ledger": "ledger.databases",
    "fcil_server.ledger.databases": "",
    "fcil_server.reports": "aggregation ledger ledger.databases reports.charts reports.results reports.sections",
    "fcil_server.reports.charts": "ledger reports.results reports.traffic",
    "fcil_server.reports.results": "ledger ledger.databases",
    "fcil_server.reports.sections": "ledger reports.charts reports.results reports.traffic",
    "fcil_server.reports.sinks": "federation ledger reports reports.results",
    "fcil_server.reports.traffic": "federation ledger rounds",
    "fcil_server.rounds": ". aggregation federation ledger sessions",
    "fcil_server.runs": ". aggregation federation ledger ledger.databases reports reports.results reports.sinks reports.traffic rounds sessions",
    "fcil_server.sessions": ". federation ledger sessions.intake_pool",
    "fcil_server.sessions.intake_pool": ". federation",
    "fcil_server.sessions.relay": "federation",
    "fcil_server.storage": "aggregation federation ledger ledger.databases runs",
    "fcil_server.web": "federation",
    "fcil_server.web.api": "federation ledger reports reports.results reports.traffic rounds web",
    "fcil_server.web.metrics": "federation ledger ledger.databases reports.results web",
    "fcil_server.web.page": "federation ledger ledger.databases reports.charts reports.results reports.sections reports.traffic web web.metrics web.page.access web.page.actions",
    "fcil_server.web.page.access": "federation reports.charts web",
    "fcil_server.web.page.actions": "federation ledger reports.results web web.page.access",
}

# Modules under 60 lines that stay by themselves, and why.
SMALL = {
    "fcil_adapters.contract.forgetting": "a part of the face for method authors",
    "fcil_adapters.numerics.symmetric": "below sums, Gaussians and LoRM, which all have packed triangles",
    "fcil_adapters.numerics.torch_numpy": "one file owns the bridge between torch and numpy",
    "fcil_adapters.resources.priority": "one file owns the priority of workers",
    "fcil_adapters.toolkit.closed_form.model": "one of three halves, which manifests name as text",
    "fcil_adapters.worker.evaluation": "the client's predictions use it without a worker",
    "fcil_client.membership.enrol_with_ticket": "for servers elsewhere; `enrol` is about this machine's",
    "fcil_client.data.file_names": "below the manifest, so that watchers need no images",
    "fcil_protocol.process.overrides": "one file owns -c of both programs",
    "fcil_protocol.process.token_bucket": "one budget for notes of both programs, and for guests",
    "fcil_server.ledger.labels": "one file has the words of every status",
}

# A message has the name that PROTOCOL.md gives it, whatever the contract or an error is called.
CLASSES_TWICE = {"Progress", "RoundClosed", "Update"}

# What has still to go. These lists only shrink: an entry that is no longer true fails a test.
KNOWN_CIRCLES: tuple[frozenset[str], ...] = ()
KNOWN_ARROWS: set[tuple[str, str]] = set()
KNOWN_SMALL = {
    "fcil_adapters.backbones.blocks",
    "fcil_adapters.backbones.precision",
    "fcil_adapters.numerics.scores",
    "fcil_adapters.numerics.update_list",
    "fcil_adapters.toolkit.training.prefetch",
    "fcil_client.data.inventory",
    "fcil_client.rounds.options",
    "fcil_protocol.link.dial",
    "fcil_server.reports.sections.events",
    "fcil_server.storage.findings",
    "fcil_server.web.page.pictures",
}
KNOWN_LARGE: dict[str, int] = {}


class Module(NamedTuple):
    """A module, parsed.

    Attributes:
        room: the package that it lies in; a package's `__init__` belongs to it.
        lines: of its file.
    """

    name: str
    room: str
    path: Path
    tree: ast.Module
    lines: int


@cache
def modules() -> dict[str, Module]:
    """Return every module of the four packages by name."""
    found = {}
    for package in PACKAGES:
        base = ROOT / package.removeprefix("fcil_")
        for path in sorted((base / package).rglob("*.py")):
            if path.is_relative_to(TEMPLATES):
                continue
            dotted = ".".join(path.relative_to(base).with_suffix("").parts)
            name = dotted.removesuffix(".__init__")
            text = path.read_text(encoding="utf-8")
            room = name if dotted != name else name.rpartition(".")[0]
            if room.startswith("fcil_adapters.methods"):
                room = "fcil_adapters.methods"
            found[name] = Module(name, room, path, syntax(path), len(text.splitlines()))
    return found


def imported(tree: ast.Module, known: frozenset[str]) -> Iterator[str]:
    """Yield every module of ours that a module names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known else node.module
        elif isinstance(node, ast.Call) and called(node) == "import_module":
            yield from (str(word.value) for word in node.args if isinstance(word, ast.Constant))


def called(node: ast.Call) -> str:
    """Return the last word of the name of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


@cache
def arrows() -> dict[str, frozenset[str]]:
    """Return module -> modules of ours that it imports."""
    known = frozenset(modules())
    return {
        name: frozenset(m for m in imported(module.tree, known) if m in known and m != name)
        for name, module in modules().items()
    }


def circles(graph: dict[str, frozenset[str]]) -> list[frozenset[str]]:
    """Return the strongly connected components of more than one node."""
    order: list[str] = []
    seen: set[str] = set()
    for start, first in graph.items():
        stack = [(start, iter(first))] if start not in seen else []
        seen.add(start)
        while stack:
            node, rest = stack[-1]
            below = next((n for n in rest if n not in seen), None)
            if below is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(below)
                stack.append((below, iter(graph[below])))
    back: dict[str, set[str]] = {node: set() for node in graph}
    for node, targets in graph.items():
        for target in targets:
            back[target].add(node)
    found, done = [], set[str]()
    for start in reversed(order):
        group, waiting = set[str](), [start]
        while waiting:
            node = waiting.pop()
            if node not in done:
                done.add(node)
                group.add(node)
                waiting.extend(back[node])
        if len(group) > 1:
            found.append(frozenset(group))
    return found


def of_modules() -> list[frozenset[str]]:
    """Return the circles of modules."""
    return circles(arrows())


def of_rooms() -> list[frozenset[str]]:
    """Return the circles of rooms; files of a package itself are a room each."""
    graph: dict[str, set[str]] = {}
    for name, targets in arrows().items():
        here = unit(name)
        graph.setdefault(here, set()).update(unit(t) for t in targets if unit(t) != here)
    return circles({room: frozenset(targets) for room, targets in graph.items()})


def unit(name: str) -> str:
    room = modules()[name].room
    return name if room in PACKAGES else room


def is_on_top(name: str) -> bool:
    return modules()[name].room in PACKAGES and name.rpartition(".")[2] in ON_TOP


def is_face(name: str) -> bool:
    """Whether a module is a package itself, which offers names of its rooms."""
    return name in PACKAGES


def refused(may_import: dict[str, str]) -> set[tuple[str, str]]:
    """Return (module, module) of all arrows between rooms of one package that nobody allowed."""
    found = set()
    for name, targets in arrows().items():
        here = modules()[name].room
        package = here.partition(".")[0]
        allowed = {
            package if word == "." else f"{package}.{word}"
            for word in may_import.get(here, "").split()
        }
        for target in targets:
            there = modules()[target].room
            if there.partition(".")[0] != package or there == here:
                continue
            if is_on_top(name) or is_face(name):
                continue
            if there not in allowed or is_on_top(target):
                found.add((name, target))
    return found


def is_entry_point(module: Module) -> bool:
    """Whether a module is started by itself."""
    ends = [ast.unparse(n.test) for n in module.tree.body if isinstance(n, ast.If)]
    return module.name.endswith("__main__") or "__name__ == '__main__'" in ends


def is_interface(module: Module) -> bool:
    """Whether a module has nothing but protocols."""
    kinds = [n for n in module.tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
    return bool(kinds) and all(
        isinstance(n, ast.ClassDef) and any("Protocol" in ast.unparse(b) for b in n.bases)
        for n in kinds
    )


def small() -> set[str]:
    """Return modules that are too short to stand by themselves; methods are a shelf."""
    return {
        m.name
        for m in modules().values()
        if m.lines < FEWEST_LINES
        and m.path.name != "__init__.py"
        and m.room not in SHELVES
        and not is_entry_point(m)
        and not is_interface(m)
    }


def large() -> dict[str, int]:
    """Return rooms with too many modules."""
    count: dict[str, int] = {}
    for module in modules().values():
        if module.path.name != "__init__.py" and module.room not in SHELVES:
            count[module.room] = count.get(module.room, 0) + 1
    return {room: number for room, number in count.items() if number > MOST_MODULES}


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({"a": "b", "b": "c", "c": ""}, []),
        ({"a": "b", "b": "a", "c": "ab"}, ["ab"]),
        ({"a": "b", "b": "c", "c": "a", "d": "e", "e": "d"}, ["abc", "de"]),
    ],
)
def test_circles_are_found(graph: dict[str, str], found: list[str]) -> None:
    made = circles({node: frozenset(targets) for node, targets in graph.items()})
    assert sorted("".join(sorted(group)) for group in made) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from fcil_a import b", ["fcil_a.b"]),
        ("from fcil_a.b import C", ["fcil_a.b"]),
        ("if TYPE_CHECKING:\n    from fcil_a.b import C", ["fcil_a.b"]),
        ("def f():\n    import fcil_a.b", ["fcil_a.b"]),
        ("importlib.import_module('fcil_a.b')", ["fcil_a.b"]),
    ],
)
def test_arrows_of_every_kind_are_seen(text: str, found: list[str]) -> None:
    assert list(imported(ast.parse(text), frozenset({"fcil_a", "fcil_a.b"}))) == found


def test_modules_import_each_other_in_no_circle_but_known_ones() -> None:
    new = [sorted(c) for c in of_modules() if not any(c <= known for known in KNOWN_CIRCLES)]
    assert new == []


def test_rooms_import_each_other_in_no_circle() -> None:
    if not KNOWN_CIRCLES and not KNOWN_ARROWS:
        assert [sorted(c) for c in of_rooms()] == []


def test_every_arrow_between_rooms_is_allowed() -> None:
    assert sorted(refused(MAY_IMPORT) - KNOWN_ARROWS) == []


def test_every_arrow_that_is_allowed_is_there() -> None:
    there = {(modules()[name].room, modules()[target].room) for name, target in refused({})}
    for room, words in MAY_IMPORT.items():
        package = room.partition(".")[0]
        for word in words.split():
            assert (room, package if word == "." else f"{package}.{word}") in there


def test_a_room_that_may_import_nothing_is_refused_everything() -> None:
    """Otherwise the test above would prove nothing."""
    assert len(refused({})) > 100


def test_every_room_is_in_the_table_and_says_its_purpose() -> None:
    rooms = {m.room for m in modules().values()}
    assert rooms == set(MAY_IMPORT)
    for room in rooms - {*PACKAGES}:
        assert ast.get_docstring(modules()[room].tree), room


def test_no_room_has_too_many_modules() -> None:
    assert {r: n for r, n in large().items() if n > KNOWN_LARGE.get(r, MOST_MODULES)} == {}


def test_no_module_is_too_small_to_stand_by_itself() -> None:
    assert sorted(small() - KNOWN_SMALL - set(SMALL)) == []


def test_no_two_modules_define_a_class_of_one_name() -> None:
    homes = defaultdict(set)
    for module in modules().values():
        if module.room != "fcil_adapters.methods":  # folders of one shape, so of the same names
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef):
                    homes[node.name].add(module.name)
    assert len(homes) > 500
    shared = {name: sorted(found) for name, found in homes.items() if len(found) > 1}
    assert shared.keys() == CLASSES_TWICE, shared


def test_what_is_known_is_still_so() -> None:
    """The lists of what has to go shrink with it."""
    assert [k for k in KNOWN_CIRCLES if not any(c <= k for c in of_modules())] == []
    assert sorted(KNOWN_ARROWS - refused(MAY_IMPORT)) == []
    assert sorted((KNOWN_SMALL | set(SMALL)) - small()) == []
    assert {r: n for r, n in KNOWN_LARGE.items() if large().get(r) != n} == {}
