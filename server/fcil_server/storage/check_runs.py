"""Checks of runs: states, rounds, classes, the spool, sealed parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from fcil_protocol.envelopes.envelope import (
    StoredEnvelope,
    open_body,
    parse_header,
    unwrap_key,
    verify_header,
)
from fcil_protocol.errors import CorruptFile, FcilError
from fcil_protocol.ids import ClientId, Digest
from fcil_protocol.process.terminal import count_of
from fcil_protocol.storage.segment import Damage, RecordKind, RecordSpan, Segment
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.aggregation.kept_updates import KeptUpdates, kept_folder
from fcil_server.aggregation.start import RunStart
from fcil_server.aggregation.store import PartStore, StateStore, check_state, states_folder
from fcil_server.federation.config import parse
from fcil_server.ledger.enums import Role, RunStatus, UpdateStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import RunRow, StateRow, UpdateRow
from fcil_server.runs.forget import leftovers
from fcil_server.runs.run_record import check_installed
from fcil_server.storage.findings import CheckFinding, failure, fine, warning

_SHOWN = 5  # faults of one kind
_RESTORE = "Restore a backup: fcil-server restore FILE --dir NEW"


def check_run(
    ledger: Ledger, directory: Path, run: RunRow, *, newest: bool
) -> Iterator[CheckFinding]:
    """Check one run; the newest, which a server would resume, in depth."""
    about = f"run {run.run_id}"
    if run.emptied_at is not None:
        yield from _emptied(directory, run, about)
        return
    found = [
        *_states(ledger, directory, run, about, newest=newest),
        *_start(ledger, directory, run, about),
        *_kept(ledger, directory, run, about),
        *_history(ledger, run, about),
        *_classes(ledger, run, about),
    ]
    if newest and run.status in (RunStatus.RUNNING, RunStatus.FAILED):
        found += _installed(run, about)
        found += _spool(ledger, directory, run, about)
        found += _parts(ledger, directory, run, about)
    yield from found
    tasks, rounds = ledger.tasks.count(run.run_id), ledger.rounds.count(run.run_id)
    states = len(ledger.states.all(run.run_id))
    held = (count_of(tasks, "task"), count_of(rounds, "round"), count_of(states, "state"))
    yield fine(about, f"{run.status.value}; {', '.join(held)}")


def _installed(run: RunRow, about: str) -> Iterator[CheckFinding]:
    try:
        check_installed(run)
    except FcilError as error:
        yield warning(about, f"it cannot be resumed: {error.message}", error.action)


def _emptied(directory: Path, run: RunRow, about: str) -> Iterator[CheckFinding]:
    left = leftovers(directory, run.run_id)
    if left:
        text = f"a client was forgotten in it, and {', '.join(p.name for p in left)} are still here"
        yield failure(about, text, "Start the server, or forget once more: it finishes that first.")
    else:
        yield fine(about, "a client was forgotten in it: states and updates removed, tables stay")


def _kept(ledger: Ledger, directory: Path, run: RunRow, about: str) -> Iterator[CheckFinding]:
    """Check that each counted update that a run keeps is there, and intact."""
    kept = KeptUpdates(kept_folder(directory, run.run_id))
    names, counted = kept.names(), ledger.updates.counted_ids(run.run_id)
    erased = set(ledger.updates.of_erased(run.run_id))
    if left := len(erased.intersection(names)):
        text = f"{left} kept updates of erased members are still here"
        yield failure(about, text, "Start the server: it removes them first.")
    wanted = names or parse(run.config).run.keep_updates
    if not wanted:
        return
    if gone := len((counted & erased) - set(names)):
        text = f"{count_of(gone, 'kept update')} of erased members: removed, as they must be"
        yield fine(about, text)
    faults = [f"{update[:16]} is missing" for update in sorted(counted - erased - set(names))]
    for update in names:
        try:
            kept.get(update)
        except CorruptFile as error:
            faults.append(error.message)
    for fault in faults[:_SHOWN]:
        action = "The run continues; a client can be forgotten exactly only with all of them."
        yield warning(about, f"kept updates: {fault}", action)
    if set(names) - counted:
        text = f"{len(set(names) - counted)} kept updates are counted in no state"
        yield warning(about, text, "The server removes them when it starts.")
    if len(faults) > _SHOWN:
        yield warning(about, f"{len(faults) - _SHOWN} more kept updates are missing or damaged")
    size = f"{kept.size_bytes() / 1e6:.1f} MB"
    yield fine(about, f"keeps {len(names)} counted updates, {size}")


def _states(
    ledger: Ledger, directory: Path, run: RunRow, about: str, *, newest: bool
) -> Iterator[CheckFinding]:
    rows = ledger.states.all(run.run_id)
    yield from _chain(rows, about)
    folder = states_folder(directory, run.run_id)
    if not folder.is_dir():
        if rows:
            yield failure(about, f"its states are gone: there is no {folder}", _RESTORE)
        return
    store = StateStore(folder)
    digests = {row.state: row.digest for row in rows}
    last = rows[-1].state if rows else -1
    for number in sorted({*store.numbers(), *([last] if rows else [])}):
        if number not in digests:
            text = f"{store.path(number)} was never committed"
            yield warning(about, text, "The server removes it when it starts; the round continues.")
            continue
        try:
            check_state(store, number, digests)
        except CorruptFile as error:
            yield _damaged_state(error, about, is_last=newest and number == last)


def _start(ledger: Ledger, directory: Path, run: RunRow, about: str) -> Iterator[CheckFinding]:
    """Check the adapter that a run began with."""
    begun = RunStart.of(states_folder(directory, run.run_id).parent, run.environment)
    try:
        if begun is not None:
            begun.load()
    except FcilError as error:
        if ledger.states.all(run.run_id):
            action = "The run does not need it to continue, only to compute its opening again."
            yield warning(about, error.message, action)
        else:
            yield failure(about, error.message, "Restore a backup, or begin a new run.")


def _damaged_state(error: CorruptFile, about: str, *, is_last: bool) -> CheckFinding:
    if is_last:
        action = (
            "Start the server: it computes the state again, or goes back to the one before "
            "and says so. Or restore a backup."
        )
        return failure(about, error.message, action)
    return warning(about, error.message, "The run does not need it to continue, only to go back.")


def _chain(rows: list[StateRow], about: str) -> Iterator[CheckFinding]:
    numbers = [row.state for row in rows]
    if numbers != list(range(len(rows))):
        yield failure(about, f"its states are numbered {numbers[:10]}, with gaps", _RESTORE)
    for before, row in pairwise(rows):
        if row.parent != before.digest:
            text = f"state {row.state} does not follow from state {before.state}"
            yield failure(about, text, _RESTORE)


def _history(ledger: Ledger, run: RunRow, about: str) -> Iterator[CheckFinding]:
    rounds = ledger.rounds.all(run.run_id)
    committed = {s.state for s in ledger.states.all(run.run_id)}
    if [r.seq for r in rounds] != list(range(len(rounds))):
        yield failure(about, "its rounds are not numbered without gaps", _RESTORE)
    for row in rounds:
        name = f"task {row.task} {row.kind} round {row.round}"
        if row.new_state is not None and row.new_state not in committed:
            yield failure(about, f"{name} made state {row.new_state}, which is unknown", _RESTORE)
        updates = ledger.updates.of_round(row.key)
        twice = [c for c, n in Counter(u.client for u in updates).items() if n > 1]
        if twice:
            yield failure(about, f"{name} counts {', '.join(twice)} twice", _RESTORE)
        left = sum(u.status is UpdateStatus.ACCEPTED for u in updates)
        if row.closed_at is not None and left:
            text = f"{name} is closed, but {left} of its updates were neither counted nor excluded"
            yield failure(about, text, _RESTORE)
        counted = any(u.status is UpdateStatus.COUNTED for u in updates)
        if row.closed_at is None and counted:
            yield failure(about, f"{name} is open, but has counted updates", _RESTORE)


def _classes(ledger: Ledger, run: RunRow, about: str) -> Iterator[CheckFinding]:
    rows, tasks = ledger.classes.all(run.run_id), ledger.tasks.all(run.run_id)
    ids = [c.class_id for c in rows if c.class_id is not None]
    if sorted(ids) != list(range(len(ids))):
        yield failure(about, f"its class ids are not 0 to {len(ids) - 1}", _RESTORE)
    if [t.task for t in tasks] != list(range(len(tasks))):
        yield failure(about, "its tasks are not numbered without gaps", _RESTORE)
    placed = {c.class_id: c.task for c in rows if c.task is not None}
    listed = {i: t.task for t in tasks for i in t.class_ids}
    if placed != listed or len(listed) != sum(len(t.class_ids) for t in tasks):
        yield failure(about, "its tasks and its class names do not fit together", _RESTORE)


def _spool(ledger: Ledger, directory: Path, run: RunRow, about: str) -> Iterator[CheckFinding]:
    """Check that every acknowledged update of the open round is there, intact, and opens."""
    records: dict[str, tuple[Segment, RecordSpan]] = {}
    folder = directory / "runs" / run.run_id / "spool"
    segments = Segment.all_in(folder) if folder.is_dir() else []
    for segment in segments:
        for found in segment.scan():
            if isinstance(found, RecordSpan):
                if found.kind is RecordKind.DATA:
                    records[found.key] = (segment, found)
                elif found.kind is RecordKind.REMOVED:
                    records.pop(found.key, None)
            elif not found.torn:
                yield _damaged_spool(segment, found, about)
    row = ledger.rounds.current(run.run_id)
    updates = ledger.updates.accepted(row.key) if row else []
    keys = _server_keys(directory)
    for update in updates:
        place = records.get(update.record)
        fault = "it is not in the spool" if place is None else ""
        if place is not None and keys is not None:
            fault = _fault(ledger, update, *place, keys)
        if fault:
            client = ledger.clients.get(update.client)
            name = client.name if client else update.client[:8]
            text = f"the update of {name} to the open round is lost: {fault}"
            action = "The server excludes it and informs the client; the round continues."
            yield failure(about, text, action)
    if row is not None:
        held = count_of(len(updates), "update")
        yield fine(about, f"task {row.task} {row.kind} round {row.round} is open with {held}")


def _damaged_spool(segment: Segment, damage: Damage, about: str) -> CheckFinding:
    text = f"{damage.size} bytes at {damage.offset} of {segment.path} are damaged"
    return failure(
        about, text, "The server moves them aside when it starts, and says what is lost."
    )


def _server_keys(directory: Path) -> PrivateKeys | None:
    try:
        return PrivateKeys.load(directory / "keys" / "server.json")
    except FcilError:
        return None  # reported with the keys


def _fault(
    ledger: Ledger, update: UpdateRow, segment: Segment, record: RecordSpan, keys: PrivateKeys
) -> str:
    """Return the fault of a stored update; empty if there is none."""
    try:
        stored = StoredEnvelope.from_bytes(segment.read(record))
        header = parse_header(stored.header, max_plain_bytes=1 << 40)  # accepted before
        if header.update_id != update.record:
            return "another update is stored under its name"
        client = ledger.clients.get(ClientId(header.core.sender))
        is_own = header.core.sender == update.client
        is_sum = update.sum_id is not None and client is not None and client.role is Role.RELAY
        if not (is_own or is_sum) or header.core.run != update.run:
            return "another client sent it, or for another run"
        if client is not None and header.core.sender_key == client.public_keys.fingerprint:
            verify_header(stored.header, stored.signature, client.public_keys)
        # else: the client has changed its keys since; the signature was verified then
        key = unwrap_key(stored.wrap, stored.header, keys)
        open_body(header, key, header.split(stored.body))
    except FcilError as error:
        return error.message
    return ""


def _parts(ledger: Ledger, directory: Path, run: RunRow, about: str) -> Iterator[CheckFinding]:
    folder = directory / "runs" / run.run_id / "parts"
    if not folder.is_dir():
        return
    store, rows = PartStore(folder), ledger.parts.all(run.run_id)
    again = "Nothing to do: it is sealed again when the round continues."
    for row in rows:
        try:
            stored = StoredEnvelope.from_bytes(store.get(Digest(row.digest)))
            header = parse_header(stored.header, max_plain_bytes=1 << 40)
            if str(header.update_id) != row.digest:
                yield warning(about, f"{store.path(Digest(row.digest))} is another part", again)
        except FcilError as error:
            yield warning(about, error.message, again)
    extra = {*store.digests()} - {Digest(r.digest) for r in rows}
    if extra:
        yield warning(about, f"{len(extra)} parts in {folder} belong to no state", again)
