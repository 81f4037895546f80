"""Starts the process that serves the figures, and starts it again whenever it ends."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fcil_protocol.errors import ConfigError
from fcil_server.config_sections import FederationSection
from fcil_server.web_door import check_certificate, open_door

BACK_OFF_S = (0.2, 1.0, 5.0, 30.0)  # after the first, second, third ... end in a row
_PACKAGES = ("prometheus_client", "starlette", "uvicorn")
STEADY_S = 60.0  # after so long it counts as the first again

Say = Callable[[str, str, str], None]


class MetricsProcess:
    """The figures' door: its socket is the server's and outlives the process behind it.

    Without an address in the configuration there is none, and nothing is started.

    Args:
        directory: of the federation.
        section: where and how to serve.
        say: tells the operator: (level, code, text).

    Raises:
        LinkError: the address cannot be listened on.
        ConfigError: the certificate cannot be used, or serves nothing; or a package is missing.
    """

    def __init__(self, directory: Path, section: FederationSection, say: Say) -> None:
        self._directory = directory
        self._section = section
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        if not section.metrics:
            _refuse_certificate_alone(section)
            return
        self._check()
        self._socket = open_door(section.metrics)
        # The writing end is never written to: it closes when this process ends, however it does.
        self._pipe = os.pipe()

    @property
    def address(self) -> str:
        """Where the figures are; empty if they are not served."""
        if self._socket is None:
            return ""
        host, port = self._socket.getsockname()[:2]
        scheme = "https" if self._section.metrics_cert else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/metrics"

    def describe(self) -> dict[str, Any] | None:
        """Return address and process id for the status; None if figures are not served."""
        if self._socket is None:
            return None
        pid = self._process.pid if self._process is not None else None
        return {"address": self.address, "pid": pid}

    def _check(self) -> None:
        """Find out now what the process would only tell the log; load none of it here."""
        missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"federation.metrics needs the packages {', '.join(missing)}.",
                action="Install them with: pip install 'fcil[server]'",
            )
        check_certificate(self._section.metrics_certificate)

    async def run(self) -> None:
        """Keep the process running until cancelled; nothing to do if figures are not served."""
        if self._socket is None:
            return
        self._say("info", "metrics", f"figures are at {self.address}")
        loop = asyncio.get_running_loop()
        ends = 0
        while True:
            began = loop.time()
            why = await self._one_life(self._socket.fileno(), self._pipe[0])
            ends = 1 if loop.time() - began > STEADY_S else ends + 1
            pause = BACK_OFF_S[min(ends, len(BACK_OFF_S)) - 1]
            text = f"the process that serves figures {why}; it is started again in {pause:g} s"
            self._say("warning", "metrics", text)
            await asyncio.sleep(pause)

    async def _one_life(self, *fds: int) -> str:
        """Start the process and wait for its end; say how it ended."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command(*fds),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C is for the server, which then ends it
            )
        except OSError as error:
            return f"cannot be started: {error.strerror}"
        try:
            code = await self._process.wait()
        finally:
            if self._process.returncode is None:  # the server ends
                self._process.kill()
                await self._process.wait()
            self._process = None
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def _command(self, fd: int, parent: int) -> list[str]:
        section = self._section
        options = {
            "dir": self._directory.resolve(),
            "fd": fd,
            "parent": parent,
            "clients": section.metrics_clients,
            "cert": section.metrics_cert,
            "key": section.metrics_key,
        }
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [sys.executable, "-m", "fcil_server.metrics_server", *given]

    def close(self) -> None:
        """Close the door and the pipe; the process, if it still runs, ends by that."""
        if self._socket is None:
            return
        self._socket.close()
        for end in self._pipe:
            os.close(end)


def _refuse_certificate_alone(section: FederationSection) -> None:
    if section.metrics_cert or section.metrics_key:
        raise ConfigError(
            "federation.metrics_cert or metrics_key is given, but no address of figures.",
            action="Give one, such as --metrics 127.0.0.1:9464, or leave the two out.",
        )
