"""Who may import whom, and what nobody may call; read from the source, so nothing escapes.

import-linter follows imports through other modules: `scripts/test` runs it beside the tests.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "fcil_protocol": ROOT / "protocol" / "fcil_protocol",
    "fcil_adapters": ROOT / "adapters" / "fcil_adapters",
    "fcil_client": ROOT / "client" / "fcil_client",
    "fcil_server": ROOT / "server" / "fcil_server",
}
# Modules whose files can run code when they are read.
UNSAFE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CIPHER_OWNERS = {
    "fcil_protocol/envelope.py",  # payloads
    "fcil_protocol/keys.py",  # identities
    "fcil_protocol/certificate.py",  # the federation's identity
    "fcil_protocol/passphrase.py",  # keys in a backup
    "fcil_server/web_door.py",  # no cipher: reads the names in a certificate
}
ZMQ_OWNERS = {
    "fcil_protocol/gate.py",  # who may connect
    "fcil_protocol/socket_reader.py",  # what has come
    "fcil_protocol/transport.py",  # the sockets themselves
}


@cache
def sources() -> dict[str, ast.Module]:
    """Every module of the packages, parsed once, and only where a test of this file runs."""
    found = {}
    for name, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            found[f"{name}/{path.relative_to(folder)}"] = ast.parse(path.read_text("utf-8"))
    return found


def imports(tree: ast.Module) -> Iterator[str]:
    """Yield every imported module, whole, also those imported inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called in ("__import__", "importlib.import_module", "import_module"):
                yield str(node.args[0].value)


def tops(tree: ast.Module) -> set[str]:
    return {name.partition(".")[0] for name in imports(tree)}


def calls(tree: ast.Module) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield every call as dotted name and keyword arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg}
            yield ast.unparse(node.func), keywords


def unsafe_imports(tree: ast.Module) -> list[str]:
    return sorted(tops(tree) & UNSAFE)


def unsafe_calls(tree: ast.Module) -> list[str]:
    """Calls that build arbitrary objects or run text."""
    found = []
    for name, keywords in calls(tree):
        if name == "torch.load" and keywords.get("weights_only") != "True":
            found.append(name)
        if name in ("yaml.load", "yaml.full_load", "yaml.unsafe_load", "eval", "exec"):
            found.append(name)
        if name in ("np.load", "numpy.load") and keywords.get("allow_pickle", "False") != "False":
            found.append(name)
        if name in ("os.system", "os.fork", "os.popen") or keywords.get("shell") == "True":
            found.append(name)
    return found


def test_all_four_packages_are_looked_at() -> None:
    assert {name.partition("/")[0] for name in sources()} == set(PACKAGES)
    assert len(sources()) > 60


@pytest.mark.parametrize(
    ("text", "check", "found"),
    [
        ("import pickle", unsafe_imports, ["pickle"]),
        ("def f():\n    from joblib import load", unsafe_imports, ["joblib"]),
        ("import importlib\nimportlib.import_module('dill')", unsafe_imports, ["dill"]),
        ("torch.load(p)", unsafe_calls, ["torch.load"]),
        ("torch.load(p, weights_only=False)", unsafe_calls, ["torch.load"]),
        ("torch.load(p, weights_only=True)", unsafe_calls, []),
        ("yaml.load(t)", unsafe_calls, ["yaml.load"]),
        ("np.load(p, allow_pickle=True)", unsafe_calls, ["np.load"]),
        ("subprocess.run('x', shell=True)", unsafe_calls, ["subprocess.run"]),
        ("model.eval()", unsafe_calls, []),
    ],
)
def test_the_checks_below_see_what_they_look_for(
    text: str, check: Callable[[ast.Module], list[str]], found: list[str]
) -> None:
    assert check(ast.parse(text)) == found


def test_no_module_reads_files_that_can_run_code() -> None:
    found = {name: unsafe_imports(tree) + unsafe_calls(tree) for name, tree in sources().items()}
    assert {name: what for name, what in found.items() if what} == {}


def test_only_one_command_reads_checkpoints() -> None:
    readers = {n for n, tree in sources().items() if "torch.load" in dict(calls(tree))}
    assert readers == {"fcil_adapters/weights_convert.py"}


def test_only_the_transport_and_its_parts_import_zmq() -> None:
    assert {name for name, tree in sources().items() if "zmq" in tops(tree)} == ZMQ_OWNERS


def test_only_their_owners_call_ciphers() -> None:
    users = {name for name, tree in sources().items() if "cryptography" in tops(tree)}
    assert users == CIPHER_OWNERS


def test_only_the_codecs_of_the_wire_and_the_pipe_use_msgpack() -> None:
    users = {name for name, tree in sources().items() if "msgpack" in tops(tree)}
    assert users <= {
        "fcil_protocol/fields.py",
        "fcil_protocol/frames.py",
        "fcil_protocol/segment.py",
        "fcil_adapters/worker_pipe.py",
    }


def test_client_and_server_are_strangers_and_nothing_looks_upwards() -> None:
    """Also inside functions and under TYPE_CHECKING."""
    allowed = {
        "fcil_protocol": {"fcil_protocol"},
        "fcil_adapters": {"fcil_protocol", "fcil_adapters"},
        "fcil_client": {"fcil_protocol", "fcil_adapters", "fcil_client"},
        "fcil_server": {"fcil_protocol", "fcil_adapters", "fcil_server"},
    }
    for name, tree in sources().items():
        package = name.partition("/")[0]
        ours = {top for top in tops(tree) if top.startswith("fcil_")}
        assert ours <= allowed[package], name


def test_methods_do_not_import_each_other() -> None:
    prefix = "fcil_adapters/methods/"
    for name, tree in sources().items():
        if not name.startswith(prefix) or name.count("/") < 3:
            continue
        own = name.removeprefix(prefix).partition("/")[0]
        for module in imports(tree):
            if module.startswith("fcil_adapters.methods."):
                assert module.split(".")[2] == own, name


def test_the_pure_machines_import_no_clock_no_socket_and_no_disk() -> None:
    """They decide without IO; time and chance come in as arguments."""
    forbidden = {"time", "datetime", "random", "os", "socket", "asyncio", "pathlib", "threading"}
    for name in (
        "fcil_client/session.py",
        "fcil_server/round.py",
        "fcil_server/round_events.py",
        "fcil_server/plan.py",
    ):
        assert not tops(sources()[name]) & forbidden, name
