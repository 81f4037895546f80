"""Ask the system what machine this is, what its disk is like, and how its units are."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import psutil

from fcil_adapters.resources import machine as limits
from fcil_adapters.resources.machine import small_text
from fcil_client.doctor.checks.facts import DiskFacts, MachineFacts, Skip
from fcil_client.rounds.resources import resources
from fcil_client.state.home import state_home
from fcil_protocol.errors import FcilError
from fcil_protocol.storage.atomic_files import storage_errors, sync_data, write_all

ANSWER_S = 3.0  # for systemd to say how units are
_PROPERTIES = "Id,LoadState,ActiveState,SubState,Result,NRestarts,UnitFileState"


def look_machine(root: Path = Path("/")) -> MachineFacts:
    """Gather what can be known without asking anybody.

    Args:
        root: where the system's own files lie.
    """
    memory = psutil.virtual_memory()
    share = limits.share(root)
    return MachineFacts(
        system=platform.system(),
        release=platform.release(),
        arch=platform.machine(),
        python=platform.python_version(),
        fcil=version("fcil"),
        cores=limits.allowed_cores(),
        quota=share.quota,
        total_bytes=int(memory.total),
        available_bytes=int(memory.available),
        limit_bytes=share.memory_bytes,
        limit_used_bytes=share.used_bytes,
        jetson=jetson_model(small_text(root / "proc/device-tree/model")),
        l4t=l4t_release(small_text(root / "etc/nv_tegra_release")),
        keep_bytes=resources().image_bytes,
    )


def jetson_model(text: str) -> str:
    """Return the board's name from /proc/device-tree/model if it is a Jetson's."""
    name = text.replace("\0", "").strip()
    known = ("Jetson", "Orin", "Xavier", "Tegra", "Thor")
    return name if any(word in name for word in known) else ""


def l4t_release(text: str) -> str:
    """Return ``L4T 36.4.0`` from the first line of /etc/nv_tegra_release."""
    match = re.search(r"R(\d+).*REVISION: ([\d.]+)", text)
    return f"L4T {match[1]}.{match[2]}" if match else ""


def nvidia_driver(root: Path = Path("/")) -> str:
    """Return the version of NVIDIA's kernel driver; empty without one."""
    words = small_text(root / "proc/driver/nvidia/version").splitlines()
    if not words:
        return "" if not (root / "dev/nvidiactl").exists() else "of an unknown version"
    numbers = [word for word in words[0].split() if word[:1].isdigit() and "." in word]
    return numbers[0] if numbers else "of an unknown version"


# --- the disk -------------------------------------------------------------------------------


def look_disk(held_bytes: int = 0) -> DiskFacts:
    """Ask the file systems under the user's state directory, and write one small file there."""
    place = state_home().absolute()
    while not place.exists():
        place = place.parent
    place = place.resolve()
    status = os.statvfs(place)
    kind, mount, read_only = mount_of(small_text(Path("/proc/self/mountinfo")), str(place))
    temporary, temporary_free = _temporary()
    return DiskFacts(
        place=str(place),
        free_bytes=status.f_bavail * status.f_frsize,
        free_inodes=status.f_favail if status.f_files else None,
        kind=kind,
        mount=mount,
        read_only=read_only,
        kept_s=_try_to_keep(place),
        temporary=temporary,
        temporary_free_bytes=temporary_free,
        held_bytes=held_bytes,
    )


def mount_of(table: str, path: str) -> tuple[str, str, bool]:
    """Return file system, mount point and read-only flag of an absolute path.

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
        if inside and len(at) >= len(found[1]):  # of two on one place the later one is on top
            options = {*fields[5].split(","), *(behind[2].split(",") if len(behind) > 2 else ())}
            found = (behind[0], at, "ro" in options)
    return found


def _unescape(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def _try_to_keep(place: Path) -> float | FcilError:
    """Write a file of 4 kB, sync it, and remove it; return the seconds, or why not."""
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
        return error
    return time.monotonic() - began


def _temporary() -> tuple[str, int | FcilError]:
    place = Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108  asked about, not trusted
    try:
        with storage_errors("use the directory for temporary files,", place):
            place = Path(tempfile.gettempdir())
            status = os.statvfs(place)
    except FcilError as error:
        return str(place), error
    return str(place), status.f_bavail * status.f_frsize


# --- systemd --------------------------------------------------------------------------------


def look_units() -> Mapping[str, Mapping[str, str]] | Skip:
    """Ask systemd about units that are called fcil-client, of the system and of this user."""
    nothing = Skip("systemd is not available")
    systemctl = shutil.which("systemctl")
    if systemctl is None:
        return nothing
    found: dict[str, dict[str, str]] | None = None
    for whose in ("--system", "--user"):
        command = [systemctl, whose, "show", "fcil-client*", f"--property={_PROPERTIES}"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=ANSWER_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            found = (found or {}) | parse_units(done.stdout)
    return nothing if found is None else found


def parse_units(text: str) -> dict[str, dict[str, str]]:
    """Return unit -> properties from what ``systemctl show`` prints."""
    found: dict[str, dict[str, str]] = {}
    for block in text.strip().split("\n\n"):
        rows = (row.partition("=") for row in block.splitlines())
        fields = {key: value for key, _, value in rows}
        if fields.get("LoadState", "loaded") == "loaded" and fields.get("Id"):
            found[fields["Id"]] = fields
    return found
