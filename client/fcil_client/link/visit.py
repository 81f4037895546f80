"""A short visit to the server: a Hello, its Welcome, one message, and the end.

For commands that need no daemon: a dry run, leaving the federation, changing keys.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version

from fcil_client.link import handshake
from fcil_client.link.connection import Connection
from fcil_client.state.home import Enrolment, Home
from fcil_protocol.errors import (
    FcilError,
    LinkError,
    Locked,
    TrustError,
    UnknownClient,
    Unreachable,
    from_code,
)
from fcil_protocol.link.dial import ADDRESS_S, REFUSALS, Dial, dial
from fcil_protocol.link.interface import COME_AGAIN
from fcil_protocol.link.zmq_link import LinkNews
from fcil_protocol.messages.frames import parse
from fcil_protocol.messages.messages import Message, Nack, Welcome
from fcil_protocol.process import control_socket
from fcil_protocol.storage.atomic_files import DirectoryLock
from fcil_protocol.trust.keys import PrivateKeys

ANSWER_S = 15.0  # for the whole visit
STOP_S = 20.0  # for a running daemon to end


def stop_daemon(home: Home) -> DirectoryLock:
    """End the client's daemon if it runs, and lock its directory.

    Raises:
        Locked: it does not end.
    """
    with suppress(FcilError):  # it is not running
        control_socket.ask(home.directory, "stop")
    ends = time.monotonic() + STOP_S
    while True:
        try:
            return DirectoryLock.acquire(home.directory, "client")
        except Locked:
            if time.monotonic() > ends:
                raise
        time.sleep(0.1)


@asynccontextmanager
async def visit(
    enrolment: Enrolment, keys: PrivateKeys, make: Dial = dial
) -> AsyncIterator[tuple[Connection, Welcome]]:
    """Open a session; the block inside has `ANSWER_S` in all.

    Raises:
        Unreachable: no address answers in time.
        UnknownClient: the server does not admit these keys.
        LinkError: the keys are currently no member's (revoked, expired or cut off).
        TrustError: the peer is not the server, or refuses this client.
    """
    line = Connection(enrolment, keys, make)
    line.open()
    try:
        async with asyncio.timeout(ANSWER_S):
            welcome = await _greet(line, enrolment)
            yield line, welcome
    except TimeoutError as error:
        raise Unreachable(
            f"no server at {', '.join(enrolment.addresses)} answered within {ANSWER_S:.0f} s.",
            action=Unreachable.default_action(),
        ) from error
    finally:
        line.close()


async def _greet(line: Connection, enrolment: Enrolment) -> Welcome:
    while True:
        news = await line.recv()
        if isinstance(news, LinkNews):
            await _link_news(line, enrolment, news)
            continue
        received = parse(news)
        message = received.message
        if isinstance(message, Welcome) and message.nonce == line.nonce:
            line.accept(received, message, handshake.read_server(message, enrolment))
            return message
        _raise_if_refused(message)


async def _link_news(line: Connection, enrolment: Enrolment, news: LinkNews) -> None:
    if news.state == "up":
        methods, _ = handshake.installed_methods()
        line.begin()
        line.send(
            handshake.hello(
                enrolment,
                nonce=line.nonce,
                session_key=line.session_key,
                package=version("fcil"),
                methods=methods,
                device=f"{platform.system()} {platform.machine()}",
                terms=None,
                claim=None,
                ready=False,
            )
        )
    elif news.state == "refused":
        text = f"{line.address}: {REFUSALS[news.reason]}"
        if news.reason == COME_AGAIN:  # a former member's key gets this refusal
            raise LinkError(text, action="Try again in a minute.")
        raise (UnknownClient if news.reason == UnknownClient.code else TrustError)(text)
    elif news.reason == "unreachable" and line.has_other_addresses:
        await asyncio.sleep(ADDRESS_S)
        line.try_next_address()


def _raise_if_refused(message: Message) -> None:
    # The Nack is not verified: its only effect is to stop the visit.
    if isinstance(message, Nack):
        raise from_code(message.code, message.text, message.action)


async def answer(line: Connection) -> Message | LinkNews:
    """Return the next message that the server signed, or link news.

    Raises:
        TrustError, WireError: the server did not sign it; or the server refuses.
    """
    news = await line.recv()
    if isinstance(news, LinkNews):
        return news
    message = line.check(parse(news))
    _raise_if_refused(message)
    return message
