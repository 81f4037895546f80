"""``fcil-server erase``: remove a client's data from the server, and name what must stay."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from fcil_adapters.masks.exchanges import MASKING, SHARES
from fcil_adapters.masks.record import members_of
from fcil_protocol.errors import CorruptFile, StorageError
from fcil_protocol.ids import ClientId, RunId
from fcil_protocol.storage.atomic_files import storage_errors
from fcil_protocol.storage.segment import Segment
from fcil_protocol.storage.spool import Spool
from fcil_server.aggregation.kept_updates import KeptUpdates, kept_folder
from fcil_server.aggregation.store import StateStore
from fcil_server.federation.roster import Roster
from fcil_server.ledger.clients import as_word
from fcil_server.ledger.databases.sqlite import remove_older
from fcil_server.ledger.enums import RunStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import ClientRow, Erased, RunRow
from fcil_server.reports import run_directory
from fcil_server.runs.forget import finish_emptying, remove_uncounted

_LOG_BYTES = 64 << 20  # of a log file that are searched for a name


@dataclass(frozen=True)
class Erasure:
    """Result of an erasure.

    Attributes:
        pseudonym: the client's name from now on.
        gone: removed data, in sentences; ``stays``: data that could not be removed.
    """

    client: ClientId
    name: str
    pseudonym: str
    gone: tuple[str, ...]
    stays: tuple[str, ...]


@dataclass(frozen=True)
class ServedRun:
    """The run that a server serves at this moment: its spool is open.

    Attributes:
        in_use: update ids of the round under way, which leave the spool as it closes.
    """

    run: RunId
    spool: Spool
    in_use: Collection[str] = ()


def preview_erasure(ledger: Ledger, directory: Path, row: ClientRow) -> list[str]:
    """Return what a client's updates are part of; only before its erasure it can be forgotten."""
    lines = []
    for run, count in ledger.updates.counted_by_run(row.client_id).items():
        kept = KeptUpdates(kept_folder(directory, run)).names()
        way = (
            f"it can be taken out exactly only before it is erased: fcil-server forget {row.name} "
            f"--run {run}"
            if kept
            else "they cannot be taken out of them"
        )
        lines.append(f"{count} of its updates are in the states of run {run}: {way}")
    return lines


def erase(
    roster: Roster, directory: Path, row: ClientRow, actor: str, going: ServedRun | None = None
) -> Erasure:
    """Erase a client; a repetition, or the next start, finishes what a kill interrupted.

    The ledger first, which ends the membership, then files; the caller rewrites reports (`tidy`).

    Args:
        roster: of the federation.
        directory: the federation's.
        row: the client.
        actor: the caller, for the audit log.
        going: the run that is served now; None: the server is stopped.

    Raises:
        StorageError: a file could not be removed; the message has the name to repeat it with.
    """
    ledger = roster.federation.ledger
    if row.curve:
        erased = roster.erase(row, actor)
    else:
        erased = Erased(row.name, evaluations=0, events=0, counted=0, audited=0)
    try:
        sealed, kept = _remove_updates(ledger, directory, row.client_id, going)
        for run in ledger.runs.all() if going is None else ():
            _clear(directory / "runs" / run.run_id / "incoming")
        if going is None:
            finish_emptying(ledger, directory)  # a fork that a kill left has its updates too
        others = (r.run_id for r in ledger.runs.all() if going is None or r.run_id != going.run)
        remove_uncounted(ledger, directory, others)
    except StorageError as error:
        raise _unfinished(error, erased.pseudonym) from None
    gone = [
        "its name, keys, device, addresses and membership",
        f"{erased.evaluations} test results, {erased.events} notes, its refusals and tickets",
        "its name in notes about others and in the tables of runs",
        f"{sealed} sealed updates and {kept} kept ones",
    ]
    stays = _stays(ledger, row, erased, kept=kept)
    return Erasure(row.client_id, row.name, erased.pseudonym, tuple(gone), tuple(stays))


def _unfinished(error: StorageError, pseudonym: str) -> StorageError:
    """Add to an error the name by which the erasure is repeated."""
    error.message += (
        f" The client is {pseudonym} in the ledger, and some of its data is still here."
    )
    error.action = f"Mend that, and repeat: fcil-server erase {pseudonym}"
    return error


def finish_erasures(ledger: Ledger, directory: Path) -> None:
    """Remove stored updates of erased clients that a kill or a full disk left; no server runs.

    A running run's spool is purged as the run opens (`make_context`), which also reports what the
    spool recovered.

    Raises:
        StorageError: a file cannot be removed.
    """
    for run in ledger.runs.all():
        ids = [str(u) for u in ledger.updates.of_erased(run.run_id)]
        KeptUpdates(kept_folder(directory, run.run_id)).remove(ids)
        if run.status is not RunStatus.RUNNING:
            _unspool(directory, run, ids, None)


def _remove_updates(
    ledger: Ledger, directory: Path, client: ClientId, going: ServedRun | None
) -> tuple[int, int]:
    """Remove a client's updates from all runs; return the numbers of sealed and of kept ones."""
    sealed = kept = 0
    for run in ledger.runs.all():
        ids = [str(u.record) for u in ledger.updates.of_client(run.run_id, client)]
        kept += KeptUpdates(kept_folder(directory, run.run_id)).remove(ids)
        sealed += _unspool(directory, run, ids, going)
    return sealed, kept


def _unspool(directory: Path, run: RunRow, ids: list[str], going: ServedRun | None) -> int:
    if going is not None and going.run == run.run_id:
        return going.spool.purge([i for i in ids if i not in going.in_use])
    folder = directory / "runs" / run.run_id / "spool"
    if not ids or not folder.is_dir() or not Segment.all_in(folder):
        return 0
    with closing(Spool(folder)) as spool:
        return spool.purge(ids)


def _clear(folder: Path) -> None:
    """Remove partially received updates; their senders begin them again."""
    if folder.is_dir():
        with storage_errors("remove", folder):
            shutil.rmtree(folder)


def _stays(ledger: Ledger, row: ClientRow, erased: Erased, *, kept: int) -> list[str]:
    lines = [
        f"{count} of its updates are averaged into the states of run {run}"
        for run, count in ledger.updates.counted_by_run(row.client_id).items()
    ]
    if kept:
        lines.append(
            "without its kept updates, no other client can be forgotten exactly in that run"
        )
    lines.append(
        f"its random id {row.client_id} in the tables of rounds and bytes, and a digest of its "
        "key, so that the key is never enrolled again"
    )
    lines.append("names of classes that it brought")
    if erased.audited:
        lines.append(f"its name in {erased.audited} lines of the audit log, which only grows")
    lines.append("backups, exported models, and what other members hold")
    return lines


def _signed_states(ledger: Ledger, directory: Path, client: ClientId) -> list[str]:
    """Return a sentence for each run with stored states that have a client's signing key.

    States in the middle of a masked round have it. Most are replaced soon; the newest of a task,
    and those of a run that has ended, stay. A state that cannot be read may have it.
    """
    lines = []
    for run in ledger.runs.all():
        folder = directory / "runs" / run.run_id / "states"
        sent = ledger.updates.of_client(run.run_id, client)
        if not folder.is_dir() or not any(u.kind in MASKING for u in sent):
            continue
        store = StateStore(folder)
        stored = store.numbers()
        if held := [n for n in stored if _may_hold_key(store, n, client)]:
            what = "state" if len(held) == 1 else "states"
            line = (
                "its public signing key, and its signatures, in stored "
                f"{what} {', '.join(map(str, held))} of run {run.run_id}"
            )
            if run.status is RunStatus.RUNNING and held[-1] == stored[-1]:
                line += ", and in the next ones until its masked round ends"
            lines.append(line)
    return lines


def _may_hold_key(store: StateStore, number: int, client: ClientId) -> bool:
    try:
        state = store.load(number)
    except CorruptFile:
        return number in store.numbers()  # a running server may have replaced it meanwhile
    return client in members_of(state, SHARES)


def _logs_with(directory: Path, name: str) -> list[str]:
    """Return the log files in the federation's directory that name a client."""
    word, found = as_word(name), []
    for path in sorted(directory.glob("*.log*")) + sorted(directory.glob("*.jsonl*")):
        with storage_errors("read", path), path.open(errors="replace") as file:
            if word.search(file.read(_LOG_BYTES)):
                found.append(path.name)
    return found


def tidy(path: Path, directory: Path, done: Erasure) -> list[str]:
    """Rewrite the existing tables of all runs, and empty the ledger's log; any thread.

    Returns what stays after all, in sentences.

    Args:
        path: of the ledger.
        directory: the federation's.
        done: the erasure.

    Raises:
        DiskFull, StorageError: the message has the name to repeat the erasure with.
    """
    try:
        return _tidy(path, directory, done)
    except StorageError as error:
        raise _unfinished(error, done.pseudonym) from None


def _tidy(path: Path, directory: Path, done: Erasure) -> list[str]:
    with Ledger(path, read_only=True) as ledger:
        for run in ledger.runs.all():
            folder = directory / "runs" / run.run_id
            if any((folder / name).exists() for name in (run_directory.ROUNDS, "summary.json")):
                run_directory.write(
                    ledger, run.run_id, folder, states=StateStore(folder / "states")
                )
        remove_older(directory)
        stays = _signed_states(ledger, directory, done.client)
        if not ledger.database.try_empty_log():  # its pages hold the old content
            stays.append("its name in the ledger's log, until the server is next stopped")
    if done.name != done.pseudonym and (logs := _logs_with(directory, done.name)):
        stays.append(f"its name in log files: {', '.join(logs)}")
    return stays
