"""Who works in a directory, and how a command waits for a daemon that starts or ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fcil_protocol.errors import Locked, Starting, Timeout, Unreachable
from fcil_protocol.process import control_socket
from fcil_protocol.storage import lock_holder
from fcil_protocol.storage.atomic_files import DirectoryLock
from fcil_protocol.storage.lock_holder import holder_of, holding_pid, wait_until_over

HOLD = """
import sys
from pathlib import Path
from fcil_protocol.storage.atomic_files import DirectoryLock
with DirectoryLock.acquire(Path(sys.argv[1]), "federation"):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def other_process(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lock of a directory until its input ends."""
    command = [sys.executable, "-c", HOLD, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process


def test_nobody_works_where_no_lock_is_or_where_it_is_free(tmp_path: Path) -> None:
    assert holder_of(tmp_path / "nowhere") is None
    assert holder_of(tmp_path) is None
    with DirectoryLock.acquire(tmp_path, "federation"):
        assert holder_of(tmp_path) == f"process {os.getpid()}"
    assert holder_of(tmp_path) is None


def test_an_unknown_process_is_another_one(tmp_path: Path) -> None:
    with DirectoryLock.acquire(tmp_path, "federation"):
        (tmp_path / "lock").write_text("")
        assert (holding_pid(tmp_path), holder_of(tmp_path)) == (0, "another process")


@pytest.mark.parametrize(
    ("what", "action"),
    [
        ("federation", "fcil-server stop"),
        ("client", "A client is already running for these images"),
    ],
)
def test_the_error_says_what_to_do_about_that_process(
    what: str, action: str, tmp_path: Path
) -> None:
    with DirectoryLock.acquire(tmp_path, what), pytest.raises(Locked, match=action):
        DirectoryLock.acquire(tmp_path, what)


def test_the_end_of_a_process_is_waited_for_and_told_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_holder, "TELL_S", 0.0)
    with other_process(tmp_path) as process:
        assert process.stdin is not None
        said: list[str] = []

        def say(text: str) -> None:
            if not said:
                process.stdin.close()  # type: ignore[union-attr]
            said.append(text)

        wait_until_over(tmp_path, holding_pid(tmp_path), 60, say)
        assert said
        assert said[0].startswith("it is still writing (")
        assert holder_of(tmp_path) is None
        assert os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def test_a_process_that_does_not_end_is_named(tmp_path: Path) -> None:
    with other_process(tmp_path) as process:
        with pytest.raises(Timeout, match=f"process {process.pid} was asked to stop"):
            wait_until_over(tmp_path, process.pid, 0, lambda _: None)
        assert process.stdin is not None
        process.stdin.close()


# --- commands for a daemon that starts --------------------------------------------------------


async def _echo(op: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"op": op}


def test_a_command_waits_for_a_daemon_that_does_not_listen_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, over = threading.Event(), threading.Event()

    def look(directory: Path) -> str | None:
        looked.set()
        return holder_of(directory)

    monkeypatch.setattr(control_socket, "holder_of", look)

    async def daemon() -> None:
        await asyncio.to_thread(looked.wait, 60)  # the command has found nobody listening
        server = await control_socket.serve(tmp_path, _echo)
        await asyncio.to_thread(over.wait, 60)
        server.close()

    with DirectoryLock.acquire(tmp_path, "federation"):
        thread = threading.Thread(target=asyncio.run, args=(daemon(),))
        thread.start()
        try:
            assert control_socket.ask(tmp_path, "status", 60) == {"op": "status"}
        finally:
            over.set()
            thread.join()


def test_a_daemon_that_goes_on_starting_is_named(tmp_path: Path) -> None:
    with (
        DirectoryLock.acquire(tmp_path, "federation"),
        pytest.raises(Starting, match=f"process {os.getpid()} is using .* accepts no commands"),
    ):
        control_socket.ask(tmp_path, "status", 0)


def test_where_nobody_works_nobody_is_waited_for(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="no daemon runs at"):
        control_socket.ask(tmp_path, "status", 60)
    with DirectoryLock.acquire(tmp_path, "client"), pytest.raises(Unreachable):
        control_socket.ask(tmp_path, "status", 60, wait=False)
