"""Enrolment of a client with a ticket: make keys here and show the ticket.

The exchange with the server is in `fcil_protocol.link.enrol_with_ticket`. A ticket may lead through
a relay; the client then always connects to that relay, and trusts the same server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from fcil_client.state.home import Enrolment, Home
from fcil_protocol.errors import BadTicket
from fcil_protocol.link.dial import Dial, dial
from fcil_protocol.link.enrol_with_ticket import redeem_ticket
from fcil_protocol.trust.keys import PrivateKeys
from fcil_protocol.trust.ticket import Ticket


async def redeem(
    ticket: Ticket, data: Path, notify: Callable[[str], None], make: Dial = dial, seat: str = ""
) -> tuple[Home, Enrolment]:
    """Enrol the client of a data folder with a ticket.

    Args:
        ticket: from the operator.
        data: the image folder; one folder is one client of a federation.
        notify: shows each attempt.
        make: starts a link to one address.
        seat: its seat among the clients that share the folder.

    Raises:
        TrustError: the server refuses the ticket, or is not the one that the ticket means.
        BadTicket: it is a relay's.
        Unreachable: no address of the ticket answers.
    """
    if ticket.relay:
        raise BadTicket(
            "this ticket admits a relay, not a client.",
            action="Use it with: fcil-server relay --ticket FILE; for a client ask the operator "
            "for another one.",
        )
    home = Home.of(ticket.federation, data, seat)
    folder = await asyncio.to_thread(data.resolve)
    keys_path = home.ticket_keys_path(ticket.digest)
    known = home.enrolment()
    if known is not None and known.ticket == ticket.digest:
        home.take_keys(keys_path)
        return home, known
    # A ticket other than the one that it enrolled with starts afresh, with new keys.
    keys = PrivateKeys.load_or_new(keys_path)
    record = await redeem_ticket(ticket, keys, make, notify)
    enrolment = Enrolment(**asdict(record), data=str(folder))
    home.save_enrolment(enrolment)
    home.take_keys(keys_path)
    notify(f"enrolled as {enrolment.name}")
    return home, enrolment
