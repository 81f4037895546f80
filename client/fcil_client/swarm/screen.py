"""Output of a running swarm: a live line on a terminal, JSON lines for machines."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fcil_client.notes import Note
from fcil_client.rounds.options import ClientOptions
from fcil_client.swarm import status as swarm_status
from fcil_client.swarm.seats import Enroller, Seat
from fcil_client.swarm.swarm import Ends, Swarm, SwarmOutcome
from fcil_protocol.process.log_file import DaemonOutput, LogFile
from fcil_protocol.process.supervisor import Service
from fcil_protocol.process.terminal import Format, count_of, printable, tell

STEP_S = 2.0  # between two summaries
HEARD = 1000  # sentences of members that are remembered as shown


class Screen:
    """Shows a swarm's notes and summaries.

    Of members only warnings and errors are shown; a sentence of many members is shown once, with
    their number afterwards; a log file gets every line.

    Args:
        form: jsonl prints an object for each note and summary to standard output.
        log: the file that gets every line.
    """

    def __init__(self, form: Format, log: LogFile | None) -> None:
        self._form = form
        self._log = log
        self._said = DaemonOutput(log)
        self._again: Counter[tuple[str, str]] = Counter()
        self._heard: dict[tuple[str, str], None] = {}
        self._last: dict[str, Any] = {}

    def note(self, name: str, note: Note) -> None:
        """Show a note of the swarm (no name) or of a member."""
        text = f"{name}: {note.text}" if name else note.text
        what = (note.level, note.text)
        if name and (note.level == "info" or what in self._heard):
            self._again[what] += note.level != "info"
            if self._log is not None:
                self._log.write(note.at, note.level, printable(text))
            return
        if name:
            self._heard[what] = None
            if len(self._heard) > HEARD:  # the oldest
                self._heard.pop(next(iter(self._heard)))
        self._show(note.at, note.level, note.text, name)

    def _show(self, at: float, level: str, text: str, name: str = "") -> None:
        words = f"{name}: {text}" if name else text
        if self._form is Format.TEXT:
            self._said(at, level, words)
            return
        if self._log is not None:
            self._log.write(at, level, printable(words))
        tell({"event": "note", "at": at, "member": name, "level": level, "text": text})

    def summary(self, told: dict[str, Any]) -> None:
        """Show the summary of all members, if it has changed."""
        again, self._again = self._again, Counter()
        for (level, text), count in again.items():
            if count:
                others = "1 other member says" if count == 1 else f"{count} other members say"
                self._show(time.time(), level, f"{others} the same: {text}")
        if told == self._last:
            return
        self._last = told
        if self._form is Format.TEXT:
            self._said(time.time(), "info", swarm_status.line(told))
        else:
            tell({"event": "summary", "at": time.time(), **told})

    def end(self, outcome: SwarmOutcome, code: int) -> None:
        """Show the swarm's end."""
        self.summary(self._last)  # repeated notes that are still pending
        if self._form is Format.TEXT:
            self._said(time.time(), "error" if code else "info", end_line(outcome))
        else:
            stopped = {"done": outcome.done, "stopped": outcome.stopped, "code": code}
            tell({"event": "end", "at": time.time(), **outcome.summary, **stopped})


def end_line(outcome: SwarmOutcome) -> str:
    """Return one line about the swarm's end."""
    how = "the server stopped" if outcome.stopped else "stopped"
    told, failed = outcome.summary, list(outcome.failed)
    words = f"{'the run is done' if outcome.done else how}: {count_of(told['members'], 'client')}, "
    words += f"{count_of(told['counted'], 'update')} counted"
    if not failed:
        return words
    names = ", ".join(failed[:5]) + (f" and {len(failed) - 5} more" if len(failed) > 5 else "")
    return f"{words}; {len(failed)} failed: {names}"


async def watched(
    seats: Sequence[Seat],
    options: ClientOptions,
    enroller: Enroller,
    form: Format,
    log: LogFile | None,
    ends: Ends,
) -> int:
    """Run a swarm and show it; return the exit code.

    Raises:
        FcilError: it could not start.
    """
    screen = Screen(form, log)
    swarm = Swarm(seats, options, enroller, notify=screen.note, service=Service(log), ends=ends)

    async def show() -> None:
        while True:
            await asyncio.sleep(STEP_S)
            screen.summary(swarm.summary())

    showing = asyncio.create_task(show())
    try:
        outcome = await swarm.run()
    finally:
        showing.cancel()
    code = outcome.code(until_done=ends.until_done)
    screen.end(outcome, code)
    return code
