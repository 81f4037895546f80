"""Checks of a client's daemon: its process, its condition, and its systemd unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fcil_client.doctor.checks.facts import DaemonFacts, Skip
from fcil_client.doctor.checks.findings import Finding, failure, ok, some, warning
from fcil_client.doctor.checks.register import of_clients, of_facts
from fcil_protocol.errors import RunFailed, Timeout
from fcil_protocol.process.terminal import printable

check = of_clients(lambda client: client.daemon or Skip("there is no client here yet"))


def _status(facts: DaemonFacts) -> Mapping[str, Any]:
    if facts.status is None:
        raise Skip("the client is not running")
    return facts.status


@check("daemon.running", "the state of the client and its work")
def running(facts: DaemonFacts) -> Finding:
    if facts.hangs:
        remedy = "It is suspended (kill -CONT) or waiting for a disk; see its log and dmesg."
        return failure("the client is running but does not answer", remedy, Timeout)
    if facts.status is None:
        return warning("the client is not running", f"Start it: {facts.start}")
    work = f"{facts.status['work']} {facts.status.get('round') or ''}".strip()
    return ok(f"the client is running: link {facts.status['link']}, {work}")


@check("daemon.version", "the running client is the installed version")
def version(facts: DaemonFacts) -> Finding:
    runs = _status(facts).get("package") or "an earlier one"
    if runs == facts.installed:
        return ok(f"it is fcil {runs}, as installed")
    text = f"it is fcil {runs}; installed is {facts.installed}"
    return warning(text, "Restart the client: it resumes where it was.")


@check("daemon.notes", "errors and warnings among its last notes")
def notes(facts: DaemonFacts) -> Finding:
    notes = _status(facts).get("notes", ())
    bad = [n for n in notes if n["level"] in ("warning", "error")]
    if not bad:
        return ok("no error or warning among its last notes")
    words = [f"{n['level']}: {printable(str(n['text']))[:300]}" for n in bad[-3:]]
    text = f"{len(bad)} of its last notes are errors or warnings: {some(words)}"
    return warning(text, "Each says what to do; older ones may be resolved by now.")


@of_facts(lambda facts: facts.units)("daemon.unit", "the systemd unit")
def units(facts: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    if not facts:
        raise Skip("no systemd unit is called fcil-client")
    return [_unit(unit, fields) for unit, fields in sorted(facts.items())]


def _unit(unit: str, fields: Mapping[str, str]) -> Finding:
    state, sub = fields.get("ActiveState", ""), fields.get("SubState", "")
    restarts = fields.get("NRestarts", "0")
    text = f"{unit} is {state} ({sub})"
    text += f", restarted {restarts} times" if restarts not in ("", "0") else ""
    if state == "failed" or (state == "activating" and sub == "auto-restart"):
        text += f", result {fields.get('Result', '')}"
        log = f"See why: journalctl -u {unit} -n 50"
        return failure(text, f"{log}; then: systemctl restart {unit}", RunFailed)
    if state != "active":
        return warning(text, f"Start it: systemctl enable --now {unit}")
    if fields.get("UnitFileState") == "disabled":
        remedy = f"Start it at boot: systemctl enable {unit}"
        return warning(f"{text}, and does not start at boot", remedy)
    return ok(text)
