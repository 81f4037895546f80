"""How both command lines speak: data on stdout, words on stderr, errors with stable codes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from fcil_protocol.errors import EXIT_INTERNAL, FcilError

SCHEMA_VERSION = 1  # of the JSON envelope


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
    """
    if form is Format.TEXT:
        show()
    elif form is Format.JSON:
        envelope = {"schema_version": SCHEMA_VERSION, "status": status, "data": data}
        sys.stdout.write(json.dumps(envelope, indent=2) + "\n")
    else:
        for row in [data] if rows is None else rows:
            sys.stdout.write(json.dumps(row) + "\n")


@contextmanager
def errors(form: Format = Format.TEXT) -> Iterator[None]:
    """Turn an `FcilError` into its sentence and exit code; a defect into code 5."""
    try:
        yield
    except FcilError as error:
        _report(form, error.code, error.message, error.action or type(error).default_action())
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        raise SystemExit(0) from None
    except Exception as error:
        import traceback

        traceback.print_exc()
        _report(form, "internal", f"{type(error).__name__}: {error}", "Report this as a defect.")
        raise SystemExit(EXIT_INTERNAL) from None


def _report(form: Format, code: str, message: str, action: str) -> None:
    # A sentence may come from another machine.
    message, action = printable(message), printable(action)
    if form is not Format.TEXT:
        data = {"code": code, "message": message, "action": action}
        envelope = {"schema_version": SCHEMA_VERSION, "status": "error", "data": data}
        sys.stdout.write(json.dumps(envelope) + "\n")
    sys.stderr.write(f"error [{code}]: {message}\n")
    if action and action not in message:
        sys.stderr.write(f"  {action}\n")


_STYLES = {"info": "", "warning": "yellow", "error": "bold red"}


class Lines:
    """Timestamped lines on stderr for daemons, coloured on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    def __call__(self, at: float, level: str, text: str) -> None:
        from rich.text import Text

        clock = time.strftime("%H:%M:%S", time.localtime(at))
        word = "" if level == "info" else f"{level}: "
        line = Text.assemble((clock, "dim"), " ", (word + text, _STYLES.get(level, "")))
        self._console.print(line)


def printable(text: str) -> str:
    """Return text from a peer without control characters, for a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
