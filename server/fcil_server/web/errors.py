"""Errors of the processes that serve HTTP: their status codes, and our own defects in the log."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable

from fcil_protocol.errors import (
    ConfigError,
    FcilError,
    LinkError,
    NotNow,
    NotYet,
    StorageError,
    Timeout,
    TooLarge,
    TrustError,
    UsageError,
)

QUIET_S = 600.0  # the same defect is logged at most this often
MAX_REMEMBERED = 50  # defects
MAX_FRAMES = 8  # of a traceback, the innermost

_STATUS: tuple[tuple[type[FcilError], int], ...] = (
    (UsageError, 400),
    (ConfigError, 400),
    (TrustError, 403),
    (NotNow, 409),
    (NotYet, 409),
    (TooLarge, 413),
    (LinkError, 503),
    (Timeout, 503),
    (StorageError, 503),
)


def status_of(error: FcilError) -> int:
    """Return the HTTP status that stands for an error."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def begun(sentence: str) -> str:
    """Capitalise a sentence, since no ``error:`` or ``warning:`` precedes it in an answer."""
    return sentence[:1].upper() + sentence[1:]


def action_of(error: FcilError) -> str:
    """Return what to do about an error, or an empty text."""
    # The general advice of UsageError is about commands.
    return error.action or ("" if isinstance(error, UsageError) else error.default_action())


class Faults:
    """Writes our own defects into the server's log, each once in a while.

    Args:
        clock: seconds that only grow.
        what: what this process serves.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, what: str = "the dashboard"
    ) -> None:
        self._what = what
        self._clock = clock
        self._told: dict[tuple[str, int], float] = {}

    def tell(self, error: BaseException, where: str) -> None:
        """Log a failure, unless the same was logged lately."""
        last = traceback.extract_tb(error.__traceback__)[-1:]
        key = (type(error).__name__, (last[0].lineno or 0) if last else 0)
        now = self._clock()
        if now - self._told.get(key, -QUIET_S) < QUIET_S:
            return
        while len(self._told) >= MAX_REMEMBERED:
            del self._told[next(iter(self._told))]
        self._told[key] = now
        lines = "".join(traceback.format_exception(error, limit=-MAX_FRAMES))
        text = f"internal: {self._what} failed at {where}\n{lines}"
        print(text, file=sys.stderr, end="")  # noqa: T201 - the server's log
