"""Enrolment of a client or relay with a ticket.

The ticket's secret makes the keys of a guest, good for one message. The answer is accepted if the
federation's root key, whose digest is in the ticket, certified the server's keys. A server repeats
its answer to the same keys, so an answer lost in transit costs nothing.
"""

from __future__ import annotations

import asyncio
import platform
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from fcil_protocol.errors import BadTicket, TooManyAtOnce, TrustError, Unreachable, from_code
from fcil_protocol.ids import ClientId, FederationId
from fcil_protocol.link.dial import REFUSALS, Dial
from fcil_protocol.link.interface import COME_AGAIN, ClientLink, LinkNews
from fcil_protocol.messages.frames import parse
from fcil_protocol.messages.messages import Enrol, Enrolled, Nack
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.trust.certificate import Certificate
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys
from fcil_protocol.trust.ticket import PROOF, Ticket, proof_text

ANSWER_S = 15.0  # for an address to answer before the next one is tried
AGAIN_S = 1.5  # shortest pause of a rejected guest before the next attempt; at most twice that
TRIES = 30  # while the gate is too busy: about a minute
_UNKNOWN_KEY = "unknown_client"


class _TurnedAway(Exception):
    """The gate did not admit the ticket's key; ``reason`` is the link's."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


async def show(
    ticket: Ticket,
    keys: PrivateKeys,
    address: str,
    make: Dial,
    notify: Callable[[str], None] = lambda _: None,
) -> tuple[Enrolled, Certificate]:
    """Ask the server at one address to enrol ``keys``; while it is too busy, for a minute.

    Args:
        ticket: from the operator.
        keys: of the new member.
        address: HOST:PORT, one of the ticket's.
        make: starts a link to it.
        notify: shows the reason of a wait.

    Returns:
        The server's answer, and its certificate, which was verified.

    Raises:
        Unreachable: the address does not answer.
        TooManyAtOnce: the server knows the ticket, and had no room for a minute.
        BadTicket: it does not know the ticket.
        TrustError: the server refuses the ticket, or is not the one that the ticket means.
    """
    unknown = False
    for number in range(TRIES):
        try:
            return await _show(ticket, keys, address, make)
        except _TurnedAway as turned:
            # A relay may receive a new ticket a moment after its holder; a second refusal is final.
            if turned.reason == _UNKNOWN_KEY and unknown:
                raise _unknown(address) from None
            unknown = turned.reason == _UNKNOWN_KEY
        if number == 0 and not unknown:
            notify(
                f"{address} turns newcomers away for a moment: many connect at once, or one ticket "
                "often; trying again for a minute"
            )
        await asyncio.sleep(random.uniform(AGAIN_S, 2 * AGAIN_S))  # noqa: S311 - not all at once
    raise TooManyAtOnce(
        f"the server at {address} knows this ticket, but was busy admitting others for a whole "
        "minute.",
        action=TooManyAtOnce.default_action(),
    )


@dataclass(frozen=True)
class EnrolmentRecord:
    """A record of an enrolment with a ticket.

    Attributes:
        client_id: the member's id in the roster, which lists relays next to clients.
        certificate: hex of the server's root-signed certificate.
        addresses: HOST:PORT of the server, or of the relay that it connects to.
        ticket: digest of the ticket.
        link_key: hex of the CURVE key of the relay at these addresses; empty: the server's.
    """

    client_id: ClientId
    name: str
    federation: FederationId
    certificate: str
    addresses: tuple[str, ...]
    ticket: str
    link_key: str = ""


async def redeem_ticket(
    ticket: Ticket, keys: PrivateKeys, make: Dial, notify: Callable[[str], None]
) -> EnrolmentRecord:
    """Enrol ``keys`` with a ticket at its addresses in turn, as in `show`.

    Raises:
        Unreachable: no address answers.
        TooManyAtOnce, BadTicket, TrustError: as in `show`.
    """
    failure: Unreachable | None = None
    for address in ticket.addresses:
        notify(f"presenting the ticket to {address}")
        try:
            answer, certificate = await show(ticket, keys, address, make, notify)
        except Unreachable as error:
            failure = error
            continue
        # The server sends its own addresses; a relay's key is not valid there.
        known = ticket.addresses if ticket.via else answer.addresses
        return EnrolmentRecord(
            client_id=ClientId(answer.client),
            name=answer.name,
            federation=ticket.federation,
            certificate=certificate.to_bytes().hex(),
            # The one that worked is first: the server may not know all that reach it.
            addresses=(address, *(a for a in known if a != address)),
            ticket=ticket.digest,
            link_key=ticket.server_key.hex() if ticket.via else "",
        )
    assert failure is not None, "a ticket has an address"
    raise failure


def _unknown(address: str) -> BadTicket:
    return BadTicket(
        f"the server at {address} does not know this ticket: it was altered, belongs to another "
        "server, or was removed there.",
        action="Ask the operator for a new one: fcil-server enrol NAME.",
    )


async def _show(
    ticket: Ticket, keys: PrivateKeys, address: str, make: Dial
) -> tuple[Enrolled, Certificate]:
    guest = ticket.guest_keys()
    # Only the server's link key is known yet; its certificate contains the others.
    server = PublicKeys(curve=ticket.server_key, signing=bytes(32), sealing=b"")
    channel = Channel(guest, server)
    link = make(address, guest, server)
    try:
        async with asyncio.timeout(ANSWER_S):
            await _up(link, address)
            link.send(channel.frames(_request(ticket, keys)))
            return await _answer(link, channel, ticket)
    except TimeoutError as error:
        raise Unreachable(
            f"no server at {address} answered within {ANSWER_S:.0f} s.",
            action="Check that the server runs and that this machine can reach the address.",
        ) from error
    finally:
        link.close()


async def _up(link: ClientLink, address: str) -> None:
    while True:
        news = await link.recv()
        if not isinstance(news, LinkNews) or news.state == "up":
            return
        if news.state == "refused" and news.reason in (_UNKNOWN_KEY, COME_AGAIN):
            raise _TurnedAway(news.reason)
        if news.state == "refused":
            raise TrustError(f"{address}: {REFUSALS[news.reason]}")


def _request(ticket: Ticket, keys: PrivateKeys) -> Enrol:
    public = keys.public
    text = proof_text(ticket.guest_keys().public.curve, public)
    return Enrol(
        device=f"{platform.system()} {platform.machine()}",
        curve=public.curve,
        signing=public.signing,
        sealing=public.sealing,
        proof=keys.sign(PROOF, text),
    )


async def _answer(
    link: ClientLink, channel: Channel, ticket: Ticket
) -> tuple[Enrolled, Certificate]:
    while True:
        frames = await link.recv()
        if isinstance(frames, LinkNews):
            continue  # a lost link reconnects by itself until the time is over
        received = parse(frames)
        message = received.message
        if isinstance(message, Nack):  # unverified: its only effect is to stop
            raise from_code(message.code, message.text, message.action)
        if not isinstance(message, Enrolled):
            continue
        certificate = Certificate.from_bytes(message.certificate)
        keys = certificate.verify(ticket.federation, time.time())
        # Through a relay the link's key is the relay's; the signer is still the server.
        if not ticket.via and keys.curve != ticket.server_key:
            raise TrustError("the server's certificate is for another key than the ticket names.")
        channel.trust(keys)
        channel.check(received)
        return message, certificate
