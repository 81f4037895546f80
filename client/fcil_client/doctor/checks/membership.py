"""Checks of who a client is: enrolment, keys, certificate, and a ticket to become one."""

from __future__ import annotations

from fcil_client.doctor.checks.facts import ClientFacts, MemberFacts, Skip, TicketFacts
from fcil_client.doctor.checks.findings import Finding, failure, of_error, ok, skipped, warning
from fcil_client.doctor.checks.register import of_clients, of_facts
from fcil_client.state.home import Enrolment, client_command
from fcil_protocol.errors import (
    BadTicket,
    FcilError,
    KeyFileError,
    TicketExpired,
    UnknownClient,
    WrongClock,
)
from fcil_protocol.formats import day, minute
from fcil_protocol.process.terminal import printable

_DAY_S = 86400
SOON_S = 30 * _DAY_S  # a certificate that ends within this time is worth a word


def _member(client: ClientFacts) -> MemberFacts | Skip:
    if client.member.directory:
        return client.member
    return Skip("the folder is not enrolled" if client.member.data else _NOBODY)


_NOBODY = "no folder of this user is enrolled"
check = of_clients(_member)


@of_clients(lambda client: client.member)(
    "membership.enrolment", "the federation that this folder is enrolled with"
)
def enrolment(facts: MemberFacts) -> Finding:
    if isinstance(facts.enrolment, FcilError):
        return of_error(facts.enrolment)
    if facts.enrolment is not None:
        e = facts.enrolment
        return ok(f"{printable(e.name)} of federation {e.federation[:12]}, {e.data}")
    if facts.former:
        text = f"{printable(facts.former)} has left its federation"
        back = client_command("join", facts.data or "FOLDER", "--ticket", "FILE")
        remedy = f"To come back, ask the operator for a ticket: {back}"
        return failure(text, remedy, UnknownClient)
    join = client_command("join", facts.data or "FOLDER")
    if facts.directory:
        return warning(f"{facts.directory} was created but never enrolled", f"Join with: {join}")
    if not facts.data:
        return warning(_NOBODY, f"Join with: {join}")
    text = f"{facts.data} is not enrolled with any federation"
    return warning(text, f"Join one: {join}, with --ticket FILE from another machine.")


@check("membership.keys", "the client's private keys")
def keys(facts: MemberFacts) -> Finding:
    if isinstance(facts.fingerprint, FcilError):
        return of_error(facts.fingerprint)
    if facts.fingerprint:
        text = f"readable by this user alone, intact, fingerprint {facts.fingerprint}"
        if not facts.changing:
            return ok(text)
        text += "; a change of keys was started but not finished"
        return warning(text, "Start the client: it finishes the change with the server.")
    if not isinstance(facts.enrolment, Enrolment):
        return skipped("not enrolled, so there are no keys")
    return failure(
        f"keys.json is missing in {facts.directory}, though the folder is enrolled",
        "Restore it from a backup. Without one, ask the operator to revoke this client, and "
        "join again with a new ticket.",
        KeyFileError,
    )


@check("membership.certificate", "the server's certificate as this client keeps it")
def certificate(facts: MemberFacts) -> Finding:
    if not isinstance(facts.enrolment, Enrolment):
        return skipped("not enrolled, so there is no certificate")
    if isinstance(facts.valid, FcilError):
        return of_error(facts.valid)
    from_s, to_s = facts.valid
    text = f"valid from {day(from_s)} to {day(to_s)}"
    if not from_s <= facts.now_s <= to_s:
        text = f"{text}, but this machine's clock says {day(facts.now_s)}"
        remedy = "Set the clock; if it is right, the server needs a new one: rotate-keys there."
        return failure(text, remedy, WrongClock)
    if to_s - facts.now_s < SOON_S:
        days = (to_s - facts.now_s) / _DAY_S
        return warning(
            f"{text}: {days:.0f} days are left", "On the server: fcil-server rotate-keys"
        )
    return ok(text)


@of_facts(lambda facts: facts.ticket)("membership.ticket", "the ticket given with --ticket")
def ticket(facts: TicketFacts) -> Finding:
    ticket = facts.ticket
    if ticket is None:
        return skipped("no ticket was given")
    if isinstance(ticket, FcilError):
        return of_error(ticket)
    until = f"good until {minute(ticket.expires)}"
    text = f"for federation {ticket.federation[:12]} at {', '.join(ticket.addresses)}"
    if ticket.relay:
        remedy = "Use it with: fcil-server relay --ticket FILE; for a client ask for another one."
        return failure(f"{text}; it admits a relay, not a client", remedy, BadTicket)
    if facts.used_here:
        return ok(
            f"{text}; {printable(facts.used_here)} has enrolled with it and no longer needs it"
        )
    if facts.answer is not None:
        return of_error(facts.answer)
    if facts.asked:
        return ok(f"{text}; the server knows it, {until} by its clock")
    if ticket.expires > facts.now_s:
        return ok(f"{text}; intact, and {until} by this machine's clock")
    text = f"{text}; it was {until}, by this machine's clock"
    return failure(text, "Ask the operator for a new one: fcil-server enrol NAME", TicketExpired)
