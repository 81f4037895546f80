"""What a check found: one line each, with what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fcil_protocol.errors import FcilError


class Level(StrEnum):
    """How bad it is; only a failure makes the command end with code 1."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        about: one word for what was looked at.
        action: what to do; empty where nothing is to be done.
    """

    level: Level
    about: str
    text: str
    action: str = ""


def fine(about: str, text: str) -> Finding:
    """Return a line that says that something is well."""
    return Finding(Level.OK, about, text)


def warning(about: str, text: str, action: str = "") -> Finding:
    """Return a line about something that works, and should be seen to."""
    return Finding(Level.WARNING, about, text, action)


def failure(about: str, text: str, action: str = "") -> Finding:
    """Return a line about something that is lost, or stops the server."""
    return Finding(Level.FAILURE, about, text, action)


def failed(about: str, error: FcilError) -> Finding:
    """Return an error as a line."""
    return failure(about, error.message, error.action or type(error).default_action())
