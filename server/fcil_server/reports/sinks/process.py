"""The server's side of its sinks and webhooks: one process each, woken by news in the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from fcil_protocol.ids import RunId
from fcil_protocol.process.children import KILLED_S, ChildProcess, module_command, wait_or_kill
from fcil_server.reports.sinks.registry import Chosen
from fcil_server.reports.sinks.webhooks import Webhook

BACK_OFF_S = (1.0, 5.0, 30.0, 300.0)  # after the first, second, third ... failure in a row
STEADY_S = 60.0  # after this long, a failure counts as the first again
END_S = 15.0  # time for the last metrics when the server ends
NEXT_RUN_S = 1.0  # the same before another run, for what resumes in it
_TAIL_BYTES = 4096  # of its last output
_WORDS = 200
_LOGIN = re.compile(r"//\S*@")  # in an address; a password may hold / and @

Notify = Callable[[str, str, str], None]


class _Output(asyncio.Protocol):
    """The last output of a sink's process, and of programs that it has started."""

    def __init__(self) -> None:
        self.silent = asyncio.Event()
        self._tail = b""

    def data_received(self, data: bytes) -> None:
        """Keep the last output; a sink may write any amount, in lines of any length."""
        self._tail = (self._tail + data)[-_TAIL_BYTES:]

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that no process can write any more."""
        del exc
        self.silent.set()

    def words(self) -> str:
        """Return its last line, without the password of an address."""
        lines = [line.strip() for line in self._tail.decode(errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "")
        return _LOGIN.sub("//...@", last)[:_WORDS]


class FollowerProcess:
    """Keeps a process running that follows the ledger.

    Args:
        kind: ``sink`` or ``webhook``; also the code of its notes.
        name: of the sink or webhook.
        content: what it takes, in a sentence.
        command: of the process.
        options: its first line of input.
        notify: writes a note for the operator: (level, code, text).
    """

    outlives_runs = False  # it resumes in the next run of a federation

    def __init__(
        self, kind: str, name: str, content: str, command: list[str], options: str, notify: Notify
    ) -> None:
        self.name = name
        self._kind = kind
        self._content = content
        self._given_command = command
        self._options = options
        self._notify = notify
        self._lives: asyncio.Task[None] | None = None
        self._pipe: asyncio.WriteTransport | None = None  # standard input of the live process
        self._ending = asyncio.Event()

    def start(self) -> None:
        """Start the process, and again whenever it ends."""
        self._lives = asyncio.create_task(self._live())

    def wake(self) -> None:
        """Report news in the ledger; never waits."""
        if self._pipe is None or self._pipe.is_closing():
            return
        if not self._pipe.get_write_buffer_size():  # an unread byte wakes it as well
            self._pipe.write(b"\n")

    async def end(self, *, next_run: bool = False) -> None:
        """Let it take the last news, and end it; a pending retry happens now.

        Args:
            next_run: another run begins then, and does not wait for what continues in it.
        """
        self._ending.set()
        if self._lives is None:
            return
        if self._pipe is not None:
            self._pipe.close()
        resumed = next_run and self.outlives_runs
        _, late = await asyncio.wait([self._lives], timeout=NEXT_RUN_S if resumed else END_S)
        if not late:
            return
        self._lives.cancel()
        await asyncio.wait([self._lives])
        if not resumed:
            self._tell_end(f"the {self._kind} did not take all {self._content} within {END_S:g} s.")

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        failures, told = 0, ""
        while True:
            began = loop.time()
            why = await self._run_once()
            if self._ending.is_set():
                break
            why = why or "its process ended with code 0."
            was_steady = loop.time() - began > STEADY_S
            failures = 1 if was_steady else failures + 1
            # A server that is down for a day is reported once, and again after it was up.
            if why != told or was_steady:
                text = f"{self._kind} {self.name}: {why} It is retried, and then gets the missing"
                self._notify("warning", self._kind, f"{text} {self._content}.")
            told = why
            pause = BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)
        if why:
            self._tell_end(why)

    def _tell_end(self, why: str) -> None:
        text = f"{self._kind} {self.name}: {why} It resumes when the server is restarted."
        self._notify("warning", self._kind, text)

    async def _run_once(self) -> str:
        """Start the process and wait for its end; return why it failed, empty if it did not."""
        try:
            child = ChildProcess(self._command(), stderr=subprocess.PIPE)
        except OSError as error:
            return f"its process cannot be started: {error.strerror}."
        loop = asyncio.get_running_loop()
        errors, output = await loop.connect_read_pipe(_Output, child.stderr)
        pipe, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, child.pipe)
        try:
            self._begin(pipe)
            code = await child.ended()
        finally:
            self._pipe = None
            await _bury(child, output)
            pipe.close()
            errors.close()
        if not code:
            return ""
        said = output.words() or f"its process ended with code {code}."
        return said if said.endswith(".") else f"{said}."

    def _begin(self, pipe: asyncio.WriteTransport) -> None:
        """Send the process its options; nothing more, if the server already ends."""
        pipe.write(f"{self._options}\n".encode())
        if self._ending.is_set():
            pipe.close()
        self._pipe = pipe

    def _command(self) -> list[str]:
        return self._given_command


class SinkProcess(FollowerProcess):
    """Keeps one sink's process running.

    Args:
        directory: of the federation.
        run: the run.
        chosen: the sink.
        notify: writes a note for the operator.
    """

    def __init__(self, directory: Path, run: RunId, chosen: Chosen, notify: Notify) -> None:
        name, options = chosen.sink.name, chosen.options.model_dump_json()
        where = ["--dir", str(directory.resolve()), "--run", run, "--name", name]
        command = module_command("fcil_server.reports.sinks.follower", *where)
        super().__init__("sink", name, "metrics", command, options, notify)


class WebhookProcess(FollowerProcess):
    """Keeps one webhook's process running.

    Args:
        directory: of the federation.
        federation: its name, for the requests.
        webhook: the webhook.
        notify: writes a note for the operator.
    """

    outlives_runs = True

    def __init__(self, directory: Path, federation: str, webhook: Webhook, notify: Notify) -> None:
        given = {"federation": federation, "options": webhook.options.model_dump(mode="json")}
        where = ["--dir", str(directory.resolve()), "--name", webhook.name]
        command = module_command("fcil_server.reports.sinks.webhook_follower", *where)
        super().__init__("webhook", webhook.name, "news", command, json.dumps(given), notify)


async def _bury(child: ChildProcess, output: _Output) -> None:
    """Kill a process and all that it has started, and read its last output."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    await asyncio.to_thread(wait_or_kill, child, 0.0)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(output.silent.wait(), KILLED_S)


class Sinks:
    """All sinks of a run and all webhooks; without any, nothing is started.

    Args:
        processes: of the sinks and webhooks.
    """

    def __init__(self, processes: Sequence[FollowerProcess]) -> None:
        self._processes = processes

    def start(self) -> None:
        """Start every sink's process."""
        for one in self._processes:
            one.start()

    def wake(self) -> None:
        """Report news in the ledger."""
        for one in self._processes:
            one.wake()

    async def end(self, *, next_run: bool = False) -> None:
        """Let all take the last news, at the same time, and end them (`FollowerProcess.end`)."""
        await asyncio.gather(*(one.end(next_run=next_run) for one in self._processes))
