"""Supervisor of a process that serves HTTP: it restarts it whenever it ends."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcil_protocol.errors import ConfigError
from fcil_protocol.process.children import ChildProcess, module_command
from fcil_server.federation.addresses import TlsFiles
from fcil_server.federation.sections import FederationSection
from fcil_server.web.http_server import check_certificate, open_listener

BACK_OFF_S = (0.2, 1.0, 5.0, 30.0)  # after the first, second, third ... end in a row
STEADY_S = 60.0  # after this long, an end counts as the first again
LAST_WORDS_S = 1.0  # time for pending answers when the server ends

Notify = Callable[[str, str, str], None]


@dataclass(frozen=True)
class WebProgram:
    """Content, address and program of a web process.

    Attributes:
        key: of the address in ``[federation]``; also the code of its notes.
        what: name of its content in a sentence, with the verb that follows it in `verb`.
        module: is run as ``python -m module``.
        packages: that it needs.
        example: of an address.
        address: ``HOST:PORT``; empty: it is not served.
        path: of its main content.
        hint: how to sign in.
        words: its options in addition to the common ones.
        status: its status fields in addition to address and process.
    """

    key: str
    what: str
    verb: str
    module: str
    packages: tuple[str, ...]
    example: str
    address: str
    certificate: TlsFiles
    path: str = ""
    hint: str = ""
    words: tuple[str, ...] = ()
    status: tuple[tuple[str, Any], ...] = ()


def figures_site(section: FederationSection) -> WebProgram:
    """Return the site of the metrics for Prometheus."""
    return WebProgram(
        key="metrics",
        what="metrics",
        verb="are",
        module="fcil_server.web.metrics.server",
        packages=("prometheus_client", "starlette", "uvicorn"),
        example="127.0.0.1:9464",
        address=section.metrics,
        certificate=section.metrics_certificate,
        path="/metrics",
        words=("--clients", str(section.metrics_clients)),
    )


def page_site(section: FederationSection) -> WebProgram:
    """Return the site of the live dashboard."""
    switches = {
        "--read-only": section.page_read_only,
        "--metrics": section.page_metrics,
        "--health": section.page_health,
    }
    figures = ("prometheus_client",) if section.page_metrics else ()
    beside = [word for folder in section.page_beside for word in ("--beside", folder)]
    return WebProgram(
        key="page",
        what="the dashboard",
        verb="is",
        module="fcil_server.web.page.server",
        packages=("jinja2", "starlette", "uvicorn", *figures),
        example="127.0.0.1:7780",
        address=section.page,
        certificate=section.page_certificate,
        hint="; for a sign-in link: fcil-server page",
        words=(
            *(word for word, on in switches.items() if on),
            *("--clients", str(section.metrics_clients)),
            *beside,
        ),
        status=(("read_only", section.page_read_only),),
    )


def api_site(section: FederationSection) -> WebProgram:
    """Return the site of the HTTP API."""
    return WebProgram(
        key="api",
        what="the HTTP API",
        verb="is",
        module="fcil_server.web.api.server",
        packages=("starlette", "uvicorn"),
        example="127.0.0.1:7790",
        address=section.api,
        certificate=section.api_certificate,
        path="/v1",
        hint="; for a token: fcil-server token new NAME",
    )


class WebProcess:
    """One listener: its socket is the server's and outlives the process behind it.

    Without an address in the configuration there is none, and nothing is started.

    Args:
        directory: of the federation.
        site: its content and program.
        notify: writes a note for the operator: (level, code, text).

    Raises:
        LinkError: the address cannot be listened on.
        ConfigError: the certificate cannot be used, or serves nothing; or a package is missing.
    """

    def __init__(self, directory: Path, site: WebProgram, notify: Notify) -> None:
        self._directory = directory
        self._site = site
        self._notify = notify
        self._process: ChildProcess | None = None
        self._socket: socket.socket | None = None
        if not site.address:
            _refuse_certificate_alone(site)
            return
        self._check()
        self._socket = open_listener(site.address)

    @property
    def served(self) -> bool:
        """True if there is a listener."""
        return self._socket is not None

    @property
    def address(self) -> str:
        """Address of the content; empty if it is not served."""
        return self.origin() + self._site.path if self.served else ""

    def origin(self, host: str = "") -> str:
        """Return the beginning of its addresses.

        Args:
            host: the name of this machine for others; empty: the listen address.
        """
        assert self._socket is not None, "only what is served has an address"
        own, port = self._socket.getsockname()[:2]
        scheme, host = "https" if self._site.certificate.chain else "http", host or own
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def describe(self) -> dict[str, Any] | None:
        """Return address and process id for the status; None if it is not served."""
        if not self.served:
            return None
        pid = self._process.pid if self._process is not None else None
        return {"address": self.address, "pid": pid, **dict(self._site.status)}

    def _check(self) -> None:
        """Check now what the process could only log; import none of it here."""
        wanted = self._site.packages
        missing = [name for name in wanted if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"federation.{self._site.key} needs the packages {', '.join(missing)}.",
                action="Install them with: pip install 'fcil[server]'",
            )
        check_certificate(self._site.certificate)

    async def run(self) -> None:
        """Keep the process running until cancelled; nothing to do if it is not served."""
        if self._socket is None:
            return
        key, what = self._site.key, self._site.what
        self._notify("info", key, f"{what} {self._site.verb} at {self.address}{self._site.hint}")
        loop = asyncio.get_running_loop()
        ends = 0
        while True:
            began = loop.time()
            why = await self._run_once(self._socket.fileno())
            ends = 1 if loop.time() - began > STEADY_S else ends + 1
            pause = BACK_OFF_S[min(ends, len(BACK_OFF_S)) - 1]
            text = f"the process that serves {what} {why}; it is restarted in {pause:g} s"
            self._notify("warning", key, text)
            await asyncio.sleep(pause)

    async def _run_once(self, fd: int) -> str:
        """Start the process and wait for its end; return how it ended."""
        try:
            self._process = process = ChildProcess(self._command(fd), fds=(fd,))
        except OSError as error:
            return f"cannot be started: {error.strerror}"
        try:
            code = await process.ended()
        finally:
            self._process = None
            await asyncio.to_thread(process.stop, LAST_WORDS_S)  # the server may end
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def _command(self, fd: int) -> list[str]:
        site = self._site
        options = {
            "--dir": str(self._directory.resolve()),
            "--fd": str(fd),
            "--cert": site.certificate.chain,
            "--key": site.certificate.key,
        }
        given = [word for pair in options.items() if pair[1] for word in pair]
        return module_command(site.module, *given, *site.words)

    def close(self) -> None:
        """Close the listener."""
        if self._socket is not None:
            self._socket.close()


def _refuse_certificate_alone(site: WebProgram) -> None:
    if site.certificate.chain or site.certificate.key:
        raise ConfigError(
            f"federation.{site.key}_cert or {site.key}_key is given, but no address of "
            f"{site.what}.",
            action=f"Give one, such as --{site.key} {site.example}, or leave the two out.",
        )
