"""A complete federation on this machine: one server and several client daemons as processes.

The demo and the system tests use it; nothing in it is simulated: processes, sockets and keys are
those of a real deployment, on the loopback address, in a separate state directory.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from fcil_protocol.errors import LinkError, Timeout, Unreachable
from fcil_protocol.process import control_socket
from fcil_protocol.process.children import LAUNCHER, ChildProcess, module_command, wait_or_kill
from fcil_server.federation.environment import without_settings
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

STOP_S = 20.0  # for a daemon to end on its own before it is killed


@dataclass
class LocalFederation:
    """Processes of one federation under a directory; they end with this one, however it ends.

    Attributes:
        directory: ``federation/`` (the server's), ``state/`` (the clients'), ``logs/``.
        port: the server's; 0 before its first start.
    """

    directory: Path
    port: int = 0
    server: subprocess.Popen[bytes] | None = None
    clients: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _files: ExitStack = field(default_factory=ExitStack)
    _heard: int = 0  # notes of this start that `until` has taken
    _last: tuple[float, str, str] = (0.0, "", "")  # time, code and text of the last one

    def __post_init__(self) -> None:
        self.directory = self.directory.resolve()
        for name in ("state", "logs"):
            (self.directory / name).mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def federation(self) -> Path:
        """The server's directory."""
        return self.directory / "federation"

    def log(self, name: str) -> Path:
        """Log file of a process's output."""
        return self.directory / "logs" / f"{name}.log"

    def environment(self) -> dict[str, str]:
        """Return the environment of all processes: a separate state directory, and no settings."""
        return {**without_settings(), "XDG_STATE_HOME": str(self.directory / "state")}

    def _start(
        self, name: str, arguments: list[str], extra: Mapping[str, str] | None
    ) -> ChildProcess:
        log = self._files.enter_context(self.log(name).open("ab"))
        environment = {**self.environment(), **(extra or {})}
        command = module_command(LAUNCHER, *arguments)
        return ChildProcess(command, env=environment, stdout=log, stderr=log)

    def serve(self, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        """Start the server; it is reachable when this returns.

        Raises:
            LinkError: it ended instead; the message has its last output.
        """
        self._heard, self._last = 0, (time.time(), "", "")
        listen = ["--dir", str(self.federation), "--port", str(self.port)]
        self.server = self._start("server", ["fcil_server", "serve", *listen, *arguments], env)
        while (status := self.status()) is None:
            try:
                self.server.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            raise LinkError(
                f"the server ended with code {self.server.returncode}: {self.last_words('server')}"
            )
        # Clients know this address: a restarted server must keep it.
        self.port = int(status["federation"]["port"])

    def join(
        self, name: str, data: Path, *arguments: str, env: Mapping[str, str] | None = None
    ) -> None:
        """Start a client daemon on a folder."""
        # Server and clients are one program here: none of them yields to another.
        command = ["fcil_client", "join", "--data", str(data), "--nice", "0", *arguments]
        self.clients[name] = self._start(name, command, env)

    def swarm(
        self,
        name: str,
        data: Path,
        partition: Path | None,
        *arguments: str,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start one process that is all clients of a partition of some data, or of its folders."""
        where = ["--data", str(data), "--name", name]
        where += ["--partition", str(partition)] if partition is not None else []
        command = ["fcil_client", "swarm", *where, "--nice", "0", *arguments]
        self.clients[name] = self._start(name, command, env)

    def status(self) -> dict[str, Any] | None:
        """Return the server's status; None while it does not answer."""
        try:
            return control_socket.ask(self.federation, "status")
        except (Unreachable, Timeout):
            return None

    def until(self, code: str, *, text: str = "", timeout_s: float = 600.0) -> dict[str, Any]:
        """Wait for a note of the server with this code and this text.

        Notes are taken in order, each once, so a second call waits for a later one. A server that
        ends soon after a note may do so before it has sent it: then the ledger has it. Between two
        runs of its queue a server does not answer for a moment.

        Raises:
            Timeout: none came. Unreachable: the server ended without one.
        """
        ends = time.monotonic() + timeout_s
        while True:
            left = ends - time.monotonic()
            if left <= 0:
                raise Timeout(f"no note {code!r} within {timeout_s:.0f} s.")
            try:
                news = control_socket.ask(self.federation, "notes", left, after=self._heard)
            except Unreachable:
                if self._runs():
                    continue
                if (last := self._last_note(code, text)) is None:
                    raise
                return last
            for number, note in enumerate(news["notes"], news["last"] - len(news["notes"]) + 1):
                self._heard, self._last = number, (note["at"], note["code"], note["text"])
                if note["code"] == code and text in note["text"]:
                    return dict(note)

    def _runs(self) -> bool:
        """Return True if the server's process still runs after a moment."""
        if self.server is None:
            return False
        try:
            self.server.wait(0.1)
        except subprocess.TimeoutExpired:
            return True
        return False

    def _last_note(self, code: str, text: str) -> dict[str, Any] | None:
        """Return a note from the ledger of a server that has ended; None: it wrote none."""
        if self.server is None:
            return None
        with Ledger(self.federation / LEDGER_NAME, read_only=True) as ledger:
            events = ledger.events.newest()
        since, *heard = self._last
        new = [e for e in events if e.at >= since]
        if new and [new[0].code, new[0].text] == heard:
            del new[0]
        for event in new:
            self._last = (event.at, event.code, event.text)
            if event.code == code and text in event.text:
                return {"at": event.at, "level": event.level, "code": code, "text": event.text}
        return None

    def last_words(self, name: str, lines: int = 5) -> str:
        """Return the end of a process's log on one line; its last error alone if that is there.

        The lines before an error say the same, once for each try.
        """
        try:
            text = self.log(name).read_text(errors="replace")
        except FileNotFoundError:
            return ""
        last = text.strip().splitlines()[-lines:]
        starts = [number for number, line in enumerate(last) if line.startswith("error [")]
        return " | ".join(last[starts[-1] :] if starts else last)

    def check_clients(self) -> None:
        """Raise if a client daemon ended on its own.

        Raises:
            LinkError: with its last output.
        """
        for name, process in self.clients.items():
            if process.poll() is not None:
                raise LinkError(
                    f"{name} ended with code {process.returncode}: {self.last_words(name)}"
                )

    def kill_client(self, name: str) -> None:
        """Kill a client's daemon with kill -9; its worker ends with its pipe."""
        process = self.clients.pop(name)
        process.kill()
        process.wait()

    def kill_server(self) -> None:
        """Kill the server."""
        assert self.server is not None
        self.server.kill()
        self.server.wait()

    def stop(self) -> None:
        """Stop clients, then the server, in order; kill processes that do not end."""
        processes = list(self.clients.values())
        if self.server is not None:
            processes.append(self.server)
        for process in processes:
            process.send_signal(signal.SIGINT)
        for process in processes:
            wait_or_kill(process, STOP_S)
        self.clients.clear()
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
