"""One client of this user, or one who wants to become one, looked at from all sides."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from fcil_adapters.backbones.known import EMBEDDED, EMBEDDED_DIGEST
from fcil_adapters.contract import BackboneInfo, Method, registry
from fcil_adapters.contract.backbone_info import backbone_from_fields
from fcil_adapters.images import named_sets
from fcil_adapters.images.sources import is_there
from fcil_client.doctor.checks.facts import (
    ClientFacts,
    DaemonFacts,
    HoldingFacts,
    MemberFacts,
    NetworkFacts,
    ServerFacts,
    Skip,
    TicketFacts,
    Wanted,
)
from fcil_client.doctor.probes import network
from fcil_client.link.handshake import Terms
from fcil_client.membership.ask_terms import look as look_at_run
from fcil_client.membership.enrol import find_server, moved
from fcil_client.state import current_model
from fcil_client.state.home import Enrolment, Home
from fcil_client.swarm import status as swarm_status
from fcil_protocol.errors import BadTicket, CorruptFile, FcilError, Timeout, Unreachable
from fcil_protocol.trust.certificate import Certificate
from fcil_protocol.trust.keys import PrivateKeys
from fcil_protocol.trust.ticket import Ticket, read_ticket

T = TypeVar("T")
DAEMON_S = 3.0  # for a daemon to say how it is
_WITHOUT_SESSION = ("offline", "greeting")
_PARTS = {
    "parts": "parts", "incoming": "parts", "outbox": "outbox", "provisional": "state",
    "state.safetensors": "state", "model": "model", "model.json": "model",
}  # fmt: skip
_KINDS = ("parts", "model", "outbox", "state", "journal", "other")


def look(home: Home) -> ClientFacts:
    """Gather the facts about one client without disturbing its session."""
    member = look_member(home)
    enrolment = member.enrolment if isinstance(member.enrolment, Enrolment) else None
    daemon = look_daemon(home)
    way, terms = NetworkFacts(ServerFacts(Skip("the folder is not enrolled"))), None
    if enrolment is not None:
        enrolment = moved(enrolment) or enrolment  # as the client itself finds its server
        addresses = network.look_addresses(enrolment.addresses)
        if daemon.status is not None or daemon.hangs:
            server = _as_the_daemon_says(daemon)
        elif not any(a.took_s is not None for a in addresses):
            server = ServerFacts(Skip("no server answers there"))
        else:
            server, terms = network.say_hello(home, enrolment)
        leave = home.command("leave", "--without-server")
        way = NetworkFacts(server, addresses, bool(enrolment.link_key), leave)
    return ClientFacts(
        member=member,
        network=way,
        home=home,
        holding=look_holding(home, running=daemon.status is not None),
        daemon=daemon,
        wanted=_wanted(home, daemon.status, terms),
    )


def look_member(home: Home) -> MemberFacts:
    """Read who a client is; nothing is made or changed."""
    enrolment = _or_error(home.enrolment)
    former = home.former_enrolment() if enrolment is None else None
    keys: PrivateKeys | FcilError | None = None
    if home.keys_path.exists():
        keys = _or_error(lambda: PrivateKeys.load(home.keys_path))
    valid: tuple[float, float] | FcilError = (0.0, 0.0)
    if isinstance(enrolment, Enrolment):
        known = enrolment
        valid = _or_error(lambda: _validity(home, known))
    return MemberFacts(
        directory=str(home.directory),
        data=former.data if former else "",
        enrolment=enrolment,
        former=former.name if former else "",
        fingerprint=keys.public.fingerprint if isinstance(keys, PrivateKeys) else keys or "",
        changing=home.next_keys_path.exists(),
        valid=valid,
        now_s=time.time(),
    )


def _or_error(read: Callable[[], T]) -> T | FcilError:
    try:
        return read()
    except FcilError as error:
        return error


def _validity(home: Home, enrolment: Enrolment) -> tuple[float, float]:
    try:
        certificate = Certificate.from_bytes(bytes.fromhex(enrolment.certificate))
        # Its signature and federation; when it is valid is told apart from that.
        certificate.verify(enrolment.federation, float(certificate.not_before))
    except ValueError:
        path = home.directory / "client.json"
        raise CorruptFile(
            f"the certificate in {path} is not valid.", action="Join again."
        ) from None
    return float(certificate.not_before), float(certificate.not_after)


def look_daemon(home: Home) -> DaemonFacts:
    """Ask a client's daemon how it is."""
    status, hangs = None, False
    try:
        status = swarm_status.ask(home, DAEMON_S)
    except Timeout:
        hangs = True
    except Unreachable:
        pass
    return DaemonFacts(status, version("fcil"), hangs, home.command("join"))


def _as_the_daemon_says(daemon: DaemonFacts) -> ServerFacts:
    status = daemon.status
    if status is None:
        return ServerFacts(Skip("the client holds the session, but it does not answer"))
    waits = str(status["link"]) in _WITHOUT_SESSION
    server = next(iter(status.get("server", ())), "the server")
    told = "no session now" if waits else f"a session with {server}"
    told = f"the client has {told} (link {status['link']}); asked through the running client"
    return ServerFacts(told, waits, status.get("clock_s"))


def look_holding(home: Home, *, running: bool) -> HoldingFacts:
    """Count what a client's directory holds; what goes away meanwhile is not counted."""
    sizes: dict[str, int] = dict.fromkeys(_KINDS, 0)
    for folder, _, files in os.walk(home.directory):
        for file in files:
            path = Path(folder) / file
            top = path.relative_to(home.directory).parts[0]
            what = "journal" if top.startswith("egress") else _PARTS.get(top, "other")
            sizes[what] += status.st_size if (status := _status(path)) else 0
    now = time.time()
    found = [_status(home.outbox_path(digest)) for digest in home.outbox()]
    times = [status.st_mtime if status else now for status in found]
    return HoldingFacts(sizes, len(times), max(0.0, now - min(times, default=now)), running)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None


# --- which backbone -------------------------------------------------------------------------


def _wanted(home: Home, status: Mapping[str, Any] | None, terms: Terms | None) -> Wanted | None:
    """Return the backbone of the client's run, from the best source."""
    record = _or_error(lambda: current_model.read_record(home))
    if isinstance(record, FcilError):  # it is damaged: predict and export say so
        record = None
    weights = (record.weights or "") if record is not None else ""
    if terms is not None:
        return replace(_of_terms(terms, "as the server says"), weights=weights)
    if status is not None and status.get("run") and status.get("backbone"):
        digest = str(status.get("backbone_digest") or "")
        source = f"as the running client says (run {status['run']})"
        size = status.get("image_size")
        return Wanted(
            str(status["backbone"]), digest, source, bool(digest), weights=weights, image_size=size
        )
    return _of_record(record) if record is not None else None


def _of_record(record: current_model.ModelRecord) -> Wanted | None:
    try:
        method = registry.load_method(record.method)
        info = backbone_from_fields(record.context["backbone_info"])
    except (FcilError, KeyError):  # of a method that is installed no more: join says so
        return None
    source = f"as the model stored here uses it (run {record.run})"
    return replace(_of(method, info, source), weights=record.weights or "")


def _of_terms(terms: Terms, source: str) -> Wanted:
    info, method = terms.backbone, terms.method
    source = f"{source} (run {terms.run})" if terms.run else source
    return _of(method, info, source)


def _of(method: Method, info: BackboneInfo, source: str) -> Wanted:
    size = info.preprocessing.size
    return Wanted(
        info.name, info.digest, source, method.needs_backbone, not method.frozen, image_size=size
    )


def embedded() -> Wanted:
    """Return the backbone that ships with the package."""
    return Wanted(EMBEDDED, EMBEDDED_DIGEST, "the one that ships with fcil: no run is known")


# --- who is not enrolled, and tickets -------------------------------------------------------


def look_stranger(data: Path | None, server: str | None, way: NetworkFacts | None) -> ClientFacts:
    """Gather the facts for a folder that is not enrolled.

    Args:
        data: the folder, if one is given.
        server: which one of this user is meant.
        way: to a ticket's server; None without a ticket.
    """
    member = MemberFacts(data="" if data is None else str(data))
    if way is not None:
        return ClientFacts(member, way)
    try:
        return ClientFacts(member, *_look_here(data, server))
    except FcilError as error:
        return ClientFacts(member, NetworkFacts(ServerFacts(error)))


def _look_here(data: Path | None, server: str | None) -> tuple[NetworkFacts, Wanted | None]:
    join = find_server(server)
    if join is None:
        nobody = "no ticket was given, and no server of this user runs on this machine"
        return NetworkFacts(ServerFacts(Skip(nobody))), None
    addresses = network.look_addresses(join.addresses)
    if data is None or not (named_sets.is_name(str(data)) or is_there(data)):
        here = ServerFacts(f"the server {join.name} of this user says it runs here")
        return NetworkFacts(here, addresses), None
    preview, _ = look_at_run(data, server, None, [])
    told = ServerFacts(f"it would accept the folder: {preview.told}")
    wanted = _of_terms(preview.terms, "as the server on this machine says")
    return NetworkFacts(told, addresses), wanted


def look_ticket(source: Path, stdin: BinaryIO) -> TicketFacts:
    """Read a ticket, and look whether a folder of this user came in with it."""
    try:
        ticket = read_ticket(source, stdin)
    except FcilError as error:
        return TicketFacts(error)
    except (OSError, ValueError) as error:
        return TicketFacts(BadTicket(f"the ticket cannot be read ({error})."))
    return TicketFacts(ticket, used_here=_came_in_with(ticket), now_s=time.time())


def _came_in_with(ticket: Ticket) -> str:
    known = (_or_error(home.enrolment) for home in Home.all())  # errors: told of that client
    used = (e.name for e in known if isinstance(e, Enrolment) and e.ticket == ticket.digest)
    return next(used, "")


def try_ticket(facts: TicketFacts) -> tuple[TicketFacts, NetworkFacts]:
    """Try the way that a ticket names, and ask there what it is worth, without using it."""
    ticket = facts.ticket
    if not isinstance(ticket, Ticket) or ticket.relay:
        return facts, NetworkFacts(ServerFacts(Skip("the ticket cannot be tried")))
    addresses = network.look_addresses(ticket.addresses)
    told: str | Skip = Skip("no server answers there")
    if any(a.took_s is not None for a in addresses):
        asked, answer = network.show_ticket(ticket)
        facts, told = replace(facts, asked=asked, answer=answer), Skip("it gave no answer")
        if asked:
            told = "it is the server, or a relay to it: the ticket was checked there, and not used"
    return facts, NetworkFacts(ServerFacts(told), addresses, ticket.via)
