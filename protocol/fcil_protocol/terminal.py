"""How both command lines speak: data on stdout, words on stderr, errors with stable codes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import IO, Any, Literal, cast

from fcil_protocol.errors import EXIT_INTERNAL, EXIT_USAGE, FcilError, StorageError

SCHEMA_VERSION = 1  # of the JSON envelope
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Format(StrEnum):
    """Forms of output."""

    TEXT = "text"
    JSON = "json"
    JSONL = "jsonl"


def chosen(form: Format, json_flag: bool) -> Format:
    """Combine ``--format`` and its short form ``--json``."""
    return Format.JSON if json_flag else form


def emit(
    data: Any,
    form: Format,
    show: Callable[[], None],
    *,
    rows: Sequence[Any] | None = None,
    status: str = "ok",
) -> None:
    """Write a command's data to stdout in the form asked for.

    Args:
        data: JSON-ready.
        form: text, json or jsonl.
        show: prints the text form.
        rows: what becomes one line each in jsonl; the data itself if None.
        status: ``ok`` or ``error``.

    Raises:
        StorageError: stdout is a file on a full or faulty disk.
    """
    try:
        if form is Format.TEXT:
            show()
        elif form is Format.JSON:
            envelope = {"schema_version": SCHEMA_VERSION, "status": status, "data": data}
            sys.stdout.write(json.dumps(envelope, indent=2) + "\n")
        else:
            for row in [data] if rows is None else rows:
                sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        text = f"standard output cannot be written to: {error.strerror}."
        raise StorageError(text, action="Free space there, or give it another place.") from error


@contextmanager
def errors(form: Format = Format.TEXT) -> Iterator[None]:
    """Turn an `FcilError` into its sentence and exit code; a defect into code 5."""
    _complete_streams()
    try:
        yield
    except FcilError as error:
        _report(form, error.code, error.message, error.action or type(error).default_action())
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # `| head` has read enough
        raise SystemExit(0) from None
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich's way to say so
            raise SystemExit(0) from None
        raise
    except Exception as error:
        import traceback

        traceback.print_exc(file=cast("IO[str]", _Patient()))
        _report(form, "internal", f"{type(error).__name__}: {error}", "Report this as a defect.")
        raise SystemExit(EXIT_INTERNAL) from None
    finally:
        # What cannot be written now cannot be at the end either, where Python would complain.
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            if not _flushes(stream):
                _to_nowhere(number)


def _report(form: Format, code: str, message: str, action: str) -> None:
    # A sentence may come from another machine.
    message, action = printable(message), printable(action)
    if form is not Format.TEXT:
        data = {"code": code, "message": message, "action": action}
        envelope = {"schema_version": SCHEMA_VERSION, "status": "error", "data": data}
        with contextlib.suppress(OSError):  # nobody reads it; the exit code remains
            sys.stdout.write(json.dumps(envelope) + "\n")
    words = _Patient()
    words.write(f"error [{code}]: {message}\n")
    if action and action not in message:
        words.write(f"  {action}\n")


_STYLES = {"info": "", "warning": "yellow", "error": "bold red"}


class Lines:
    """Timestamped lines on stderr for daemons, coloured on a terminal.

    Whoever read them may be gone, and the disk behind them full: a daemon goes on without.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self._out = _Patient()
        file = cast("IO[str]", self._out)
        self._console = Console(file=file, highlight=False, soft_wrap=True, emoji=False)

    @property
    def is_terminal(self) -> bool:
        """Whether somebody sits in front of it."""
        return self._console.is_terminal

    def __call__(self, at: float, level: str, text: str) -> None:
        """Show one line if there is somebody to show it to; nothing is raised."""
        clock = time.strftime("%H:%M:%S", time.localtime(at))
        word = "" if level == "info" else f"{level}: "
        if not self.is_terminal:  # nothing to lay out or to colour: a tenth of the time
            self._out.write(f"{clock} {word}{text}\n")
            self._out.flush()
            return
        from rich.text import Text

        line = Text.assemble((clock, "dim"), " ", (word + text, _STYLES.get(level, "")))
        self._console.print(line)


def tell(fields: dict[str, Any]) -> None:
    """Print one JSON line of a daemon, if there is somebody to read it; nothing is raised."""
    out = _Patient("stdout")
    out.write(json.dumps(fields) + "\n")
    out.flush()


class _Patient:
    """A daemon's standard error, or output, as far as it can be written to.

    A reader that is gone (EPIPE) or a terminal that was closed (EIO) does not come back: from
    then on the lines go nowhere. A full disk may have room again: only this line is lost.
    """

    encoding = "utf-8"

    def __init__(self, name: Literal["stdout", "stderr"] = "stderr") -> None:
        self._name = name

    @property
    def _stream(self) -> IO[str]:
        stream: IO[str] = getattr(sys, self._name)
        return stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                _to_nowhere(1 if self._name == "stdout" else 2)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def _to_nowhere(number: int) -> None:
    """Let what is written to a standard stream from now on vanish."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, number)
    os.close(null)


def _complete_streams() -> None:
    """Open what the caller closed (``>&-``): a socket must not get the number of a stream."""
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(null, True)
    os.close(null)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _flushes(stream: IO[str]) -> bool:
    try:
        stream.flush()
    except OSError:
        return False
    return True


def printable(text: str) -> str:
    """Return text from a peer without control characters, for a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def run_app(app: Any) -> None:
    """Run a typer command line; arguments that it refuses end with our code for them, not 2."""
    import typer

    for kind in typer.BadParameter.__mro__:
        if kind.__name__ == "UsageError":
            kind.exit_code = EXIT_USAGE  # type: ignore[attr-defined]
    app()
