"""Seats of a swarm's members: one folder each, or one slot each of a partition; and their homes."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fcil_client.data import partition_file
from fcil_client.membership.enrol import find, find_enrolled
from fcil_client.membership.enrol_with_ticket import redeem
from fcil_client.membership.rotate_keys import finish_first
from fcil_client.rounds.options import ClientOptions
from fcil_client.state.home import Enrolment, Home, find_data
from fcil_protocol.errors import DataError, UsageError
from fcil_protocol.link.dial import Dial
from fcil_protocol.trust.ticket import read_ticket

MOST_DIGITS = 100  # of a range of slots; Python refuses to read numbers of thousands


@dataclass(frozen=True)
class Seat:
    """One member, before it is enrolled or started.

    Attributes:
        name: its name in the swarm's messages and in its enrolment.
        data: its folder or zip file; with a partition, the one of all.
        partition: the partition's file; None: the member uses all of the data.
        slot: its number in the partition; -1 without one.
    """

    name: str
    data: Path
    partition: Path | None = None
    slot: int = -1

    @property
    def seat(self) -> str:
        """Suffix that distinguishes its home from others of the same data."""
        if self.partition is None:
            return ""
        return partition_file.seat(partition_file.load(self.partition), self.slot)

    def options(self, shared: ClientOptions) -> ClientOptions:
        """Return the swarm's options for this member's images."""
        return replace(shared, data=self.data, partition=self.partition, slot=self.slot)


def find_seats(data: Path, partition: Path | None, slots: str | None, name: str) -> list[Seat]:
    """Return the members that a command line selects.

    Raises:
        UsageError, DataError, CorruptFile: there are none.
    """
    folder = find_data(str(data))
    if partition is not None:
        return partition_seats(folder, partition, slots, name)
    if slots is not None:
        raise UsageError("--slots are those of a partition: give --partition FILE as well.")
    return folder_seats(folder, name)


def folder_seats(data: Path, name: str) -> list[Seat]:
    """Return a seat for each folder or zip file in a folder, or else each list or tar, by name.

    Raises:
        DataError: there is none.
    """
    inside = sorted(
        path for path in (data.iterdir() if data.is_dir() else ()) if not path.name.startswith(".")
    )
    found = [p for p in inside if p.is_dir() or p.suffix.lower() == ".zip"]
    # Beside folders of images, a list or a tar is rather about them than of another client.
    found = found or [p for p in inside if p.suffix.lower() in (".csv", ".tar")]
    if not found:
        raise DataError(
            f"a swarm needs a folder with one folder (or zip file) for each client; {data} has "
            "none.",
            action="Lay them out as DIR/CLIENT/CLASS/IMAGE, or divide one data set: "
            "fcil-client split",
        )
    return [Seat(f"{name}-{path.name}", path) for path in found]


def partition_seats(data: Path, partition: Path, slots: str | None, name: str) -> list[Seat]:
    """Return a seat for each slot of a partition, or for some of them.

    Raises:
        CorruptFile, DataError: the file is no partition.
        UsageError: the partition does not have these slots.
    """
    clients = partition_file.load(partition).clients
    chosen = range(clients) if slots is None else read_slots(slots, clients)
    return [Seat(f"{name}-{slot:03d}", data, partition, slot) for slot in chosen]


def read_slots(text: str, clients: int) -> list[int]:
    """Read ``--slots``: numbers and ranges such as ``0-9,12``; each slot once, in order.

    Raises:
        UsageError: the text has another form, or names a slot that the partition does not have.
    """
    found: set[int] = set()
    for word in text.split(","):
        first, dash, last = (part.strip() for part in word.partition("-"))
        last = last if dash else first
        numbers = first.isdecimal() and last.isdecimal() and len(first + last) < MOST_DIGITS
        if not numbers or int(first) > int(last):
            raise UsageError(
                f"--slots takes numbers and ranges; {word.strip()!r} is neither.",
                action="Write for instance --slots 0-9 or --slots 0,3,5-7.",
            )
        if int(last) >= clients:
            raise UsageError(
                f"--slots names slot {last}, and the partition has the slots 0 to {clients - 1}.",
                action="Name slots of this partition, or make another one: fcil-client split",
            )
        found.update(range(int(first), int(last) + 1))
    return sorted(found)


def swarm_digest(seats: Sequence[Seat]) -> str:
    """Return the name of a swarm's directory, derived from its seats."""
    rows = [[str(s.data.resolve()), s.seat] for s in seats]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def swarm_name(seats: Sequence[Seat]) -> str:
    """Return the first and the last name of the swarm's members."""
    first, last = seats[0].name, seats[-1].name
    return first if first == last else f"{first} ... {last}"


def restart_arguments(seats: Sequence[Seat]) -> str:
    """Return the arguments that start these members again."""
    first = seats[0]
    if first.partition is None:
        return f"--data {shlex.quote(str(first.data.resolve().parent))}"
    words = ["--data", str(first.data.resolve()), "--partition", str(first.partition.resolve())]
    if [s.slot for s in seats] != list(range(partition_file.load(first.partition).clients)):
        words += ["--slots", ",".join(str(s.slot) for s in seats)]
    return shlex.join(words)


@dataclass(frozen=True)
class Enroller:
    """Enrolment of a swarm's members.

    Attributes:
        server: a federation's name, id or address, if several are possible.
        tickets: folder with ``NAME.ticket`` for each member; None: on the server's own machine.
        waits: a member that reaches no server, or finds it full, tries again.
    """

    server: str | None = None
    tickets: Path | None = None
    waits: bool = True

    async def enrol(self, seat: Seat, make: Dial) -> tuple[Home, Enrolment]:
        """Return a member's home and enrolment, enrolling it if it is new.

        Raises:
            FcilError: the reason why it cannot be enrolled.
        """
        return await finish_first(seat.data, seat.seat, partial(self._enrol, seat, make))

    async def _enrol(self, seat: Seat, make: Dial) -> tuple[Home, Enrolment]:
        if self.tickets is None:
            return await asyncio.to_thread(self._find, seat)
        path = self.tickets / f"{seat.name}.ticket"
        ticket = read_ticket(path, io.BytesIO()) if path.is_file() else None
        meant = self.server or (None if ticket is None else str(ticket.federation))
        known = await asyncio.to_thread(find_enrolled, seat.data, meant, seat.seat)
        if known is not None:
            return known
        if ticket is None:
            raise UsageError(
                f"there is no ticket for {seat.name}: expected the file {path}.",
                action=f"Make one on the server: fcil-server enrol {seat.name} --out {path.name}",
            )
        return await redeem(ticket, seat.data, _quiet, make, seat.seat)

    def _find(self, seat: Seat) -> tuple[Home, Enrolment]:
        return find(seat.data, self.server, seat=seat.seat, name=seat.name)


_quiet: Callable[[str], None] = lambda _: None  # noqa: E731
