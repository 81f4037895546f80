"""Lines about the connection to the server: names, addresses, the server's answer, the clock."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from fcil_client.doctor.checks.line import Line, failure, fault, ok, skipped, some, warning
from fcil_protocol.errors import FcilError, Unreachable

NAMES = ("network.path", "network.name", "network.reach", "network.server", "network.clock")
CLOCK_S = 60.0  # smallest clock difference to warn about: certificates and tickets count in days

# Reasons for a missing answer, and their usual causes.
REASONS: dict[int, tuple[str, str]] = {
    errno.ECONNREFUSED: (
        "refused: the machine answers, and nothing listens on this port",
        (
            "Start the server, or correct the port; for others its listen must not be 127.0.0.1. "
            "Of one that is gone for good: fcil-client leave --data FOLDER --without-server"
        ),
    ),
    errno.EHOSTUNREACH: (
        "no route: no machine answers at this address",
        "Check the address, the cable or Wi-Fi, and that both are on one network or VPN.",
    ),
    errno.ENETUNREACH: (
        "no network: this machine has no way to that network",
        "Connect this machine to the network, or the VPN.",
    ),
    errno.ETIMEDOUT: (
        "timeout: no answer at all",
        "A firewall drops it, or the machine is off: open the server's TCP port in its firewall.",
    ),
    errno.ECONNRESET: (
        "reset: something on the way cuts the connection",
        "Look for a firewall or proxy between here and the server.",
    ),
}
_OTHER = "Check the address and that the server runs."


@dataclass(frozen=True)
class AddressFacts:
    """Result of one HOST:PORT at the TCP level.

    Attributes:
        resolved: IP addresses of the host. name_fault: reason why there are none.
        took_s: seconds until a connection was open; None: none was. number: errno of the failure.
    """

    address: str
    resolved: tuple[str, ...] = ()
    name_fault: str = ""
    took_s: float | None = None
    number: int = 0


@dataclass(frozen=True)
class ServerFacts:
    """Answer of the server, or of a process that speaks for it.

    Attributes:
        how: ``hello``, ``daemon`` (the running client was asked) or ``control`` (a server of this
            user on this machine); empty: no process was asked.
        told: the answer as text.
        error: the refusal.
        waits: there is no session, but one may come by itself; ``told`` says why.
        skipped: reason why no process was asked.
        clock_s: lower and upper bound of this clock's lag behind the server's, s; None: unknown.
    """

    how: str = ""
    told: str = ""
    error: FcilError | None = None
    waits: bool = False
    skipped: str = ""
    clock_s: Sequence[float] | None = None


@dataclass(frozen=True)
class NetworkFacts:
    """The connection from one client, or one ticket, to its server."""

    addresses: Sequence[AddressFacts] = field(default_factory=tuple)
    relay: bool = False
    server: ServerFacts = ServerFacts()


def lines(facts: NetworkFacts) -> list[Line]:
    """Return the lines about each step of the connection to the server."""
    if not facts.addresses:
        return [skipped(n, facts.server.skipped or "no server is known") for n in NAMES]
    return [_path(facts), _names(facts), _reach(facts), _server(facts.server), _clock(facts.server)]


def _path(facts: NetworkFacts) -> Line:
    listed = ", ".join(a.address for a in facts.addresses)
    kind = "through a relay at" if facts.relay else "directly to"
    return ok("network.path", f"{kind} {listed}")


def _names(facts: NetworkFacts) -> Line:
    name = "network.name"
    bad = [f"{a.address}: {a.name_fault}" for a in facts.addresses if a.name_fault]
    good = [f"{a.address} is {', '.join(a.resolved[:3])}" for a in facts.addresses if a.resolved]
    if not bad:
        return ok(name, some(good))
    action = "Check the name, this machine's DNS and its network."
    if good:
        return warning(name, some([*bad, *good]), action)
    return failure(name, some(bad), action, Unreachable.code)


def _reach(facts: NetworkFacts) -> Line:
    name = "network.reach"
    tried = [a for a in facts.addresses if a.resolved]
    if not tried:
        return skipped(name, "no name could be resolved")
    good = [f"{a.address} in {a.took_s * 1000:.0f} ms" for a in tried if a.took_s is not None]
    bad = [a for a in tried if a.took_s is None]
    words = [f"{a.address}: {REASONS.get(a.number, (_system(a.number), ''))[0]}" for a in bad]
    if not bad:
        return ok(name, some(good))
    action = REASONS.get(bad[0].number, ("", _OTHER))[1]
    if good:
        return warning(name, f"{some(words)}; {some(good)}", f"{action} The other one is used.")
    return failure(name, some(words), action, Unreachable.code)


def _system(number: int) -> str:
    import os

    return os.strerror(number).lower() if number > 0 else "it failed"


def _server(facts: ServerFacts) -> Line:
    name = "network.server"
    if facts.error is not None:
        return fault(name, facts.error)
    if not facts.how:
        return skipped(name, facts.skipped)
    if facts.waits:
        action = "The client goes on trying by itself; network.reach says how far it gets."
        return warning(name, facts.told, action)
    return ok(name, facts.told)


def _clock(facts: ServerFacts) -> Line:
    name = "network.clock"
    if facts.clock_s is None:
        return skipped(name, "the server's clock is not known: it did not say, or nobody asked")
    low, high = facts.clock_s
    if low <= CLOCK_S and high >= -CLOCK_S:
        most = max(abs(low), abs(high))
        return ok(name, f"this clock and the server's are at most {most:.1f} s apart")
    off = low if low > 0 else high
    way = "behind" if off > 0 else "ahead of"
    text = f"this clock is {_duration(abs(off))} {way} the server's"
    action = "Set the clock (timedatectl set-ntp true), here or there, whichever is wrong."
    return warning(name, text, action)


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def name_reason(number: int) -> str:
    """Return the reason why a name was not resolved, from the error of getaddrinfo."""
    if number in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)):
        return "this name is not known"
    if number == socket.EAI_AGAIN:
        return "no name server answers"
    return "it cannot be resolved"
