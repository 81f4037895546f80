"""Forks: new runs that begin with a kept state of another one, with its files and history."""

from __future__ import annotations

import contextlib
from pathlib import Path

from fcil_protocol.errors import StorageError, UsageError
from fcil_protocol.ids import ClientId, RunId
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic
from fcil_server.aggregation import start
from fcil_server.aggregation.kept_updates import KeptUpdates, kept_folder
from fcil_server.aggregation.store import (
    StateStore,
    check_state,
    is_valid_state,
    kept_states,
    new_id,
    states_folder,
)
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import RunRow


def fork(
    ledger: Ledger, directory: Path, source: RunId, state: int, *, actor: str, action: str
) -> RunRow:
    """Begin a new run with the states of ``source`` up to ``state``; the old one is kept.

    Files first, then the ledger in one transaction: a kill in between leaves only a run directory
    that no run owns.

    Args:
        ledger: the federation's.
        directory: the federation's.
        source: the run to go back in.
        state: the number of a state that is kept.
        actor: the caller, for the audit log.
        action: the reason, one word for the audit log.

    Raises:
        CorruptFile: the state is missing or damaged.
        DiskFull, StorageError: nothing was changed.
    """
    run = new_id(ledger)
    old, target = StateStore(states_folder(directory, source)), states_folder(directory, run)
    digests = {row.state: row.digest for row in ledger.states.all(source)}
    check_state(old, state, digests)
    new = StateStore(target)
    with storage_errors("create the run directory", target):
        target.parent.chmod(0o700)
    for number in old.numbers():
        if number < state and is_valid_state(old, number, digests):
            old.copy_to(new, number)
    old.copy_to(new, state)
    share_start(directory, source, run)
    share_kept(ledger, directory, source, run)
    with ledger.transaction():
        ledger.forks.begin(source, state, run)
        ledger.audit.add(actor, action, f"{run} from state {state} of {source}")
    row = ledger.runs.get(run)
    assert row is not None, "it was just written"
    kept = KeptUpdates(kept_folder(directory, run))
    with contextlib.suppress(StorageError):  # the fork is made; the next start removes them
        kept.remove(set(kept.names()) - ledger.updates.counted_ids(run))  # of later rounds
    return row


def share_start(directory: Path, source: RunId, run: RunId) -> None:
    """Copy what a run began with, if anything: an opening is computed again from it."""
    begun = states_folder(directory, source).with_name(start.NAME)
    if begun.exists():
        with storage_errors("copy", begun):
            data = begun.read_bytes()
        write_atomic(states_folder(directory, run).with_name(start.NAME), data)


def share_kept(
    ledger: Ledger,
    directory: Path,
    source: RunId,
    run: RunId,
    *,
    without: ClientId | None = None,
) -> None:
    """Let a fork keep its parent's kept updates, also those that it will not count.

    Raises:
        DiskFull, StorageError.
    """
    theirs = KeptUpdates(kept_folder(directory, source))
    ids = ledger.updates.counted_ids(source)
    if without is not None:
        ids -= {u.update_id for u in ledger.updates.of_client(source, without)}
    theirs.share(KeptUpdates(kept_folder(directory, run)), sorted(ids))


def choose_state(
    ledger: Ledger, directory: Path, run: RunId, *, task: int | None, state: int | None
) -> int:
    """Return the number of the state that the operator chose: after a task, or by number.

    Raises:
        UsageError: both or none is given, the task is not learned, or the state is not kept; the
            message lists the kept ones.
    """
    if (task is None) == (state is None):
        raise UsageError(
            "expected --to-task or --to-state, and one of them only.",
            action="Give --to-task T to go back to the end of a task.",
        )
    if task is not None:
        learned = [t.task for t in ledger.tasks.all(run) if t.closed_at is not None]
        if task not in learned:
            listed = ", ".join(map(str, learned)) or "none"
            raise UsageError(
                f"task {task} of run {run} is not learned to its end; those that are: {listed}.",
                action="Name one of those, or a state with --to-state.",
            )
        state = max(row.state for row in ledger.states.all(run) if row.task == task)
    kept = kept_states(ledger, directory, run)
    if state not in {row.state for row in kept}:
        listed = ", ".join(f"{row.state} (task {row.task})" for row in kept) or "none"
        raise UsageError(
            f"state {state} of run {run} is not kept; there are: {listed}.",
            action="The last of each task and the newest ones are kept ([storage] keep_states).",
        )
    assert state is not None, "it is among the kept ones"
    return state
