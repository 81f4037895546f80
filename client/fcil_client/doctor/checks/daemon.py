"""Lines about a client's daemon: its state, version and notes, and its systemd unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fcil_client.doctor.checks.line import Line, failure, ok, skipped, some, warning
from fcil_protocol.errors import Timeout
from fcil_protocol.process.terminal import printable

NAMES = ("daemon.running", "daemon.version", "daemon.notes")


@dataclass(frozen=True)
class DaemonFacts:
    """Facts about a client's daemon.

    Attributes:
        status: its own status; None: it is not running, or does not answer.
        hangs: it is running and does not answer.
        installed: this doctor's version of fcil.
        data: the client's folder.
    """

    status: Mapping[str, Any] | None
    installed: str
    hangs: bool = False
    data: str = ""


def lines(facts: DaemonFacts) -> list[Line]:
    """Return the lines about a client's daemon."""
    return [_running(facts), _version(facts), _notes(facts)]


def no_client() -> list[Line]:
    """Return the lines for a device without a client."""
    return [skipped(name, "there is no client here yet") for name in NAMES]


def _running(facts: DaemonFacts) -> Line:
    name = "daemon.running"
    if facts.hangs:
        action = "It is stopped (kill -CONT), or waits for a disk; see its log and dmesg."
        text = "the client runs and does not answer"
        return failure(name, text, action, Timeout.code)
    if facts.status is None:
        text = "the client does not run"
        return warning(name, text, f"Start it: fcil-client join --data {printable(facts.data)}")
    doing = facts.status.get("round") or ""
    work = f"{facts.status['work']} {doing}".strip()
    return ok(name, f"the client runs: link {facts.status['link']}, {work}")


def _version(facts: DaemonFacts) -> Line:
    name = "daemon.version"
    if facts.status is None:
        return skipped(name, "the client does not run")
    runs = facts.status.get("package") or "an earlier one"
    if runs == facts.installed:
        return ok(name, f"it is fcil {runs}, as installed")
    text = f"it is fcil {runs}; installed is {facts.installed}"
    return warning(name, text, "Start the client again: it goes on where it was.")


def _notes(facts: DaemonFacts) -> Line:
    name = "daemon.notes"
    if facts.status is None:
        return skipped(name, "the client does not run")
    bad = [n for n in facts.status.get("notes", ()) if n["level"] in ("warning", "error")]
    if not bad:
        return ok(name, "no error or warning among its last notes")
    words = [f"{n['level']}: {printable(str(n['text']))[:300]}" for n in bad[-3:]]
    text = f"{len(bad)} of its last notes are errors or warnings: {some(words)}"
    return warning(name, text, "They say what to do; older ones may be over by now.")


@dataclass(frozen=True)
class UnitFacts:
    """Facts about the systemd units named fcil-client.

    Attributes:
        units: name -> its properties ActiveState, SubState, Result, NRestarts, UnitFileState.
        asked: systemd could be asked.
    """

    units: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    asked: bool = False


def unit_lines(facts: UnitFacts) -> list[Line]:
    """Return the lines about the systemd units of clients."""
    name = "daemon.unit"
    if not facts.asked:
        return [skipped(name, "there is no systemd to ask")]
    if not facts.units:
        return [skipped(name, "no systemd unit is called fcil-client")]
    return [_unit(name, unit, fields) for unit, fields in sorted(facts.units.items())]


def _unit(name: str, unit: str, fields: Mapping[str, str]) -> Line:
    state, sub = fields.get("ActiveState", ""), fields.get("SubState", "")
    restarts = fields.get("NRestarts", "0")
    text = f"{unit} is {state} ({sub})"
    text += f", started again {restarts} times" if restarts not in ("", "0") else ""
    log = f"See why: journalctl -u {unit} -n 50"
    if state == "failed" or (state == "activating" and sub == "auto-restart"):
        text += f", result {fields.get('Result', '')}"
        return failure(name, text, f"{log}; then: systemctl restart {unit}", "run_failed")
    if state != "active":
        return warning(name, text, f"Start it: systemctl enable --now {unit}")
    if fields.get("UnitFileState") == "disabled":
        action = f"Let it start with the machine: systemctl enable {unit}"
        return warning(name, f"{text}, and does not start with the machine", action)
    return ok(name, text)


def parse_units(text: str) -> dict[str, dict[str, str]]:
    """Return unit -> properties from the output of ``systemctl show``."""
    found: dict[str, dict[str, str]] = {}
    for block in text.strip().split("\n\n"):
        rows = (row.partition("=") for row in block.splitlines())
        fields = {key: value for key, _, value in rows}
        if fields.get("LoadState", "loaded") == "loaded" and fields.get("Id"):
            found[fields["Id"]] = fields
    return found
