"""Enrolment with a server on this machine: find it, make keys here, have them listed.

A server that runs as the same user leaves a join file (0600) that names its control socket. The
client makes its keys itself and hands over the public halves; private keys never travel. Enrolment
from other machines needs a ticket (`enrol_with_ticket`).
"""

from __future__ import annotations

import json
import re
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

from fcil_client.state.home import Enrolment, Home, client_command, state_home
from fcil_protocol.errors import (
    FcilError,
    LinkError,
    TrustError,
    Unreachable,
    UsageError,
    WrongClock,
)
from fcil_protocol.ids import ClientId, FederationId
from fcil_protocol.process import control_socket
from fcil_protocol.process.terminal import command, printable
from fcil_protocol.trust.certificate import Certificate
from fcil_protocol.trust.keys import PrivateKeys

_ANSWER_S, _NOW_S = 10.0, 1.0
_SEAT = re.compile(r"[0-9a-f]{8}-[0-9]{3,}")
_FEDERATION = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class JoinFile:
    """The data that a server gives to other programs of its own user."""

    federation: FederationId
    name: str
    directory: Path
    addresses: tuple[str, ...]


def join_files() -> list[JoinFile]:
    """Return the servers of this user with join files, sorted by path."""
    found = []
    for path in sorted((state_home() / "servers").glob("*.json")):
        try:
            fields = json.loads(path.read_bytes())
            if not _FEDERATION.fullmatch(fields["federation"]) or not fields["addresses"]:
                continue
            found.append(
                JoinFile(
                    FederationId(fields["federation"]),
                    str(fields["name"]),
                    Path(fields["directory"]),
                    tuple(fields["addresses"]),
                )
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # half removed by a server that is stopping
    return found


def find(
    data: Path, server: str | None, *, seat: str = "", name: str = ""
) -> tuple[Home, Enrolment]:
    """Return the client's home and enrolment, enrolling it if it is new.

    A folder that a ticket enrolled elsewhere stays there, unless ``server`` names another.

    Args:
        data: the image folder; one folder is one client of a federation.
        server: a federation's name, id or address, if several are possible.
        seat: its seat among the clients that share the folder.
        name: of a new client, after the machine's; empty: the folder's.

    Raises:
        Unreachable: no server runs here and the folder was never enrolled.
        LinkError: nor is the selected one among those that run here.
        UsageError: several servers are possible.
    """
    elsewhere = None if server is not None else _invited_elsewhere(data, seat)
    if elsewhere is not None:
        return elsewhere
    running = find_server(server)
    if running is not None:
        home = Home.of(running.federation, data, seat)
        if home.enrolment() is None:
            return home, _enrol(home, running, data, name)
        try:  # a server that lost its ledger accepts the same keys again
            return home, _enrol(home, running, data, name)
        except (LinkError, WrongClock):
            # It is down, or this device does not know the time yet: the daemon keeps trying.
            enrolment = home.enrolment()
            assert enrolment is not None
            return home, enrolment
    enrolled = find_enrolled(data, server, seat)
    if enrolled is not None:
        return enrolled
    raise no_server(data, server)


def no_server(data: Path, server: str | None) -> FcilError:
    """Return the error that no server, or not the selected one, runs here for a new folder."""
    asked = f" that is called {server!r}" if server else ""
    here = [j for j in join_files() if _answers(j)] if server else []
    if here:
        return LinkError(
            f"no fcil server{asked} runs on this machine as this user; there "
            f"{'are' if len(here) > 1 else 'is'} {', '.join(map(_described, here))}.",
            action="Give one of these after --server, or start the one that you mean.",
        )
    return Unreachable(
        f"no fcil server{asked} runs on this machine as this user, and {data} is not enrolled.",
        action="Start one with: fcil-server serve. To join one on another machine, ask its "
        f"operator for a ticket: {client_command('join', data, '--ticket', 'FILE')}",
    )


def _invited_elsewhere(data: Path, seat: str) -> tuple[Home, Enrolment] | None:
    """Return a folder's membership by a ticket, if it has one and none with a server here."""
    here = {join.federation for join in join_files()}
    known = [(home, home.enrolment()) for home in Home.known(data, seat)]
    if any(e is not None and e.federation in here for _, e in known):
        return None
    invited = [(home, e) for home, e in known if e is not None and e.ticket]
    return invited[0] if len(invited) == 1 else None


def find_server(server: str | None) -> JoinFile | None:
    """Return the selected server of this user and machine, if one has a join file.

    Raises:
        UsageError: several are possible.
    """
    running = [j for j in join_files() if server is None or _is_of_server(j, server)]
    if len(running) > 1:  # a server that was killed leaves its join file behind
        running = [j for j in running if _answers(j)] or running
    if len(running) > 1:
        raise UsageError(
            "several servers run on this machine: " + ", ".join(map(_described, running)) + ".",
            action="Say which one: --server ADDRESS.",
        )
    return running[0] if running else None


def find_enrolled(data: Path, server: str | None, seat: str = "") -> tuple[Home, Enrolment] | None:
    """Return the selected membership of a folder, if it has one.

    Of several, the one whose server runs on this machine as this user.

    Raises:
        UsageError: several are possible.
    """
    known = [h for h in Home.known(data, seat) if server is None or home_is_of_server(h, server)]
    if len(known) > 1:
        mine = {home.directory.parent.name for home in known}
        here = {j.federation for j in join_files() if j.federation in mine and _answers(j)}
        known = [home for home in known if home.directory.parent.name in here] or known
    if len(known) > 1:
        many = [h.enrolment() for h in known]
        which = (f"{e.federation[:12]} ({e.addresses[0]})" for e in many if e is not None)
        raise UsageError(
            f"{data} is enrolled with {len(known)} federations: {', '.join(which)}.",
            action="Say which one: --server ADDRESS.",
        )
    enrolment = known[0].enrolment() if known else None
    return (known[0], enrolment) if enrolment is not None else None


def find_member(
    data: Path, server: str | None, slot: str | None = None
) -> tuple[Home, Enrolment] | None:
    """Return the selected membership of a folder, which a partition may divide.

    Args:
        data: the image folder.
        server: as in `find`.
        slot: number of the client in its partition, or its seat (`partition_file.seat`) where
            several partitions have that number; None: the client with the complete folder, or else
            the only one.

    Raises:
        UsageError: several are possible, or ``slot`` is neither.
    """
    if slot is None and Home.known(data):
        return find_enrolled(data, server)
    homes = [h for h in Home.known(data, None) if server is None or home_is_of_server(h, server)]
    seats = sorted({home.seat for home in homes if home.seat})
    if slot is not None:
        number = _slot_number(slot)
        seats = [seat for seat in seats if seat == slot or int(seat.rpartition("-")[2]) == number]
    if len(seats) > 1 and slot is None:
        raise UsageError(
            f"{data} is divided between {len(seats)} clients of this machine.",
            action="Say which one: --slot K. See them with: fcil-client status",
        )
    if len(seats) > 1:
        raise UsageError(
            f"slot {slot} exists in {len(seats)} partitions of {data}: {', '.join(seats)}.",
            action="Give one of these after --slot.",
        )
    return find_enrolled(data, server, seats[0]) if seats else None


def _slot_number(slot: str) -> int:
    """Return the number of a slot; -1: it is given by its seat.

    Raises:
        UsageError: it is neither a number nor a seat.
    """
    if _SEAT.fullmatch(slot):
        return -1
    if not re.fullmatch("[0-9]{1,9}", slot):
        raise UsageError(
            f"expected the number of a slot, from 0, or its seat, got {slot[:40]!r}.",
            action="See them with: fcil-client status",
        )
    return int(slot)


def _answers(join: JoinFile, *, now: bool = False) -> bool:
    """Return True if a join file's own server answers, and not another one in its place.

    Args:
        join: the file.
        now: do not wait for a server that begins or is slow.
    """
    longest = _NOW_S if now else _ANSWER_S
    try:
        status = control_socket.ask(join.directory, "status", longest, wait=not now)
    except FcilError:
        return False
    return bool(status["federation"]["id"] == join.federation)


def _is_of_server(join: JoinFile, server: str) -> bool:
    return server in (join.name, join.federation, *join.addresses)


def _described(join: JoinFile) -> str:
    return f"{join.name} ({join.addresses[0]}) {join.federation[:12]}"


def home_is_of_server(home: Home, server: str) -> bool:
    """Return True if a client is enrolled with a server of this name, id or address."""
    enrolment = home.enrolment()
    if enrolment is None:
        return False
    names = [j.name for j in join_files() if j.federation == enrolment.federation]
    return server in (enrolment.federation, *enrolment.addresses, *names)


def moved(enrolment: Enrolment) -> Enrolment | None:
    """Return the enrolment with the current addresses of its server on this machine.

    Returns:
        None: the addresses are unchanged, no server answers here, or the client uses a relay.
    """
    if enrolment.link_key:
        return None
    for join in join_files():
        others = join.federation == enrolment.federation and join.addresses != enrolment.addresses
        # A server that was killed leaves its join file behind.
        if others and _answers(join, now=True):
            return replace(enrolment, addresses=join.addresses)
    return None


def with_current_addresses(home: Home, enrolment: Enrolment) -> Enrolment | None:
    """Return what `moved` returns, after storing it.

    Raises:
        StorageError: the new addresses cannot be stored.
    """
    fresh = moved(enrolment)
    if fresh is not None:
        home.save_enrolment(fresh)
    return fresh


def _enrol(home: Home, join: JoinFile, data: Path, name: str) -> Enrolment:
    keys = PrivateKeys.load_or_new(home.keys_path)
    # A folder's name may hold bytes that are not valid text.
    name = printable(f"{socket.gethostname()}:{name or data.resolve().name}")[:128]
    public = {k: v.hex() for k, v in keys.public.to_fields().items()}
    try:
        reply = control_socket.ask(join.directory, "enrol_local", name=name, keys=public)
    except Unreachable as error:
        start = command("fcil-server", "serve", "--dir", join.directory)
        raise Unreachable(
            f"the server {join.name} left a join file but does not answer.",
            action=f"Start it again with: {start}",
        ) from error
    certificate = Certificate.from_bytes(bytes.fromhex(reply["certificate"]))
    if certificate.federation != join.federation:
        raise TrustError("the server's certificate is of another federation than its join file.")
    certificate.verify(join.federation, time.time())
    enrolment = Enrolment(
        client_id=ClientId(reply["client_id"]),
        name=reply["name"],
        federation=join.federation,
        certificate=reply["certificate"],
        addresses=tuple(reply["addresses"]),
        data=str(data.resolve()),
    )
    home.save_enrolment(enrolment)
    return enrolment
