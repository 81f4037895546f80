"""``fcil-server check``: verify the files that a restart or a backup needs.

Changes nothing; also works while the server runs. Files that a running server was changing at that
moment are checked again, and only lasting faults are reported.
"""

from __future__ import annotations

import re
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fcil_protocol.errors import FcilError, StorageError, Timeout, Unreachable
from fcil_protocol.process import control_socket as control
from fcil_protocol.process.terminal import count_of
from fcil_protocol.storage.atomic_files import is_temporary_name, is_written
from fcil_protocol.storage.lock_holder import LOCK_NAME
from fcil_protocol.trust.certificate import Certificate, RootKey
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys
from fcil_server.federation.api_tokens import REQUESTS_NAME, TOKENS_NAME, read_tokens
from fcil_server.federation.config import load
from fcil_server.federation.directory import (
    CONFIG,
    WEBHOOKS,
    describe_lost_frames,
    open_to_others,
)
from fcil_server.federation.page_key import KEY_NAME, LEFT_NAME, check_key
from fcil_server.ledger.databases.location import LOCATION_NAME
from fcil_server.ledger.databases.opening import has_ledger, host_of_server, location_of
from fcil_server.ledger.databases.sqlite import older_copies
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.runs.export_jobs import EXPORTS
from fcil_server.runs.run_queue import QUEUE, RunQueue
from fcil_server.storage.backup import SCRATCH
from fcil_server.storage.check_runs import check_run
from fcil_server.storage.findings import CheckFinding, Severity, failed, failure, fine, warning

LOW_BYTES, TOO_LOW_BYTES = 1_000_000_000, 50_000_000
CERTIFICATE_DAYS = 30.0
_PASSES = 3
_OURS = {
    CONFIG,
    "keys",
    LEDGER_NAME,
    LOCATION_NAME,
    "runs",
    LOCK_NAME,
    "control.sock",
    KEY_NAME,
    LEFT_NAME,
}
_OURS |= {TOKENS_NAME, REQUESTS_NAME, WEBHOOKS, EXPORTS}
_OURS |= {QUEUE, f"{LEDGER_NAME}-wal", f"{LEDGER_NAME}-shm"}
_KEYS = {"server.json", "root.json", "certificate", "server.next.json"}
_LOG = re.compile(r".+\.(log|jsonl)(\.\d+)?")  # the worker's, and those of `--log`


def check(directory: Path) -> list[CheckFinding]:
    """Return the findings, good and bad, in the order in which to mend them.

    Raises:
        StorageError: the directory holds no federation at all.
    """
    if not any((directory / name).exists() for name in (CONFIG, "keys")) and not (
        has_ledger(directory)
    ):
        raise StorageError(
            f"{directory} holds no federation (no {CONFIG}, no {LEDGER_NAME}, no keys).",
            action="Name its directory with --dir.",
        )
    server = _server(directory)
    found = list(_look(directory))
    if server.running:
        for _ in range(_PASSES - 1):
            if all(f.level is Severity.OK for f in found):
                break
            # A state may be pruned, a round closed, between two passes.
            again = list(_look(directory))
            stays = {(f.about, f.text) for f in found if f.level is not Severity.OK}
            found = [f for f in again if f.level is Severity.OK or (f.about, f.text) in stays]
    return [server.finding, *found]


@dataclass(frozen=True)
class _Server:
    running: bool
    finding: CheckFinding


def _server(directory: Path) -> _Server:
    try:
        control.ask(directory, "status", 5.0)
    except Unreachable:
        if host := host_of_server(directory):
            return _Server(True, fine("server", f"it is running on {host}; this check only reads"))
        return _Server(False, fine("server", "it is not running"))
    except Timeout as error:
        action = "If this persists, restart it; the round continues."
        return _Server(True, warning("server", error.message, action))
    except FcilError as error:
        return _Server(True, warning("server", error.message, error.action))
    return _Server(True, fine("server", "it is running; this check only reads"))


def _look(directory: Path) -> Iterator[CheckFinding]:
    yield from _config(directory)
    yield from _keys(directory / "keys")
    yield from _page_key(directory)
    yield from _api_tokens(directory)
    try:
        lost = describe_lost_frames(directory / LEDGER_NAME)
        if lost:
            action = "Restore a backup that holds more; or start the server without it."
            yield failure("ledger", lost, action)
        with Ledger(directory / LEDGER_NAME, read_only=True) as ledger:
            yield from _ledger(ledger)
            yield from _members(ledger)
            yield from _runs(ledger, directory)
    except FcilError as error:
        yield failed("ledger", error)
    yield from _queue(directory)
    yield from _leftovers(directory)
    yield from _disk(directory)


def _config(directory: Path) -> Iterator[CheckFinding]:
    path = directory / CONFIG
    try:
        load(path)
    except FcilError as error:
        yield failed("configuration", error)
        return
    yield fine("configuration", f"{CONFIG} is valid")


def _keys(folder: Path) -> Iterator[CheckFinding]:
    found: list[CheckFinding] = []
    public = None
    try:
        public = PrivateKeys.load(folder / "server.json").public
    except FcilError as error:
        found.append(failed("keys", error))
    root = None
    if (folder / "root.json").exists():
        try:
            root = RootKey.load(folder / "root.json")
        except FcilError as error:
            found.append(failed("keys", error))
    found += _certificate(folder / "certificate", public, root)
    if (folder / "server.next.json").exists():
        text = "a change of the server's keys was interrupted"
        found.append(warning("keys", text, "Start the server; it is finished then."))
    yield from found
    if public is not None and all(f.level is Severity.OK for f in found):
        where = "root key here" if root else "root key kept elsewhere"
        yield fine("keys", f"server key {public.fingerprint}, certified; {where}")


def _page_key(directory: Path) -> Iterator[CheckFinding]:
    """Check the dashboard's key; a server that serves no dashboard has none."""
    if (directory / KEY_NAME).exists():
        try:
            check_key(directory)
        except FcilError as error:
            yield failed("keys", error)


def _api_tokens(directory: Path) -> Iterator[CheckFinding]:
    """Check the file of the API's tokens; without tokens there is none."""
    try:
        read_tokens(directory)
    except FcilError as error:
        yield failed("keys", error)


def _queue(directory: Path) -> Iterator[CheckFinding]:
    """Check the runs that wait, if any do."""
    try:
        entries = RunQueue(directory).entries()
    except FcilError as error:
        yield failed("queue", error)
        return
    for entry in entries:
        if entry.refused:
            action = f"Submit it again, corrected, and: fcil-server run cancel {entry.number}"
            yield warning("queue", f"{entry.name} could not begin: {entry.refused}", action)


def _certificate(
    path: Path, public: PublicKeys | None, root: RootKey | None
) -> Iterator[CheckFinding]:
    if not path.exists():
        text = f"the certificate {path} is missing"
        if root is None:
            yield failure("keys", text, "Restore a backup: fcil-server restore")
        else:
            yield warning("keys", text, "Start the server; the root key issues another.")
        return
    try:
        certificate = Certificate.from_bytes(path.read_bytes())
        federation = root.federation if root else certificate.federation
        certified = certificate.verify(federation, time.time())
    except (FcilError, OSError) as error:
        text = error.message if isinstance(error, FcilError) else str(error)
        yield failure("keys", f"{path}: {text}", "Restore a backup: fcil-server restore")
        return
    if public is not None and certified != public:
        text = f"{path} certifies {certified.fingerprint}, the server's key is {public.fingerprint}"
        yield failure("keys", text, "Restore keys/ from a backup.")
    days = (certificate.not_after - time.time()) / 86_400
    if days < CERTIFICATE_DAYS:
        text = f"the certificate ends in {days:.0f} days"
        yield warning("keys", text, "Stop the server and run: fcil-server rotate-keys")


def _ledger(ledger: Ledger) -> Iterator[CheckFinding]:
    faults = ledger.database.faults()
    for fault in faults:
        action = "Stop the server and restore a backup: fcil-server restore FILE --dir NEW"
        yield failure("ledger", f"{ledger.database.place} is damaged: {fault}", action)
    if not faults:
        runs = count_of(len(ledger.runs.all()), "run")
        acts = count_of(ledger.audit.count(), "action")
        location = location_of(ledger.path)
        if location is not None:  # no file to look at
            yield fine("ledger", f"in Postgres, which checks its own files, {runs}, {acts}")
            return
        yield fine("ledger", f"intact, {runs}, {acts}")
    mode = stat.S_IMODE(ledger.path.stat().st_mode)
    if mode & 0o077:
        text = (
            f"{ledger.path} has permissions {mode:04o}, so other users can read it; expected 0600"
        )
        yield warning("ledger", text, f"Run: chmod 600 {ledger.path}")


def _members(ledger: Ledger) -> Iterator[CheckFinding]:
    rows = ledger.clients.all()
    bad = []
    for row in rows:
        if not row.curve:
            continue  # erased
        fields = {"curve": row.curve, "signing": row.signing, "sealing": row.sealing}
        try:
            PublicKeys.from_fields(fields)
        except FcilError as error:
            bad.append(f"{row.name} ({error.message})")
    if bad:
        text = f"members whose keys cannot be used: {', '.join(bad[:5])}"
        yield failure("members", text, "Revoke and enrol them again.")
    active = sum(r.may_join(ledger.now) for r in rows)
    yield fine("members", f"{active} may join, {len(rows) - active} may not any more")


def _runs(ledger: Ledger, directory: Path) -> Iterator[CheckFinding]:
    rows = ledger.runs.all()
    for row in rows:
        yield from check_run(ledger, directory, row, newest=row is rows[-1])
    folder = directory / "runs"
    known = {r.run_id for r in rows}
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    for name in names:
        if name not in known and not name.startswith("."):
            text = f"{folder / name} belongs to no run of the ledger"
            action = "A rollback or forget that was interrupted leaves such a folder; remove it."
            yield warning("leftovers", text, action)


def _leftovers(directory: Path) -> Iterator[CheckFinding]:
    there = [p for p in sorted(directory.iterdir()) if p.name not in _OURS]
    older = older_copies(directory)
    odd = [p for p in there if not _LOG.fullmatch(p.name) and p not in older]
    keys = directory / "keys"
    if keys.is_dir():
        odd += [p for p in sorted(keys.iterdir()) if p.name not in _KEYS]
    halves = {p for p in directory.rglob(".*.tmp") if is_temporary_name(p.name)}
    temporary = {p for p in halves if not is_written(p.name)}
    for path in sorted({*odd, *temporary}):
        if path in temporary:
            text, action = (
                f"{path} is an incomplete write",
                "The next start of the server removes it.",
            )
        elif path in halves:
            continue  # being written now
        elif path.name.startswith(f".{SCRATCH}."):
            text = f"{path} belongs to a backup that is being written or was killed"
            action = "The next backup to that folder removes the remains of killed ones."
        else:
            text, action = f"{path} is not a file of fcil", "Move it elsewhere if it is yours."
        yield warning("leftovers", text, action)


def _disk(directory: Path) -> Iterator[CheckFinding]:
    free = shutil.disk_usage(directory).free
    text = f"{free / 1e9:.1f} GB free on the disk of {directory}"
    if free < TOO_LOW_BYTES:
        yield failure("disk", text, "Free space now: no update can be stored.")
    elif free < LOW_BYTES:
        yield warning("disk", text, "Free space there.")
    else:
        yield fine("disk", text)
    if text := open_to_others(directory):
        yield replace(failure("disk", text), action=f"Run: chmod 700 {directory}")
