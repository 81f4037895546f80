"""The member list of `fcil-server clients` and of the dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fcil_server.federation.eligibility import former_client_state
from fcil_server.ledger.labels import GONE
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import ClientRow

SHOWN_REFUSALS = 3  # newest reasons per client


def member_rows(ledger: Ledger, live: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return every client that was ever enrolled, oldest first, as plain data.

    Args:
        ledger: the federation's.
        live: client id -> state, for clients connected to a running server.
    """
    rounds, traffic = ledger.updates.rounds_by_client(), ledger.bytes.by_client()
    names = {client.client_id: client.name for client in ledger.clients.all()}
    rows = []
    for client in ledger.clients.all():
        here = live.get(client.client_id, "away") not in ("away", "refused", *GONE)
        up, down = traffic.get(client.client_id, (0, 0))
        refusals = ledger.refusals.of_client(client.client_id, limit=SHOWN_REFUSALS)
        rows.append(
            {
                "id": client.client_id,
                "name": client.name,
                "state": _state(client, ledger.now, live),
                "enrolled_at": client.enrolled_at,
                "not_after": client.not_after,
                "revoked_at": client.revoked_at,
                "revoked_why": client.revoked_why,
                "last_seen": ledger.now if here else client.last_seen,
                "device": client.device,
                "role": client.role.value,
                "via": names.get(client.via) if client.via else None,
                "rounds": rounds.get(client.client_id, 0),
                "wire_up": up,
                "wire_down": down,
                "refusals": [{"at": r.at, "code": r.code, "reason": r.reason} for r in refusals],
            }
        )
    return rows


def _state(client: ClientRow, now: float, live: Mapping[str, str]) -> str:
    if state := former_client_state(client):
        return state
    if not client.may_join(now):
        return "expired"
    return live.get(client.client_id, "away")


def ticket_rows(ledger: Ledger) -> list[dict[str, Any]]:
    """Return the tickets that are still good, as plain data; never their secrets."""
    return [
        {"name": t.name, "issued_at": t.issued_at, "expires_at": t.expires_at}
        for t in ledger.tickets.all()
        if t.open_s(ledger.now)
    ]
