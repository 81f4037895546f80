"""``fcil-server stop``: what it does while the server's process goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fcil_protocol.process import control_socket
from fcil_server.cli.main import app

HOLDER = (
    "import sys\nfrom pathlib import Path\n"
    "from fcil_protocol.storage.atomic_files import DirectoryLock\n"
    "with DirectoryLock.acquire(Path(sys.argv[1]), 'federation'):\n"
    "    print(flush=True)\n    sys.stdin.read()\n"
)


@contextmanager
def a_server(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Hold a directory in another process until its standard input ends."""
    command = [sys.executable, "-c", HOLDER, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


def test_a_server_that_has_not_ended_in_time_is_named_and_the_code_is_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "ask", lambda *_: {})
    with a_server(tmp_path) as process:
        arguments = ["stop", "--dir", str(tmp_path), "--timeout", "0", "--json"]
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 3
    assert f"process {process.pid} was asked to stop" in done.stderr
    assert json.loads(done.stdout)["data"]["code"] == "timeout"


def test_stop_returns_as_soon_as_the_process_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_server(tmp_path) as process:

        def ends(*_: Any) -> dict[str, Any]:
            assert process.stdin is not None
            process.stdin.close()
            return {}

        monkeypatch.setattr(control_socket, "ask", ends)
        done = CliRunner().invoke(app, ["stop", "--dir", str(tmp_path)])
        assert (done.exit_code, process.wait(0)) == (0, 0)
    assert "The server has stopped." in done.stderr


def test_a_limit_for_a_wait_and_no_wait_do_not_go_together(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["stop", "--dir", str(tmp_path), "--no-wait", "--timeout", "9"])
    assert done.exit_code == 4
    assert "--no-wait" in done.stderr
