"""What of requirements.lock is for given extras, and the compiling of what is imported.

A part of `scripts/venv`. Usage:

    locked.py EXTRAS FILE FILE   writes the requirements of these extras, a half to each file, and
                                 prints those of the extras that need something that is not locked
    locked.py --pip FILE         writes what pip itself is installed from
    locked.py --tests FILE       writes what the tests that need no extra need
    locked.py --warm             imports what fcil and its tests import, on two cores
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNLOCKED = {"torch", "torchvision"}  # scripts/venv installs them itself
TESTS = {"hypothesis", "iniconfig", "packaging", "pluggy", "pytest", "pytest-timeout",
         "sortedcontainers"}  # fmt: skip
# What several processes of a test run import, each of which would else compile it; for two here.
WARM = (
    ("fcil_adapters.backbones.backbone", "fcil_server.aggregation.worker",
     "fcil_client.rounds.worker"),
    ("fcil_server.daemon.server", "fcil_server.cli.main", "fcil_client.daemon.client",
     "fcil_client.cli.main", "pandas", "matplotlib.pyplot",
     "sklearn.linear_model", "onnxruntime", "hypothesis", "pytest"),
)  # fmt: skip
IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError:
        pass  # of an extra that is not wanted
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def blocks(lock: str) -> list[tuple[set[str], str, str]]:
    """Return (extras that need it, name, text) of every package of a lock."""
    found = re.findall(r"^# extras: ?(.*)\n((\S+?)==(?:.*\\\n)*.*\n)", lock, re.MULTILINE)
    return [(set(extras.split()), normal(name), text) for extras, text, name in found]


def unlocked(extras: list[str], lock: str, project: str) -> list[str]:
    """Return those of the extras that name a package that the lock lacks."""
    held = {name for _, name, _ in blocks(lock)} | UNLOCKED
    wanted = tomllib.loads(project)["project"]["optional-dependencies"]
    named = {e: {normal(re.match(r"[\w.-]+", r)[0]) for r in wanted[e]} for e in extras}
    return [extra for extra in extras if not named[extra] <= held]


def warm() -> None:
    """Import once what many processes import, so that its byte code is there."""
    at_work = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", IMPORTS, *m]) for m in WARM]
    for process in at_work:
        process.wait()


def main() -> int:
    if sys.argv[1:] == ["--warm"]:
        warm()
        return 0
    lock = (ROOT / "requirements.lock").read_text()
    if sys.argv[1] in {"--pip", "--tests"}:
        named, needed = ({"pip"}, set()) if sys.argv[1] == "--pip" else (TESTS, {"fcil"})
        chosen = [text for needs, name, text in blocks(lock) if needs & needed or name in named]
        Path(sys.argv[2]).write_text("".join(chosen))
        return 0
    extras, targets = sys.argv[1].split(","), [Path(name) for name in sys.argv[2:]]
    project = (ROOT / "pyproject.toml").read_text()
    unknown = set(extras) - set(tomllib.loads(project)["project"]["optional-dependencies"])
    if unknown:
        print(f"pyproject.toml has no extra {', '.join(sorted(unknown))}.", file=sys.stderr)
        return 4
    chosen = {"fcil", *extras}
    wanted = [text for needs, name, text in blocks(lock) if needs & chosen and name != "pip"]
    for i, target in enumerate(targets):
        target.write_text("".join(wanted[i :: len(targets)]))
    print(",".join(unlocked(extras, lock, project)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
