"""Reports of defects: one small file for each.

They are in ``<state home>/fcil/defects/``, or in the temporary directory if that cannot be written,
readable by this user alone; only the newest are kept.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
import time
import traceback
from pathlib import Path

KEPT = 20  # a daemon that its supervisor restarts again and again must not fill the disk


def place_of(error: BaseException) -> str:
    """Return the innermost line of fcil that raised an error, as ``module.py:12``."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "fcil_" in f.filename] or list(frames)
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""


def keep_details(error: BaseException) -> Path | None:
    """Write the traceback and versions of an error to a file; None if no folder is writable."""
    lines = [
        f"fcil {own_version()}, Python {platform.python_version()}, {platform.platform()}",
        f"command: {' '.join([Path(sys.argv[0]).name, *sys.argv[1:2]])} ...",
        "",
        *traceback.format_exception(error),
    ]
    data = "\n".join(line.rstrip("\n") for line in lines).encode(errors="backslashreplace")
    for folder in _folders():
        with contextlib.suppress(OSError):
            return _write(folder, data + b"\n")
    return None


def own_version() -> str:
    """Return the version of the installed distribution."""
    # Every command reaches this module, and hardly any needs it: 20 ms of each start.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("fcil")
    except PackageNotFoundError:  # the packages are on the path, but were never installed
        return "of unknown version"


def extra_of(error: BaseException) -> str | None:
    """Return the extra of fcil with the package that an import lacks; None for other errors."""
    from importlib.metadata import PackageNotFoundError, requires

    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    lacking = re.sub("[-_.]+", "-", error.name.partition(".")[0]).lower()
    try:
        stated = requires("fcil") or []
    except PackageNotFoundError:
        return None
    for requirement in stated:
        found = re.match(r"([\w.-]+).*\bextra == .([\w-]+)", requirement)
        if found and re.sub("[-_.]+", "-", found[1]).lower() == lacking:
            return found[2]
    return None


def _folders() -> list[Path]:
    import tempfile

    import platformdirs

    state = Path(platformdirs.user_state_dir("fcil", appauthor=False)) / "defects"
    return [state, Path(tempfile.gettempdir())]


def _write(folder: Path, data: bytes) -> Path:
    if folder.name == "defects":
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = sorted(folder.glob("defect-*.txt"), key=lambda p: p.name)
        for old in kept[: max(0, len(kept) - KEPT + 1)]:
            old.unlink(missing_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    import tempfile

    number, name = tempfile.mkstemp(".txt", f"defect-{stamp}-", folder)
    with os.fdopen(number, "wb") as file:
        file.write(data)
    return Path(name)
