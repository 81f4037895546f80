"""Fork a run: a new run that begins with a kept state of another one, files and history."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fcil_protocol.errors import CorruptFile, UsageError
from fcil_protocol.files import storage_errors
from fcil_protocol.ids import ClientId, RunId, new_run_id
from fcil_server.kept import KeptUpdates, kept_folder
from fcil_server.ledger import Ledger
from fcil_server.ledger_rows import Run, StateRow
from fcil_server.store import StateStore


def states_folder(directory: Path, run: RunId) -> Path:
    """Return where the states of a run lie in a federation's directory."""
    return directory / "runs" / run / "states"


def fork(
    ledger: Ledger, directory: Path, source: RunId, state: int, *, actor: str, action: str
) -> Run:
    """Begin a new run with the states of ``source`` up to ``state``; the old one is kept.

    Files first, then the ledger in one transaction: a kill in between leaves a run directory
    that no run owns, and nothing else.

    Args:
        ledger: the federation's.
        directory: the federation's.
        source: the run to go back in.
        state: the number of a state that is kept.
        actor: who wants it, for the audit log.
        action: why, one word for the audit log.

    Raises:
        CorruptFile: the state is missing or damaged.
        DiskFull, StorageError: nothing was changed.
    """
    run = new_id(ledger)
    old, target = StateStore(states_folder(directory, source)), states_folder(directory, run)
    digests = {row.state: row.digest for row in ledger.states(source)}
    check_state(old, state, digests)
    new = StateStore(target)
    with storage_errors("create the run directory", target):
        target.parent.chmod(0o700)
    for number in old.numbers():
        if number < state and _is_whole(old, number, digests):
            old.copy_to(new, number)
    old.copy_to(new, state)
    share_kept(ledger, directory, source, run)
    with ledger.transaction():
        ledger.fork_run(source, state, run)
        ledger.add_audit(actor, action, f"{run} from state {state} of {source}")
    row = ledger.run(run)
    assert row is not None, "it was just written"
    return row


def share_kept(
    ledger: Ledger,
    directory: Path,
    source: RunId,
    run: RunId,
    *,
    without: ClientId | None = None,
) -> None:
    """Let a fork keep the updates that its parent keeps; what it does not count goes later.

    Raises:
        DiskFull, StorageError.
    """
    theirs = KeptUpdates(kept_folder(directory, source))
    ids = ledger.counted_ids(source)
    if without is not None:
        ids -= {u.update_id for u in ledger.updates_of(source, without)}
    theirs.share(KeptUpdates(kept_folder(directory, run)), sorted(ids))


def new_id(ledger: Ledger) -> RunId:
    """Draw the id of a new run."""
    run = new_run_id()
    while ledger.run(run) is not None:
        run = new_run_id()
    return run


def check_state(store: StateStore, state: int, digests: Mapping[int, str]) -> None:
    """Refuse a state whose file is not the one that the ledger knows.

    Raises:
        CorruptFile: it is missing, damaged, or another one.
    """
    store.load(state)
    if store.record(state).digest != digests.get(state):
        raise CorruptFile(
            f"{store.path(state)} is a whole state, but not the one that the ledger knows.",
            action="Restore it from a backup.",
        )


def _is_whole(store: StateStore, state: int, digests: Mapping[int, str]) -> bool:
    try:
        check_state(store, state, digests)
    except CorruptFile:
        return False
    return True


def kept_states(ledger: Ledger, directory: Path, run: RunId) -> list[StateRow]:
    """Return the committed states of a run whose files are there and whole."""
    folder = states_folder(directory, run)
    if not folder.is_dir():
        return []
    store, rows = StateStore(folder), ledger.states(run)
    digests = {row.state: row.digest for row in rows}
    held = set(store.numbers())
    return [row for row in rows if row.state in held and _is_whole(store, row.state, digests)]


def choose_state(
    ledger: Ledger, directory: Path, run: RunId, *, task: int | None, state: int | None
) -> int:
    """Return the number of the state that an operator means: after a task, or by number.

    Raises:
        UsageError: both or none is given, the task is not learned, or the state is not kept;
            the message lists what there is.
    """
    if (task is None) == (state is None):
        raise UsageError(
            "expected --to-task or --to-state, and one of them only.",
            action="Give --to-task T to go back to the end of a task.",
        )
    if task is not None:
        learned = [t.task for t in ledger.tasks(run) if t.closed_at is not None]
        if task not in learned:
            listed = ", ".join(map(str, learned)) or "none"
            raise UsageError(
                f"task {task} of run {run} is not learned to its end; those that are: {listed}.",
                action="Name one of those, or a state with --to-state.",
            )
        state = max(row.state for row in ledger.states(run) if row.task == task)
    kept = kept_states(ledger, directory, run)
    if state not in {row.state for row in kept}:
        listed = ", ".join(f"{row.state} (task {row.task})" for row in kept) or "none"
        raise UsageError(
            f"state {state} of run {run} is not kept; there are: {listed}.",
            action="The last of each task and the newest ones are kept ([storage] keep_states).",
        )
    assert state is not None, "it is among the kept ones"
    return state
