"""What the operator is told: notes in the terminal, in the ledger, and to who waits for them.

Notes and refusals are no promises, so they are committed together, at most `BATCH_S` later. What
one client can cause without end is written in full only as far as its budget goes
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
from fcil_server.ledger.forget import as_word
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import NewEvent, NewRefusal

KEPT_NOTES = 200
BATCH_S = 1.0  # at most so long a note waits for others that are committed with it
# Said in full always: what the server or its operator does, and what comes once in a round.
ALWAYS = frozenset({"cut_off", "erased", "over_budget", "revoked", "update"})
STRANGERS = ""  # whose refusals are nobody's that is known


@dataclass(frozen=True)
class Note:
    """One line for the operator."""

    at: float
    level: str
    code: str
    text: str


class _Kind(NamedTuple):
    """Which notes are alike; ``level`` is empty for a refusal."""

    client: ClientId | None
    level: str
    code: str


class Journal:
    """Takes notes; never raises, since a full disk must not make the server deaf.

    Outside an event loop each note is committed at once.

    Attributes:
        refused: how many messages were refused since the start.
    """

    def __init__(
        self,
        ledger: Ledger,
        say: Callable[[Note], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.refused = 0
        self._ledger = ledger
        self._say = say
        self._clock = clock
        self._run: RunId | None = None  # that notes are about
        self._notes: deque[Note] = deque(maxlen=KEPT_NOTES)
        self._noted = 0
        self._news = asyncio.Event()
        # Apart: messages that are refused must not use up what may be said of their sender.
        self._said = NoteBudget[_Kind]()
        self._refusals = NoteBudget[_Kind]()
        self._new_events: list[NewEvent] = []
        self._new_refusals: list[NewRefusal] = []
        self._counts = Counter[str]()  # refused and not yet in the ledger, by code
        self._written_at = clock() - BATCH_S
        self._timer: asyncio.TimerHandle | None = None

    def begin_run(self, run: RunId) -> None:
        """Say of every note from now on that it is about this run."""
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
        """Tell the operator, and keep it in the ledger as far as that is possible.

        Args:
            level: ``info``, ``warning`` or ``error``.
            code: of what happened.
            text: one line.
            client: whom it is about. Notes about one client have a budget, so that it fills
                neither the log nor the disk.
            origin: who caused it, where that is nobody of whom the ledger knows.
            heard: a client chose the code, so that none is said in full for its sake.
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
        note = Note(time.time(), level, code, text)
        self._notes.append(note)
        self._noted += 1
        self._news.set()  # whoever waits is woken; the next wait is for the next note
        self._news = asyncio.Event()
        self._say(note)
        self._new_events.append(NewEvent(self._ledger.now, level, self._run, client, code, text))

    def rename(self, name: str, pseudonym: str) -> None:
        """Call somebody otherwise in the notes that are still here."""
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
        """Commit now, or with what comes until a second after the last commit."""
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
        """Commit what waits, with a line for what was held back and is due.

        Args:
            everything: what was held back is said, due or not: this is the end.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._written_at = self._clock()
        for held in self._said.due(now, everything=everything):
            self._tell(held.key.level, held.key.code, held.told, held.key.client)
        for held in self._refusals.due(now, everything=everything):
            self._refuse(held.key.client, held.key.code, held.told)
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
            self._ledger.add_notes(events, refusals, self._counts)
            self._counts = Counter()  # else they are written with the next ones

    # --- for who asks -----------------------------------------------------------------------

    @property
    def last(self) -> int:
        """The number of the newest note, from 1; 0: there is none."""
        return self._noted

    def latest(self, count: int) -> list[dict[str, Any]]:
        """Return the newest notes, oldest first."""
        return [asdict(n) for n in list(self._notes)[-count:]]

    async def after(self, number: int) -> dict[str, Any]:
        """Wait until there is a note beyond the ``number``-th, and return those."""
        while self._noted <= number:
            await self._news.wait()
        return {"last": self._noted, "notes": self.latest(self._noted - number)}
