"""How a relay and the clients behind it become members."""

import asyncio
import json
import sqlite3

import pytest

from fcil_client.membership.enrol_with_ticket import redeem
from fcil_protocol.errors import BadTicket, CorruptFile, KeyFileError, StorageError, UsageError
from fcil_protocol.ids import new_client_id
from fcil_protocol.messages.messages import Enrolled
from fcil_protocol.trust.keys import PrivateKeys
from fcil_protocol.trust.ticket import Ticket
from fcil_server.federation.operator_text import describe_done
from fcil_server.ledger.databases.schema import APPLICATION_ID, MIGRATIONS
from fcil_server.ledger.enums import Role
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.sessions.relay.home import enrol, load_keys, load_record
from server.relay_kit import ADDRESS, Center

SERVER = ("server.example:7710",)


@pytest.fixture
def center(tmp_path):
    with Ledger(tmp_path / LEDGER_NAME) as ledger:
        yield Center(ledger)


def issue(center, name, **extra):
    return center.roster.issue(name, 600, SERVER, "test", **extra)


def test_a_ticket_through_a_relay_names_the_relay_and_the_federation(center):
    keys, relay = center.member("site", role=Role.RELAY)
    center.ledger.clients.set_address(relay, ADDRESS)
    ticket = issue(center, "c", via="site")
    assert (ticket.server_key, ticket.addresses) == (keys.public.curve, (ADDRESS,))
    assert (ticket.federation, ticket.via, ticket.relay) == (center.federation.id, True, False)
    assert center.roster.is_behind(ticket.guest_keys().public.curve, relay)
    assert Ticket.from_text(ticket.to_text()) == ticket


def test_who_came_in_through_a_relay_stays_behind_it(center):
    _, relay = center.member("site", role=Role.RELAY)
    center.ledger.clients.set_address(relay, ADDRESS)
    keys, client = center.member("c", via="site")
    row = center.ledger.clients.get(client)
    assert (row.role, row.via) == (Role.CLIENT, relay)
    assert center.roster.is_behind(keys.public.curve, relay)
    assert not center.roster.is_behind(keys.public.curve, client)
    assert center.roster.is_behind(PrivateKeys.generate().public.curve, relay) is False


def test_a_relays_own_ticket_leads_to_the_server(center):
    ticket = issue(center, "site", role=Role.RELAY)
    assert (ticket.addresses, ticket.via, ticket.relay) == (SERVER, False, True)
    assert Ticket.from_text(ticket.to_text()) == ticket


@pytest.mark.parametrize(
    ("via", "role", "words"),
    [
        ("nobody", Role.CLIENT, "no client is called"),
        ("invited", Role.CLIENT, "the relay 'invited' has an open ticket and has not joined yet"),
        ("camera", Role.CLIENT, "is not a relay"),
        ("fresh", Role.CLIENT, "never connected"),
        ("full", Role.CLIENT, "as many as it can"),
        ("gone", Role.CLIENT, "no longer is one"),
    ],
)
def test_where_no_client_can_be_sent_no_ticket_is_made(center, monkeypatch, via, role, words):
    center.member("camera")
    for name in ("site", "fresh", "full", "gone"):
        _, relay = center.member(name, role=Role.RELAY)
        if name != "fresh":
            center.ledger.clients.set_address(relay, ADDRESS)
    center.member("c", via="full")
    issue(center, "invited", role=Role.RELAY)
    if via == "full":
        monkeypatch.setattr("fcil_server.federation.roster.MAX_BEHIND", 1)
    gone = center.ledger.clients.by_name("gone")
    monkeypatch.setattr(center.roster, "named", _named(center, gone))
    center.ledger.clients.revoke(gone.client_id)
    with pytest.raises(UsageError, match=words):
        issue(center, "new", via=via, role=role)


def _named(center, gone):
    known = center.roster.named
    return lambda name: center.ledger.clients.get(gone.client_id) if name == "gone" else known(name)


def test_a_ticket_of_the_wrong_kind_is_refused_before_it_is_used(center, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = []
    with pytest.raises(BadTicket, match="admits a relay"):
        asyncio.run(redeem(issue(center, "a", role=Role.RELAY), tmp_path, made.append))
    with pytest.raises(BadTicket, match="for a client"):
        asyncio.run(enrol(tmp_path, issue(center, "b"), made.append))
    assert made == []


def test_a_relay_without_a_ticket_is_told_how_to_get_one(tmp_path):
    with pytest.raises(UsageError, match="is not an enrolled relay"):
        asyncio.run(enrol(tmp_path, None, print))


def test_a_relay_that_is_enrolled_needs_no_ticket_and_takes_no_other(center, tmp_path):
    ticket = issue(center, "site", role=Role.RELAY)
    shown = "a" * 64
    certificate = center.federation.certificate.to_bytes().hex()
    text = (
        f'{{"client_id": "{new_client_id()}", "name": "site", "federation": "{ticket.federation}",'
        f' "certificate": "{certificate}", "addresses": ["a:1"], "ticket": "{shown}"}}'
    )
    (tmp_path / "relay.json").write_text(text)
    record = load_record(tmp_path)
    assert asyncio.run(enrol(tmp_path, None, print)) == record
    with pytest.raises(UsageError, match="is the relay 'site' already"):
        asyncio.run(enrol(tmp_path, ticket, print))
    damaged = (
        text[:-40],
        text.replace(certificate, ""),
        text.replace(certificate, "no hex"),
        text.replace(certificate, certificate[2:]),
        text.replace('"a:1"', '"a"'),
        text.replace('"a:1"', "1"),
        text.replace("}", ', "link_key": "ab"}'),
        text.replace("}", ', "link_key": null}'),
        "[]",
    )
    for wrong in damaged:
        (tmp_path / "relay.json").write_text(wrong)
        with pytest.raises(CorruptFile, match=r"relay\.json is damaged"):
            load_record(tmp_path)


def test_a_folder_in_the_place_of_a_relays_record_is_named(tmp_path):
    (tmp_path / "relay.json").mkdir()
    with pytest.raises(StorageError, match=r"cannot read .*relay\.json"):
        load_record(tmp_path)


def test_client_and_relay_keep_what_their_ticket_brought(center, tmp_path, monkeypatch):
    """In their own files, whose fields and order stay; a second attempt shows no ticket."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "images").mkdir()
    shown = []

    async def show(ticket, keys, address, _make, _notify):
        shown.append(keys.public)
        answer = Enrolled(client="c" * 26, name="site", certificate=b"", addresses=["lan:1"])
        return answer, center.federation.certificate

    monkeypatch.setattr("fcil_protocol.link.enrol_with_ticket.show", show)
    own = issue(center, "site", role=Role.RELAY)
    _, relay = center.member("other", role=Role.RELAY)
    center.ledger.clients.set_address(relay, ADDRESS)
    through = issue(center, "c", via="other")
    record = asyncio.run(enrol(tmp_path, own, print))
    home, enrolment = asyncio.run(redeem(through, tmp_path / "images", print))
    certificate = center.federation.certificate.to_bytes().hex()
    alike = {
        "client_id": "c" * 26, "name": "site", "federation": center.federation.id,
        "certificate": certificate,
    }  # fmt: skip
    relays = {
        **alike, "addresses": [*SERVER, "lan:1"], "ticket": own.digest, "link_key": "",
    }  # fmt: skip
    clients = {
        **alike, "addresses": [ADDRESS], "data": str((tmp_path / "images").resolve()),
        "ticket": through.digest, "link_key": through.server_key.hex(),
    }  # fmt: skip
    for path, fields in (
        (tmp_path / "relay.json", relays),
        (home.directory / "client.json", clients),
    ):
        assert list(json.loads(path.read_bytes()).items()) == list(fields.items())
    assert asyncio.run(enrol(tmp_path, own, print)) == record
    assert asyncio.run(redeem(through, tmp_path / "images", print))[1] == enrolment
    assert shown == [load_keys(tmp_path).public, PrivateKeys.load(home.keys_path).public]


def test_the_relays_keys_are_its_users_alone(tmp_path):
    keys = load_keys(tmp_path)
    assert load_keys(tmp_path).public == keys.public
    assert (tmp_path / "keys.json").stat().st_mode & 0o777 == 0o600


def test_a_relay_that_lost_its_keys_makes_no_new_ones(tmp_path):
    """The server would admit none of them, and the relay would run on without service."""
    (tmp_path / "relay.json").touch()
    with pytest.raises(KeyFileError, match=r"keys\.json is missing, and the relay is enrolled"):
        load_keys(tmp_path)
    assert not (tmp_path / "keys.json").exists()


def test_a_ledger_from_before_relays_has_clients_only(tmp_path):
    path = tmp_path / LEDGER_NAME
    with sqlite3.connect(path) as old:
        old.executescript(f"PRAGMA application_id = {APPLICATION_ID};")
        for number, script in enumerate(MIGRATIONS[:2], start=1):
            old.executescript(f"{script} PRAGMA user_version = {number};")
        old.execute(
            "INSERT INTO clients (client_id, name, curve, signing, sealing, enrolled_at) "
            "VALUES ('c', 'camera', x'01', x'02', x'03', 0)"
        )
        old.execute(
            "INSERT INTO tickets (curve, signing, name, issued_at, expires_at) "
            "VALUES (x'04', x'05', 'other', 0, 1)"
        )
    old.close()
    with Ledger(path) as ledger:
        (row,), (ticket,) = ledger.clients.all(), ledger.tickets.all()
        assert (row.role, row.via, row.address) == (Role.CLIENT, None, "")
        assert (ticket.role, ticket.via) == (Role.CLIENT, None)


def test_a_revocation_of_a_relay_names_the_members_behind_it(center):
    _, site = center.member("site", role=Role.RELAY)
    center.ledger.clients.set_address(site, ADDRESS)
    for name in ("a", "gone", "b"):
        center.member(name, via="site")
    center.roster.revoke(center.roster.named("gone"), "", "test")
    relay = center.roster.named("site")
    center.roster.revoke(relay, "", "test")
    behind = center.roster.behind(relay)
    assert behind == ["a", "b"]
    assert describe_done("revoke", {"name": "site", "behind": behind}) == (
        "site: the membership is revoked. a, b can connect only through it: "
        "revoke each and give it a new ticket to connect another way."
    )
    told = {"name": "site", "behind": [], "tickets": ["c", "d"]}
    assert describe_done("revoke", told) == (
        "site: the membership is revoked. Open tickets that lead through it are withdrawn: c, d."
    )
    many = {"name": "site", "behind": [f"c{n}" for n in range(10)]}
    assert "c7 and 2 more can connect only" in describe_done("revoke", many)


@pytest.mark.parametrize("how", ["revoke", "erase"])
def test_the_open_tickets_through_a_relay_end_with_it(center, how):
    """Nothing passes through it any more, so they lead nowhere."""
    _, site = center.member("site", role=Role.RELAY)
    _, other = center.member("other", role=Role.RELAY)
    for relay in (site, other):
        center.ledger.clients.set_address(relay, ADDRESS)
    center.member("joined", via="site")
    for name, via in (("a", "site"), ("stays", "other"), ("b", "site")):
        issue(center, name, via=via)
    issue(center, "direct")
    row = center.roster.named("site")
    if how == "revoke":
        assert center.roster.revoke(row, "", "test") == ["a", "b"]
    else:
        center.roster.erase(row, "test")
    tickets, now = center.ledger.tickets, center.ledger.now
    assert [t.name for t in tickets.all() if t.open_s(now)] == ["stays", "direct"]
    assert center.roster.withdraw("a", "test") is False
