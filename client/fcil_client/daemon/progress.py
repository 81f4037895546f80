"""How far the work of a round is: kept for ``status``, and told to the server now and then."""

from __future__ import annotations

import time

from fcil_client.link.connection import Connection
from fcil_client.session.events import Link
from fcil_client.session.machine import Session
from fcil_protocol.messages.messages import Progress

PROGRESS_S = 1.0  # the server hears at most this often how far the work is


class Reports:
    """Tells the server how far a client's work is.

    Attributes:
        now: phase, done and total; None: nothing is under way.
    """

    def __init__(self, line: Connection, session: Session) -> None:
        self.now: tuple[str, int, int] | None = None
        self._line = line
        self._session = session
        self._last = float("-inf")

    def report(self, phase: str, done: int, total: int) -> None:
        """Note how far the work is, and tell the server if it has not heard for a while."""
        self.now = (phase, done, total)
        moment, key = time.monotonic(), self._session.key
        online = self._session.link is Link.READY
        if key is None or not online or moment - self._last < PROGRESS_S:
            return
        self._last = moment
        said = {**key._asdict(), "phase": phase, "done": done, "total": total}
        self._line.send(Progress.model_validate({**said, "paused": bool(self._session.barred)}))

    def again(self) -> None:
        """Tell at once, since the work stands still, or goes on."""
        if self.now is not None:
            self._last = float("-inf")
            self.report(*self.now)
