"""Commands of the control socket: the operator's and local enrolment."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fcil_protocol.errors import FcilError, NotNow, UsageError
from fcil_protocol.messages.messages import NONCE_BYTES
from fcil_protocol.trust.keys import PublicKeys
from fcil_server.daemon.api_access import token_new, token_revoke
from fcil_server.daemon.live import gauges
from fcil_server.daemon.page_access import page_enter, page_link, page_sign_out
from fcil_server.daemon.status import status
from fcil_server.federation.api_tokens import check_token_name
from fcil_server.federation.operator_text import check_ticket_lifetime
from fcil_server.federation.roster import Roster, check_name, ever_named
from fcil_server.ledger.enums import Role, RunStatus
from fcil_server.ledger.rows import ClientRow
from fcil_server.rounds.class_changes import apply_change
from fcil_server.rounds.position import Mode, RunProgress
from fcil_server.runs.erase import ServedRun, erase, tidy
from fcil_server.runs.run_queue import append, cancel, check_submitted, describe_submitted
from fcil_server.runs.run_record import in_thread
from fcil_server.sessions import handshake

if TYPE_CHECKING:
    from fcil_server.daemon.context import ServerActions, ServerContext
    from fcil_server.daemon.live import LiveReports
    from fcil_server.daemon.sessions import ClientSessions
    from fcil_server.runs.active_run import OpenRun
    from fcil_server.runs.export_jobs import ExportJobs

# Fields of a Welcome that belong to a session; the others are terms of the run.
_OF_SESSION = {
    "nonce", "seq", "server_nonce", "certificate", "ready", "verdict", "clock_ms", "promoted",
}  # fmt: skip


class Commands:
    """Carries out the commands that come over the control socket.

    Args:
        context: the server.
        actions: operations on the server as a whole.
        sessions: of clients, some of which a command ends.
        live: reports to the dashboard.
        exports: starts exports.
    """

    def __init__(
        self,
        context: ServerContext,
        actions: ServerActions,
        sessions: ClientSessions,
        live: LiveReports,
        exports: ExportJobs,
    ) -> None:
        self._context = context
        self._actions = actions
        self._sessions = sessions
        self._live = live
        self._exports = exports
        self._queue_lock = asyncio.Lock()
        self._looks = asyncio.Semaphore(2)  # slow folders leave threads for other work

    async def answer(self, op: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command; ``fields["uid"]`` is the caller's, from the kernel.

        Raises:
            UsageError: there is no such command, or its fields are wrong.
        """
        context, actor = self._context, _actor(fields)
        match op:
            case "status":
                return await status(context)
            case "gauges":
                return gauges(context, fields)
            case "live":
                return await self._live.report(fields)
            case "outlook":
                return preview_terms(context.run)
            case "notes":
                return await context.journal.after(int(fields.get("after", 0)))
            case "enrol_local":
                reply = enrol_local(context, fields)
                await self._sync_ledger()
                return reply
            case "enrol":
                return issue_ticket(context.roster, context.addresses(), fields, actor)
            case "revoke":
                return self._revoke(fields)
            case "erase":
                return await self._erase(fields)
            case "classes":
                return change_classes(context, fields)
            case "promote":
                return await self._promote(fields)
            case "export":
                record = await self._exports.start(fields, actor)
                what = f"{record['format']} of state {record['state']}"
                context.audit_done(actor, op, what)
                return record
            case "submit_run":
                return await self._submit_run(fields)
            case "cancel_run":
                async with self._queue_lock:
                    self._refuse_between_runs()
                    entry = await asyncio.to_thread(cancel, context.federation.directory, fields)
                context.audit_done(actor, op, entry.name)
                return {"number": entry.number, "title": entry.title}
            case "page_link":
                return page_link(context, actor)
            case "page_enter":
                return page_enter(context, fields, actor)
            case "page_sign_out":
                return await page_sign_out(context, actor)
            case "token_new":
                return await token_new(context, fields, actor)
            case "token_revoke":
                return await token_revoke(context, fields, actor)
            case _:
                return self._steer(op, fields)

    def _refuse_between_runs(self) -> None:
        """Refuse an act that the next run would not hear of, or that would take it away."""
        if self._actions.is_between_runs():
            raise NotNow(
                "nothing was done: this run is over, and the next one is about to begin.",
                action="Try again in a moment.",
            )

    def _steer(self, op: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Stop, hold or shorten the server's work.

        Raises:
            NotNow: the next run is about to begin, and would not hear of it.
        """
        if op in ("close_round", "pause", "resume", "drain"):
            self._refuse_between_runs()
        match op:
            case "stop":
                self._actions.stop()  # first: a full disk keeps no server from ending
                self._context.audit_done(_actor(fields), op)
                return {}
            case "close_round":
                rest = fields.get("rest_of_task") is True
                coordinator = self._context.run.coordinator
                check_round(coordinator.progress, fields.get("only"))
                coordinator.close_short(rest_of_task=rest)
                detail = "and the rest of its task" if rest else ""
                self._context.audit_done(_actor(fields), op, detail)
                return {}
            case "pause" | "resume" | "drain":
                reply = self._set_mode(op)
                self._context.audit_done(_actor(fields), op)
                return reply
            case "stop_run":
                return self._stop_run(fields)
            case _:
                raise UsageError(f"this server knows no command {op!r}.")

    async def _sync_ledger(self) -> None:
        """Wait until all commits are on disk; the server ends if that fails."""
        try:
            await asyncio.to_thread(self._context.ledger.sync)
        except FcilError as error:
            self._actions.fail(error)
            raise

    def _set_mode(self, op: str) -> dict[str, Any]:
        coordinator = self._context.run.coordinator
        if op == "drain":
            self._actions.drain_rounds()
        else:
            mode = Mode.PAUSED if op == "pause" else Mode.RUNNING
            coordinator.set_mode(mode)
            text = "no round opens" if op == "pause" else "rounds continue"
            self._context.journal.note("info", mode.value, text)
            if mode is Mode.RUNNING and self._context.run.is_over:
                self._actions.begin_next()
        return {"mode": coordinator.progress.mode.value, "round_open": coordinator.progress.is_open}

    def _stop_run(self, fields: dict[str, Any]) -> dict[str, Any]:
        context = self._context
        run = context.run.coordinator.context.run
        _audit(context, fields, "stop_run", run)
        row = context.ledger.runs.get(run)
        if row is not None and row.status is not RunStatus.DONE:
            context.ledger.runs.set_status(run, RunStatus.STOPPED)
        if self._actions.begin_next():
            return {"run": run, "next": True}
        self._actions.stop()
        return {"run": run, "next": False}

    async def _submit_run(self, fields: dict[str, Any]) -> dict[str, Any]:
        context, directory = self._context, self._context.federation.directory
        actor = _actor(fields)
        async with self._looks:
            await in_thread(check_submitted, context.config, fields)
        async with self._queue_lock:  # numbers are given once
            entry = await asyncio.to_thread(append, directory, fields, actor)
        context.audit_done(actor, "submit_run", entry.name)
        reply = await asyncio.to_thread(describe_submitted, directory, entry)
        begins = context.run.is_over and not self._is_paused() and self._actions.begin_next()
        return {**reply, "begins": begins}

    async def _promote(self, fields: dict[str, Any]) -> dict[str, Any]:
        state = str(fields.get("state", ""))
        return await self._context.run.promotion.promote(state, _actor(fields))

    def _is_paused(self) -> bool:
        return self._context.run.coordinator.progress.mode is Mode.PAUSED

    def _revoke(self, fields: dict[str, Any]) -> dict[str, Any]:
        roster, name, actor = self._context.roster, str(fields.get("name", "")), _actor(fields)
        if roster.withdraw(name, actor):
            return {"client": None, "name": name, "withdrawn": True}
        if fields.get("ticket") is True:
            raise NotNow(
                f"nothing was done: {name!r} has no open ticket any more.",
                action="It may have joined with it just now; start again if you want to revoke it.",
            )
        row = roster.named(name, exact=fields.get("exact") is True)
        keep, why = fields.get("keep") is True, str(fields.get("why", ""))
        tickets = self._sessions.revoke(row, keep=keep, actor=actor, why=why)
        behind = roster.behind(row)
        return {"client": row.client_id, "name": row.name, "behind": behind, "tickets": tickets}

    async def _erase(self, fields: dict[str, Any]) -> dict[str, Any]:
        context, actor = self._context, _actor(fields)
        ledger, journal, coordinator = context.ledger, context.journal, context.run.coordinator
        exact = fields.get("exact") is True
        row = ever_named(ledger, str(fields.get("name", "")), exact=exact)
        run_context, directory = coordinator.context, context.federation.directory
        under_way = ledger.rounds.current(run_context.run)
        rows = ledger.updates.of_round(under_way.key) if under_way else []
        going = ServedRun(run_context.run, run_context.spool, {str(u.record) for u in rows})
        journal.write()  # waiting notes name the client, too
        try:
            done = erase(context.roster, directory, row, actor, going)
        finally:
            self._on_erased(row)
        text = f"{done.pseudonym} is what remains of a member"
        journal.note("warning", "erased", text, row.client_id)
        more = await asyncio.to_thread(tidy, ledger.path, directory, done)
        return {**asdict(done), "stays": [*done.stays, *more]}

    def _on_erased(self, row: ClientRow) -> None:
        """Let nothing here know an erased client any more; no change if the ledger still does."""
        context, now = self._context, self._context.ledger.clients.get(row.client_id)
        if now is None or now.curve:
            return
        context.run.coordinator.on_client_revoked(row.client_id)
        context.journal.rename(row.name, now.name)
        context.peers.refused.pop(row.client_id, None)
        peer = context.peers.by_client(row.client_id)
        if peer is not None:
            peer.name = now.name
            self._sessions.cut(peer)


def _actor(fields: dict[str, Any]) -> str:
    door = ""
    if fields.get("by") == "page":
        door = ", page"
    elif fields.get("by") == "api":
        door = f", api {check_token_name(fields.get('token'))}"
    return f"uid {fields.get('uid', '?')}{door}"


def _audit(context: ServerContext, fields: dict[str, Any], action: str, detail: str = "") -> None:
    context.ledger.audit.add(_actor(fields), action, detail)


def check_round(progress: RunProgress, only: Any) -> None:
    """Refuse an act on a round that is no longer under way.

    Args:
        progress: of the run.
        only: ``task``, ``kind`` and ``round`` of the round that is meant; None: any.

    Raises:
        NotNow: another round, or none, is under way.
    """
    if only is None:
        return
    task, step = progress.task, progress.step
    here = None
    if task is not None and step is not None and progress.round is not None:
        here = {"task": task.index, "kind": step.kind, "round": step.round}
    if here != only:
        now = f"task {here['task']}, {here['kind']} {here['round']}" if here else "none"
        raise NotNow(
            f"nothing was done: the round under way is another one than you named; now: {now}.",
            action="Look at the status, and start again if you still want that.",
        )


def change_classes(context: ServerContext, fields: dict[str, Any]) -> dict[str, Any]:
    """Carry out one of the operator's changes to class names.

    Raises:
        UsageError: there is no such change or class, or it would mix classes.
    """
    coordinator = context.run.coordinator
    names = apply_change(coordinator.context.classes, fields)
    _audit(context, fields, f"classes_{fields['change']}", ", ".join(names))
    coordinator.on_classes_changed()
    return {"names": names}


def enrol_local(context: ServerContext, fields: dict[str, Any]) -> dict[str, Any]:
    """Enrol a client of this machine and user; its private keys stay with it.

    Raises:
        UsageError: the request has no name or no public keys.
        TrustError: these keys were revoked.
    """
    name, keys = check_name(fields.get("name")), fields.get("keys")
    try:
        raw = {str(k): bytes.fromhex(v) for k, v in keys.items()}  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError("an enrolment needs public keys in hexadecimal.") from error
    client = context.roster.enrol_local(name, PublicKeys.from_fields(raw), _actor(fields))
    row = context.ledger.clients.get(client)
    assert row is not None
    return {
        "client_id": client,
        "name": row.name,
        "certificate": context.federation.certificate.to_bytes().hex(),
        "addresses": context.addresses(),
    }


def issue_ticket(
    roster: Roster, addresses: list[str], fields: dict[str, Any], actor: str
) -> dict[str, Any]:
    """Make a ticket; its text goes only to the caller and is stored nowhere.

    Args:
        roster: issues the ticket.
        addresses: of the server.
        actor: the caller, for the audit log.
        fields: ``name``, ``lasts_s``, and perhaps ``relay`` and ``via``.

    Raises:
        UsageError: the name is taken or missing, the time is out of range, or ``via`` no relay.
    """
    via = fields.get("via")
    ticket = roster.issue(
        check_name(fields.get("name")),
        check_ticket_lifetime(fields.get("lasts_s")),
        tuple(addresses),
        actor,
        role=Role.RELAY if fields.get("relay") is True else Role.CLIENT,
        via=None if via is None else str(via),
    )
    return {
        "ticket": ticket.to_text(),
        "expires": ticket.expires,
        "addresses": list(ticket.addresses),
        "fingerprint": roster.federation.keys.public.fingerprint,
    }


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
        "terms": told.model_dump(exclude=_OF_SESSION),
        "rounds_per_task": run_context.config.round.rounds_per_task,
        "evaluate": run_context.config.run.evaluate,
        "tasks": tasks,
        "waiting": None if listed else [c.name for c in run_context.classes.pending()],
    }
