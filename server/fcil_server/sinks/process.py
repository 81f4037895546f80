"""The server's side of its sinks: a process each, woken when something new is in the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

from fcil_protocol.ids import RunId
from fcil_server.sinks.doors import Chosen

BACK_OFF_S = (1.0, 5.0, 30.0, 300.0)  # after the first, second, third ... failure in a row
STEADY_S = 60.0  # after so long it counts as the first again
END_S = 15.0  # to take the last figures when the server ends
_WORDS = 200  # of what it says last

Say = Callable[[str, str, str], None]


class SinkProcess:
    """Keeps one sink's process running.

    Args:
        directory: of the federation.
        run: which.
        chosen: the sink.
        say: tells the operator: (level, code, text).
    """

    def __init__(self, directory: Path, run: RunId, chosen: Chosen, say: Say) -> None:
        self._directory = directory
        self._run = run
        self._chosen = chosen
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._told = ""
        self._ending = False

    @property
    def name(self) -> str:
        """The sink's name."""
        return self._chosen.sink.name

    def wake(self) -> None:
        """Say that something new is in the ledger; never waits."""
        if self._process is None or self._process.returncode is not None or self._ending:
            return
        pipe = self._process.stdin
        assert pipe is not None
        if not pipe.transport.get_write_buffer_size():  # what it has not read yet wakes it as well
            pipe.write(b"\n")

    async def run(self) -> None:
        """Keep the process running until it is told to end."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            began = loop.time()
            why = await self._one_life()
            if self._ending:
                return
            failures = 1 if loop.time() - began > STEADY_S else failures + 1
            pause = BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1]
            if why != self._told:  # a server that is down for a day is told of once
                text = f"sink {self.name}: {why} It is tried again, and then gets what it lacks."
                self._say("warning", "sink", text)
            self._told = why
            await asyncio.sleep(pause)

    async def _one_life(self) -> str:
        """Start the process and wait for its end; return its last words."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the server, which then lets it end
            )
        except OSError as error:
            return f"its process cannot be started: {error.strerror}."
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(f"{self._chosen.options.model_dump_json()}\n".encode())
        self._process = process
        words: deque[str] = deque(maxlen=1)
        async for line in process.stderr:
            words.extend([line.decode(errors="replace").strip()[:_WORDS]] if line.strip() else [])
        code = await process.wait()
        said = words[0] if words else f"its process ended with code {code}."
        return said if said.endswith(".") else f"{said}."

    def _command(self) -> list[str]:
        where = ["--dir", str(self._directory.resolve()), "--run", self._run]
        return [sys.executable, "-m", "fcil_server.sinks.follow", *where, "--name", self.name]

    async def end(self) -> None:
        """Let it take what is new, and end it."""
        self._ending = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            text = f"sink {self.name}: not all figures were taken in {END_S:g} s."
            self._say("warning", "sink", f"{text} It goes on when the server is started again.")


class Sinks:
    """All sinks of a run; without any, nothing is started.

    Args:
        directory: of the federation.
        run: which.
        chosen: the sinks.
        say: tells the operator.
    """

    def __init__(self, directory: Path, run: RunId, chosen: list[Chosen], say: Say) -> None:
        self._processes = [SinkProcess(directory, run, one, say) for one in chosen]
        self._lives: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start every sink's process."""
        self._lives = [asyncio.create_task(one.run()) for one in self._processes]

    def wake(self) -> None:
        """Say that something new is in the ledger."""
        for one in self._processes:
            one.wake()

    async def end(self) -> None:
        """Let all take what is new, at the same time, and end them."""
        await asyncio.gather(*(one.end() for one in self._processes))
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
