"""Listening sockets of one port for several processes, among which the kernel divides clients."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys

from fcil_protocol.errors import LinkError, PortInUse
from fcil_protocol.link.door import spare_descriptors

BACKLOG = 1024  # connections that wait to be accepted


def open_listeners(host: str, port: int, count: int) -> tuple[list[socket.socket], socket.socket]:
    """Return sockets that listen on the same port, and one that claims it; port 0: a free one.

    A new connection goes to one of them, by a hash of its two addresses. One whose process has
    ended keeps its share waiting until another process accepts from it. The claim, as long as it is
    open, keeps another server that shares a port from taking a part of the clients.

    Raises:
        PortInUse: another program listens there.
        LinkError: it is no address of this machine, or the system cannot divide connections.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise LinkError(
            "this system cannot divide the connections of a port among processes.",
            action="Set federation.intake = 0.",
        )
    with contextlib.ExitStack() as ends:
        try:
            with _bound(host, port) as alone:  # not shared: no other program has the port
                port = alone.getsockname()[1]
                claim = ends.enter_context(_claim(host, port))
            sockets = [ends.enter_context(_bound(host, port, shared=True)) for _ in range(count)]
            for sock in sockets:
                sock.listen(backlog())
        except OSError as error:
            raise cannot_listen(host, port, error.errno, error.strerror) from error
        ends.pop_all()
    return sockets, claim


def cannot_listen(host: str, port: int, number: int | None, why: str | None) -> LinkError:
    """Return the error of a server that cannot listen, from that of the system."""
    if number == errno.EADDRINUSE:
        return PortInUse(
            f"port {port} on {host} is in use by another program.",
            action=PortInUse.default_action(),
        )
    return LinkError(
        f"cannot listen on {host}:{port}: {why}.",
        action="Set `[federation] listen` to an address of this machine.",
    )


def _claim(host: str, port: int) -> socket.socket:
    """Return a socket of a name that no second one can have; on Linux, like ports, of a network."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        if sys.platform == "linux":
            claim.bind(f"\0fcil-intake-{port}-{host}"[:100])
    except BaseException:
        claim.close()
        raise
    return claim


def backlog() -> int:
    """Return how many connections may wait to be accepted: they are, even when the door is shut."""
    return min(BACKLOG, spare_descriptors() // 4)


def _bound(host: str, port: int, *, shared: bool = False) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, "it is no name of a host") from error
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
