"""A daemon's log file: one line per note, 0600, self-rotating; its failure never stops a daemon.

The file is renamed to ``FILE.1`` (and that to ``FILE.2`` and so on) when it is full. An outside
tool may rename it instead and send SIGHUP: the daemon then reopens the name. A line that cannot be
written is lost and counted, and the count is written with the next successful line: a full disk for
the log does not stop the daemon.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fcil_protocol.errors import StorageError
from fcil_protocol.process.cli_options import LOG_PANEL
from fcil_protocol.process.terminal import Lines, printable
from fcil_protocol.storage.atomic_files import storage_errors, write_all

KEPT_LOGS = 5  # older files in addition to the current one


class LogFormat(StrEnum):
    """Forms of a line."""

    TEXT = "text"
    JSONL = "jsonl"


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """The options of a daemon's log file."""

    log: Annotated[
        Path | None,
        typer.Option(
            "--log",
            help="Write the log into this file; SIGHUP reopens it.",
            rich_help_panel=LOG_PANEL,
        ),
    ] = None
    log_format: Annotated[
        LogFormat,
        typer.Option(
            "--log-format", help="Format of the lines in the log file.", rich_help_panel=LOG_PANEL
        ),
    ] = LogFormat.TEXT
    log_mb: Annotated[
        int,
        typer.Option(
            "--log-mb",
            min=0,
            help=f"Rotate at this size, keep {KEPT_LOGS}; 0: never.",
            rich_help_panel=LOG_PANEL,
        ),
    ] = 10

    def open(self) -> LogFile | None:
        """Open the log that the command line names, if it names one.

        Raises:
            StorageError: it cannot be opened.
        """
        if self.log is None:
            return None
        return LogFile(self.log, self.log_format, self.log_mb * 1_000_000)


class LogFile:
    """One open log file.

    Args:
        path: its name; older files get a number after it.
        form: text or one JSON object per line.
        max_bytes: size at which it is rotated; 0: never.

    Raises:
        StorageError: it cannot be opened, or is no regular file.
    """

    def __init__(
        self, path: Path, form: LogFormat = LogFormat.TEXT, max_bytes: int = 10_000_000
    ) -> None:
        self._path = path
        self._form = form
        self._max_bytes = max_bytes
        self._lost = 0
        self._torn = False
        self._fd = -1
        with storage_errors("open the log", path):
            self._fd = _opened(path)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def reopen(self) -> None:
        """Reopen the name, after another program renamed the file.

        Raises:
            StorageError: it cannot be opened, or is no regular file; the old file stays in use.
        """
        with storage_errors("open the log", self._path):
            fd = _opened(self._path)
            self._close()
            self._fd, self._torn = fd, False

    def write(self, at: float, level: str, text: str, code: str = "") -> None:
        """Append one line; a line that cannot be written is counted; no error is raised.

        Args:
            at: unix seconds.
            level: ``info``, ``warning`` or ``error``.
            text: the message, one line.
            code: stable name of the event, if it has one.
        """
        line = self._line(at, level, text, code)
        if self._lost:
            line = self._line(at, "warning", f"{self._lost} lines before this one were lost") + line
        if self._torn:  # after a partial line that did not fit
            line = "\n" + line
        try:
            self._append(line.encode(errors="replace"))
        except (OSError, StorageError):
            self._lost += 1  # reported in the next line that can be written
            return
        self._lost, self._torn = 0, False

    def _append(self, data: bytes) -> None:
        if self._fd < 0:
            self._fd = _opened(self._path)
        size = os.fstat(self._fd).st_size
        if self._max_bytes and size and size + len(data) > self._max_bytes:
            self._rotate()
        start = os.fstat(self._fd).st_size
        try:
            write_all(self._fd, data)
        except OSError:
            self._torn = self._torn or os.fstat(self._fd).st_size > start
            raise

    def _rotate(self) -> None:
        """Rename the older files and this one, and reopen the name.

        If that is not permitted the file keeps growing: a line is worth more than its place.
        """
        names = [self._path] + [
            self._path.with_name(f"{self._path.name}.{n}") for n in range(1, KEPT_LOGS + 1)
        ]
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            with contextlib.suppress(OSError):  # fewer files exist so far, or it is not permitted
                newer.replace(older)
        self._close()
        self._fd = _opened(self._path)

    def _line(self, at: float, level: str, text: str, code: str = "") -> str:
        moment = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
        moment = moment.replace("+00:00", "Z")
        if self._form is LogFormat.JSONL:
            fields = {"time": moment, "level": level, "code": code, "text": text}
            return json.dumps({k: v for k, v in fields.items() if v}) + "\n"
        return f"{moment} {level.upper():7} {text}\n"

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # every line was handed to the system before
            self._close()


def _opened(path: Path) -> int:
    """Open a regular file, readable by its owner alone; do not wait for a pipe's reader."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a pipe without a reader, a socket
            raise _no_file(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _no_file(path)
    with contextlib.suppress(OSError):  # created by another user: its mode is that user's choice
        os.fchmod(fd, 0o600)
    return fd


def _no_file(path: Path) -> StorageError:
    return StorageError(
        f"cannot open the log {path}: expected a file, got a pipe or a device.",
        action="Name a file with --log; without it the lines go to standard error.",
    )


class DaemonOutput:
    """Writes a daemon's notes to the terminal, to the log file, or to both.

    With a log file, standard error gets the lines only if it is a terminal: a supervisor would
    store them a second time.
    """

    def __init__(self, log: LogFile | None) -> None:
        lines = Lines()
        self._log = log
        self._show: Callable[[float, str, str], None] | None = lines
        if log is not None and not lines.is_terminal:
            self._show = None
        if log is not None:
            logging.getLogger().addHandler(_Handler(log))

    def __call__(self, at: float, level: str, text: str, code: str = "") -> None:
        """Write one line; no error is raised."""
        text = printable(text)
        if self._log is not None:
            self._log.write(at, level, text, code)
        if self._show is not None:
            self._show(at, level, text)


class _Handler(logging.Handler):
    """Writes log records of libraries and fcil's own defects, with tracebacks, to the log file."""

    def __init__(self, log: LogFile) -> None:
        super().__init__(logging.WARNING)
        self._file = log

    def emit(self, record: logging.LogRecord) -> None:
        level = "error" if record.levelno >= logging.ERROR else "warning"
        for line in self.format(record).splitlines():
            self._file.write(record.created, level, printable(line), record.name)
