"""A relay's directory, and its enrolment with a ticket.

::

    <directory>/
        relay.json   its identity in its federation (0600)
        keys.json    private keys (0600); made here, never leave
        cache/       sealed chunks of broadcast parts
        lock  control.sock
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from fcil_protocol.errors import BadTicket, CorruptFile, UsageError
from fcil_protocol.ids import ClientId, FederationId, is_client_id
from fcil_protocol.link.dial import Dial, dial
from fcil_protocol.link.enrol_with_ticket import show_anywhere
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic
from fcil_protocol.trust.keys import PrivateKeys
from fcil_protocol.trust.ticket import Ticket

_RECORD, _KEYS = "relay.json", "keys.json"


@dataclass(frozen=True)
class RelayRecord:
    """A relay's record of its enrolment.

    Attributes:
        client_id: its id in the roster, which lists relays next to clients.
        certificate: hex of the server's root-signed certificate.
        addresses: HOST:PORT of the server.
        ticket: digest of the ticket that enrolled it.
    """

    client_id: ClientId
    name: str
    federation: FederationId
    certificate: str
    addresses: tuple[str, ...]
    ticket: str


def make_directory(directory: Path) -> None:
    """Create a relay's directory, readable only by this user."""
    with storage_errors("create the relay's directory", directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def load_keys(directory: Path) -> PrivateKeys:
    """Return the relay's keys, created at the first call."""
    return PrivateKeys.load_or_new(directory / _KEYS)


def save_record(directory: Path, record: RelayRecord) -> None:
    """Save the relay's identity and the newest certificate of its server."""
    write_atomic(directory / _RECORD, json.dumps(asdict(record), indent=1).encode())


def load_record(directory: Path) -> RelayRecord | None:
    """Return the relay's identity, or None before its enrolment.

    Raises:
        CorruptFile: the file is there and cannot be read.
    """
    path = directory / _RECORD
    try:
        fields = json.loads(path.read_bytes())
        fields["addresses"] = tuple(fields["addresses"])
        record = RelayRecord(**fields)
        if not is_client_id(record.client_id) or not record.addresses:
            raise ValueError("client_id or addresses")
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptFile(
            f"{path} is damaged ({error}).",
            action="Remove this relay's directory and enrol it again.",
        ) from error
    return record


async def enrol(
    directory: Path, ticket: Ticket | None, notify: Callable[[str], None], make: Dial = dial
) -> RelayRecord:
    """Return the relay's record, enrolling it first if the ticket is new.

    Raises:
        UsageError: it is not enrolled and there is no ticket.
        BadTicket: the ticket is a client's.
        TrustError, Unreachable: see `fcil_protocol.link.enrol_with_ticket.show_anywhere`.
    """
    known = load_record(directory)
    if ticket is None:
        if known is None:
            raise UsageError(
                f"{directory} is not an enrolled relay.",
                action="Make a ticket on the server, `fcil-server enrol NAME --relay`, and start "
                "the relay with --ticket FILE.",
            )
        return known
    if not ticket.relay:
        raise BadTicket(
            "this ticket is for a client, not for a relay.",
            action="Make one with: fcil-server enrol NAME --relay",
        )
    digest = hashlib.sha256(ticket.guest_keys().public.curve).hexdigest()
    if known is not None and known.ticket == digest:
        return known
    if known is not None:
        raise UsageError(
            f"{directory} is the relay {known.name!r} already; its clients know its key.",
            action="Start it without --ticket, or use another --dir for a new relay.",
        )
    keys = load_keys(directory)
    address, answer, certificate = await show_anywhere(ticket, keys, make, notify)
    record = RelayRecord(
        client_id=ClientId(answer.client),
        name=answer.name,
        federation=ticket.federation,
        certificate=certificate.to_bytes().hex(),
        addresses=(address, *(a for a in answer.addresses if a != address)),
        ticket=digest,
    )
    save_record(directory, record)
    notify(f"enrolled as {record.name}")
    return record
