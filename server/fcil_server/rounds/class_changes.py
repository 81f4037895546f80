"""An operator's changes of class names, as fields of a command."""

from __future__ import annotations

from typing import Any

from fcil_protocol.errors import UsageError
from fcil_protocol.ids import RunId
from fcil_server.ledger.ledger import Ledger
from fcil_server.rounds.classes import ClassRegistry

CHANGES = ("admit", "alias", "rename", "hide", "show")


def apply_change(classes: ClassRegistry, fields: dict[str, Any]) -> list[str]:
    """Carry out one change; return the names that it changed.

    Args:
        classes: of the run.
        fields: ``change`` (one of `CHANGES`) and ``names``: the classes to admit (none: all that
            wait), hide or show; a name and the class that it stands for; or the old and the new
            name.

    Raises:
        UsageError: there is no such change or class, it would mix classes, or a masked round
            depends on their names.
    """
    change, names = fields.get("change"), [str(n) for n in fields.get("names") or ()]
    if change not in CHANGES:
        raise UsageError(
            f"expected a change of classes that is one of {', '.join(CHANGES)}, got {change!r}."
        )
    if change != "admit" and classes.are_signed():
        raise UsageError(
            "a masked round is under way, in which clients sign the names of classes.",
            action="Try again when it is over (fcil-server status).",
        )
    if change == "admit" and not names:
        names = [c.name for c in classes.awaiting_admission()]
    if change in ("alias", "rename"):
        if len(names) != 2:
            raise UsageError(f"{change} takes two names, got {len(names)}.")
        (classes.alias if change == "alias" else classes.rename)(*names)
        return names
    for name in names:
        if change == "admit":
            classes.admit(name)
        else:
            classes.hide(name, hidden=change == "hide")
    return names


def class_list(ledger: Ledger, run: RunId) -> list[dict[str, Any]]:
    """Return the run's class names as plain data: those with ids first, in order of ids."""
    by = {c.client_id: c.name for c in ledger.clients.all()}
    aliases: dict[str, list[str]] = {}
    for row in ledger.classes.alias_rows(run):
        aliases.setdefault(row.target, []).append(row.name)
    return [
        {
            "id": c.class_id,
            "name": c.name,
            "task": c.task,
            "planned_task": c.planned_task,
            "aliases": aliases.get(c.key, []),
            "hidden": c.hidden,
            "admitted": c.admitted,
            "first_seen_by": by.get(c.first_seen_by, "") if c.first_seen_by else "",
            "seen_at": c.seen_at,
        }
        for c in ledger.classes.all(run)
    ]
