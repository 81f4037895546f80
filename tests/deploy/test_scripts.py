"""Shell scripts: nothing that shellcheck warns of."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import yaml

from deploy.kit import BIN, ROOT


def is_script(path: Path) -> bool:
    return path.is_file() and path.read_bytes()[:64].split(b"\n")[0].endswith((b"bash", b"/sh"))


def scripts() -> list[Path]:
    return [p for f in ("scripts", ".ci", "deploy") for p in (ROOT / f).rglob("*") if is_script(p)]


def check(*paths: Path) -> str:
    command = [str(BIN / "shellcheck"), "--format=gcc", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def test_shellcheck_finds_nothing():
    names = {path.name for path in scripts()}
    assert {"test", "venv", "quickstart", "fuzz", "run"} <= names
    assert check(*scripts()) == ""


def test_shellcheck_finds_what_is_wrong(tmp_path):
    path = tmp_path / "wrong"
    path.write_text("#!/bin/bash\ncd $1\nrm -r *\n", encoding="utf-8")
    assert "SC2086" in check(path)


def test_who_waits_for_the_installation_is_told_what_it_does_and_how_long_it_takes(tmp_path):
    (tmp_path / "scripts").mkdir()
    for name in ("constraints.txt", "requirements.lock", "pyproject.toml", "scripts/locked.py"):
        (tmp_path / name).touch()
    script = shutil.copy(ROOT / "scripts" / "venv", tmp_path / "scripts")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || exit 9\n', encoding="utf-8")  # makes no .venv
    python.chmod(0o755)
    env = {**os.environ, "PYTHON": str(python)}
    done = subprocess.run([script, "server"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 9
    said = "installing fcil[server] into .venv; about a minute with a fast network ...\n"
    assert done.stderr == said


def test_hooks_before_a_commit_run_what_the_checks_run():
    """The same commands as scripts/test, from .venv, so that no version differs."""
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    entries = [hook["entry"] for hook in repo["hooks"]]
    assert len(entries) == 3
    script = (ROOT / "scripts" / "test").read_text("utf-8")
    for entry in entries:
        assert f"$bin/{entry.removeprefix('.venv/bin/')}" in script
