"""The server's side of its sinks: one process each, woken by news in the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

from fcil_protocol.ids import RunId
from fcil_protocol.process.children import module_command
from fcil_server.reports.sinks.registry import Chosen

BACK_OFF_S = (1.0, 5.0, 30.0, 300.0)  # after the first, second, third ... failure in a row
STEADY_S = 60.0  # after this long, a failure counts as the first again
END_S = 15.0  # time for the last metrics when the server ends
_DEAD_S = 5.0  # until a killed process is gone; one that waits for a bad disk may never be
_TAIL_BYTES = 4096  # of its last output
_WORDS = 200
_LOGIN = re.compile(r"//[^/\s@]+@")  # in an address

Notify = Callable[[str, str, str], None]


class _Life(asyncio.SubprocessProtocol):
    """One process of a sink: its end, and its last output.

    Its end is independent of its pipes: programs that a sink has started may hold those open.
    """

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.silent = asyncio.Event()
        self._tail = b""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Keep the last output; a sink may write any amount, in lines of any length."""
        del fd  # standard error is the only one
        self._tail = (self._tail + data)[-_TAIL_BYTES:]

    def process_exited(self) -> None:
        """Note the end of the process."""
        self.ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that no process can write any more."""
        del exc
        self.silent.set()

    def words(self) -> str:
        """Return its last line, without the password of an address."""
        lines = [line.strip() for line in self._tail.decode(errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "")
        return _LOGIN.sub("//...@", last)[:_WORDS]


class SinkProcess:
    """Keeps one sink's process running.

    Args:
        directory: of the federation.
        run: the run.
        chosen: the sink.
        notify: writes a note for the operator: (level, code, text).
    """

    def __init__(self, directory: Path, run: RunId, chosen: Chosen, notify: Notify) -> None:
        self._directory = directory
        self._run = run
        self._chosen = chosen
        self._notify = notify
        self._lives: asyncio.Task[None] | None = None
        self._pipe: asyncio.WriteTransport | None = None  # standard input of the live process
        self._ending = asyncio.Event()

    @property
    def name(self) -> str:
        """The sink's name."""
        return self._chosen.sink.name

    def start(self) -> None:
        """Start the process, and again whenever it ends."""
        self._lives = asyncio.create_task(self._live())

    def wake(self) -> None:
        """Report news in the ledger; never waits."""
        if self._pipe is None or self._pipe.is_closing():
            return
        if not self._pipe.get_write_buffer_size():  # an unread byte wakes it as well
            self._pipe.write(b"\n")

    async def end(self) -> None:
        """Let it take the last news, and end it; a pending retry happens now."""
        self._ending.set()
        if self._lives is None:
            return
        if self._pipe is not None:
            self._pipe.close()
        _, late = await asyncio.wait([self._lives], timeout=END_S)
        if late:
            self._lives.cancel()
            await asyncio.wait([self._lives])
            self._tell_end(f"the sink did not take all metrics within {END_S:g} s.")

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        failures, told = 0, ""
        while True:
            began = loop.time()
            why = await self._one_life()
            if self._ending.is_set():
                break
            why = why or "its process ended with code 0."
            failures = 1 if loop.time() - began > STEADY_S else failures + 1
            if why != told:  # a server that is down for a day is reported once
                text = f"sink {self.name}: {why} It is retried, and then gets the missing metrics."
                self._notify("warning", "sink", text)
            told = why
            pause = BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)
        if why:
            self._tell_end(why)

    def _tell_end(self, why: str) -> None:
        text = f"sink {self.name}: {why} It resumes when the server is restarted."
        self._notify("warning", "sink", text)

    async def _one_life(self) -> str:
        """Start the process and wait for its end; return why it failed, empty if it did not."""
        loop = asyncio.get_running_loop()
        try:
            process, life = await loop.subprocess_exec(
                _Life,
                *self._command(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the server, which then lets it end
            )
        except OSError as error:
            return f"its process cannot be started: {error.strerror}."
        try:
            self._begin(process)
            await life.ended.wait()
        finally:
            self._pipe = None
            await _bury(process, life)
        code = process.get_returncode()
        if not code:
            return ""
        said = life.words() or f"its process ended with code {code}."
        return said if said.endswith(".") else f"{said}."

    def _begin(self, process: asyncio.SubprocessTransport) -> None:
        """Send the process its options; nothing more, if the server already ends."""
        pipe = process.get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport)
        pipe.write(f"{self._chosen.options.model_dump_json()}\n".encode())
        if self._ending.is_set():
            pipe.close()
        self._pipe = pipe

    def _command(self) -> list[str]:
        where = ["--dir", str(self._directory.resolve()), "--run", self._run]
        return module_command("fcil_server.reports.sinks.follower", *where, "--name", self.name)


async def _bury(process: asyncio.SubprocessTransport, life: _Life) -> None:
    """Kill a process and all that it has started, and read its last output."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.get_pid(), signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(life.silent.wait(), _DEAD_S)
    process.close()


class Sinks:
    """All sinks of a run; without any, nothing is started.

    Args:
        directory: of the federation.
        run: the run.
        chosen: the sinks.
        notify: writes a note for the operator.
    """

    def __init__(self, directory: Path, run: RunId, chosen: list[Chosen], notify: Notify) -> None:
        self._processes = [SinkProcess(directory, run, one, notify) for one in chosen]

    def start(self) -> None:
        """Start every sink's process."""
        for one in self._processes:
            one.start()

    def wake(self) -> None:
        """Report news in the ledger."""
        for one in self._processes:
            one.wake()

    async def end(self) -> None:
        """Let all take the last news, at the same time, and end them."""
        await asyncio.gather(*(one.end() for one in self._processes))
