"""Lines about the disk of a client's state."""

from __future__ import annotations

from dataclasses import dataclass, field

from fcil_client.doctor.checks.line import Line, failure, fault, megabytes, ok, skipped, warning
from fcil_protocol.errors import DiskFull, FcilError, StorageError

NAMES = (
    "disk.space", "disk.inodes", "disk.writable", "disk.filesystem", "disk.sync",
    "disk.temporary", "disk.caches", "disk.outbox",
)  # fmt: skip
LEAST_BYTES = 50_000_000  # below this, an update or a part may not fit any more
ENOUGH_BYTES = 500_000_000
LEAST_INODES = 1000
SLOW_SYNC_S = 0.25  # a round syncs a few times; cards of this sort take seconds for it
NETWORK = frozenset(("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "ceph", "afs"))
MEMORY = frozenset(("tmpfs", "ramfs"))
NO_RIGHTS = frozenset(("vfat", "exfat", "msdos", "ntfs", "fuseblk"))


@dataclass(frozen=True)
class DiskFacts:
    """Facts about the file systems.

    Attributes:
        place: the directory examined: the state's, or the nearest existing one above it.
        free_bytes, free_inodes: available to this user; inodes None: not counted.
        kind: of the file system; empty: unknown. read_only: mounted so.
        write_error: error of a test write; sync_s: seconds until a small file was on disk.
        temporary: directory of temporary files; temporary_free_bytes there; temporary_error.
    """

    place: str
    free_bytes: int
    free_inodes: int | None
    kind: str = ""
    mount: str = ""
    read_only: bool = False
    write_error: FcilError | None = None
    sync_s: float | None = None
    temporary: str = ""
    temporary_free_bytes: int = 0
    temporary_error: FcilError | None = None


def lines(facts: DiskFacts, held_bytes: int = 0) -> list[Line]:
    """Return the lines about the disk of a client's state.

    Args:
        facts: facts of the disk.
        held_bytes: size of this user's clients there already; they may grow by as much again.
    """
    return [
        _space(facts, held_bytes),
        _inodes(facts),
        _writable(facts),
        _filesystem(facts),
        _sync(facts),
        _temporary(facts),
    ]


def _space(facts: DiskFacts, held_bytes: int) -> Line:
    name = "disk.space"
    text = f"{megabytes(facts.free_bytes)} free at {facts.place}"
    if facts.free_bytes < LEAST_BYTES:
        action = "Free space: a client keeps its updates and the model there."
        return failure(name, f"{text}: too little", action, DiskFull.code)
    if facts.free_bytes < max(ENOUGH_BYTES, held_bytes):
        held = f"; clients hold {megabytes(held_bytes)} there" if held_bytes else ""
        action = "Free space before it runs out, or move the state: set XDG_STATE_HOME."
        return warning(name, f"{text}{held}", action)
    return ok(name, text)


def _inodes(facts: DiskFacts) -> Line:
    name = "disk.inodes"
    if facts.free_inodes is None:
        return skipped(name, "this file system does not count them")
    text = f"{facts.free_inodes:,} free"
    if facts.free_inodes < LEAST_INODES:
        action = "Remove small files there: no new file can be made without an inode."
        bad = failure if facts.free_inodes < 10 else None
        return bad(name, text, action, DiskFull.code) if bad else warning(name, text, action)
    return ok(name, text)


def _writable(facts: DiskFacts) -> Line:
    name = "disk.writable"
    if facts.write_error is not None:
        return fault(name, facts.write_error)
    return ok(name, f"{facts.place} can be written to")


def _filesystem(facts: DiskFacts) -> Line:
    name = "disk.filesystem"
    if not facts.kind:
        return skipped(name, "the system does not say which it is")
    text = f"{facts.kind}, mounted at {facts.mount}"
    move = "Put the state on a local disk: set XDG_STATE_HOME."
    if facts.read_only:
        action = "Mount it writable; after faults a disk is mounted read-only: check it first."
        return failure(name, f"{text}, read-only", action, StorageError.code)
    if facts.kind in MEMORY:
        text += ": memory; keys and waiting updates are gone at the next start of the machine"
        return warning(name, text, move)
    if facts.kind in NETWORK:
        text += ": a network share; locks may not hold there, and it may be away"
        return warning(name, text, move)
    if facts.kind in NO_RIGHTS:
        text += ": it keeps no permissions, so key files cannot be private there"
        return failure(name, text, move, StorageError.code)
    return ok(name, text)


def _sync(facts: DiskFacts) -> Line:
    name = "disk.sync"
    if facts.sync_s is None:
        return skipped(name, "nothing could be written")
    text = f"a small file is kept within {facts.sync_s * 1000:.0f} ms (measured once)"
    if facts.sync_s > SLOW_SYNC_S:
        action = "Rounds wait for that a few times each. Look for a worn card or a busy disk."
        return warning(name, text, action)
    return ok(name, text)


def _temporary(facts: DiskFacts) -> Line:
    name = "disk.temporary"
    if facts.temporary_error is not None:
        return fault(name, facts.temporary_error)
    text = f"{megabytes(facts.temporary_free_bytes)} free at {facts.temporary}"
    if facts.temporary_free_bytes < LEAST_BYTES:
        return warning(name, text, "Free space there, or set TMPDIR to another directory.")
    return ok(name, text)


# --- a client's own directory ---------------------------------------------------------------


@dataclass(frozen=True)
class HoldingFacts:
    """Contents of a client's directory.

    Attributes:
        sizes: bytes by type: parts, model, outbox, state, journal, other.
        outbox: number of waiting updates. outbox_age_s: age of the oldest.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    outbox: int = 0
    outbox_age_s: float = 0.0


def holding_lines(facts: HoldingFacts, *, running: bool) -> list[Line]:
    """Return the lines about a client's directory and its waiting updates."""
    listed = ", ".join(f"{what} {megabytes(n)}" for what, n in facts.sizes.items() if n)
    total = megabytes(sum(facts.sizes.values()))
    caches = ok("disk.caches", f"{total} in all{f': {listed}' if listed else ''}")
    if not facts.outbox:
        return [caches, ok("disk.outbox", "no update waits to be sent")]
    waits = "updates wait" if facts.outbox > 1 else "update waits"
    text = f"{facts.outbox} {waits} to be sent, since {_age(facts.outbox_age_s)}"
    if running:
        return [caches, ok("disk.outbox", f"{text}; the client offers it as soon as it can")]
    action = "Start the client: it sends it, unless its round is over by then."
    return [caches, warning("disk.outbox", text, action)]


def no_holdings() -> list[Line]:
    """Return the lines for a device without a client's directory."""
    why = "there is no client here yet"
    return [skipped("disk.caches", why), skipped("disk.outbox", why)]


def _age(seconds: float) -> str:
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.0f} days"
    return f"{seconds / 3600:.0f} hours" if seconds >= 7200 else f"{max(0, seconds) / 60:.0f} min"


# --- system files ---------------------------------------------------------------------------


def mount_of(table: str, path: str) -> tuple[str, str, bool]:
    """Return file system, mount point and True if it is read-only, for an absolute path.

    Args:
        table: the text of /proc/self/mountinfo.
        path: resolved.
    """
    found = ("", "", False)
    for row in table.splitlines():
        fields = row.split(" ")
        if "-" not in fields or len(fields) < 6:
            continue
        at = _unescape(fields[4])
        behind = fields[fields.index("-") + 1 :]
        inside = path == at or path.startswith(at.rstrip("/") + "/")
        if inside and len(at) >= len(found[1]):  # of two on one place the later is on top
            options = {*fields[5].split(","), *(behind[2].split(",") if len(behind) > 2 else ())}
            found = (behind[0], at, "ro" in options)
    return found


def _unescape(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
