"""The wheel for devices has the client and nothing of the server."""

import os
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "client-wheel"
PROGRAM = "import fcil_client.cli.main as cli; print(cli.__file__); cli.main()"


def test_what_it_builds_from_has_no_word_of_the_server():
    text = runpy.run_path(str(SCRIPT))["without_server"]((ROOT / "pyproject.toml").read_text())
    assert "server" not in text
    for kept in ('fcil-client = "', "[project.entry-points.", "\nclient = [", "\nedge = ["):
        assert kept in text


def test_a_pyproject_of_another_form_is_refused_by_name():
    without_server = runpy.run_path(str(SCRIPT))["without_server"]
    with pytest.raises(ValueError, match="fcil-server"):
        without_server("[project]\nname = 'other'\n")


@pytest.mark.full
def test_the_wheel_runs_a_client_and_holds_no_server(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=True
    )
    wheel = Path(done.stdout.strip())
    with zipfile.ZipFile(wheel) as archive:
        folders = {name.partition("/")[0] for name in archive.namelist()}
        (commands,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        assert "fcil_server" not in archive.read(commands).decode()
        archive.extractall(tmp_path / "site")
    assert {f for f in folders if not f.endswith(".dist-info")} == {
        "fcil_adapters", "fcil_client", "fcil_protocol",
    }  # fmt: skip
    shown = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, "join", "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout.startswith(str(tmp_path / "site"))
    assert "--ticket" in shown.stdout
