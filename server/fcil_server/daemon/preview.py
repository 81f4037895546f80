"""The run's terms for a client's dry run (`fcil-client join`), over the control socket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fcil_protocol.messages.messages import NONCE_BYTES
from fcil_server.sessions import handshake

if TYPE_CHECKING:
    from fcil_server.runs.active_run import OpenRun

# Fields of a Welcome that do not belong to a session.
_TERMS = {
    "protocol", "run", "method", "method_version", "method_package", "hparams", "schema_digest",
    "backbone", "needs_backbone", "max_payload_bytes", "credit", "privacy", "half",
}  # fmt: skip


def preview_terms(run: OpenRun) -> dict[str, Any]:
    """Return the terms of the run, its rounds, and the class names of its tasks.

    The caller is the operator; clients of other users learn only names that they hold.

    Returns:
        ``terms`` (fields of a Welcome), ``rounds_per_task``, ``evaluate``, ``tasks`` (a list of
        ``classes`` and ``closed``), and ``waiting``: names for the next task, None if tasks are
        listed.
    """
    run_context = run.coordinator.context
    told = handshake.welcome(run.terms, nonce=bytes(NONCE_BYTES), ready=False, verdict=None)
    rows = run_context.ledger.classes.all(run_context.run)
    opened = run_context.ledger.tasks.all(run_context.run)
    listed = run_context.classes.listed_tasks()
    tasks = []
    for number in range(max(listed, len(opened))):
        names = [c.name for c in rows if (c.planned_task if listed else c.task) == number]
        closed = number < len(opened) and opened[number].closed_at is not None
        tasks.append({"classes": names, "closed": closed})
    return {
        "terms": told.model_dump(include=_TERMS),
        "rounds_per_task": run_context.config.round.rounds_per_task,
        "evaluate": run_context.config.run.evaluate,
        "tasks": tasks,
        "waiting": None if listed else [c.name for c in run_context.classes.pending()],
    }
