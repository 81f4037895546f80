"""Checks of the disk under a client's state, and of what the client keeps there."""

from __future__ import annotations

from fcil_client.doctor.checks.facts import DiskFacts, HoldingFacts, Skip
from fcil_client.doctor.checks.findings import (
    Finding,
    failure,
    megabytes,
    of_error,
    ok,
    skipped,
    warning,
)
from fcil_client.doctor.checks.register import of_clients, of_facts
from fcil_protocol.errors import DiskFull, FcilError, StorageError

LEAST_BYTES = 50_000_000  # below, an update or a part may not fit any more
ENOUGH_BYTES = 500_000_000
LEAST_INODES = 1000
SLOW_SYNC_S = 0.25  # a round syncs a few times; cards of this sort take seconds for it
NETWORK = frozenset(("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "ceph", "afs"))
MEMORY = frozenset(("tmpfs", "ramfs"))
NO_RIGHTS = frozenset(("vfat", "exfat", "msdos", "ntfs", "fuseblk"))

check = of_facts(lambda facts: facts.disk)


@check("disk.space", "free space where the client keeps its state")
def space(facts: DiskFacts) -> Finding:
    text = f"{megabytes(facts.free_bytes)} free at {facts.place}"
    if facts.free_bytes < LEAST_BYTES:
        remedy = "Free space: a client keeps its updates and the model there."
        return failure(f"{text}: too little", remedy, DiskFull)
    if facts.free_bytes >= max(ENOUGH_BYTES, facts.held_bytes):
        return ok(text)
    text += f"; clients hold {megabytes(facts.held_bytes)} there" if facts.held_bytes else ""
    return warning(text, "Free space before it runs out, or move the state: set XDG_STATE_HOME.")


@check("disk.inodes", "free inodes there")
def inodes(facts: DiskFacts) -> Finding:
    if facts.free_inodes is None:
        return skipped("this file system does not count them")
    text = f"{facts.free_inodes:,} free"
    if facts.free_inodes >= LEAST_INODES:
        return ok(text)
    remedy = "Remove small files there: no new file can be made without an inode."
    return failure(text, remedy, DiskFull) if facts.free_inodes < 10 else warning(text, remedy)


@check("disk.writable", "the client can write there")
def writable(facts: DiskFacts) -> Finding:
    if isinstance(facts.kept_s, FcilError):
        return of_error(facts.kept_s)
    return ok(f"{facts.place} can be written to")


@check("disk.filesystem", "type of that disk and its mount")
def filesystem(facts: DiskFacts) -> Finding:
    if not facts.kind:
        return skipped("the system does not say which it is")
    text = f"{facts.kind}, mounted at {facts.mount}"
    move = "Put the state on a local disk: set XDG_STATE_HOME."
    if facts.read_only:
        remedy = "Mount it writable; after faults a disk is mounted read-only: check it first."
        return failure(f"{text}, read-only", remedy, StorageError)
    if facts.kind in MEMORY:
        text += ": in memory; keys and waiting updates are lost when the machine restarts"
        return warning(text, move)
    if facts.kind in NETWORK:
        text += ": a network share; locks may not work there, and it may be unreachable"
        return warning(text, move)
    if facts.kind in NO_RIGHTS:
        text += ": it has no file permissions, so key files cannot be private there"
        return failure(text, move, StorageError)
    return ok(text)


@check("disk.sync", "time that the disk needs to write and sync a small file")
def sync(facts: DiskFacts) -> Finding:
    if isinstance(facts.kept_s, FcilError):
        return skipped("nothing could be written")
    text = f"a small file is written and synced within {facts.kept_s * 1000:.0f} ms (measured once)"
    if facts.kept_s > SLOW_SYNC_S:
        remedy = "Each round waits for this a few times. Look for a worn card or a busy disk."
        return warning(text, remedy)
    return ok(text)


@check("disk.temporary", "free space for temporary files")
def temporary(facts: DiskFacts) -> Finding:
    if isinstance(facts.temporary_free_bytes, FcilError):
        return of_error(facts.temporary_free_bytes)
    text = f"{megabytes(facts.temporary_free_bytes)} free at {facts.temporary}"
    if facts.temporary_free_bytes < LEAST_BYTES:
        return warning(text, "Free space there, or set TMPDIR to another directory.")
    return ok(text)


# --- a client's own directory ---------------------------------------------------------------

holding = of_clients(lambda client: client.holding or Skip("there is no client here yet"))


@holding("disk.caches", "sizes of what the client's directory holds")
def caches(facts: HoldingFacts) -> Finding:
    listed = ", ".join(f"{what} {megabytes(n)}" for what, n in facts.sizes.items() if n)
    total = megabytes(sum(facts.sizes.values()))
    return ok(f"{total} in all{f': {listed}' if listed else ''}")


@holding("disk.outbox", "updates that wait to be sent")
def outbox(facts: HoldingFacts) -> Finding:
    if not facts.outbox:
        return ok("no update waits to be sent")
    waits = "updates wait" if facts.outbox > 1 else "update waits"
    text = f"{facts.outbox} {waits} to be sent, since {_age(facts.outbox_age_s)}"
    if facts.running:
        return ok(f"{text}; the client offers it as soon as it can")
    return warning(text, "Start the client: it sends it, unless its round is over by then.")


def _age(seconds: float) -> str:
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.0f} days"
    return f"{seconds / 3600:.0f} hours" if seconds >= 7200 else f"{max(0, seconds) / 60:.0f} min"
