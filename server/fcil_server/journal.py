"""What the operator is told: notes in the terminal, in the ledger, and to who waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from fcil_protocol.errors import FcilError
from fcil_protocol.ids import ClientId, RunId
from fcil_server.ledger import Ledger
from fcil_server.ledger_forget import as_word

KEPT_NOTES = 200


@dataclass(frozen=True)
class Note:
    """One line for the operator."""

    at: float
    level: str
    code: str
    text: str


class Journal:
    """Takes notes; never raises, since a full disk must not make the server deaf.

    Attributes:
        run: the run that notes are about, once it is known.
        refused: how many messages were refused since the start.
    """

    def __init__(self, ledger: Ledger, say: Callable[[Note], None]) -> None:
        self.run: RunId | None = None
        self.refused = 0
        self._ledger = ledger
        self._say = say
        self._notes: deque[Note] = deque(maxlen=KEPT_NOTES)
        self._noted = 0
        self._news = asyncio.Event()

    def note(self, level: str, code: str, text: str, client: ClientId | None = None) -> None:
        """Tell the operator, and keep it in the ledger as far as that is possible."""
        note = Note(time.time(), level, code, text)
        self._notes.append(note)
        self._noted += 1
        self._news.set()  # whoever waits is woken; the next wait is for the next note
        self._news = asyncio.Event()
        self._say(note)
        with contextlib.suppress(FcilError):
            self._ledger.add_event(level, code, text, run=self.run, client=client)

    def rename(self, name: str, pseudonym: str) -> None:
        """Call somebody otherwise in the notes that are still here."""
        notes = [replace(n, text=as_word(name).sub(pseudonym, n.text)) for n in self._notes]
        self._notes.clear()
        self._notes.extend(notes)

    def refusal(self, client: ClientId | None, error: FcilError) -> None:
        """Count a refused message."""
        self.refused += 1
        with contextlib.suppress(FcilError):
            self._ledger.add_refusal(client, error.code, error.message)

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
