"""A relay's directory, and its enrolment with a ticket.

::

    <directory>/
        relay.json   its identity in its federation (0600)
        keys.json    private keys (0600); made here, never leave
        cache/       sealed chunks of broadcast parts
        incoming/    large sealed updates that are arriving (--sums)
        lock  control.sock
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from fcil_protocol.errors import BadTicket, CorruptFile, KeyFileError, UsageError, WireError
from fcil_protocol.ids import is_client_id
from fcil_protocol.link.dial import Dial, dial
from fcil_protocol.link.enrol_with_ticket import EnrolmentRecord, redeem_ticket
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic
from fcil_protocol.trust.certificate import Certificate
from fcil_protocol.trust.keys import CURVE_BYTES, PrivateKeys
from fcil_protocol.trust.ticket import Ticket, check_address

_RECORD, _KEYS = "relay.json", "keys.json"
_LOST = (
    "Restore it from a backup, or revoke the relay, enrol a new one in another --dir, and give its "
    "clients new tickets."
)


def make_directory(directory: Path) -> None:
    """Create a relay's directory, readable only by this user."""
    with storage_errors("create the relay's directory", directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def load_keys(directory: Path) -> PrivateKeys:
    """Return the relay's keys, created at the first call.

    Raises:
        KeyFileError: the relay is enrolled, and its keys are gone or damaged.
    """
    path = directory / _KEYS
    if (directory / _RECORD).exists() and not path.exists():
        raise KeyFileError(
            f"the key file {path} is missing, and the relay is enrolled already; with new keys "
            "neither the server nor its clients would know it.",
            action=_LOST,
        )
    return PrivateKeys.load_or_new(path)


def save_record(directory: Path, record: EnrolmentRecord) -> None:
    """Save the relay's identity and the newest certificate of its server."""
    write_atomic(directory / _RECORD, json.dumps(asdict(record), indent=1).encode())


def load_record(directory: Path) -> EnrolmentRecord | None:
    """Return the relay's identity, or None before its enrolment.

    Raises:
        CorruptFile: the file is there and holds no record.
        StorageError: it cannot be read.
    """
    path = directory / _RECORD
    with storage_errors("read", path):
        data = path.read_bytes() if path.exists() else None
    if data is None:
        return None
    try:
        fields = json.loads(data)
        fields["addresses"] = tuple(fields["addresses"])
        record = EnrolmentRecord(**fields)
        if not is_client_id(record.client_id) or not record.addresses:
            raise ValueError("client_id or addresses")
        for address in record.addresses:
            check_address(address, "")
        Certificate.from_bytes(bytes.fromhex(record.certificate))
        if len(bytes.fromhex(record.link_key)) not in (0, CURVE_BYTES):
            raise ValueError("link_key")
    except (ValueError, TypeError, KeyError, RecursionError, BadTicket, WireError) as error:
        raise CorruptFile(
            f"{path} is damaged ({error}).",
            action=_LOST,
        ) from error
    return record


async def enrol(
    directory: Path, ticket: Ticket | None, notify: Callable[[str], None], make: Dial = dial
) -> EnrolmentRecord:
    """Return the relay's record, enrolling it first if the ticket is new.

    Raises:
        UsageError: it is not enrolled and there is no ticket.
        BadTicket: the ticket is a client's.
        TrustError, Unreachable: see `fcil_protocol.link.enrol_with_ticket.redeem_ticket`.
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
    if known is not None and known.ticket == ticket.digest:
        return known
    if known is not None:
        raise UsageError(
            f"{directory} is the relay {known.name!r} already; its clients know its key.",
            action="Start it without --ticket, or use another --dir for a new relay.",
        )
    record = await redeem_ticket(ticket, load_keys(directory), make, notify)
    save_record(directory, record)
    notify(f"enrolled as {record.name}")
    return record
