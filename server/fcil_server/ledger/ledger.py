"""The ledger: one SQLite file in the federation directory, and its tables by name.

After a kill at any moment, `RoundTable.current` and `UpdateTable.accepted` say where to go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fcil_server.ledger.byte_counts import ByteTable
from fcil_server.ledger.clients import ClientTable, TicketTable
from fcil_server.ledger.database import LEDGER_NAME, Database
from fcil_server.ledger.events import AuditTable, EventTable, RefusalTable
from fcil_server.ledger.rounds import AnswerTable, RoundTable, UpdateTable
from fcil_server.ledger.rows import Run
from fcil_server.ledger.runs import Forks, PartTable, RunTable, StateTable
from fcil_server.ledger.tasks import ClassTable, EvaluationTable, TaskTable

__all__ = ["LEDGER_NAME", "Ledger", "run_named"]

# BEGIN old names: callers come to the tables in a commit of their own.
_OLD = {
    "add_client": ("clients", "add"),
    "client": ("clients", "get"),
    "client_by_curve": ("clients", "by_curve"),
    "client_by_name": ("clients", "by_name"),
    "refuse_taken": ("clients", "refuse_taken"),
    "clients_via": ("clients", "via"),
    "free_name": ("clients", "free_name"),
    "touch": ("clients", "touch"),
    "touch_all": ("clients", "touch_all"),
    "set_address": ("clients", "set_address"),
    "revoke_client": ("clients", "revoke"),
    "replace_keys": ("clients", "replace_keys"),
    "erase_client": ("clients", "erase"),
    "refuse_erased_key": ("clients", "refuse_erased_key"),
    "add_ticket": ("tickets", "add"),
    "ticket": ("tickets", "get"),
    "tickets_via": ("tickets", "via"),
    "use_ticket": ("tickets", "use"),
    "withdraw_tickets": ("tickets", "withdraw"),
    "new_run": ("runs", "add"),
    "run": ("runs", "get"),
    "newest_run": ("runs", "newest"),
    "set_run_status": ("runs", "set_status"),
    "empty_run": ("runs", "empty"),
    "emptied_runs": ("runs", "emptied"),
    "fork_run": ("forks", "begin"),
    "forget_in": ("forks", "leave_out"),
    "lineage": ("forks", "lineage"),
    "add_state": ("states", "add"),
    "newest_state": ("states", "newest"),
    "newest_combined": ("states", "newest_combined"),
    "add_part": ("parts", "add"),
    "part": ("parts", "get"),
    "part_by_plain": ("parts", "by_plain"),
    "remove_part": ("parts", "remove"),
    "add_class": ("classes", "add"),
    "place_class": ("classes", "place"),
    "rename_class": ("classes", "rename"),
    "hide_class": ("classes", "hide"),
    "admit_class": ("classes", "admit"),
    "remove_class": ("classes", "remove"),
    "add_alias": ("classes", "add_alias"),
    "move_aliases": ("classes", "move_aliases"),
    "aliases": ("classes", "aliases"),
    "alias_rows": ("classes", "alias_rows"),
    "new_task": ("tasks", "open"),
    "close_task": ("tasks", "close"),
    "add_evaluation": ("evaluations", "add"),
    "evaluated": ("evaluations", "tasks"),
    "new_round": ("rounds", "open"),
    "set_asked": ("rounds", "set_asked"),
    "set_remaining": ("rounds", "set_remaining"),
    "reopen_round": ("rounds", "reopen"),
    "close_round": ("rounds", "close"),
    "round": ("rounds", "get"),
    "open_round": ("rounds", "current"),
    "was_closed_by": ("rounds", "was_closed_by"),
    "was_learned": ("rounds", "was_learned"),
    "void_rounds": ("rounds", "count_void"),
    "closed_rounds": ("rounds", "count_closed"),
    "seq_before": ("rounds", "seq_before"),
    "accept_update": ("updates", "accept"),
    "update_of": ("updates", "get"),
    "accepted": ("updates", "accepted"),
    "updates_of": ("updates", "of_client"),
    "last_judged": ("updates", "last_judged"),
    "exclude_update": ("updates", "exclude"),
    "count_updates": ("updates", "mark_counted"),
    "counted_tasks": ("updates", "counted_tasks"),
    "counted_ids": ("updates", "counted_ids"),
    "counts_of": ("updates", "counted_by_run"),
    "forgotten": ("updates", "forgotten"),
    "rounds_by_client": ("updates", "rounds_by_client"),
    "set_answer": ("answers", "set"),
    "add_byte_counts": ("bytes", "add"),
    "byte_counts": ("bytes", "all"),
    "byte_counts_of": ("bytes", "of_round"),
    "bytes_by_client": ("bytes", "by_client"),
    "add_event": ("events", "add"),
    "add_notes": ("events", "add_all"),
    "add_refusal": ("refusals", "add"),
    "refusals_of": ("refusals", "of_client"),
    "refusal_counts": ("refusals", "counts"),
    "add_audit": ("audit", "add"),
    "copy_to": ("database", "copy_to"),
    "refuse_damage": ("database", "refuse_damage"),
    "refuse_if_gone": ("database", "refuse_if_gone"),
    "empty_log": ("database", "empty_log"),
    "emptied_beside": ("database", "emptied_beside"),
    "checkpoint_by_hand": ("database", "checkpoint_by_hand"),
    "faults": ("database", "faults"),
    "moment": ("database", "moment"),
    "read_only": ("database", "read_only"),
    "_execute": ("database", "execute"),
    "_execute_each": ("database", "execute_each"),
    "_write": ("database", "write"),
    "_insert": ("database", "insert"),
    "_rows": ("database", "rows"),
    "_all": ("database", "all"),
    "_one": ("database", "one"),
    "_number": ("database", "number"),
    "_clock": ("database", "clock"),
    "_in_durable": ("database", "in_durable"),
    "_commits": ("database", "_commits"),
    "_db": ("database", "_db"),
}
# END old names


class Ledger:
    """Everything that the server must know after a restart.

    All tables write through one connection, so a `transaction` holds whatever is written
    inside it, to however many tables.

    Attributes:
        database: the open file; what concerns it as a whole is done there.

    Raises:
        As `Database`.
    """

    def __init__(
        self,
        path: Path,
        *,
        read_only: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.database = Database(path, read_only=read_only, clock=clock)
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
        """Where the file is."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def transaction(
        self, *, durable: bool = True, waits: bool = True
    ) -> AbstractContextManager[None]:
        """Make everything inside atomic, in all tables. See `Database.transaction`."""
        return self.database.transaction(durable=durable, waits=waits)

    def sync(self) -> None:
        """Return when everything committed so far is on the disk. See `Database.sync`."""
        self.database.sync()

    @property
    def long_log(self) -> bool:
        """Whether it is time for a `checkpoint`."""
        return self.database.long_log

    def checkpoint(self) -> None:
        """Bring what the log holds into the file. See `Database.checkpoint`."""
        self.database.checkpoint()

    # BEGIN old names
    def __getattr__(self, name: str) -> Any:
        table, new = _OLD.get(name) or _refused(name)
        return getattr(getattr(self, table), new)


def _refused(name: str) -> tuple[str, str]:
    raise AttributeError(name)


def run_named(ledger: Ledger, run: str | None) -> Run:
    """Return the run that a command means."""
    return ledger.runs.named(run)


_CALLED: tuple[tuple[Any, str], ...] = (
    (ClientTable, "all"),
    (TicketTable, "all"),
    (RunTable, "all"),
    (StateTable, "all"),
    (PartTable, "all"),
    (ClassTable, "all"),
    (TaskTable, "all"),
    (EvaluationTable, "all"),
    (RoundTable, "all"),
    (UpdateTable, "of_round"),
    (AnswerTable, "of_round"),
    (EventTable, "newest"),
    (RefusalTable, "newest"),
    (AuditTable, "newest"),
)
for _table, _new in _CALLED:
    _table.__call__ = getattr(_table, _new)
# END old names
