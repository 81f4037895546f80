"""Probes of the way to a server, as a client takes it, without disturbing any session.

A client that runs has the session; its control socket reports on it. Otherwise
the probe sends a Hello and takes it back with a Bye, as a dry run does; with a ticket it asks the
server, by the ticket's key, if it would accept it, which does not use the ticket.
"""

from __future__ import annotations

import asyncio
import errno
import platform
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

from fcil_client.doctor.checks.facts import AddressFacts, ServerFacts, Skip
from fcil_client.link import handshake
from fcil_client.link.handshake import Terms
from fcil_client.link.visit import visit
from fcil_client.state.home import Enrolment, Home
from fcil_protocol.errors import (
    BadTicket,
    FcilError,
    Locked,
    StorageError,
    TooManyAtOnce,
    TrustError,
    UnknownClient,
    Unreachable,
    from_code,
)
from fcil_protocol.ids import ClientId
from fcil_protocol.link.dial import REFUSALS, dial
from fcil_protocol.link.interface import COME_AGAIN, LinkNews
from fcil_protocol.messages.frames import parse
from fcil_protocol.messages.messages import Bye, Nack
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.storage.atomic_files import DirectoryLock
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys
from fcil_protocol.trust.ticket import Ticket

TCP_S = 3.0  # for one address
TICKET_S = 12.0  # for a server's word about a ticket; a link that is refused tries again after 5


def look_addresses(addresses: Sequence[str]) -> list[AddressFacts]:
    """Resolve and connect to every address, all at the same time."""
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        return list(pool.map(look_address, addresses))


def look_address(address: str) -> AddressFacts:
    """Resolve one HOST:PORT and connect to it."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        return AddressFacts(address, name_fault="it is not HOST:PORT")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return AddressFacts(address, name_fault=_name_reason(error.errno))
    except (OSError, ValueError):
        return AddressFacts(address, name_fault="this is not a host name")
    resolved = tuple(dict.fromkeys(str(row[4][0]) for row in found))
    number = 0
    for family, kind, protocol, _, where in found:
        began = time.monotonic()
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.settimeout(TCP_S)
                sock.connect(where)
            return AddressFacts(address, resolved, took_s=time.monotonic() - began)
        except TimeoutError:
            number = errno.ETIMEDOUT
        except OSError as error:
            number = error.errno or 0
    return AddressFacts(address, resolved, number=number)


def _name_reason(number: int | None) -> str:
    if number in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)):
        return "this name is not known"
    if number == socket.EAI_AGAIN:
        return "no name server answers"
    return "it cannot be resolved"


def say_hello(home: Home, enrolment: Enrolment) -> tuple[ServerFacts, Terms | None]:
    """Say Hello to the server of an enrolled folder whose client does not run, and leave.

    Returns:
        What it said, and its terms if it has any for this client.
    """
    try:
        lock = DirectoryLock.acquire(home.directory, "client")
    except Locked as error:  # a second link with its key would look like a stolen one
        return ServerFacts(Skip(f"{error.message.rstrip('.')}, and only one may connect")), None
    except StorageError as error:
        return ServerFacts(Skip(str(error))), None
    with lock:
        try:
            return asyncio.run(_hello(home, enrolment))
        except FcilError as error:
            return ServerFacts(error), None


async def _hello(home: Home, enrolment: Enrolment) -> tuple[ServerFacts, Terms | None]:
    if not home.keys_path.exists():
        return ServerFacts(Skip("there are no keys to present to the server")), None
    async with visit(enrolment, PrivateKeys.load_or_new(home.keys_path)) as (line, welcome):
        line.send(Bye(reason="fcil-client doctor is done"))
        await asyncio.sleep(0.05)  # let the goodbye leave the socket
    told = f"{line.address} is the server, and accepts this client; it runs {welcome.method} (run "
    told += f"{welcome.run})"
    try:
        terms = handshake.read_terms(welcome)
    except FcilError as error:  # it is the server, and something here does not fit it
        return ServerFacts(error, clock_s=line.clock_s), None
    trains = any(terms.method.reports_training(e) for e in terms.exchanges)
    if terms.training_metrics and trains:
        told += ", and takes the loss and accuracy of training (join --no-training-metrics: none)"
    return ServerFacts(told, clock_s=line.clock_s), terms


# --- a ticket -------------------------------------------------------------------------------


def show_ticket(ticket: Ticket) -> tuple[bool, FcilError | None]:
    """Ask the server if it would accept a ticket, without using the ticket.

    Returns:
        True if it answered, and its refusal; None: it would accept the ticket.
    """
    for address in ticket.addresses:
        try:
            return True, asyncio.run(_ask(ticket, address))
        except Unreachable:
            continue
    return False, None


async def _ask(ticket: Ticket, address: str) -> FcilError | None:
    """Say Hello with the ticket's own key: it is no member's, and the refusal says what it is."""
    guest = ticket.guest_keys()
    server = PublicKeys(curve=ticket.server_key, signing=bytes(32), sealing=b"")
    channel = Channel(guest, server)
    nobody = Enrolment(ClientId("a" * 26), "", ticket.federation, "", ticket.addresses, "")
    hello = handshake.hello(
        nobody, nonce=channel.nonce, session_key=None, package=version("fcil"), methods=[],
        device=f"{platform.system()} {platform.machine()}", terms=None, claim=None, ready=False,
    )  # fmt: skip
    link = dial(address, guest, server)
    refused = 0
    try:
        async with asyncio.timeout(TICKET_S):
            while True:
                news = await link.recv()
                if not isinstance(news, LinkNews):
                    message = parse(news).message
                    if isinstance(message, Nack):
                        return _refusal(message)
                elif news.state == "up":
                    link.send(channel.frames(hello))
                elif news.state == "refused":
                    refused += 1
                    # A relay may not have heard of the ticket yet, or too many come at once.
                    known = news.reason in (UnknownClient.code, COME_AGAIN)
                    if not known or refused > 1:
                        return _gate(news.reason, address)
    except TimeoutError as error:
        raise Unreachable(f"no server at {address} answered.") from error
    finally:
        link.close()


def _gate(reason: str, address: str) -> FcilError:
    if reason == UnknownClient.code:
        return BadTicket(
            f"the server at {address} does not know this ticket: it is another server's, or was "
            "removed there.",
            action=BadTicket.default_action(),
        )
    if reason == COME_AGAIN:
        return TooManyAtOnce(
            f"the server at {address} knows this ticket, but too many others came at once.",
            action=TooManyAtOnce.default_action(),
        )
    return TrustError(f"{address}: {REFUSALS[reason]}")


def _refusal(nack: Nack) -> FcilError | None:
    """Return the fault of the ticket; None if its key is merely no member yet."""
    if nack.code == UnknownClient.code:
        return None
    return from_code(nack.code, nack.text, nack.action)
