"""Show a ticket to a server and be taken in; clients and relays do it alike.

The ticket's secret makes the keys of a guest, good for one message. What the server answers
is believed if the federation's root key, whose digest the ticket has, certified its keys.
Asked twice with the same keys, a server says the same again, so an answer that was lost on
the way costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time

from fcil_protocol.certificate import Certificate
from fcil_protocol.channel import Channel
from fcil_protocol.dialling import REFUSALS, Dial
from fcil_protocol.errors import BadTicket, TrustError, Unreachable, from_code
from fcil_protocol.frames import parse
from fcil_protocol.keys import PrivateKeys, PublicKeys
from fcil_protocol.link import ClientLink, LinkNews
from fcil_protocol.messages import Enrol, Enrolled, Nack
from fcil_protocol.ticket import PROOF, Ticket, proof_text

ANSWER_S = 15.0  # for an address to answer before the next one is tried
# A server lets one key knock once a second, and somebody may have asked with it just now
# (`fcil-client doctor --ticket`); so who is turned away knocks once more.
AGAIN_S = 1.5
_UNKNOWN_KEY = "unknown_client"


class _TurnedAway(Exception):
    """The gate did not let the ticket's key in."""


async def show(
    ticket: Ticket, keys: PrivateKeys, address: str, make: Dial
) -> tuple[Enrolled, Certificate]:
    """Ask the server at one address to take ``keys`` in.

    Returns:
        The server's answer, and its certificate, which was verified.

    Raises:
        Unreachable: nobody answers there.
        TrustError: the server refuses the ticket, or is not the one that the ticket means.
    """
    with contextlib.suppress(_TurnedAway):
        return await _show(ticket, keys, address, make)
    await asyncio.sleep(AGAIN_S)
    try:
        return await _show(ticket, keys, address, make)
    except _TurnedAway:
        raise BadTicket(
            f"the server at {address} does not know this ticket: it was altered, belongs to "
            "another server, or was removed there; or too many came at once.",
            action="Try again; then ask the operator for a new one: fcil-server enrol NAME.",
        ) from None


async def _show(
    ticket: Ticket, keys: PrivateKeys, address: str, make: Dial
) -> tuple[Enrolled, Certificate]:
    guest = ticket.guest_keys()
    # Of the server only its link key is known yet; its certificate brings the others.
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
            f"nobody at {address} answered within {ANSWER_S:.0f} s.",
            action="Check that the server runs and that this machine can reach the address.",
        ) from error
    finally:
        link.close()


async def _up(link: ClientLink, address: str) -> None:
    while True:
        news = await link.recv()
        if not isinstance(news, LinkNews) or news.state == "up":
            return
        if news.state == "refused" and news.reason == _UNKNOWN_KEY:
            raise _TurnedAway
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
            continue  # a lost link comes back by itself until the time is over
        received = parse(frames)
        message = received.message
        if isinstance(message, Nack):  # nothing is done on its word but to stop
            raise from_code(message.code, message.text, message.action)
        if not isinstance(message, Enrolled):
            continue
        certificate = Certificate.from_bytes(message.certificate)
        keys = certificate.verify(ticket.federation, time.time())
        # Through a relay the link's key is the relay's; who signs is the server all the same.
        if not ticket.via and keys.curve != ticket.server_key:
            raise TrustError("the server's certificate is for another key than the ticket names.")
        channel.trust(keys)
        channel.check(received)
        return message, certificate
