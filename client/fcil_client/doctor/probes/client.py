"""Read a client's directory, and ask its daemon and systemd."""

from __future__ import annotations

import shutil
import subprocess
import time
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

from fcil_client.doctor.checks.daemon import DaemonFacts, UnitFacts, parse_units
from fcil_client.doctor.checks.membership import MemberFacts, TicketFacts
from fcil_client.state.home import Enrolment, Home
from fcil_client.swarm import status as swarm_status
from fcil_protocol.errors import BadTicket, CorruptFile, FcilError, Timeout, Unreachable
from fcil_protocol.trust.certificate import Certificate
from fcil_protocol.trust.keys import PrivateKeys
from fcil_protocol.trust.ticket import Ticket, read_ticket

DAEMON_S = 3.0  # for a daemon's status
_PROPERTIES = "Id,LoadState,ActiveState,SubState,Result,NRestarts,UnitFileState"


def look_member(home: Home) -> MemberFacts:
    """Read a client's identity; no file is created or changed."""
    enrolment, error = None, None
    try:
        enrolment = home.enrolment()
    except FcilError as damage:
        error = damage
    former = home.former() if enrolment is None and error is None else None
    keys, keys_error = None, None
    has_keys = home.keys_path.exists()
    try:
        keys = PrivateKeys.load(home.keys_path) if has_keys else None
    except FcilError as damage:
        keys_error = damage
    from_s, to_s, certificate_error = _certificate(home, enrolment)
    return MemberFacts(
        directory=str(home.directory),
        enrolment=enrolment,
        error=error,
        former=former.name if former else "",
        has_keys=has_keys,
        keys_error=keys_error,
        fingerprint=keys.public.fingerprint if keys else "",
        changing=home.next_keys_path.exists(),
        from_s=from_s,
        to_s=to_s,
        certificate_error=certificate_error,
        now_s=time.time(),
    )


def _certificate(home: Home, enrolment: Enrolment | None) -> tuple[float, float, FcilError | None]:
    if enrolment is None:
        return 0.0, 0.0, None
    try:
        certificate = Certificate.from_bytes(bytes.fromhex(enrolment.certificate))
        # Check its signature and federation; its validity in time is reported separately.
        certificate.verify(enrolment.federation, float(certificate.not_before))
    except ValueError:
        path = home.directory / "client.json"
        damage = CorruptFile(f"the certificate in {path} is none.", action="Join again.")
        return 0.0, 0.0, damage
    except FcilError as error:
        return 0.0, 0.0, error
    return float(certificate.not_before), float(certificate.not_after), None


def look_ticket(source: Path, stdin: BinaryIO) -> TicketFacts:
    """Read a ticket, and look for a folder of this user that enrolled with it."""
    try:
        ticket = read_ticket(source, stdin)
    except FcilError as error:
        return TicketFacts(error=error)
    except (OSError, ValueError) as error:
        return TicketFacts(error=BadTicket(f"the ticket cannot be read ({error})."))
    return TicketFacts(ticket, used_here=_came_in_with(ticket), now_s=time.time())


def _came_in_with(ticket: Ticket) -> str:
    digest = sha256(ticket.guest_keys().public.curve).hexdigest()
    for home in Home.all():
        try:
            enrolment = home.enrolment()
        except FcilError:  # reported in that client's own lines
            continue
        if enrolment is not None and enrolment.ticket == digest:
            return enrolment.name
    return ""


def look_daemon(home: Home, data: str) -> DaemonFacts:
    """Ask a client's daemon for its status."""
    installed = version("fcil")
    try:
        status = swarm_status.ask(home, DAEMON_S)
    except Timeout:
        return DaemonFacts(None, installed, hangs=True, data=data)
    except Unreachable:
        return DaemonFacts(None, installed, data=data)
    return DaemonFacts(status, installed, data=data)


def look_units() -> UnitFacts:
    """Ask systemd about units named fcil-client, of the system and of this user."""
    systemctl = shutil.which("systemctl")
    if systemctl is None:
        return UnitFacts()
    found: dict[str, dict[str, str]] = {}
    asked = False
    for whose in ("--system", "--user"):
        command = [systemctl, whose, "show", "fcil-client*", f"--property={_PROPERTIES}"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=DAEMON_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            asked = True
            found |= parse_units(done.stdout)
    return UnitFacts(found, asked)
