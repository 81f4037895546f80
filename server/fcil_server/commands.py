"""What the server's control socket answers: the operator's commands and local enrolment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fcil_protocol.errors import UsageError
from fcil_protocol.ids import ClientId, new_client_id
from fcil_protocol.keys import PublicKeys
from fcil_server.ledger_rows import RunStatus
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
            return status(server)
        case "notes":
            return await server.journal.after(int(fields.get("after", 0)))
        case "enrol_local":
            return enrol_local(server, fields)
        case "stop":
            _audit(server, fields, "stop")
            server.stop()
            return {}
        case "close_round":
            _audit(server, fields, "close_round")
            server.open.coordinator.close_short()
            return {}
        case "stop_run":
            return _stop_run(server, fields)
        case _:
            raise UsageError(f"this server knows no command {op!r}.")


def _audit(server: Server, fields: dict[str, Any], action: str, detail: str = "") -> None:
    server.ledger.add_audit(f"uid {fields.get('uid', '?')}", action, detail)


def _stop_run(server: Server, fields: dict[str, Any]) -> dict[str, Any]:
    run = server.open.coordinator.kit.run
    _audit(server, fields, "stop_run", run)
    row = server.ledger.run(run)
    if row is not None and row.status is not RunStatus.DONE:
        server.ledger.set_run_status(run, RunStatus.STOPPED)
    server.stop()
    return {}


def enrol_local(server: Server, fields: dict[str, Any]) -> dict[str, Any]:
    """Enrol a client of this machine and user; its private keys stay with it.

    Raises:
        UsageError: the request has no name or no public keys.
    """
    name, keys = fields.get("name"), fields.get("keys")
    if not isinstance(name, str) or not 0 < len(name) <= 128 or not isinstance(keys, dict):
        raise UsageError("an enrolment needs a name of at most 128 characters and public keys.")
    try:
        raw = {str(k): bytes.fromhex(v) for k, v in keys.items()}
    except (TypeError, ValueError) as error:
        raise UsageError("public keys must be hexadecimal text.") from error
    client = _admit(server, fields, name, PublicKeys.from_fields(raw))
    row = server.ledger.client(client)
    assert row is not None
    return {
        "client_id": client,
        "name": row.name,
        "certificate": server.federation.certificate.to_bytes().hex(),
        "addresses": server.addresses(),
    }


def _admit(server: Server, fields: dict[str, Any], name: str, keys: PublicKeys) -> ClientId:
    known = server.ledger.client_by_curve(keys.curve)
    if known is not None:
        return known.client_id
    client = new_client_id()
    free = server.ledger.free_name(name)
    server.ledger.add_client(
        client, free, curve=keys.curve, signing=keys.signing, sealing=keys.sealing
    )
    server.admit(keys.curve)
    _audit(server, fields, "enrol_local", free)
    return client
