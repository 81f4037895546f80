"""A small HTTP door for operators: bounded in everything, since strangers may knock.

On the loopback address any program of this machine can reach it, and so can a web page in
somebody's browser that names it (DNS rebinding): whoever calls it by a name that is not ours
is sent away. On another address it needs a certificate. Requests are few, small and short;
whoever is slow, silent or greedy is cut. uvicorn speaks HTTP, Starlette finds the answer.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from fcil_protocol.errors import ConfigError, LinkError
from fcil_server.addresses import Certificate, split_address

MAX_CONNECTIONS = 32
MAX_HEAD_BYTES = 8192  # of a request: its line and headers
HANDSHAKE_S = 5.0  # of TLS, which comes before what is bounded below
FIRST_S = 2.0  # from a connection to its first request: who says nothing leaves room soon
REQUEST_S = 10.0  # from the first request, or the last answer, to the end of the next answer
KEEP_ALIVE_S = 5.0  # without a request
BACKLOG = 64

_HOST = re.compile(r"(?:\[(?P<six>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(?::[0-9]*)?")

App = Callable[[Any, Any, Any], Awaitable[None]]


def open_door(address: str) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Raises:
        LinkError: the address is in use, or not of this machine.
    """
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, number, _, place = found[0]
        sock = socket.socket(family, kind, number)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and host != "::":
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(place)
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise LinkError(
            f"cannot listen on {address}: {error.strerror or error}.",
            action="Stop what listens there, or choose another address.",
        ) from error
    return sock


def check_certificate(certificate: Certificate) -> None:
    """Refuse a certificate or a key that cannot be used; none at all is well.

    Raises:
        ConfigError: with the files.
    """
    if not certificate.chain:
        return
    own_names(certificate)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate.chain, certificate.key)
    except OSError as error:  # what ssl raises is one, too
        files = f"{certificate.chain} and {certificate.key}"
        raise ConfigError(f"cannot use the certificate and key {files}: {error}.") from error


def own_names(certificate: Certificate) -> frozenset[str]:
    """Return the names by which the door may be called: localhost, and its certificate's.

    Raises:
        ConfigError: the certificate cannot be read.
    """
    if not certificate.chain:
        return frozenset({"localhost"})
    from cryptography import x509

    try:
        loaded = x509.load_pem_x509_certificates(Path(certificate.chain).read_bytes())
        names = loaded[0].extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return frozenset({"localhost"})
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the certificate {certificate.chain}: {error}.") from error
    found = names.value.get_values_for_type(x509.DNSName)
    return frozenset({"localhost", *(name.lower() for name in found)})


def is_ours(host: str, names: frozenset[str]) -> bool:
    """Say whether a ``Host`` header calls the door by its own name.

    An address in numbers is nobody's name: no page can have got there by a name that it
    controls. A wildcard of the certificate stands for one label.
    """
    written = _HOST.fullmatch(host)
    if written is None:
        return False
    name = written["six"] or written["name"]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        name = name.lower().rstrip(".")
        return name in names or f"*.{name.partition('.')[2]}" in names
    return True


class OwnNames:
    """Sends away whoever calls the door by a name that is not its own, or says too much."""

    def __init__(self, app: App, names: frozenset[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            from starlette.responses import PlainTextResponse

            await PlainTextResponse(*refusal)(scope, receive, send)

    def _refusal(self, scope: Any) -> tuple[str, int] | None:
        if _head_bytes(scope) > MAX_HEAD_BYTES:
            return f"a request may be {MAX_HEAD_BYTES} bytes long.\n", 431
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not is_ours(hosts[0].decode("latin-1"), self._names):
            return "this door is not called that; use its address in numbers.\n", 421
        return None


def _head_bytes(scope: Any) -> int:
    """Return the length of a request without its body; h11 bounds only heads in pieces."""
    target = len(scope["raw_path"]) + len(scope["query_string"])
    return target + sum(len(name) + len(value) + 4 for name, value in scope["headers"])


def make_server(app: App, certificate: Certificate) -> Any:
    """Return a ``uvicorn.Server`` for the app; ``serve(sockets=[...])`` runs it.

    Raises:
        ConfigError: the certificate or its key cannot be used.
    """
    import uvicorn

    check_certificate(certificate)
    config = uvicorn.Config(
        OwnNames(app, own_names(certificate)),
        http=_bounded(),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # what strangers send is no news
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=int(KEEP_ALIVE_S),
        timeout_graceful_shutdown=1,
        backlog=BACKLOG,
        ssl_certfile=certificate.chain or None,
        ssl_keyfile=certificate.key or None,
    )

    class Door(uvicorn.Server):
        """uvicorn's server, with an end to patience before the first word of HTTP, too."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Listen; who does not finish the handshake of TLS is cut after `HANDSHAKE_S`."""
            loop = asyncio.get_running_loop()
            if config.ssl is not None:
                # uvicorn knows no such limit, and asyncio's own is a minute.
                bounded = functools.partial(loop.create_server, ssl_handshake_timeout=HANDSHAKE_S)
                loop.create_server = bounded  # type: ignore[method-assign]
            try:
                await super().startup(sockets)
            finally:
                vars(loop).pop("create_server", None)

    return Door(config)


def _bounded() -> type[asyncio.Protocol]:
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Bounded(H11Protocol):
        """uvicorn's HTTP, with an end to patience."""

        _patience: asyncio.TimerHandle | None = None
        _asked = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Take a connection, unless there are many."""
            super().connection_made(transport)
            if len(self.connections) > MAX_CONNECTIONS:
                transport.abort()
            else:
                self._wait(FIRST_S)

        def handle_events(self) -> None:
            """Take what came; with the first request, its time begins."""
            super().handle_events()
            if not self._asked and self.cycle is not None:
                self._asked = True
                self._wait(REQUEST_S)

        def connection_lost(self, exc: Exception | None) -> None:
            """Forget a connection."""
            self._forgive()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            """Wait for the next request."""
            super().on_response_complete()
            self._wait(REQUEST_S)

        def _wait(self, seconds: float) -> None:
            self._forgive()
            self._patience = self.loop.call_later(seconds, self.transport.abort)

        def _forgive(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

    return cast("type[asyncio.Protocol]", Bounded)
