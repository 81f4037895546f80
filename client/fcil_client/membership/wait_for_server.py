"""A client's first start waits for its server, as every later start does.

A device may boot before its server and before it knows the time, and a server may have no room for
another newcomer for a while. None of it is a reason to end: a new start would only do the same,
less gently.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from fcil_protocol.errors import FcilError, Starting, TooManyAtOnce, Unreachable, WrongClock
from fcil_protocol.process.supervisor import Service

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 10.0
# The server may be there later; a device may learn the time after its start.
_PASSES = (Unreachable, TooManyAtOnce, Starting, WrongClock)

T = TypeVar("T")


async def wait_for_server(
    attempt: Callable[[], Awaitable[T]], service: Service, notify: Callable[[str], None]
) -> T | None:
    """Repeat an attempt to enrol until a server can be reached and has room.

    Args:
        attempt: enrols, or raises what kept it from doing so.
        service: hears that the client waits, and ends the wait on a signal.
        notify: shows each new reason of the wait, once.

    Returns:
        The attempt's result; None if a signal ended the wait.

    Raises:
        FcilError: waiting cannot help, such as a refused ticket.
    """
    ready = partial(service.ready, lambda: "waiting for a server")
    waiting = asyncio.ensure_future(repeat_attempt(attempt, notify, ready))
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        waiting.cancel()

    service.catch(stop, notify)
    try:
        result = await waiting
    except asyncio.CancelledError:
        return None
    else:
        return None if stopped else result  # a signal may come with the last answer
    finally:
        service.over()


async def repeat_attempt(
    attempt: Callable[[], Awaitable[T]],
    notify: Callable[[str], None],
    ready: Callable[[], None] = lambda: None,
) -> T:
    """Repeat an attempt as `wait_for_server` does, until it succeeds or is cancelled.

    Args:
        attempt: enrols, or raises what kept it from doing so.
        notify: shows each new reason of the wait, once.
        ready: is called when the wait begins.

    Raises:
        FcilError: waiting cannot help.
    """
    pause_s, told = FIRST_PAUSE_S, ""
    while True:
        try:
            return await attempt()
        except _PASSES as error:
            if not told:
                ready()
            if error.message != told:
                told = error.message
                notify(_sentence(error))
        # Devices that lost their server together do not come back together.
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _sentence(error: FcilError) -> str:
    action = error.action or type(error).default_action()
    return f"{error.message} This client keeps trying; Ctrl-C ends it. {action}"
