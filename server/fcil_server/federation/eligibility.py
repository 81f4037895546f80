"""Validity of tickets and memberships, with the reason in words for the bearer."""

from __future__ import annotations

from fcil_protocol.errors import (
    BadTicket,
    MembershipExpired,
    Revoked,
    TicketExpired,
    TicketUsed,
    TrustError,
    UnknownClient,
)
from fcil_protocol.formats import minute, second
from fcil_server.ledger.rows import ClientRow, TicketRow

REVOKED = "revoked by the operator"  # if no other reason was given
LEFT_BY_ITSELF = "the client left by itself"  # compared with what ledgers hold: it never changes


def former_state(*, erased: bool, revoked: bool, why: str) -> str:
    """Return the state of a former member: ``left``, ``revoked``, ``erased``; or ""."""
    if erased:
        return "erased"
    if revoked:
        return "left" if why == LEFT_BY_ITSELF else "revoked"
    return ""


def former_client_state(row: ClientRow) -> str:
    """Return `former_state` for a client of the ledger."""
    why = row.revoked_why or ""
    return former_state(erased=not row.curve, revoked=row.revoked_at is not None, why=why)


def check_ticket(ticket: TicketRow, now: float) -> None:
    """Refuse a ticket that is no longer valid.

    Raises:
        TicketUsed, TicketExpired, BadTicket: why, in words for the person at the client.
    """
    if ticket.client is not None:
        raise TicketUsed(
            f"this ticket was used on {minute(ticket.used_at)} by another device.",
            action=TicketUsed.default_action(),
        )
    if ticket.withdrawn_at is not None:
        raise BadTicket(
            f"this ticket was withdrawn on {minute(ticket.withdrawn_at)}; a newer one was issued.",
            action=BadTicket.default_action(),
        )
    if now >= ticket.expires_at:
        raise TicketExpired(
            f"this ticket expired on {second(ticket.expires_at)} by the server's clock, which says "
            f"{second(now)}.",
            action=TicketExpired.default_action(),
        )


def refusal(row: ClientRow | None, now: float) -> TrustError:
    """Return why a key may not take part, in words for the person at the client."""
    if row is None:
        return UnknownClient("this key is not enrolled here.")
    if row.revoked_at is not None:
        since, why = minute(row.revoked_at), row.revoked_why or REVOKED
        return Revoked(f"client {row.name!r} was removed from the allow list on {since}: {why}.")
    assert row.not_after is not None, f"{row.client_id} may join at {now}"
    return MembershipExpired(
        f"client {row.name!r} was enrolled until {second(row.not_after)}, and the server's clock "
        f"says {second(now)}."
    )
