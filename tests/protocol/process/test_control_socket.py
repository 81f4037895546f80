"""The control socket: this user's commands to this user's daemons, and nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import socket
import stat
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fcil_protocol.errors import (
    DiskFull,
    FcilError,
    InternalError,
    Timeout,
    TrustError,
    Unreachable,
    WireError,
)
from fcil_protocol.process import control_socket as control


async def echo(op: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"op": op, "fields": fields}


def with_daemon(directory: Path, handler: control.Handler, work: Callable[[], Any]) -> Any:
    """Serve in a loop, run blocking ``work`` beside it, return its result."""

    async def both() -> Any:
        door = await control.serve(directory, handler)
        try:
            return await asyncio.wait_for(asyncio.to_thread(work), 60)
        finally:
            door.close()
            if hasattr(door, "close_clients"):  # from Python 3.13 on
                door.close_clients()  # also one that was accepted a moment ago
            await door.wait_closed()

    return asyncio.run(both())


def raw(directory: Path, data: bytes) -> bytes:
    """Send bytes to the socket and return all that comes back."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(str(control.socket_path(directory)))
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        out = b""
        while piece := sock.recv(65536):
            out += piece
        return out


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """A directory whose path is too long for a Unix socket."""
    directory = tmp_path / ("d" * 60) / ("e" * 60)
    directory.mkdir(parents=True)
    return directory


@pytest.fixture(autouse=True)
def _own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Sockets of long paths go into a directory of this test (a short one: paths are limited)."""
    assert tmp_path.exists(), "made first: it depends on the same setting"
    short = tempfile.mkdtemp(prefix="fcil-test-")
    monkeypatch.setattr(tempfile, "tempdir", short)
    yield
    shutil.rmtree(short)


def test_a_command_and_its_answer_go_there_and_back(tmp_path: Path) -> None:
    fields = {"text": 'Käse\n"x"', "list": [1, None, True], "map": {"a": 0.5}}
    reply = with_daemon(tmp_path, echo, lambda: control.ask(tmp_path, "status", **fields))
    assert reply == {"op": "status", "fields": fields | {"uid": os.getuid()}}


def test_who_asks_is_the_kernels_word_not_the_requests(tmp_path: Path) -> None:
    """An operator's action is recorded under this number."""
    reply = with_daemon(tmp_path, echo, lambda: control.ask(tmp_path, "stop", uid=4711))
    assert reply["fields"] == {"uid": os.getuid()}


def test_a_large_answer_passes(tmp_path: Path) -> None:
    async def handler(op: str, fields: dict[str, Any]) -> dict[str, Any]:
        return {"rows": ["x" * 1000] * 3000}

    reply = with_daemon(tmp_path, handler, lambda: control.ask(tmp_path, "rounds"))
    assert len(reply["rows"]) == 3000


def test_several_commands_one_after_the_other(tmp_path: Path) -> None:
    def work() -> list[str]:
        return [control.ask(tmp_path, f"op{n}")["op"] for n in range(5)]

    assert with_daemon(tmp_path, echo, work) == [f"op{n}" for n in range(5)]


def test_an_error_comes_back_as_its_class_with_sentence_and_action(tmp_path: Path) -> None:
    async def full(op: str, fields: dict[str, Any]) -> dict[str, Any]:
        raise DiskFull("the disk at /data is full.", action="Free space there.")

    with pytest.raises(DiskFull) as error:
        with_daemon(tmp_path, full, lambda: control.ask(tmp_path, "x"))
    assert (error.value.message, error.value.action) == (
        "the disk at /data is full.",
        "Free space there.",
    )


def test_an_error_code_of_a_later_version_is_still_an_error(tmp_path: Path) -> None:
    async def later(op: str, fields: dict[str, Any]) -> dict[str, Any]:
        error = FcilError("something new.", action="Wait.")
        error.code = "later_thing"  # type: ignore[misc]
        raise error

    with pytest.raises(FcilError, match=r"something new\. Wait\."):
        with_daemon(tmp_path, later, lambda: control.ask(tmp_path, "x"))


def test_a_defect_in_the_daemon_is_told_as_one_without_a_traceback(tmp_path: Path) -> None:
    async def broken(op: str, fields: dict[str, Any]) -> dict[str, Any]:
        return {"x": 1 // 0}

    with pytest.raises(InternalError, match="ZeroDivisionError") as error:
        with_daemon(tmp_path, broken, lambda: control.ask(tmp_path, "x"))
    assert "Traceback" not in str(error.value)


def test_a_daemon_removes_its_own_socket_and_no_successors(tmp_path: Path) -> None:
    path = control.socket_path(tmp_path)
    path.touch()
    remove = control.remover(tmp_path)
    path.rename(tmp_path / "kept")  # so that the successor's has another inode
    path.touch()
    remove()
    assert path.exists()
    path.unlink()
    (tmp_path / "kept").rename(path)
    remove()
    assert not path.exists()
    remove()


def test_no_daemon_is_said_with_the_directory(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=str(tmp_path)):
        control.ask(tmp_path, "status")


def test_a_socket_that_a_killed_daemon_left_behind_is_no_daemon_and_no_obstacle(
    tmp_path: Path,
) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "control.sock"))
    with pytest.raises(Unreachable):
        control.ask(tmp_path, "status")
    assert with_daemon(tmp_path, echo, lambda: control.ask(tmp_path, "again"))["op"] == "again"


def test_a_daemon_that_does_not_answer_is_a_timeout(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "control.sock"))
        mute.listen()
        with pytest.raises(Timeout, match=str(tmp_path)):
            control.ask(tmp_path, "status", timeout_s=0.05)


def test_a_daemon_that_closes_without_an_answer_is_unreachable(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "control.sock"))
        door.listen()

        async def close_at_once() -> None:
            loop = asyncio.get_running_loop()

            def accept() -> None:
                peer, _ = door.accept()
                peer.recv(65536)
                peer.close()

            waiting = loop.run_in_executor(None, accept)
            with pytest.raises(Unreachable, match="closed the connection"):
                await asyncio.to_thread(control.ask, tmp_path, "status")
            await waiting

        asyncio.run(close_at_once())


@pytest.mark.parametrize(
    "answer",
    [b"hello\n", b"[]\n", b"7\n", b"{}\n", b'{"data": 7}\n', b'{"error": 7}\n', b"[" * 9000],
    ids=range(7),
)
def test_an_answer_that_is_none_is_told_in_a_sentence(tmp_path: Path, answer: bytes) -> None:
    """Of a daemon of another version, or of another program."""

    def tell() -> None:
        peer, _ = door.accept()
        with peer:
            peer.recv(65536)
            peer.sendall(answer)

    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "control.sock"))
        door.listen()
        telling = threading.Thread(target=tell)
        telling.start()
        with pytest.raises(WireError, match="not what a command expects"):
            control.ask(tmp_path, "status")
        telling.join()


def test_a_daemon_that_ends_while_a_command_waits_leaves_no_traceback(tmp_path: Path) -> None:
    waiting, complaints = threading.Event(), []

    async def wait(_op: str, _fields: dict[str, Any]) -> dict[str, Any]:
        waiting.set()
        await asyncio.Event().wait()
        return {}

    async def until_asked() -> None:
        door = await control.serve(tmp_path, wait)
        asking.start()
        await asyncio.to_thread(waiting.wait, 20)
        door.close()

    def ask() -> None:
        with contextlib.suppress(FcilError):
            control.ask(tmp_path, "status")

    asking = threading.Thread(target=ask)
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(lambda _, about: complaints.append(about))
        runner.run(until_asked())
    asking.join()
    assert complaints == []


@pytest.mark.parametrize(
    "line",
    [
        b"hello\n",
        b"\xff\xfe\x00\n",
        b"[1, 2]\n",
        b"null\n",
        b'"status"\n',
        b"{}\n",
        b'{"op": 7}\n',
        b'{"op": null, "x": 1}\n',
        b"\n",
        b"[" * 100_000 + b"\n",
    ],
    ids=range(10),
)
def test_a_junk_line_is_answered_as_wrong_usage_and_the_daemon_goes_on(
    tmp_path: Path, line: bytes
) -> None:
    """A junk line is the caller's mistake, never reported as a defect of the daemon."""

    def work() -> tuple[bytes, dict[str, Any]]:
        return raw(tmp_path, line), control.ask(tmp_path, "still here")

    answer, after = with_daemon(tmp_path, echo, work)
    assert answer.count(b"\n") == 1
    assert b'"error": "usage"' in answer
    assert after["op"] == "still here"


def test_a_line_without_an_end_is_refused_at_the_limit(tmp_path: Path) -> None:
    def work() -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(str(control.socket_path(tmp_path)))
            with pytest.raises(OSError):  # noqa: PT012 - which write is the one is open
                while True:
                    sock.sendall(b"x" * 65536)
        return control.ask(tmp_path, "still here")

    assert with_daemon(tmp_path, echo, work)["op"] == "still here"


def test_a_command_that_hangs_up_at_once_disturbs_nobody(tmp_path: Path) -> None:
    def work() -> dict[str, Any]:
        for _ in range(5):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(control.socket_path(tmp_path)))
        return control.ask(tmp_path, "still here")

    assert with_daemon(tmp_path, echo, work)["op"] == "still here"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_socket_is_this_users_alone_and_the_umask_is_as_before(
    tmp_path: Path, umask: int
) -> None:
    old = os.umask(umask)
    try:

        async def look() -> int:
            door = await control.serve(tmp_path, echo)
            mode = stat.S_IMODE(control.socket_path(tmp_path).stat().st_mode)
            door.close()  # from Python 3.13 on the socket goes with it
            await door.wait_closed()
            return mode

        assert asyncio.run(look()) == 0o600
        assert os.umask(umask) == umask
    finally:
        os.umask(old)


def test_daemons_that_begin_together_in_one_process_leave_its_umask_alone(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()

    async def begin() -> None:
        doors = await asyncio.gather(*(control.serve(folder, echo) for folder in folders))
        for door in doors:
            door.close()
            await door.wait_closed()

    old = os.umask(0o022)
    try:
        asyncio.run(begin())
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(old)


class Peer:
    """The other end of a socket, as the kernel describes it."""

    def __init__(self, uid: int) -> None:
        self.uid = uid

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("3i", 1234, self.uid, 99)


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="the kernel does not say who asks")
def test_another_user_is_refused_by_the_kernels_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the file's mode. Root may command every daemon, this user his own."""
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    for uid in (1000, 0):
        assert control._check_peer(Peer(uid)) == uid  # type: ignore[arg-type]
    for uid in (1001, 65534):
        with pytest.raises(TrustError, match=str(uid)):
            control._check_peer(Peer(uid))  # type: ignore[arg-type]


class TestLongPaths:
    def test_a_short_path_has_its_socket_inside(self, tmp_path: Path) -> None:
        assert control.socket_path(tmp_path) == tmp_path.resolve() / "control.sock"

    def test_a_long_path_has_it_in_a_private_directory_and_both_sides_find_it(
        self, deep: Path
    ) -> None:
        path = control.socket_path(deep)
        assert len(os.fsencode(path)) <= control.MAX_UNIX_PATH
        assert with_daemon(deep, echo, lambda: control.ask(deep, "deep"))["op"] == "deep"
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    def test_two_long_paths_do_not_meet(self, deep: Path) -> None:
        other = deep.parent / ("f" * 60)
        assert control.socket_path(deep) != control.socket_path(other)

    def test_a_link_to_a_directory_finds_the_same_daemon(self, deep: Path, tmp_path: Path) -> None:
        link = tmp_path / "link"
        link.symlink_to(deep)
        assert control.socket_path(link) == control.socket_path(deep)

    def test_a_directory_of_somebody_else_is_not_used(
        self, deep: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Somebody made the well-known place first."""
        monkeypatch.setattr(os, "getuid", lambda: 54321)
        with pytest.raises(TrustError, match="another user"):
            asyncio.run(control.serve(deep, echo))
        control.socket_path(deep).touch()  # as if that user's daemon listened there
        with pytest.raises(TrustError, match="another user"):
            control.ask(deep, "status")

    def test_a_link_to_a_directory_is_not_used(self, deep: Path, tmp_path: Path) -> None:
        place = control.socket_path(deep).parent
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
        for use in (lambda: asyncio.run(control.serve(deep, echo)), lambda: control.ask(deep, "x")):
            with pytest.raises(TrustError, match="is no folder"):
                use()

    def test_a_directory_that_others_may_write_is_not_used(self, deep: Path) -> None:
        place = control.socket_path(deep).parent
        place.mkdir()
        place.chmod(0o777)
        with pytest.raises(TrustError, match="other users"):
            asyncio.run(control.serve(deep, echo))


def test_another_users_answer_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def note(op: str, _: dict[str, Any]) -> dict[str, Any]:
        asked.append(op)
        return {}

    def work() -> None:
        with pytest.raises(TrustError, match="user 4321 listens in the place of the daemon"):
            control.ask(tmp_path, "status")
        with socket.socket(socket.AF_UNIX) as later:  # answered, once the first was accepted
            later.connect(str(control.socket_path(tmp_path)))
            later.shutdown(socket.SHUT_WR)
            assert b"may not control this daemon" in later.recv(1000)

    monkeypatch.setattr(control, "_user_of", lambda _: 4321)
    with_daemon(tmp_path, note, work)
    assert asked == []


def test_a_connection_is_closed_whose_answer_is_cancelled_before_it_begins(tmp_path: Path) -> None:
    async def story() -> None:
        listening = await control.serve(tmp_path, echo)
        before = asyncio.all_tasks()
        with socket.socket(socket.AF_UNIX) as command:
            command.connect(str(control.socket_path(tmp_path)))
            answers: list[asyncio.Task[Any]] = []
            while not answers:
                await asyncio.sleep(0)
                new = asyncio.all_tasks() - before
                answers = [t for t in new if t.get_coro().__qualname__.endswith("answer")]
            (answer,) = answers
            assert inspect.getcoroutinestate(answer.get_coro()) == inspect.CORO_CREATED
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            command.setblocking(False)
            assert command.recv(1) == b"", "it was closed"
        listening.close()

    asyncio.run(story())


def test_what_is_asked_must_be_json(tmp_path: Path) -> None:
    """A path or a set is our own mistake and is not sent."""

    def work() -> None:
        with pytest.raises(TypeError):
            control.ask(tmp_path, "x", path={1, 2})

    with_daemon(tmp_path, echo, work)
