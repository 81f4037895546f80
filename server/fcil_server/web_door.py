"""A small HTTP door for operators: bounded in everything, since strangers may knock.

On the loopback address any program of this machine can reach it, and so can a web page in
somebody's browser that names it (DNS rebinding): whoever calls it by a name that is not ours
is sent away. On another address it needs a certificate. Requests are few, small and short;
whoever is slow, silent or greedy is cut. uvicorn speaks HTTP, Starlette finds the answer.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from fcil_protocol.errors import ConfigError, LinkError
from fcil_server.addresses import Certificate, split_address

MAX_CONNECTIONS = 32
MAX_HEAD_BYTES = 8192  # of a request: its line and headers
REQUEST_S = 10.0  # from a connection, or the last answer, to the end of the next answer
KEEP_ALIVE_S = 5.0  # without a request
BACKLOG = 64

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
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        name = name.lower().rstrip(".")
        return name in names or f"*.{name.partition('.')[2]}" in names
    return True


class OwnNames:
    """Sends away whoever calls the door by a name that is not its own."""

    def __init__(self, app: App, names: frozenset[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            hosts = [value for name, value in scope["headers"] if name == b"host"]
            if len(hosts) != 1 or not is_ours(hosts[0].decode("latin-1"), self._names):
                from starlette.responses import PlainTextResponse

                text = "this door is not called that; use its address in numbers.\n"
                await PlainTextResponse(text, 421)(scope, receive, send)
                return
        await self._app(scope, receive, send)


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
    return uvicorn.Server(config)


def _bounded() -> type[asyncio.Protocol]:
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Bounded(H11Protocol):
        """uvicorn's HTTP, with an end to patience."""

        _patience: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Take a connection, unless there are many."""
            super().connection_made(transport)
            if len(self.connections) > MAX_CONNECTIONS:
                transport.abort()
            else:
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            """Forget a connection."""
            self._forgive()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            """Wait for the next request."""
            super().on_response_complete()
            self._wait()

        def _wait(self) -> None:
            self._forgive()
            self._patience = self.loop.call_later(REQUEST_S, self.transport.abort)

        def _forgive(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

    return cast("type[asyncio.Protocol]", Bounded)
