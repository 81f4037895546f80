"""A small HTTP listener for operators: bounded in everything, since strangers may connect.

On the loopback address any program of this machine can reach it, and so can a web page in a browser
that names it (DNS rebinding): a request with a foreign host name is refused. On another address it
needs a certificate. Requests are few, small and short; slow, silent or greedy clients are cut.
uvicorn speaks HTTP, Starlette finds the answer.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import functools
import ipaddress
import re
import socket
import ssl
import termios
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fcil_protocol.errors import ConfigError, LinkError
from fcil_server.federation.addresses import TlsFiles, split_address

MAX_HEAD_BYTES = 8192  # of a request: its line and headers
HANDSHAKE_S = 5.0  # of TLS, which precedes the limits below
KEEP_ALIVE_S = 5.0  # without a request
BACKLOG = 64
STREAM_BUFFER_BYTES = 64 << 10  # kernel buffer for a client that does not read its stream

_HOST = re.compile(r"(?:\[(?P<six>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(?::[0-9]*)?")

App = Callable[[Any, Any, Any], Awaitable[None]]
Refusal = Callable[[str, int], App]  # makes the answer from a sentence and a status code


@dataclass(frozen=True)
class HttpLimits:
    """Limits of a listener's connections, sizes and times.

    Attributes:
        connections: at a time; one more is cut at once.
        body_bytes: of a request.
        first_s: from a connection to its first request: silent clients soon make room.
        request_s: from the first request, or the last answer, to the end of the next answer.
        stalled_s: how long a stream's reader may take nothing while data waits for it; the only
            limit of a stream (`mark_as_stream`).
    """

    connections: int = 32
    body_bytes: int = 0
    first_s: float = 2.0
    request_s: float = 10.0
    stalled_s: float = 10.0


LIMITS = HttpLimits()
ALL_USED = "socket.accept() out of system resource"  # asyncio's words
_ENDLESS = "fcil_endless"  # in a request's state: marks its answer as a stream


def mark_as_stream(scope: Any) -> None:
    """Mark the answer to a request as a stream, limited only by `HttpLimits.stalled_s`.

    Each piece then waits until all before it have left this process.
    """
    scope["state"][_ENDLESS]()


def open_listener(address: str) -> socket.socket:
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
            action="Stop the program that listens there, or choose another address.",
        ) from error
    return sock


def check_certificate(certificate: TlsFiles) -> None:
    """Refuse a certificate or a key that cannot be used; none at all is allowed.

    Raises:
        ConfigError: with the files.
    """
    if not certificate.chain:
        return
    own_names(certificate)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate.chain, certificate.key)
    except OSError as error:  # ssl's errors are OSErrors, too
        files = f"{certificate.chain} and {certificate.key}"
        raise ConfigError(f"cannot use the certificate and key {files}: {error}.") from error


def own_names(certificate: TlsFiles) -> frozenset[str]:
    """Return the listener's accepted host names: localhost, and its certificate's.

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
    """Return True if a ``Host`` header names the listener itself.

    A numeric address is accepted: no page can have come here by a name that it controls. A wildcard
    of the certificate stands for one label.
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


def plain_refusal(sentence: str, status: int) -> App:
    """Return the answer to a refused request as a line of text."""
    from starlette.responses import PlainTextResponse

    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return PlainTextResponse(f"{sentence}\n", status, headers)


class OwnNames:
    """Refuses requests with a foreign host name or an oversized head or body."""

    def __init__(
        self,
        app: App,
        names: frozenset[str],
        body_bytes: int = 0,
        refusal: Refusal = plain_refusal,
    ) -> None:
        self._app = app
        self._names = names
        self._body_bytes = body_bytes
        self._refusal_of = refusal

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await self._refusal_of(*refusal)(scope, receive, send)

    def _refusal(self, scope: Any) -> tuple[str, int] | None:
        if _head_bytes(scope) > MAX_HEAD_BYTES:
            return f"a request may be at most {MAX_HEAD_BYTES} bytes long.", 431
        hosts = _all(scope, b"host")
        if len(hosts) != 1 or not is_ours(hosts[0].decode("latin-1"), self._names):
            return "this listener does not have that host name; use its numeric address.", 421
        if _all(scope, b"transfer-encoding"):
            return "say how long the request's body is (Content-Length).", 411
        if any(int(length) > self._body_bytes for length in _all(scope, b"content-length")):
            return f"a request's body may be at most {self._body_bytes} bytes long.", 413
        return None


def _all(scope: Any, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _head_bytes(scope: Any) -> int:
    """Return the length of a request without its body; h11 limits only heads in pieces."""
    target = len(scope["raw_path"]) + len(scope["query_string"])
    return target + sum(len(name) + len(value) + 4 for name, value in scope["headers"])


def make_server(
    app: App,
    certificate: TlsFiles,
    limits: HttpLimits = LIMITS,
    refusal: Refusal = plain_refusal,
) -> Any:
    """Return a ``uvicorn.Server`` for the app; ``serve(sockets=[...])`` runs it.

    Args:
        app: answers the requests.
        certificate: of the listener.
        limits: of its connections.
        refusal: makes the answer to a request that does not reach the app.

    Raises:
        ConfigError: the certificate or its key cannot be used.
    """
    import uvicorn

    check_certificate(certificate)
    config = uvicorn.Config(
        OwnNames(app, own_names(certificate), limits.body_bytes, refusal),
        http=_bounded(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # errors of strangers are not worth a log line
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

    class BoundedServer(uvicorn.Server):
        """uvicorn's server, with a time limit for the TLS handshake."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Listen; cut connections whose TLS handshake takes longer than `HANDSHAKE_S`."""
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(_tell)
            if config.ssl is not None:
                # uvicorn has no such limit, and asyncio's own is a minute.
                bounded = functools.partial(loop.create_server, ssl_handshake_timeout=HANDSHAKE_S)
                loop.create_server = bounded  # type: ignore[method-assign]
            try:
                await super().startup(sockets)
            finally:
                vars(loop).pop("create_server", None)

    return BoundedServer(config)


def _tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what failed in the loop, but not, once a second, that strangers use all descriptors."""
    if context.get("message") != ALL_USED:
        loop.default_exception_handler(context)


def _bounded(limits: HttpLimits) -> type[asyncio.Protocol]:
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Bounded(H11Protocol):
        """uvicorn's HTTP, with time limits."""

        _patience: asyncio.TimerHandle | None = None
        _limited: object = None  # the request whose time limit runs
        _streams = False
        _gone = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Take a connection, unless there are too many."""
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.abort()
            else:
                self._wait(limits.first_s)

        def handle_events(self) -> None:
            """Handle received data; each request starts a time limit of its own."""
            super().handle_events()
            if self.scope is not None:
                self.scope["state"][_ENDLESS] = self._stream
            if self.cycle is not None and self.cycle is not self._limited:
                self._limited = self.cycle
                self._wait(limits.request_s)

        def connection_lost(self, exc: Exception | None) -> None:
            """Forget a connection."""
            self._gone = True
            self._forgive()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            """Wait for the next request."""
            self._streams = False
            super().on_response_complete()
            self._wait(limits.request_s)

        def pause_writing(self) -> None:
            """Wait for a slow reader; the reader of a stream must take something."""
            super().pause_writing()
            if self._streams:
                self._watch(_untaken(self.transport))

        def resume_writing(self) -> None:
            """Resume: the reader has caught up."""
            super().resume_writing()
            if self._streams:
                self._forgive()

        def _stream(self) -> None:
            if self._gone:  # its socket is closed; the stream hears so from `receive`
                return
            self._streams = True
            self._forgive()
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, STREAM_BUFFER_BYTES)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # a machine that is gone takes nothing, either
                patience_ms = int(limits.stalled_s * 1000)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
            self.transport.set_write_buffer_limits(high=1, low=0)  # at 0, TLS waits for ever

        def _watch(self, behind: int) -> None:
            """Cut the reader unless it takes some of the waiting data in time."""
            self._forgive()

            def look() -> None:
                left = _untaken(self.transport)
                if left >= behind:
                    self.transport.abort()
                else:
                    self._watch(left)

            self._patience = self.loop.call_later(limits.stalled_s, look)

        def _wait(self, seconds: float) -> None:
            self._forgive()
            self._patience = self.loop.call_later(seconds, self.transport.abort)

        def _forgive(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

    return cast("type[asyncio.Protocol]", Bounded)


def _untaken(transport: asyncio.Transport) -> int:
    """Return the number of written bytes that the other machine has not taken."""
    in_kernel = array.array("i", [0])
    sock = transport.get_extra_info("socket")
    with contextlib.suppress(OSError):  # without kernel support: it holds little (`_stream`)
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, in_kernel)
    return transport.get_write_buffer_size() + in_kernel[0]
