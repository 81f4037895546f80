"""Who may import whom, and what nobody may call; read from the source, so nothing escapes.

import-linter follows imports through other modules: `scripts/test` runs it beside the tests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from architecture.tree_texts import ROOT, syntax

PACKAGES = {
    "fcil_protocol": ROOT / "protocol" / "fcil_protocol",
    "fcil_adapters": ROOT / "adapters" / "fcil_adapters",
    "fcil_client": ROOT / "client" / "fcil_client",
    "fcil_server": ROOT / "server" / "fcil_server",
}
# Modules whose files can run code when they are read.
UNSAFE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CIPHER_OWNERS = {
    "fcil_adapters/masks/shares.py",  # secrets and streams of masked rounds
    "fcil_protocol/envelopes/envelope.py",  # payloads
    "fcil_protocol/trust/keys.py",  # identities
    "fcil_protocol/trust/certificate.py",  # the federation's identity
    "fcil_protocol/trust/session_keys.py",  # MACs of messages
    "fcil_protocol/trust/passphrase.py",  # keys in a backup
    "fcil_server/web/http_server.py",  # no cipher: reads the names in a certificate
}
ZMQ_OWNERS = {
    "fcil_protocol/link/gate.py",  # who may connect
    "fcil_protocol/link/socket_reader.py",  # what has come
    "fcil_protocol/link/zmq_link.py",  # the sockets themselves
}
# Who starts processes that end with this one, and who waits for a command.
PARENTS = {
    "fcil_adapters/worker/host.py",
    "fcil_client/doctor/probes/engines.py",
    "fcil_client/swarm/ray.py",
    "fcil_server/lab/local/federation.py",
    "fcil_server/reports/sinks/process.py",
    "fcil_server/runs/export_jobs.py",
    "fcil_server/sessions/intake_pool/pool.py",
    "fcil_server/web/supervisor.py",
}
STARTERS = {
    "fcil_client/doctor/probes/system.py",  # systemctl, by its whole path
    "fcil_server/lab/data.py",
    "fcil_server/lab/results.py",
}
PYTHON = {
    "fcil_protocol/process/child.py",  # runs a module in this process, which is a child
    "fcil_protocol/process/children.py",  # writes every command that starts Python
}
_STARTS = re.compile(
    r"(subprocess\.(?!DEVNULL|PIPE|STDOUT|Popen\[)\w+|os\.(exec|spawn|posix_spawn|fork|startfile)\w*"
    r"|\w+\.(create_)?subprocess_(exec|shell))"
)


@cache
def sources() -> dict[str, ast.Module]:
    """Return every module of the packages."""
    found = {}
    for name, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            found[f"{name}/{path.relative_to(folder)}"] = syntax(path)
    return found


def imports(tree: ast.Module) -> Iterator[str]:
    """Yield every imported module, whole, also those imported inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = dotted(node.func) if isinstance(node.args[0].value, str) else ""
            if called in ("__import__", "importlib.import_module", "import_module"):
                yield str(node.args[0].value)


def dotted(node: ast.expr) -> str:
    """Return a dotted name; an expression before its dots is as `ast.unparse` writes it."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ast.unparse(node)


@cache
def tops(tree: ast.Module) -> set[str]:
    return {name.partition(".")[0] for name in imports(tree)}


@cache
def calls(tree: ast.Module) -> list[tuple[str, dict[str, str]]]:
    """Return every call as dotted name and keyword arguments."""
    return [
        (dotted(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg})
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]


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


def starts(tree: ast.Module) -> list[str]:
    """Calls that start a process."""
    return [name for name, _ in calls(tree) if _STARTS.fullmatch(name)]


def own_python(tree: ast.Module) -> list[str]:
    """Ways to start Python by another command than that of `module_command`."""
    found = sorted(tops(tree) & {"multiprocessing", "runpy", "pty"})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            last = node.attr if isinstance(node, ast.Attribute) else node.id
            if last in ("executable", "orig_argv", "ProcessPoolExecutor"):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Constant) and node.value == "-m":
            found.append("-m")
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
        ("subprocess.Popen(words)", starts, ["subprocess.Popen"]),
        ("loop.subprocess_exec(f, *words)", starts, ["loop.subprocess_exec"]),
        ("os.execv(words[0], words)", starts, ["os.execv"]),
        ("pool = ThreadPoolExecutor()", own_python, []),
        ("pool = futures.ProcessPoolExecutor()", own_python, ["futures.ProcessPoolExecutor"]),
        ("[sys.executable, '-m', 'json']", own_python, ["sys.executable", "-m"]),
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
    assert readers == {"fcil_adapters/backbones/convert_weights.py"}


def test_every_child_that_runs_python_is_started_without_the_current_directory() -> None:
    """`module_command` has `-P`; who starts a process is named above."""
    assert {name for name, tree in sources().items() if starts(tree)} == STARTERS
    users = {name for name, tree in sources().items() if "ChildProcess" in dict(calls(tree))}
    assert users == PARENTS
    assert {name for name, tree in sources().items() if own_python(tree)} == PYTHON
    assert '[sys.executable, "-P", "-m", module, *words]' in PACKAGES["fcil_protocol"].joinpath(
        "process/children.py"
    ).read_text("utf-8")


@pytest.mark.parametrize("folder", ["scripts", "deploy"])
def test_no_script_runs_a_module_of_ours_with_the_current_directory(folder: str) -> None:
    for path in (p for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix != ".pyc"):
        text = path.read_text("utf-8", errors="replace")
        for found in re.finditer(r"-m[\"' ,]+fcil_\w+", text):
            safe = text[: found.start()].rstrip("\"' ,").endswith("-P")
            assert safe, f"{path}: {found[0]}"


def test_only_the_transport_and_its_parts_import_zmq() -> None:
    assert {name for name, tree in sources().items() if "zmq" in tops(tree)} == ZMQ_OWNERS


def test_only_their_owners_call_ciphers() -> None:
    users = {name for name, tree in sources().items() if "cryptography" in tops(tree)}
    assert users == CIPHER_OWNERS


def test_only_the_codecs_of_the_wire_and_the_pipe_use_msgpack() -> None:
    users = {name for name, tree in sources().items() if "msgpack" in tops(tree)}
    assert users <= {
        "fcil_protocol/trust/canonical.py",
        "fcil_protocol/messages/frames.py",
        "fcil_protocol/storage/segment.py",
        "fcil_adapters/worker/pipe.py",
        "fcil_server/sessions/intake_pool/pipe.py",
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
        "fcil_client/session/machine.py",
        "fcil_server/rounds/machine.py",
        "fcil_server/rounds/events.py",
        "fcil_server/rounds/schedule.py",
    ):
        assert not tops(sources()[name]) & forbidden, name
