"""Query the file systems of a client's state, and write one small file there."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from fcil_client.doctor.checks.disk import DiskFacts, HoldingFacts, mount_of
from fcil_client.state.home import Home, state_home
from fcil_protocol.errors import FcilError
from fcil_protocol.storage.atomic_files import storage_errors, sync_data, write_all

_PARTS = {
    "parts": "parts", "incoming": "parts", "outbox": "outbox", "provisional": "state",
    "state.safetensors": "state", "model": "model", "model.json": "model",
}  # fmt: skip

_KINDS = ("parts", "model", "outbox", "state", "journal", "other")


def look() -> DiskFacts:
    """Gather the facts about the disk of the user's state directory."""
    place = _existing(state_home())
    status = os.statvfs(place)
    kind, mount, read_only = mount_of(_mounts(), str(place))
    sync_s, write_error = _try_to_keep(place)
    temporary, free, error = _temporary()
    return DiskFacts(
        place=str(place),
        free_bytes=status.f_bavail * status.f_frsize,
        free_inodes=status.f_favail if status.f_files else None,
        kind=kind,
        mount=mount,
        read_only=read_only,
        write_error=write_error,
        sync_s=sync_s,
        temporary=temporary,
        temporary_free_bytes=free,
        temporary_error=error,
    )


def _existing(place: Path) -> Path:
    place = place.absolute()
    while not place.exists():
        place = place.parent
    return place.resolve()


def _mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text(errors="replace")
    except OSError:
        return ""


def _try_to_keep(place: Path) -> tuple[float | None, FcilError | None]:
    """Write a file of 4 kB, sync it, and remove it; return the seconds, or the error."""
    began = time.monotonic()
    try:
        with storage_errors("write into", place):
            fd, name = tempfile.mkstemp(prefix=".fcil-doctor-", suffix=".tmp", dir=place)
            try:
                write_all(fd, bytes(4096))
                sync_data(fd)
            finally:
                os.close(fd)
                Path(name).unlink()
    except FcilError as error:
        return None, error
    return time.monotonic() - began, None


def _temporary() -> tuple[str, int, FcilError | None]:
    place = Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108  examined, not trusted
    try:
        with storage_errors("use the directory for temporary files,", place):
            place = Path(tempfile.gettempdir())
            status = os.statvfs(place)
    except FcilError as error:
        return str(place), 0, error
    return str(place), status.f_bavail * status.f_frsize, None


def look_holding(home: Home) -> HoldingFacts:
    """Sum up the files of a client's directory; files removed meanwhile are not counted."""
    sizes: dict[str, int] = dict.fromkeys(_KINDS, 0)
    for folder, _, files in os.walk(home.directory):
        for file in files:
            path = Path(folder) / file
            top = path.relative_to(home.directory).parts[0]
            what = "journal" if top.startswith("egress") else _PARTS.get(top, "other")
            sizes[what] += _size(path)
    times = [_written(home.outbox_path(digest)) for digest in home.outbox()]
    age_s = max(0.0, time.time() - min(times)) if times else 0.0
    return HoldingFacts(sizes, len(times), age_s)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()
