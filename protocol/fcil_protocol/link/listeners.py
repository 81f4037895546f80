"""Listening sockets of one port for several processes, among which the kernel divides clients."""

from __future__ import annotations

import errno
import socket

from fcil_protocol.errors import LinkError, PortInUse

BACKLOG = 1024  # connections that wait to be accepted, for each socket


def open_listeners(host: str, port: int, count: int) -> list[socket.socket]:
    """Return sockets that listen on the same port; port 0 takes a free one.

    A new connection goes to one of them, by a hash of its two addresses. One whose process has
    ended keeps its share waiting until another process accepts from it.

    Raises:
        PortInUse: another program listens there.
        LinkError: it is no address of this machine, or the system cannot divide connections.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise LinkError(
            "this system cannot divide the connections of a port among processes.",
            action="Set federation.intake = 0.",
        )
    sockets: list[socket.socket] = []
    try:
        # By itself the first: two programs could share a port otherwise, and each get a part.
        with _bound(host, port) as alone:
            port = alone.getsockname()[1]
        while len(sockets) < count:
            sockets += [_bound(host, port, shared=True)]
        for sock in sockets:
            sock.listen(BACKLOG)
    except OSError as error:
        for sock in sockets:
            sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} on {host} is in use by another program.",
                action=PortInUse.default_action(),
            ) from error
        raise LinkError(
            f"cannot listen on {host}:{port}: {error.strerror or error}.",
            action="Set `[federation] listen` to an address of this machine.",
        ) from error
    return sockets


def _bound(host: str, port: int, *, shared: bool = False) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, number, _, place = found[0]
    sock = socket.socket(family, kind, number)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
        sock.bind(place)
    except BaseException:
        sock.close()
        raise
    return sock
