"""A line of the doctor's report: finding, severity and remedy."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from fcil_protocol.errors import EXIT_OK, FcilError, InternalError, all_errors

# Subject of each line; docs/doctor.md has the same list.
IDS: dict[str, str] = {
    "machine.system": "system, processor, Python and fcil",
    "machine.cores": "cores that this user's processes may use",
    "machine.memory": "free memory against what the backbone and the images need",
    "machine.shared_gpu": "several clients of this user that compute on one GPU",
    "machine.jetson": "a Jetson, and what it needs",
    "engine.installed": "something that can run a backbone",
    "engine.torch": "torch, its build, and the devices that it sees",
    "engine.onnxruntime": "onnxruntime and its providers",
    "engine.providers": "providers that are listed and cannot be used",
    "engine.clash": "two distributions of onnxruntime on top of each other",
    "engine.device": "the device that a client would compute on",
    "backbone.which": "the backbone, and who names it",
    "backbone.digest": "its weights are those that are expected",
    "backbone.features": "this device computes the features that others compute",
    "backbone.speed": "images a second, and how long a pass over the images here takes",
    "images.folder": "the folder or zip file can be read as classes of images",
    "images.layout": "files and folders that the layout leaves out, and class names refused",
    "images.unreadable": "files that are no readable image",
    "images.classes": "classes and how many images each has",
    "images.small": "classes with too few images to learn or to measure",
    "images.duplicates": "the same image in several classes",
    "images.sides": "images for training, for tuning and for tests",
    "membership.enrolment": "which federation this folder is enrolled with",
    "membership.keys": "the client's private keys",
    "membership.certificate": "the server's certificate as this client keeps it",
    "membership.ticket": "the ticket given with --ticket",
    "network.path": "the addresses, and whether they are a relay's",
    "network.name": "names of the addresses can be resolved",
    "network.reach": "something answers there over TCP",
    "network.server": "it is the server, and it takes this client",
    "network.clock": "this machine's clock against the server's",
    "disk.space": "free space where the client keeps its state",
    "disk.inodes": "free inodes there",
    "disk.writable": "the client can write there",
    "disk.filesystem": "what sort of disk that is",
    "disk.sync": "how long the disk takes to keep something",
    "disk.temporary": "room for temporary files",
    "disk.caches": "what the client's directory holds",
    "disk.outbox": "updates that wait to be sent",
    "daemon.running": "whether the client runs, and what it does",
    "daemon.version": "it is of the installed version",
    "daemon.notes": "errors and warnings among what it said last",
    "daemon.unit": "the systemd unit",
}


class State(StrEnum):
    """Severity of a line."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Line:
    """One finding.

    Attributes:
        id: of `IDS`; stable.
        text: the finding.
        action: the next step; empty if none is needed.
        code: of a failure, the code of the error (docs/errors.md), which sets the exit code.
        client: name of the client concerned; empty for the machine.
    """

    id: str
    state: State
    text: str
    action: str = ""
    code: str = ""
    client: str = ""

    def __post_init__(self) -> None:
        assert self.id in IDS, self.id
        assert (self.state is State.FAILURE) == bool(self.code), self

    @property
    def section(self) -> str:
        """The part of the report that contains the line."""
        return self.id.partition(".")[0]

    def fields(self) -> dict[str, Any]:
        """Return the line JSON-ready."""
        return {**asdict(self), "state": self.state.value, "section": self.section}


def ok(name: str, text: str) -> Line:
    """Return a line without a problem."""
    return Line(name, State.OK, text)


def warning(name: str, text: str, action: str) -> Line:
    """Return a line about something that works and should be improved."""
    return Line(name, State.WARNING, text, action)


def failure(name: str, text: str, action: str, code: str) -> Line:
    """Return a line about a problem that stops a client."""
    return Line(name, State.FAILURE, text, action, code)


def skipped(name: str, why: str) -> Line:
    """Return a line about a check without an object or a means."""
    return Line(name, State.SKIPPED, why)


def fault(name: str, error: FcilError) -> Line:
    """Return an error as a failure."""
    action = error.action or type(error).default_action()
    return failure(name, error.message, action, error.code)


def guarded(names: Iterable[str], check: Callable[[], list[Line]]) -> list[Line]:
    """Return a check's lines; if it breaks, a failure in their place.

    Args:
        names: ids of its lines.
        check: returns its lines.
    """
    try:
        return check()
    except FcilError as error:
        return [fault(name, error) for name in list(names)[:1]]
    except Exception as error:
        at = traceback.extract_tb(sys.exc_info()[2])[-1]
        text = f"this check broke: {type(error).__name__}: {error} ({at.name}, line {at.lineno})."
        action = f"Report this. {InternalError.default_action()}"
        return [failure(name, text, action, InternalError.code) for name in list(names)[:1]]


def of_client(name: str, lines: Iterable[Line]) -> list[Line]:
    """Return lines with the name of the client concerned."""
    return [replace(line, client=name) for line in lines]


def exit_code(lines: Iterable[Line]) -> int:
    """Return the exit code of the first failure; 0 without one."""
    codes = {cls.code: cls.exit_code for cls in all_errors()}
    for line in lines:
        if line.state is State.FAILURE:
            return codes[line.code]
    return EXIT_OK


def megabytes(size: float) -> str:
    """Return a size for people."""
    if size >= 1e9:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def some(items: Iterable[str], most: int = 5) -> str:
    """Return the first few of a list, and the number of the others."""
    items = list(items)
    more = f"; and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more
