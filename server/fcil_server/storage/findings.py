"""Findings of a check: one line each, with what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fcil_protocol.errors import FcilError


class Severity(StrEnum):
    """Severity; only a failure makes the command end with code 1."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class CheckFinding:
    """One line.

    Attributes:
        about: one word for the subject.
        action: what to do; empty if nothing.
    """

    level: Severity
    about: str
    text: str
    action: str = ""


def fine(about: str, text: str) -> CheckFinding:
    """Return a line about a part in good order."""
    return CheckFinding(Severity.OK, about, text)


def warning(about: str, text: str, action: str = "") -> CheckFinding:
    """Return a line about a part that works, and needs attention."""
    return CheckFinding(Severity.WARNING, about, text, action)


def failure(about: str, text: str, action: str = "") -> CheckFinding:
    """Return a line about a loss, or a fault that stops the server."""
    return CheckFinding(Severity.FAILURE, about, text, action)


def failed(about: str, error: FcilError) -> CheckFinding:
    """Return an error as a line."""
    return failure(about, error.message, error.action or type(error).default_action())
