"""What runs without torch: the protocol, the manifests, the daemons and both command lines."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import fcil_protocol
from fcil_protocol.errors import EXIT_USAGE

# Put in front of a program: torch and what needs it cannot be imported any more.
REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "timm", "torchvision", "functorch"}:
            raise ImportError(f"refused: {name}")

sys.meta_path.insert(0, Refuse())
"""
TORCH_FREE_ADAPTERS = (
    "backbones.engines",
    "backbones.known",
    "backbones.onnx_backbone",
    "backbones.onnx_session",
    "backbones.probes",
    "backbones.weights",
    "contract",
    "contract.backbone_info",
    "contract.manifest_checks",
    "contract.registry",
    "images.decoding",
    "numerics.class_means",
    "numerics.client_weights",
    "worker.models",
)
SHELLS = (
    "fcil_client.cli.main",
    "fcil_client.daemon.client",
    "fcil_client.session.machine",
    "fcil_client.state.outbox",
    "fcil_client.rounds.worker",
    "fcil_server.cli.main",
    "fcil_server.daemon.server",
    "fcil_server.rounds.coordinator",
    "fcil_server.lab.cli",
    "fcil_server.rounds.machine",
    "fcil_server.ledger.ledger",
)


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", REFUSE + program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def protocol_modules() -> list[str]:
    folder = Path(fcil_protocol.__file__).parent
    found = (p.relative_to(folder).with_suffix("") for p in folder.rglob("*.py"))
    return sorted(".".join(("fcil_protocol", *p.parts)) for p in found if p.stem != "__init__")


def manifests() -> list[str]:
    found = {e.value.partition(":")[0] for e in entry_points(group="fcil.methods")}
    return sorted(m for m in found if m.startswith("fcil_adapters."))


def test_the_hook_refuses_torch() -> None:
    """Otherwise the tests below would prove nothing."""
    done = python("import torch")
    assert done.returncode != 0
    assert "refused: torch" in done.stderr


def test_protocol_manifests_and_daemons_import_without_torch() -> None:
    modules = [
        "fcil_protocol",
        *protocol_modules(),
        *(f"fcil_adapters.{name}" for name in TORCH_FREE_ADAPTERS),
        *manifests(),
        *SHELLS,
    ]
    assert len(modules) > 30
    assert any("pilora" in m for m in modules)
    done = python(
        "import importlib, json\n"
        "faults = {}\n"
        f"for name in {modules!r}:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except Exception as error:\n"
        "        faults[name] = f'{type(error).__name__}: {error}'\n"
        "print(json.dumps(faults))\n"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}


def test_manifests_say_everything_about_their_method_without_torch() -> None:
    """Hyper-parameters, exchanges and schemas: all that the two sides must agree on."""
    done = python(
        "from fcil_adapters.contract import registry\n"
        "for name in registry.method_names():\n"
        "    method = registry.load_method(name)\n"
        "    print(name, method.version, type(method.hparams()).__name__)\n"
    )
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()} >= {"pilora", "running_mean"}


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_command_line_shows_its_help_without_torch(side: str) -> None:
    """And each of its verbs: help is what one asks for on a machine where nothing runs yet."""
    done = python(
        f"from typer.testing import CliRunner\n"
        f"from fcil_{side}.cli.main import app\n"
        "import typer\n"
        "runner = CliRunner()\n"
        "names = list(typer.main.get_command(app).commands)\n"
        "for args in ([], *([n] for n in names)):\n"
        "    result = runner.invoke(app, [*args, '--help'])\n"
        "    assert result.exit_code == 0, (args, result.output)\n"
        "    assert 'Usage' in result.output, (args, result.output)\n"
        "print(len(names), 'torch' in sys.modules)\n"
    )
    assert done.returncode == 0, done.stderr
    count, loaded = done.stdout.split()
    assert int(count) >= 2
    assert loaded == "False"


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_command_line_starts_without_numpy_and_the_protocol_still_offers_its_names(
    side: str,
) -> None:
    done = python(
        f"import fcil_{side}.cli.main, fcil_protocol\n"
        "print('numpy' in sys.modules)\n"
        "for name in fcil_protocol.__all__:\n"
        "    assert getattr(fcil_protocol, name) is not None\n"
        "print('numpy' in sys.modules, hasattr(fcil_protocol, 'nothing'))\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True", "False"]


@pytest.mark.parametrize("side", ["client", "server"])
def test_the_installed_command_line_starts_without_torch(side: str) -> None:
    done = python(
        f"from fcil_{side}.cli.main import main\nsys.argv = ['fcil-{side}', '--help']\nmain()\n"
    )
    assert done.returncode == 0, done.stderr
    assert "--help" in done.stdout


@pytest.mark.parametrize(
    "arguments", [["no-such-verb"], ["status", "--no-such-option"], ["status", "--format", "x"]]
)
@pytest.mark.parametrize("side", ["client", "server"])
def test_a_wrong_argument_is_wrong_usage_without_a_traceback(
    side: str, arguments: list[str]
) -> None:
    given = [f"fcil-{side}", *arguments]
    done = python(f"from fcil_{side}.cli.main import main\nsys.argv = {given!r}\nmain()\n")
    assert done.returncode == EXIT_USAGE
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
