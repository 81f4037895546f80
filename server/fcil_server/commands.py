"""What the server's control socket answers: the operator's commands and local enrolment."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fcil_protocol.errors import FcilError, UsageError
from fcil_protocol.keys import PublicKeys
from fcil_server.class_changes import apply_change
from fcil_server.erase import Going, erase, tidy
from fcil_server.gauges import gauges
from fcil_server.ledger_words import Role, RunStatus
from fcil_server.orders import check_lasts
from fcil_server.outlook import outlook
from fcil_server.page_entry import page_enter, page_link, page_sign_out
from fcil_server.position import Mode
from fcil_server.roster import Roster, check_name, ever_named
from fcil_server.status import status

if TYPE_CHECKING:
    from fcil_server.daemon import Server


async def answer(server: Server, op: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Carry out one command; ``fields["uid"]`` is who asks, as the kernel says.

    Raises:
        UsageError: there is no such command, or its fields are wrong.
    """
    match op:
        case "status":
            return await status(server)
        case "gauges":
            return gauges(server, fields)
        case "live":
            return await server.live.tell(fields)
        case "outlook":
            return outlook(server)
        case "notes":
            return await server.journal.after(int(fields.get("after", 0)))
        case "enrol_local":
            reply = enrol_local(server, fields)
            await _sync_ledger(server)
            return reply
        case "enrol":
            return issue_ticket(server.roster, server.addresses(), fields, _actor(fields))
        case "revoke":
            return _revoke(server, fields)
        case "erase":
            return await _erase(server, fields)
        case "stop":
            _audit(server, fields, "stop")
            server.stop()
            return {}
        case "close_round":
            rest = fields.get("rest_of_task") is True
            server.open.coordinator.close_short(rest_of_task=rest)
            _audit(server, fields, "close_round", "and the rest of its task" if rest else "")
            return {}
        case "pause" | "resume" | "drain":
            _audit(server, fields, op)
            return _set_mode(server, op)
        case "classes":
            return change_classes(server, fields)
        case "stop_run":
            return _stop_run(server, fields)
        case "page_link":
            return page_link(server, _actor(fields))
        case "page_enter":
            return page_enter(server, fields, _actor(fields))
        case "page_sign_out":
            return await page_sign_out(server, _actor(fields))
        case _:
            raise UsageError(f"this server knows no command {op!r}.")


def _actor(fields: dict[str, Any]) -> str:
    page = ", page" if fields.get("by") == "page" else ""
    return f"uid {fields.get('uid', '?')}{page}"


async def _sync_ledger(server: Server) -> None:
    """Wait until what is committed is on the disk; the server ends if it cannot be."""
    try:
        await asyncio.to_thread(server.ledger.sync)
    except FcilError as error:
        server.fail(error)
        raise


def _audit(server: Server, fields: dict[str, Any], action: str, detail: str = "") -> None:
    server.ledger.add_audit(_actor(fields), action, detail)


def _set_mode(server: Server, op: str) -> dict[str, Any]:
    coordinator = server.open.coordinator
    if op == "drain":
        server.drain_rounds()
    else:
        mode = Mode.PAUSED if op == "pause" else Mode.RUNNING
        coordinator.set_mode(mode)
        server.note("info", mode.value, "no round opens" if op == "pause" else "rounds go on")
    return {"mode": coordinator.at.mode.value, "round_open": coordinator.at.is_open}


def change_classes(server: Server, fields: dict[str, Any]) -> dict[str, Any]:
    """Carry out one of the operator's changes to class names.

    Raises:
        UsageError: there is no such change or class, or it would mix classes.
    """
    coordinator = server.open.coordinator
    names = apply_change(coordinator.kit.classes, fields)
    _audit(server, fields, f"classes_{fields['change']}", ", ".join(names))
    coordinator.classes_changed()
    return {"names": names}


def _stop_run(server: Server, fields: dict[str, Any]) -> dict[str, Any]:
    run = server.open.coordinator.kit.run
    _audit(server, fields, "stop_run", run)
    row = server.ledger.run(run)
    if row is not None and row.status is not RunStatus.DONE:
        server.ledger.set_run_status(run, RunStatus.STOPPED)
    server.stop()
    return {"run": run}


def enrol_local(server: Server, fields: dict[str, Any]) -> dict[str, Any]:
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
    client = server.roster.enrol_local(name, PublicKeys.from_fields(raw), _actor(fields))
    row = server.ledger.client(client)
    assert row is not None
    return {
        "client_id": client,
        "name": row.name,
        "certificate": server.federation.certificate.to_bytes().hex(),
        "addresses": server.addresses(),
    }


def issue_ticket(
    roster: Roster, addresses: list[str], fields: dict[str, Any], actor: str
) -> dict[str, Any]:
    """Make a ticket; its text goes to whoever asked and is kept nowhere.

    Args:
        roster: where it is issued.
        addresses: of the server.
        actor: who asks, for the audit log.
        fields: ``name``, ``lasts_s``, and perhaps ``relay`` and ``via``.

    Raises:
        UsageError: the name is taken or none, the time is out of range, or ``via`` no relay.
    """
    via = fields.get("via")
    ticket = roster.issue(
        check_name(fields.get("name")),
        check_lasts(fields.get("lasts_s")),
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


def _revoke(server: Server, fields: dict[str, Any]) -> dict[str, Any]:
    name = str(fields.get("name", ""))
    if server.roster.withdraw(name, _actor(fields)):
        return {"client": None, "name": name, "withdrawn": True}
    row = server.roster.named(name)
    keep = fields.get("keep") is True
    server.sessions.revoke(row, keep=keep, actor=_actor(fields), why=str(fields.get("why", "")))
    return {"client": row.client_id, "name": row.name}


async def _erase(server: Server, fields: dict[str, Any]) -> dict[str, Any]:
    row = ever_named(server.ledger, str(fields.get("name", "")))
    kit = server.open.coordinator.kit
    under_way = server.ledger.open_round(kit.run)
    rows = server.ledger.updates(under_way.key) if under_way else []
    going = Going(kit.run, kit.spool, {str(u.update_id) for u in rows})
    server.journal.write()  # what waits to be written names it, too
    done = erase(server.roster, server.federation.directory, row, _actor(fields), going)
    server.open.coordinator.revoked(row.client_id)
    server.journal.rename(row.name, done.pseudonym)
    server.peers.refused.pop(row.client_id, None)
    peer = server.peers.by_client(row.client_id)
    if peer is not None:
        peer.name = done.pseudonym
        server.sessions.cut(peer)
    server.note("warning", "erased", f"{done.pseudonym} is what remains of a member", row.client_id)
    more = await asyncio.to_thread(tidy, server.ledger.path, server.federation.directory)
    return {**asdict(done), "stays": [*done.stays, *more]}
