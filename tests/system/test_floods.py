"""Floods of notes, lanes and handshakes: what they leave on the server's disk, and whom they hold up.

Two honest clients learn on meanwhile. Nothing here measures time: bytes, counts and updates.
"""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

import pytest

from attack_kit import newcomers, notes, relays
from fcil_protocol.link.dial import dial
from fcil_protocol.link.enrol_with_ticket import show
from fcil_protocol.process import control_socket
from fcil_protocol.trust.keys import PrivateKeys
from fcil_protocol.trust.ticket import Ticket
from fcil_server.daemon.note_budget import BURST
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.ledger import LEDGER_NAME
from fcil_server.sessions.conduct import MOST
from system.kit import open_ledger
from system.raw_client import RawClient
from system.siege import Siege, size_of

pytestmark = [pytest.mark.processes, pytest.mark.full]

LOG_MB, LEDGER_MB, WORDS_MB = 64, 4, 2  # what an attack may leave; it sends 3 to 50 MB
SECONDS = 30.0


@pytest.fixture(scope="module")
def siege(tmp_path_factory):
    folder = tmp_path_factory.mktemp("floods")
    with LocalFederation(folder) as federation:
        yield Siege(federation, folder)


@dataclass
class Disk:
    """Bytes of the server's files, MB: its log of commits, the ledger, what it says."""

    log: float
    ledger: float
    words: float


def disk(siege):
    ledger = siege.federation.federation / LEDGER_NAME
    sizes = (
        size_of(ledger.with_name(f"{LEDGER_NAME}-wal")),
        size_of(ledger),
        size_of(siege.federation.log("server")),
    )
    return Disk(*(size / 1e6 for size in sizes))


@pytest.fixture
def endure(siege):
    """Let an attack come to its end while rounds go on; return what it poured."""

    async def besiege(attack):
        before, longest = disk(siege), 0.0
        siege.federation.until("update")
        flood = asyncio.create_task(attack)
        async for _ in siege.passes():
            await siege.next_update()
            longest = max(longest, disk(siege).log)
        while not flood.done():
            await siege.next_update()
            longest = max(longest, disk(siege).log)
        siege.check_all()
        after = disk(siege)
        print(f"longest log {longest:.1f} MB; {before} -> {after}")
        assert longest <= LOG_MB
        assert after.ledger - before.ledger <= LEDGER_MB
        assert after.words - before.words <= WORDS_MB
        assert "Traceback" not in siege.federation.log("server").read_text()
        return flood.result()

    def run(attack):
        poured = asyncio.run(besiege(attack))
        print(poured)
        return poured

    return run


def member(siege, name):
    client = RawClient(siege.federation, name)
    return client, client.client


def rows(siege, client):
    """Return how many lines the ledger has of a client: code -> events, code -> refusals."""
    control_socket.ask(siege.federation.federation, "status")  # what waits to be written is written
    with open_ledger(siege.federation) as ledger:
        events = Counter(e.code for e in ledger.events.newest(limit=100_000) if e.client == client)
        refusals = Counter(r.code for r in ledger.refusals.of_client(client, limit=100_000))
        audit = [a.detail for a in ledger.audit.newest() if a.action == "cut_off"]
    return events, refusals, audit


def state(siege, client):
    clients = control_socket.ask(siege.federation.federation, "status")["clients"]
    return next(c for c in clients if c["id"] == client)


def must_be_cut_off(siege, name, client, poured):
    assert poured.cut
    events, refusals, audit = rows(siege, client)
    assert events["cut_off"] == 1
    assert sum(events.values()) + sum(refusals.values()) <= 2 * BURST + 60
    assert sum(f"{name} is cut off" in detail for detail in audit) == 1
    row = state(siege, client)
    for _ in range(1000):  # its connection ends when it had time to hear why
        if row["state"] == "refused":
            break
        siege.federation.until("update")
        row = state(siege, client)
    assert row["state"] == "refused"
    assert "cut off" in row["why"]


def test_a_flood_of_class_names_is_a_few_lines(siege, endure):
    client, who = member(siege, "lister")
    poured = endure(notes.inventory_flood(client, most_s=SECONDS))
    assert poured.answers["ack"] >= 1
    events, refusals, _ = rows(siege, who)
    assert events["class_refused"] >= 1
    # Twenty a minute on top; where the server is too slow to be flooded, it is cut off by nobody.
    assert sum(events.values()) + sum(refusals.values()) <= 2 * BURST + 60


def test_a_flood_of_declines_is_a_few_lines(siege, endure):
    client, who = member(siege, "decliner")
    poured = endure(notes.decline_flood(client, most_s=SECONDS, patient=True))
    must_be_cut_off(siege, "decliner", who, poured)


@pytest.mark.parametrize("attack", [notes.bad_signatures, notes.junk])
def test_a_flood_of_refusals_is_counted_and_a_few_lines(siege, endure, attack):
    name = attack.__name__
    client, who = member(siege, name)
    before = siege.refused()
    poured = endure(attack(client, most_s=SECONDS, patient=True))
    assert MOST <= siege.refused() - before <= poured.messages
    must_be_cut_off(siege, name, who, poured)


@pytest.mark.parametrize("attack", [notes.bad_signatures, notes.junk])
def test_who_does_not_wait_for_answers_is_cut_before_much_of_it_is_read(siege, endure, attack):
    """Its unread messages keep more memory than a member may."""
    client, who = member(siege, f"hasty-{attack.__name__}")
    poured = endure(attack(client, most_s=SECONDS))
    assert poured.cut
    events, refusals, _ = rows(siege, who)
    assert sum(events.values()) + sum(refusals.values()) <= 2 * BURST + 60


def test_a_relay_that_floods_and_does_not_read_stops_nobody(siege, endure):
    federation = siege.federation
    keys = PrivateKeys.generate()
    reply = control_socket.ask(
        federation.federation, "enrol", name="deaf", lasts_s=600.0, relay=True
    )
    ticket = Ticket.from_text(reply["ticket"])
    address = ticket.addresses[0]

    async def attack():
        enrolled, certificate = await show(ticket, keys, address, dial)
        server = certificate.verify(ticket.federation, time.time())
        poured = await relays.lane_flood(
            address, keys, enrolled.client, server, certificate.federation, most_s=SECONDS
        )
        return enrolled.client, poured

    who, poured = endure(attack())
    must_be_cut_off(siege, "deaf", who, poured)


def test_former_members_keep_no_newcomer_out(siege):
    federation = siege.federation
    hostile = []
    for number in range(6):
        client = RawClient(federation, f"former-{number}")
        control_socket.ask(federation.federation, "revoke", name=f"former-{number}")
        hostile.append(client)
    address, server = hostile[0].address, hostile[0].server

    async def story():
        over = asyncio.Event()
        keys = [c.keys for c in hostile]
        knocking = asyncio.create_task(
            newcomers.knocking(address, keys, server.curve, most_s=120.0, until=over)
        )
        try:
            names = []
            for number in range(8):
                reply = await asyncio.to_thread(
                    control_socket.ask,
                    federation.federation,
                    "enrol",
                    name=f"new-{number}",
                    lasts_s=600.0,
                )
                ticket = Ticket.from_text(reply["ticket"])
                enrolled, _ = await show(ticket, PrivateKeys.generate(), address, dial)
                names.append(enrolled.name)
            return names
        finally:
            over.set()
            said.update(await knocking)

    said = Counter()
    names = asyncio.run(story())
    print(said)
    assert names == [f"new-{number}" for number in range(8)]
    assert said["up"] <= 2 * len(hostile), "once, and once more after a minute"
    assert said["come_again"] > 0
