"""The ledger: one database, and its tables by name.

After a kill at any moment, `RoundTable.current` and `UpdateTable.accepted` say where to go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self, TypeVar

from fcil_server.ledger.byte_counts import ByteTable
from fcil_server.ledger.clients import ClientTable, TicketTable
from fcil_server.ledger.databases.database import Database
from fcil_server.ledger.databases.opening import open_database
from fcil_server.ledger.databases.sqlite import LEDGER_NAME
from fcil_server.ledger.events import AuditTable, EventTable, RefusalTable
from fcil_server.ledger.rounds import AnswerTable, RoundTable, UpdateTable
from fcil_server.ledger.runs import Forks, PartTable, RunTable, StateTable
from fcil_server.ledger.tasks import ClassTable, EvaluationTable, TaskTable

R = TypeVar("R")

__all__ = ["LEDGER_NAME", "Ledger"]


class Ledger:
    """All data that the server needs after a restart.

    All tables write through one connection, so a `transaction` holds all writes inside it,
    to any number of tables.

    Attributes:
        database: the open database; what concerns it as a whole is done there.

    Args:
        path: of its file (see `opening.open_database`).
        read_only: for a reader.
        clock: tells unix seconds.
        database: one of this path that is open already.

    Raises:
        As `opening.open_database`.
    """

    def __init__(
        self,
        path: Path,
        *,
        read_only: bool = False,
        clock: Callable[[], float] = time.time,
        database: Database | None = None,
    ) -> None:
        self.database = database or open_database(path, read_only=read_only, clock=clock)
        self.clients = ClientTable(self.database)
        self.tickets = TicketTable(self.database)
        self.runs = RunTable(self.database)
        self.forks = Forks(self.database)
        self.states = StateTable(self.database)
        self.parts = PartTable(self.database)
        self.classes = ClassTable(self.database)
        self.tasks = TaskTable(self.database)
        self.evaluations = EvaluationTable(self.database)
        self.rounds = RoundTable(self.database)
        self.updates = UpdateTable(self.database)
        self.answers = AnswerTable(self.database)
        self.bytes = ByteTable(self.database)
        self.events = EventTable(self.database)
        self.refusals = RefusalTable(self.database)
        self.audit = AuditTable(self.database)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.database.path

    @property
    def now(self) -> float:
        """The ledger's clock, unix seconds."""
        return self.database.now

    def close(self) -> None:
        """Close the file; open transactions are rolled back."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def transaction(
        self, *, durable: bool = True, waits: bool = True
    ) -> AbstractContextManager[None]:
        """Make everything inside atomic, in all tables. See `Database.transaction`."""
        return self.database.transaction(durable=durable, waits=waits)

    def remember(self, name: Hashable, tables: Sequence[str], read: Callable[[], R]) -> R:
        """Return what a reading of some tables gives. See `Database.remember`."""
        return self.database.remember(name, tables, read)

    def sync(self) -> None:
        """Return when everything committed so far is on the disk. See `Database.sync`."""
        self.database.sync()

    @property
    def long_log(self) -> bool:
        """True if a `checkpoint` is due."""
        return self.database.long_log

    def checkpoint(self) -> None:
        """Bring what the log holds into the file. See `Database.checkpoint`."""
        self.database.checkpoint()
