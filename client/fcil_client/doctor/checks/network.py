"""Checks of the way to the server: names, addresses, the server's answer, the clock."""

from __future__ import annotations

import errno
import os

from fcil_client.doctor.checks.facts import ClientFacts, NetworkFacts, Skip
from fcil_client.doctor.checks.findings import (
    Finding,
    failure,
    of_error,
    ok,
    skipped,
    some,
    warning,
)
from fcil_client.doctor.checks.register import of_clients
from fcil_protocol.errors import FcilError, Unreachable

CLOCK_S = 60.0  # of difference that is worth a word: certificates and tickets are told by days

# Why nobody answers, and what that usually is; LEAVE is `NetworkFacts.leave`.
REASONS: dict[int, tuple[str, str]] = {
    errno.ECONNREFUSED: (
        "refused: the machine answers, but nothing listens on this port",
        (
            "Start the server, or correct the port; for clients on other machines its `listen` "
            "must not be 127.0.0.1. If the server is gone permanently: LEAVE"
        ),
    ),
    errno.EHOSTUNREACH: (
        "no route: no machine answers at this address",
        "Check the address, the cable or Wi-Fi, and that both are on one network or VPN.",
    ),
    errno.ENETUNREACH: (
        "no network: this machine has no route to that network",
        "Connect this machine to the network, or the VPN.",
    ),
    errno.ETIMEDOUT: (
        "timeout: no answer at all",
        "A firewall drops it, or the machine is off: open the server's TCP port in its firewall.",
    ),
    errno.ECONNRESET: (
        "reset: something in between cuts the connection",
        "Look for a firewall or proxy between here and the server.",
    ),
}


def _way(client: ClientFacts) -> NetworkFacts | Skip:
    told = client.network.server.told
    if client.network.addresses:
        return client.network
    return told if isinstance(told, Skip) else Skip("no server is known")


check = of_clients(_way)


@check("network.path", "the addresses, and whether they are a relay's")
def path(facts: NetworkFacts) -> Finding:
    listed = ", ".join(a.address for a in facts.addresses)
    return ok(f"{'through a relay at' if facts.relay else 'directly to'} {listed}")


@check("network.name", "names of the addresses can be resolved")
def name(facts: NetworkFacts) -> Finding:
    bad = [f"{a.address}: {a.name_fault}" for a in facts.addresses if a.name_fault]
    good = [f"{a.address} is {', '.join(a.resolved[:3])}" for a in facts.addresses if a.resolved]
    if not bad:
        return ok(some(good))
    remedy = "Check the name, this machine's DNS and its network."
    if good:
        return warning(some([*bad, *good]), remedy)
    return failure(some(bad), remedy, Unreachable)


@check("network.reach", "something answers there over TCP")
def reach(facts: NetworkFacts) -> Finding:
    tried = [a for a in facts.addresses if a.resolved]
    if not tried:
        return skipped("no name could be resolved")
    good = [f"{a.address} in {a.took_s * 1000:.0f} ms" for a in tried if a.took_s is not None]
    bad = [(a.address, *_reason(a.number)) for a in tried if a.took_s is None]
    if not bad:
        return ok(some(good))
    text = some(f"{address}: {why}" for address, why, _ in bad)
    remedy = bad[0][2].replace("LEAVE", facts.leave)
    if good:
        return warning(f"{text}; {some(good)}", f"{remedy} The other one is used.")
    return failure(text, remedy, Unreachable)


def _reason(number: int) -> tuple[str, str]:
    other = os.strerror(number).lower() if number > 0 else "it failed"
    return REASONS.get(number, (other, "Check the address and that the server runs."))


@check("network.server", "it is the server, and it accepts this client")
def server(facts: NetworkFacts) -> Finding:
    told = facts.server.told
    if isinstance(told, FcilError):
        return of_error(told)
    if isinstance(told, Skip):
        return skipped(told)
    if facts.server.waits:
        remedy = "The client keeps trying; network.reach shows how far it gets."
        return warning(told, remedy)
    return ok(told)


@check("network.clock", "this machine's clock against the server's")
def clock(facts: NetworkFacts) -> Finding:
    if facts.server.clock_s is None:
        return skipped("the server's clock is not known: it did not say, or no client asked")
    low, high = facts.server.clock_s
    if low <= CLOCK_S and high >= -CLOCK_S:
        most = max(abs(low), abs(high))
        return ok(f"this clock and the server's are at most {most:.1f} s apart")
    off = low if low > 0 else high
    way = "behind" if off > 0 else "ahead of"
    return warning(
        f"this clock is {_duration(abs(off))} {way} the server's",
        "Set the clock (timedatectl set-ntp true), here or there, whichever is wrong.",
    )


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
