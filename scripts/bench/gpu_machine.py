"""The Python in which `scripts/gpu` measures, and its device; needs no package.

A machine with a GPU often has a torch for CUDA in its own Python, and no network. That torch is
used: what else is missing goes into a virtual environment that finds the packages of the Python
that made it. (``--system-site-packages`` does that only for a Python that is no virtual environment
itself.)
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("server", "client", "demo")
VENV = ROOT / "local" / "gpu-venv"  # git ignores local/

_NAME = re.compile(r"[\w.-]+")
_EXTRA = re.compile(r"""extra == ["']([\w-]+)["']""")
_NOT_FOUND = re.compile(r"No matching distribution found for (\S+)")

_FACTS = """
import json, platform, sys
import torch

device, facts = sys.argv[1], {"torch": torch.__version__, "python": platform.python_version()}
if device.startswith("cuda") and torch.cuda.is_available():
    try:
        found = torch.cuda.get_device_properties(device)
        facts |= {"gpu": found.name, "gpu_gb": found.total_memory / 1e9}
    except (AssertionError, RuntimeError):
        pass
try:
    from fcil_server.lab.results import revision
    facts["revision"] = revision(sys.argv[2])
except ImportError:
    pass
print(json.dumps(facts))
"""


class Unusable(Exception):
    """This machine cannot run it; the message is one sentence that says why and what to do."""


# --- the Python -----------------------------------------------------------------------------


def find_python(wheels: Path | None, log: IO[str]) -> str:
    """Return a Python that has fcil of this tree with all that it needs; install what is missing.

    Args:
        wheels: folder of wheels, the only source of packages; None: pip's own sources.
        log: receives the output of what is run.

    Raises:
        Unusable: something could not be installed.
    """
    if wheels is not None and not wheels.is_dir():
        raise Unusable(f"--wheels {wheels}: there is no such folder.")
    if not lacking():
        return sys.executable
    if wheels is None and not has_torch():
        _run([str(ROOT / "scripts" / "venv"), ",".join(EXTRAS)], wheels, log)
        return str(ROOT / ".venv" / "bin" / "python")
    python = make_venv(VENV)
    for command in pip_commands(python, wheels):
        _run(command, wheels, log)
    return python


def lacking() -> list[str]:
    """Return the distributions that this Python lacks to run fcil from this tree."""
    here = importlib.util.find_spec("fcil_server")
    if not is_installed("fcil") or here is None or ROOT not in Path(here.origin or "").parents:
        return ["fcil"]
    found = []
    for requirement in importlib.metadata.requires("fcil") or ():
        extra, name = _EXTRA.search(requirement), _NAME.match(requirement)
        assert name is not None, requirement
        if (extra is None or extra[1] in EXTRAS) and not is_installed(name[0]):
            found.append(name[0])
    return found


def is_installed(distribution: str) -> bool:
    """Say whether this Python has a distribution, of any version."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def has_torch() -> bool:
    """Say whether this Python has torch, without importing it."""
    return is_installed("torch")


def make_venv(folder: Path) -> str:
    """Make an environment that finds this Python's packages after its own; return its Python."""
    no_pip = importlib.util.find_spec("pip") is None
    venv.EnvBuilder(symlinks=True, with_pip=no_pip).create(folder)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    lines = (f"import site; site.addsitedir({place!r})" for place in package_folders(sys.path))
    target = folder / "lib" / version / "site-packages" / "inherited.pth"
    target.write_text("\n".join(lines) + "\n")
    return str(folder / "bin" / "python")


def package_folders(path: list[str]) -> list[str]:
    """Return those folders of a Python's path into which packages are installed."""
    return [p for p in path if Path(p).name in ("site-packages", "dist-packages")]


def pip_commands(python: str, wheels: Path | None) -> list[list[str]]:
    """Return the commands that install fcil of this tree and what it needs and lacks.

    pip keeps what is there and new enough; this Python's torch is fixed, so that it stays.
    """
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    if wheels is not None:
        pip += ["--no-index", "--find-links", str(wheels)]
    if has_torch():
        fixed = VENV / "torch.txt"
        fixed.parent.mkdir(parents=True, exist_ok=True)
        fixed.write_text(f"torch=={importlib.metadata.version('torch')}\n")
        pip += ["--constraint", str(fixed)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tree = ["--no-build-isolation", "--editable", f"{ROOT}[{','.join(EXTRAS)}]"]
    return [[*pip, *project["build-system"]["requires"]], [*pip, *tree]]


def _run(command: list[str], wheels: Path | None, log: IO[str]) -> None:
    """Run a command that installs something."""
    log.write(f"$ {' '.join(command)}\n")
    log.flush()
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    log.write(done.stdout + done.stderr)
    log.flush()
    if done.returncode:
        raise Unusable(why_not_installed(done.stderr, wheels))


def why_not_installed(words: str, wheels: Path | None) -> str:
    """Return one sentence from pip's words."""
    version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if found := _NOT_FOUND.search(words):
        if wheels is None:
            return f"pip finds no {found[1]} for {version}; without a network, give --wheels DIR."
        return (
            f"the folder of wheels {wheels} has no {found[1]} for {version}; fetch it where pip "
            "works (scripts/gpu --help says how), or use a Python that has it."
        )
    last = [line for line in words.strip().splitlines() if line.strip()] or ["it said nothing"]
    return f"the packages could not be installed: {last[-1][:300]}"


# --- the device -----------------------------------------------------------------------------


def check_before(device: str) -> None:
    """Refuse a machine that certainly has no such device, before anything is installed.

    Raises:
        Unusable: it has none.
    """
    if not device.startswith("cuda"):
        return
    if has_torch():
        check(facts_of(sys.executable, device), device)
    elif not has_nvidia():
        raise Unusable(no_gpu("this machine has no NVIDIA GPU"))


def has_nvidia() -> bool:
    """Say whether this machine has an NVIDIA device, as far as visible without torch."""
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def facts_of(python: str, device: str) -> dict[str, Any]:
    """Return what a Python says of itself and a device: torch, python, gpu, gpu_gb, revision.

    Raises:
        Unusable: its torch cannot be imported.
    """
    command = [python, "-c", _FACTS, device, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        raise Unusable(f"torch cannot be used in {python}: {last[-1][:300]}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def check(facts: dict[str, Any], device: str) -> None:
    """Refuse a Python whose torch does not see the device.

    Raises:
        Unusable: it does not.
    """
    if device.startswith("cuda") and not facts.get("gpu"):
        raise Unusable(no_gpu(f"torch {facts['torch']} sees no GPU {device!r} here"))


def no_gpu(why: str) -> str:
    """Return the sentence for a machine without a GPU."""
    return f"{why}; run it where there is one, or the same sections small with --device cpu."
