"""Lines about a client's identity: enrolment, keys, certificate, and a ticket to enrol with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from fcil_client.doctor.checks.line import Line, failure, fault, ok, skipped, warning
from fcil_client.state.home import Enrolment
from fcil_protocol.errors import (
    BadTicket,
    FcilError,
    KeyFileError,
    TicketExpired,
    UnknownClient,
    WrongClock,
)
from fcil_protocol.process.terminal import printable
from fcil_protocol.trust.ticket import Ticket

NAMES = ("membership.enrolment", "membership.keys", "membership.certificate")
_DAY_S = 86400
SOON_S = 30 * _DAY_S  # a certificate that ends within this time brings a warning


@dataclass(frozen=True)
class MemberFacts:
    """Facts from a client's directory.

    Attributes:
        directory: of the client.
        enrolment: its identity; None if it is not, no longer, or not readably enrolled.
        error: reason why client.json cannot be read.
        former: its name, if it has left.
        has_keys: there is a key file. keys_error: reason why it cannot be used.
        fingerprint: of the keys.
        changing: a change of keys was begun and not finished.
        from_s, to_s: unix seconds of the certificate; certificate_error: why it is invalid.
        now_s: this machine's clock.
    """

    directory: str
    enrolment: Enrolment | None = None
    error: FcilError | None = None
    former: str = ""
    has_keys: bool = False
    keys_error: FcilError | None = None
    fingerprint: str = ""
    changing: bool = False
    from_s: float = 0.0
    to_s: float = 0.0
    certificate_error: FcilError | None = None
    now_s: float = 0.0


def lines(facts: MemberFacts) -> list[Line]:
    """Return the lines about a client's identity, keys and certificate."""
    return [_enrolment(facts), _keys(facts), _certificate(facts)]


def not_enrolled(data: str) -> list[Line]:
    """Return the lines for a folder that has no membership."""
    text = f"{data} is not enrolled with any federation"
    action = "Join one: fcil-client join --data FOLDER, with --ticket FILE from another machine."
    why = "the folder is not enrolled"
    return [warning(NAMES[0], text, action), *(skipped(n, why) for n in NAMES[1:])]


def nobody() -> list[Line]:
    """Return the lines for a user without an enrolled or named folder."""
    text = "no folder of this user is enrolled"
    action = "Join with: fcil-client join --data FOLDER"
    return [warning(NAMES[0], text, action), *(skipped(n, text) for n in NAMES[1:])]


def _enrolment(facts: MemberFacts) -> Line:
    name = "membership.enrolment"
    if facts.error is not None:
        return fault(name, facts.error)
    if facts.enrolment is not None:
        e = facts.enrolment
        return ok(name, f"{printable(e.name)} of federation {e.federation[:12]}, {e.data}")
    if facts.former:
        text = f"{printable(facts.former)} has left its federation"
        action = "To come back, ask the operator for a ticket: fcil-client join --ticket FILE"
        return failure(name, text, action, UnknownClient.code)
    text = f"{facts.directory} was begun and never enrolled"
    return warning(name, text, "Join with: fcil-client join --data FOLDER")


def _keys(facts: MemberFacts) -> Line:
    name = "membership.keys"
    if facts.keys_error is not None:
        return fault(name, facts.keys_error)
    if not facts.has_keys:
        if facts.enrolment is None:
            return skipped(name, "not enrolled, so there are no keys")
        text = f"keys.json is missing in {facts.directory}, though the folder is enrolled"
        action = (
            "Restore it from a backup. Without one, ask the operator to revoke this client, and "
            "join again with a new ticket."
        )
        return failure(name, text, action, KeyFileError.code)
    text = f"readable by this user alone, whole, fingerprint {facts.fingerprint}"
    if facts.changing:
        action = "Start the client: it finishes the change with the server."
        return warning(name, f"{text}; a change of keys was begun and not finished", action)
    return ok(name, text)


def _certificate(facts: MemberFacts) -> Line:
    name = "membership.certificate"
    if facts.enrolment is None:
        return skipped(name, "not enrolled, so there is no certificate")
    if facts.certificate_error is not None:
        return fault(name, facts.certificate_error)
    text = f"valid from {_day(facts.from_s)} to {_day(facts.to_s)}"
    if not facts.from_s <= facts.now_s <= facts.to_s:
        text = f"{text}, and this machine's clock says {_day(facts.now_s)}"
        action = "Set the clock; if it is right, the server needs a new one: rotate-keys there."
        return failure(name, text, action, WrongClock.code)
    if facts.to_s - facts.now_s < SOON_S:
        days = (facts.to_s - facts.now_s) / _DAY_S
        action = "On the server: fcil-server rotate-keys"
        return warning(name, f"{text}: {days:.0f} days are left", action)
    return ok(name, text)


# --- a ticket -------------------------------------------------------------------------------


@dataclass(frozen=True)
class TicketFacts:
    """A given ticket, and the facts about it that do not use it.

    Attributes:
        ticket: None if it cannot be read; error says why.
        asked: the server that it names answered. answer: its refusal; None: it would accept it.
        used_here: name of a client of this user that enrolled with it.
        now_s: this machine's clock.
    """

    ticket: Ticket | None = None
    error: FcilError | None = None
    asked: bool = False
    answer: FcilError | None = None
    used_here: str = ""
    now_s: float = 0.0


def ticket_line(facts: TicketFacts | None) -> Line:
    """Return the line about a ticket."""
    name = "membership.ticket"
    if facts is None:
        return skipped(name, "no ticket was given")
    if facts.ticket is None:
        assert facts.error is not None
        return fault(name, facts.error)
    ticket = facts.ticket
    until = f"{datetime.fromtimestamp(ticket.expires, UTC):%Y-%m-%d %H:%M} UTC"
    text = f"for federation {ticket.federation[:12]} at {', '.join(ticket.addresses)}"
    if ticket.relay:
        action = "Use it with: fcil-server relay --ticket FILE; for a client ask for another one."
        return failure(name, f"{text}; it lets in a relay, not a client", action, BadTicket.code)
    if facts.used_here:
        words = f"{text}; {printable(facts.used_here)} has come in with it, and needs it no more"
        return ok(name, words)
    if facts.answer is not None:
        return fault(name, facts.answer)
    if facts.asked:
        return ok(name, f"{text}; the server knows it, good until {until} by its clock")
    if ticket.expires <= facts.now_s:
        action = "Ask the operator for a new one: fcil-server enrol NAME"
        words = f"{text}; it was good until {until}, by this machine's clock"
        return failure(name, words, action, TicketExpired.code)
    return ok(name, f"{text}; whole, and good until {until} by this machine's clock")


def _day(seconds: float) -> str:
    return f"{datetime.fromtimestamp(min(seconds, 2**37), UTC):%Y-%m-%d}"


# --- several clients ------------------------------------------------------------------------


def by_device(statuses: Mapping[str, str]) -> dict[str, list[str]]:
    """Return GPU -> names of the clients on it, from the devices that running clients report."""
    found: dict[str, list[str]] = {}
    for name, device in statuses.items():
        first = device.partition(" ")[0]
        if first.startswith("cuda"):
            found.setdefault("cuda:0" if first == "cuda" else first, []).append(name)
    return found
