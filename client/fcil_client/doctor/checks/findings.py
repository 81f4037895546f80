"""Findings: a fact, its severity, and a remedy."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fcil_protocol.errors import EXIT_OK, FcilError, InternalError, all_errors


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        text: the fact.
        remedy: the next action; empty if none is needed.
        code: of a failure, the code of the error (docs/errors.md), which gives the exit code.
        id: of the check; stable. client: the client that it is about; empty for the machine. The
            register fills in both.
    """

    level: Level
    text: str
    remedy: str = ""
    code: str = ""
    id: str = ""
    client: str = ""

    def __post_init__(self) -> None:
        assert (self.level is Level.FAILURE) == bool(self.code), self

    @property
    def section(self) -> str:
        """The part of the report that it stands in."""
        return self.id.partition(".")[0]

    def fields(self) -> dict[str, Any]:
        """Return the finding JSON-ready."""
        return {
            "id": self.id,
            "state": self.level.value,
            "text": self.text,
            "action": self.remedy,
            "code": self.code,
            "client": self.client,
            "section": self.section,
        }


def ok(text: str) -> Finding:
    """All is well."""
    return Finding(Level.OK, text)


def warning(text: str, remedy: str) -> Finding:
    """It works, and something should be done."""
    return Finding(Level.WARNING, text, remedy)


def failure(text: str, remedy: str, error: type[FcilError]) -> Finding:
    """A client cannot work like this; the error gives the exit code."""
    return Finding(Level.FAILURE, text, remedy, error.code)


def skipped(why: object) -> Finding:
    """There was nothing to look at, or no way to."""
    return Finding(Level.SKIPPED, str(why))


def of_error(error: Exception) -> Finding:
    """Return an error as a failure; an unforeseen one is a defect of the doctor."""
    if isinstance(error, FcilError):
        remedy = error.action or error.default_action()
        return Finding(Level.FAILURE, error.message, remedy, error.code)
    at = traceback.extract_tb(sys.exc_info()[2])[-1]
    text = f"this check broke: {type(error).__name__}: {error} ({at.name}, line {at.lineno})."
    return failure(text, f"Report this. {InternalError.default_action()}", InternalError)


def exit_code(found: Iterable[Finding]) -> int:
    """Return the exit code of the first failure; 0 without one."""
    codes = {cls.code: cls.exit_code for cls in all_errors()}
    return next((codes[f.code] for f in found if f.level is Level.FAILURE), EXIT_OK)


def megabytes(size: float) -> str:
    """Return a size as people read it."""
    if size >= 1e9:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def some(items: Iterable[str], most: int = 5) -> str:
    """Return the first few of a list, and how many more there are."""
    items = list(items)
    more = f"; and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more
