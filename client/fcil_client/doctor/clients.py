"""Facts about one client of this user, or about a device that is to become one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fcil_adapters.backbones.known import EMBEDDED, EMBEDDED_DIGEST
from fcil_adapters.contract import registry
from fcil_adapters.contract.backbone_info import backbone_from_fields
from fcil_client.doctor.checks.backbone import Wanted
from fcil_client.doctor.checks.daemon import DaemonFacts
from fcil_client.doctor.checks.disk import HoldingFacts
from fcil_client.doctor.checks.membership import MemberFacts, TicketFacts
from fcil_client.doctor.checks.network import NetworkFacts, ServerFacts
from fcil_client.doctor.probes import (
    client as look_client,
)
from fcil_client.doctor.probes import (
    disk as look_disk,
)
from fcil_client.doctor.probes import (
    network as look_network,
)
from fcil_client.link.handshake import Terms
from fcil_client.membership.ask_terms import look as look_at_run
from fcil_client.membership.enrol import find_server
from fcil_client.state import current_model
from fcil_client.state.home import Home
from fcil_protocol.errors import FcilError

_WITHOUT_SESSION = ("offline", "greeting")


@dataclass(frozen=True)
class ClientFacts:
    """The facts about one client.

    Attributes:
        wanted: the backbone of its run; None: unknown.
    """

    home: Home
    member: MemberFacts
    daemon: DaemonFacts
    holding: HoldingFacts
    network: NetworkFacts
    wanted: Wanted | None

    @property
    def name(self) -> str:
        """Its name, or the directory's if it has none."""
        enrolment = self.member.enrolment
        return enrolment.name if enrolment else self.member.former or self.home.directory.name

    @property
    def data(self) -> Path | None:
        """Its folder, if known."""
        return Path(self.member.enrolment.data) if self.member.enrolment else None


def look(home: Home) -> ClientFacts:
    """Gather the facts about one client; its session, if it has one, is not disturbed."""
    member = look_client.look_member(home)
    enrolment = member.enrolment
    daemon = look_client.look_daemon(home, enrolment.data if enrolment else "")
    network, terms = NetworkFacts(server=ServerFacts(skipped="the folder is not enrolled")), None
    if enrolment is not None:
        addresses = look_network.look_addresses(enrolment.addresses)
        if daemon.status is not None or daemon.hangs:
            server = _as_the_daemon_says(daemon)
        elif not any(a.took_s is not None for a in addresses):
            server = ServerFacts(skipped="nobody answers there")
        else:
            server, terms = look_network.say_hello(home, enrolment)
        network = NetworkFacts(addresses, bool(enrolment.link_key), server)
    return ClientFacts(
        home=home,
        member=member,
        daemon=daemon,
        holding=look_disk.look_holding(home),
        network=network,
        wanted=_wanted(home, daemon.status, terms),
    )


def _as_the_daemon_says(daemon: DaemonFacts) -> ServerFacts:
    status = daemon.status
    if status is None:
        return ServerFacts(skipped="the client runs and does not answer, and has the session")
    link = str(status["link"])
    asked = "asked through the client that runs"
    if link in _WITHOUT_SESSION:
        told = f"the client has no session now (link {link}); {asked}"
        return ServerFacts("daemon", told, waits=True, clock_s=status.get("clock_s"))
    told = f"the client has a session with {_first(status)} (link {link}); {asked}"
    return ServerFacts("daemon", told, clock_s=status.get("clock_s"))


def _first(status: Mapping[str, Any]) -> str:
    return str(next(iter(status.get("server", ())), "the server"))


# --- which backbone -------------------------------------------------------------------------


def _wanted(home: Home, status: Mapping[str, Any] | None, terms: Terms | None) -> Wanted | None:
    """Return the backbone of the client's run, from the best source available."""
    record = _record(home)
    weights = (record.weights or "") if record is not None else ""
    if terms is not None:
        return replace(of_terms(terms, "as the server says"), weights=weights)
    if status is not None and status.get("run") and status.get("backbone"):
        digest = str(status.get("backbone_digest") or "")
        source = f"as the client that runs says (run {status['run']})"
        return Wanted(str(status["backbone"]), digest, source, bool(digest), weights=weights)
    return _of_record(record) if record is not None else None


def _of_record(record: current_model.Record) -> Wanted | None:
    try:
        method = registry.load_method(record.method)
        info = backbone_from_fields(record.context["backbone_info"])
    except (FcilError, KeyError):  # of a method that is no longer installed: join reports it
        return None
    source = f"as the model that is kept here uses it (run {record.run})"
    needed, gradient = method.needs_backbone, not method.frozen
    return Wanted(info.name, info.digest, source, needed, gradient, record.weights or "")


def _record(home: Home) -> current_model.Record | None:
    try:
        return current_model.read_record(home)
    except FcilError:  # it is damaged: predict and export report it
        return None


def of_terms(terms: Terms, source: str) -> Wanted:
    """Return the backbone of a run's terms."""
    info, method = terms.backbone, terms.method
    source = f"{source} (run {terms.run})" if terms.run else source
    return Wanted(info.name, info.digest, source, method.needs_backbone, not method.frozen)


def embedded() -> Wanted:
    """Return the backbone that ships with the package."""
    return Wanted(EMBEDDED, EMBEDDED_DIGEST, "the one that ships with fcil: no run is known")


# --- not enrolled ---------------------------------------------------------------------------


def look_stranger(
    data: Path | None, server: str | None, ticket: TicketFacts | None
) -> tuple[NetworkFacts, TicketFacts | None, Wanted | None]:
    """Gather the facts for a device that is not enrolled: at a ticket's server, or one here."""
    if ticket is not None:
        ticket, network = look_ticket(ticket)
        return network, ticket, None
    try:
        join = find_server(server)
        if join is None:
            nobody = "no ticket was given, and no server of this user runs on this machine"
            return NetworkFacts(server=ServerFacts(skipped=nobody)), None, None
        addresses = look_network.look_addresses(join.addresses)
        if data is None:
            here = ServerFacts("control", f"the server {join.name} of this user says it runs here")
            return NetworkFacts(addresses, server=here), None, None
        outlook, _ = look_at_run(data, server, None, [])
        facts = ServerFacts("control", f"it would take the folder: {outlook.told}")
        wanted = of_terms(outlook.terms, "as the server on this machine says")
        return NetworkFacts(addresses, server=facts), None, wanted
    except FcilError as error:
        return NetworkFacts(server=ServerFacts("control", error=error)), None, None


def look_ticket(facts: TicketFacts) -> tuple[TicketFacts, NetworkFacts]:
    """Try the addresses of a ticket, and ask there if it is valid, without using it."""
    ticket = facts.ticket
    if ticket is None or ticket.relay:
        return facts, NetworkFacts(server=ServerFacts(skipped="the ticket leads nowhere"))
    addresses = look_network.look_addresses(ticket.addresses)
    if not any(a.took_s is not None for a in addresses):
        server = ServerFacts(skipped="nobody answers there")
        return facts, NetworkFacts(addresses, ticket.via, server)
    asked, answer = look_network.show_ticket(ticket)
    told = "it is the server, or leads to it: the ticket was looked at there, and not used"
    server = ServerFacts("hello", told) if asked else ServerFacts(skipped="it gave no answer")
    return replace(facts, asked=asked, answer=answer), NetworkFacts(addresses, ticket.via, server)
