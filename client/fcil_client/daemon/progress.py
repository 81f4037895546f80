"""Progress of a round's work: kept for ``status``, and reported to the server at intervals."""

from __future__ import annotations

import time

from fcil_client.link.connection import Connection
from fcil_client.session.events import Link
from fcil_client.session.machine import ClientSession
from fcil_protocol.messages.messages import Progress

PROGRESS_S = 1.0  # shortest interval between two reports to the server


class Reports:
    """Reports a client's progress to the server.

    Attributes:
        now: phase, done and total; None: no work is running.
    """

    def __init__(self, line: Connection, session: ClientSession) -> None:
        self.now: tuple[str, int, int] | None = None
        self._line = line
        self._session = session
        self._last = float("-inf")

    def report(self, phase: str, done: int, total: int) -> None:
        """Record the progress, and report it to the server if the last report is old enough."""
        self.now = (phase, done, total)
        moment, key = time.monotonic(), self._session.key
        online = self._session.link is Link.READY
        if key is None or not online or moment - self._last < PROGRESS_S:
            return
        self._last = moment
        said = {**key._asdict(), "phase": phase, "done": done, "total": total}
        self._line.send(
            Progress.model_validate({**said, "paused": bool(self._session.pause_reason)})
        )

    def report_now(self) -> None:
        """Report at once that work has been suspended or resumed."""
        if self.now is not None:
            self._last = float("-inf")
            self.report(*self.now)
