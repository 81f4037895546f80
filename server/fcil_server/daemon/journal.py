"""Notes for the operator: in the terminal, in the ledger, and for commands that wait for them.

Notes and refusals are no promises, so they are committed together, at most `BATCH_S` later. Notes
that one client can cause without end are written in full only as far as its budget goes
(`note_budget`), and then as a count: the terminal, the log and the ledger stay small, and every
total stays exact.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from fcil_protocol.errors import FcilError
from fcil_protocol.ids import ClientId, RunId
from fcil_server.daemon.note_budget import NoteBudget
from fcil_server.ledger.clients import as_word
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import NewEvent, NewRefusal

KEPT_NOTES = 200
BATCH_S = 1.0  # longest time that a note waits for others to be committed with it
# Always written in full: acts of the server or its operator, and notes made once in a round.
ALWAYS = frozenset({"cut_off", "erased", "over_budget", "revoked", "update"})
STRANGERS = ""  # origin of refusals that no known client caused


@dataclass(frozen=True)
class JournalNote:
    """One line for the operator."""

    at: float
    level: str
    code: str
    text: str


class _Kind(NamedTuple):
    """Kind of a note, for counting alike ones; ``level`` is empty for a refusal."""

    client: ClientId | None
    level: str
    code: str


class Journal:
    """Takes notes; never raises, since a full disk must not stop the server.

    Outside an event loop each note is committed at once.

    Attributes:
        refused: number of refused messages since the start.
    """

    def __init__(
        self,
        ledger: Ledger,
        notify: Callable[[JournalNote], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.refused = 0
        self._ledger = ledger
        self._notify = notify
        self._clock = clock
        self._run: RunId | None = None  # the run that notes are about
        self._notes: deque[JournalNote] = deque(maxlen=KEPT_NOTES)
        self._noted = 0
        self._news = asyncio.Event()
        # Separate budgets: refused messages must not use up the notes about their sender.
        self._said = NoteBudget[_Kind]()
        self._refusals = NoteBudget[_Kind]()
        self._new_events: list[NewEvent] = []
        self._new_refusals: list[NewRefusal] = []
        self._counts = Counter[str]()  # refused and not yet in the ledger, by code
        self._written_at = clock() - BATCH_S
        self._timer: asyncio.TimerHandle | None = None

    def begin_run(self, run: RunId) -> None:
        """Mark all notes from now on as about this run."""
        self._run = run

    def note(
        self,
        level: str,
        code: str,
        text: str,
        client: ClientId | None = None,
        *,
        origin: str = "",
        heard: bool = False,
    ) -> None:
        """Write a note for the operator, and keep it in the ledger if possible.

        Args:
            level: ``info``, ``warning`` or ``error``.
            code: of the event.
            text: one line.
            client: its subject. Notes about one client have a budget, so that it fills neither the
                log nor the disk.
            origin: its cause, if the ledger does not know it.
            heard: a client chose the code, so the code exempts no note from the budget.
        """
        whose = origin if client is None else client
        if whose and (heard or code not in ALWAYS):
            kind = _Kind(client, level, code)
            if not self._said.take(whose, kind, text, self._clock()):
                self._write_soon()
                return
        self._tell(level, code, text, client)
        self._write_soon()

    def _tell(self, level: str, code: str, text: str, client: ClientId | None) -> None:
        note = JournalNote(time.time(), level, code, text)
        self._notes.append(note)
        self._noted += 1
        self._news.set()  # wakes all waiting commands; the next wait is for the next note
        self._news = asyncio.Event()
        self._notify(note)
        self._new_events.append(NewEvent(self._ledger.now, level, self._run, client, code, text))

    def rename(self, name: str, pseudonym: str) -> None:
        """Replace a client's name in the notes kept in memory."""
        word = as_word(name)
        notes = [replace(n, text=word.sub(pseudonym, n.text)) for n in self._notes]
        self._notes.clear()
        self._notes.extend(notes)
        for budget in (self._said, self._refusals):
            texts = budget.texts().items()
            budget.reword({place: word.sub(pseudonym, text) for place, text in texts})

    def refusal(self, client: ClientId | None, error: FcilError) -> None:
        """Count a refused message."""
        self.refused += 1
        self._counts[error.code] += 1
        kind = _Kind(client, "", error.code)
        if self._refusals.take(client or STRANGERS, kind, error.message, self._clock()):
            self._refuse(client, error.code, error.message)
        self._write_soon()

    def _refuse(self, client: ClientId | None, code: str, text: str) -> None:
        self._new_refusals.append(NewRefusal(self._ledger.now, client, code, text))

    # --- into the ledger --------------------------------------------------------------------

    def _write_soon(self) -> None:
        """Commit now, or with other notes within a second of the last commit."""
        if self._timer is not None:
            return
        wait = self._written_at + BATCH_S - self._clock()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            wait = 0.0
        if wait <= 0:
            self.write()
        else:
            self._timer = loop.call_later(wait, self.write)

    def write(self, *, everything: bool = False) -> None:
        """Commit waiting notes, with a line for held-back notes that are due.

        Args:
            everything: include held-back notes that are not due: this is the end.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._written_at = self._clock()
        for held in self._said.due(now, everything=everything):
            self._tell(held.key.level, held.key.code, held.summary_line, held.key.client)
        for held in self._refusals.due(now, everything=everything):
            self._refuse(held.key.client, held.key.code, held.summary_line)
        self._commit()
        if self._said.holds or self._refusals.holds:
            with contextlib.suppress(RuntimeError):
                self._timer = asyncio.get_running_loop().call_later(BATCH_S, self.write)

    def _commit(self) -> None:
        events, self._new_events = self._new_events, []
        refusals, self._new_refusals = self._new_refusals, []
        if not (events or refusals or self._counts):
            return
        with contextlib.suppress(FcilError):
            self._ledger.events.add_all(events, refusals, self._counts)
            self._counts = Counter()  # else they are written with the next ones

    # --- for callers ------------------------------------------------------------------------

    @property
    def last(self) -> int:
        """Number of the newest note, from 1; 0: there is none."""
        return self._noted

    def latest(self, count: int) -> list[dict[str, Any]]:
        """Return the newest notes, oldest first."""
        return [asdict(n) for n in list(self._notes)[-count:]]

    async def after(self, number: int) -> dict[str, Any]:
        """Wait until there is a note after the ``number``-th, and return those notes."""
        while self._noted <= number:
            await self._news.wait()
        return {"last": self._noted, "notes": self.latest(self._noted - number)}
