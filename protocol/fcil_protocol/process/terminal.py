"""Output of both command lines: data on stdout, messages on stderr, errors with stable codes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Literal, cast

from fcil_protocol.errors import (
    EXIT_INTERNAL,
    EXIT_USAGE,
    FcilError,
    InternalError,
    StorageError,
    UsageError,
)
from fcil_protocol.formats import with_iso_times
from fcil_protocol.process.completion import completing

SCHEMA_VERSION = 2  # of the JSON envelope; 1 had moments in unix seconds
PROGRESS_S = 2.0  # between two lines about the progress of a long work
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
    """Write a command's data to stdout in the requested form.

    Args:
        data: JSON-ready; its moments are unix seconds, and shown as `with_iso_times` says.
        form: text, json or jsonl.
        show: prints the text form.
        rows: values of one jsonl line each; the data itself if None.
        status: ``ok`` or ``error``.

    Raises:
        StorageError: stdout is a file on a full or faulty disk.
    """
    try:
        if form is Format.TEXT:
            show()
        elif form is Format.JSON:
            envelope: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "status": status}
            envelope["data"] = with_iso_times(data)
            sys.stdout.write(json.dumps(envelope, indent=2) + "\n")
        else:
            for row in [data] if rows is None else rows:
                sys.stdout.write(json.dumps(with_iso_times(row)) + "\n")
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        text = f"standard output cannot be written to: {error.strerror}."
        raise StorageError(
            text, action="Free space there, or send the output elsewhere."
        ) from error


@contextmanager
def errors(form: Format = Format.TEXT) -> Iterator[None]:
    """Turn an `FcilError` into its sentence and exit code; a defect into code 5.

    A defect's exception and traceback go into a file that its sentence names.
    """
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
        raise SystemExit(_end(form, error)) from None
    finally:
        # A stream that cannot be written now would fail at exit too, with a complaint from Python.
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            if not _flushes(stream):
                _discard_output(number)


def _end(form: Format, error: Exception) -> int:
    """Report an exception other than `FcilError` that ends a command; return its exit code."""
    import typer

    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, typer.Abort):
        _report(
            form, UsageError.code, "the question was not answered with yes.", "Nothing was done."
        )
        return EXIT_USAGE
    if isinstance(error, _usage_error()):
        return _refuse(form, error)
    from fcil_protocol.process.defects import extra_of, keep_details, place_of

    if extra := extra_of(error):
        text = f"this command needs a package that is not installed: {error.name}."  # type: ignore[attr-defined]
        _report(form, UsageError.code, text, f"Install it: pip install 'fcil[{extra}]'")
        return EXIT_USAGE
    kept = keep_details(error)
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    place = f" ({place_of(error)})" * bool(place_of(error))
    how = (
        f", with this file, which has the details: {kept}"
        if kept
        else ", with this line and the command."
    )
    _report(form, InternalError.code, what + place, f"This is a defect of fcil. Report it{how}")
    return EXIT_INTERNAL


def _usage_error() -> type[Exception]:
    """Return the base class of the argument parser's errors; typer exports only subclasses."""
    import typer

    found: type[Exception] = next(
        c for c in typer.BadParameter.__mro__ if c.__name__ == "UsageError"
    )
    return found


def _refuse(form: Format, error: Any) -> int:
    """Report an error of the argument parser, or show the help if it got no arguments."""
    text = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        if form is Format.TEXT:
            error.show()
            return EXIT_USAGE
        text = "a command is missing."
    context = getattr(error, "ctx", None)
    program = context.command_path if context else "the command"
    what = "commands" if hasattr(getattr(context, "command", None), "commands") else "options"
    _report(form, UsageError.code, " ".join(text.split()), f"List the {what}: {program} --help")
    return EXIT_USAGE


def _report(form: Format, code: str, message: str, action: str) -> None:
    # A sentence may come from another machine.
    message, action = printable(message), printable(action)
    if form is not Format.TEXT:
        data = {"code": code, "message": message, "action": action}
        envelope = {"schema_version": SCHEMA_VERSION, "status": "error", "data": data}
        with contextlib.suppress(OSError):  # no reader is left; the exit code remains
            sys.stdout.write(json.dumps(envelope) + "\n")
    words = _Patient()
    words.write(f"error [{code}]: {message}\n")
    if action and action not in message:
        words.write(f"  {action}\n")


_STYLES = {"info": "", "warning": "yellow", "error": "bold red"}


class Lines:
    """Timestamped lines on stderr for daemons, coloured on a terminal.

    The reader may be gone, or the disk full: the daemon continues without it.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self._out = _Patient()
        file = cast("IO[str]", self._out)
        self._console = Console(file=file, highlight=False, soft_wrap=True, emoji=False)

    @property
    def is_terminal(self) -> bool:
        """True if stderr is a terminal."""
        return self._console.is_terminal

    def __call__(self, at: float, level: str, text: str) -> None:
        """Show one line, if stderr accepts it; no error is raised."""
        clock = time.strftime("%H:%M:%S", time.localtime(at))
        word = "" if level == "info" else f"{level}: "
        if not self.is_terminal:  # no layout or colour: a tenth of the time
            self._out.write(f"{clock} {word}{text}\n")
            self._out.flush()
            return
        from rich.text import Text

        line = Text.assemble((clock, "dim"), " ", (word + text, _STYLES.get(level, "")))
        self._console.print(line)


def tell(fields: dict[str, Any]) -> None:
    """Print one JSON line of a daemon, if stdout accepts it; no error is raised."""
    out = _Patient("stdout")
    out.write(json.dumps(with_iso_times(fields)) + "\n")
    out.flush()


class _Patient:
    """A daemon's standard error or output, written as far as possible.

    A reader that is gone (EPIPE) or a terminal that was closed (EIO) does not come back: from then
    on lines are discarded. A full disk may have room again: only this line is lost.
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
                _discard_output(1 if self._name == "stdout" else 2)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def _discard_output(number: int) -> None:
    """Discard all further output of a standard stream."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, number)
    os.close(null)


def _complete_streams() -> None:
    """Open streams that the caller closed (``>&-``): a socket must not get a stream's number."""
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


def count_of(count: int, what: str) -> str:
    """Return ``1 round``, ``2 rounds``, ``3 classes``."""
    plural = "es" if what.endswith("s") else "s"
    return f"{count:,} {what}{'' if count == 1 else plural}"


def printable(text: str) -> str:
    """Return a peer's text without control characters, for a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def command(*words: object) -> str:
    """Return a command line for the person at the terminal to copy, with its words in quotes."""
    return printable(shlex.join(map(str, words)))


def say(text: str) -> None:
    """Write a sentence for the person at the terminal to stderr; stdout is for data."""
    print(printable(text), file=sys.stderr)  # noqa: T201


def say_at_times(text: Callable[[int, int], str]) -> Callable[[int, int], None]:
    """Return a callback that says how far a long work is, about every two seconds.

    Args:
        text: returns the sentence, given the number done and the total.
    """
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_S:
            last = time.monotonic()
            say(text(done, total))

    return report


def run_app(app: Any, program: str | None = None) -> None:
    """Run a typer command line; every exception in it ends as one sentence with fcil's code.

    Args:
        app: the `typer.Typer`.
        program: name in its help; None: the name that it was started with.

    Raises:
        SystemExit: always, with the exit code.
    """
    import typer

    form = _form_asked(sys.argv[1:])
    with errors(form), completing(program or Path(sys.argv[0]).name):
        # Help has panels and colours on a terminal, and is plain in a pipe.
        app.rich_markup_mode = "rich" if sys.stdout.isatty() else None
        # Not standalone: typer would show what its parser refuses, and its own traceback.
        code = typer.main.get_command(app).main(prog_name=program, standalone_mode=False)
        raise SystemExit(code if isinstance(code, int) else 0)


def _form_asked(arguments: Sequence[str]) -> Format:
    """Return the output form that arguments request, even if they do not parse."""
    values = [*arguments[1:], ""]
    for word, following in zip(arguments, values, strict=False):
        name, _, value = word.partition("=")
        if name == "--json":
            return Format.JSON
        if name == "--format":
            with contextlib.suppress(ValueError):
                return Format(value or following)
    return Format.TEXT
