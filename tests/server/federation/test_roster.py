"""Tickets, members and the gate's lists, on a real ledger with a clock of its own."""

import pytest

from fcil_protocol.errors import BadTicket, Revoked, TicketExpired, TicketUsed, UsageError
from fcil_protocol.ids import is_client_id, named_client_id
from fcil_protocol.messages.messages import Rotate
from fcil_protocol.trust.certificate import RootKey
from fcil_protocol.trust.keys import PrivateKeys
from fcil_protocol.trust.ticket import PROOF, proof_text
from fcil_server.federation.allow_list import AllowList
from fcil_server.federation.eligibility import LEFT_BY_ITSELF, refusal
from fcil_server.federation.roster import Roster, check_name
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

ADDRESSES = ("127.0.0.1:7710",)


class Federation:
    """As much of a federation as a roster needs."""

    def __init__(self, ledger):
        self.ledger = ledger
        self.keys = PrivateKeys.generate()
        self.id = RootKey.generate().federation


class Clock:
    def __init__(self):
        self.now = 1_800_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("fcil_protocol.trust.ticket.time.time", made)
    return made


@pytest.fixture
def roster(tmp_path, clock):
    with Ledger(tmp_path / LEDGER_NAME, clock=clock) as ledger:
        yield Roster(Federation(ledger), AllowList())


def issue(roster, name="camera", lasts_s=3600.0):
    """Issue a ticket; returns it with the server's row of it."""
    ticket = roster.issue(name, lasts_s, ADDRESSES, "uid 0")
    return ticket, roster.federation.ledger.tickets.get(ticket.guest_keys().public.curve)


def row_of(roster, ticket):
    return roster.federation.ledger.tickets.get(ticket.guest_keys().public.curve)


def test_a_ticket_makes_its_bearer_a_member_under_the_name_that_it_was_issued_for(roster):
    ticket, row = issue(roster)
    guest, keys = ticket.guest_keys().public.curve, PrivateKeys.generate().public
    assert roster.allow_list(guest) is True
    assert roster.allow_list(keys.curve) is False
    client = roster.redeem(row, keys, "Linux")
    assert roster.allow_list.is_member(keys.curve)
    assert not roster.allow_list.is_member(guest)
    assert roster.federation.ledger.clients.get(client).name == "camera"
    audit = [(e.action, e.detail) for e in roster.federation.ledger.audit.newest()]
    assert audit == [("enrol", "camera"), ("enrolled", client)]


def test_the_ledger_keeps_nothing_that_opens_a_ticket(roster, tmp_path):
    ticket, _ = issue(roster)
    roster.federation.ledger.close()
    stored = (tmp_path / LEDGER_NAME).read_bytes()
    secrets = ticket.guest_keys()
    for secret in (ticket.secret, secrets.curve_secret, ticket.to_text().encode()):
        assert secret not in stored
        assert secret.hex().encode() not in stored


def test_asked_again_with_the_same_keys_it_says_the_same(roster):
    ticket, row = issue(roster)
    keys = PrivateKeys.generate().public
    client = roster.redeem(row, keys, "")
    assert roster.redeem(row_of(roster, ticket), keys, "") == client
    assert len(roster.federation.ledger.clients.all()) == 1


def test_a_used_ticket_is_refused_to_another_device(roster):
    ticket, row = issue(roster)
    roster.redeem(row, PrivateKeys.generate().public, "")
    with pytest.raises(TicketUsed, match="by another device"):
        roster.redeem(row_of(roster, ticket), PrivateKeys.generate().public, "")
    assert len(roster.federation.ledger.clients.all()) == 1


def test_the_servers_clock_says_when_a_ticket_is_over(roster, clock):
    ticket, row = issue(roster, lasts_s=100.0)
    clock.now += 99
    keys = PrivateKeys.generate().public
    clock.now += 2
    words = "expired on 2027-01-15 08:01:40 UTC by .* which says 2027-01-15 08:01:41 UTC"
    with pytest.raises(TicketExpired, match=words):
        roster.redeem(row, keys, "")
    assert roster.allow_list(ticket.guest_keys().public.curve) is True  # it is told why


def test_a_newer_ticket_of_the_same_name_withdraws_the_older_one(roster):
    first, _ = issue(roster)
    _second, row = issue(roster)
    with pytest.raises(BadTicket, match="withdrawn"):
        roster.redeem(row_of(roster, first), PrivateKeys.generate().public, "")
    roster.redeem(row, PrivateKeys.generate().public, "")


def test_a_name_in_use_gets_no_ticket(roster):
    _, row = issue(roster)
    roster.redeem(row, PrivateKeys.generate().public, "")
    with pytest.raises(UsageError, match="'camera' is enrolled"):
        issue(roster)


def test_a_client_of_this_machine_takes_no_name_that_a_ticket_is_for(roster):
    """To revoke the name would then end its membership, and leave the ticket open."""
    _, row = issue(roster)
    local = roster.enrol_local("camera", PrivateKeys.generate().public, "uid 0")
    assert roster.federation.ledger.clients.get(local).name == "camera-2"
    invited = roster.redeem(row, PrivateKeys.generate().public, "")
    assert roster.federation.ledger.clients.get(invited).name == "camera"


def test_two_tickets_cannot_both_become_the_same_name(roster, monkeypatch):
    _, row = issue(roster)
    monkeypatch.setattr(roster.federation.ledger.clients, "free_name", lambda name: name)
    roster.enrol_local("camera", PrivateKeys.generate().public, "uid 0")
    with pytest.raises(UsageError, match="'camera' is enrolled"):
        roster.redeem(row, PrivateKeys.generate().public, "")
    assert roster.federation.ledger.tickets.get(row.curve).used_at is None
    roster.revoke(roster.named("camera"), "", "uid 0")
    with pytest.raises(BadTicket, match="withdrawn"):  # it is for the same name
        roster.redeem(
            roster.federation.ledger.tickets.get(row.curve), PrivateKeys.generate().public, ""
        )


def test_a_revoked_member_is_a_guest_who_is_told_why(roster):
    _, row = issue(roster)
    keys = PrivateKeys.generate().public
    roster.redeem(row, keys, "")
    member = roster.named("camera")
    roster.revoke(member, "the device was stolen", "uid 0")
    assert not roster.allow_list.is_member(keys.curve)
    assert roster.allow_list(keys.curve) is True
    now = roster.federation.ledger.now
    error = refusal(roster.federation.ledger.clients.get(member.client_id), now)
    assert isinstance(error, Revoked)
    assert "the device was stolen" in error.message
    with pytest.raises(Revoked):  # nor does it come back through the join file
        roster.enrol_local("camera", keys, "uid 0")


def test_the_first_revocation_stays(roster, clock):
    keys = PrivateKeys.generate().public
    client = roster.enrol_local("camera", keys, "uid 0")
    row = roster.federation.ledger.clients.get(client)
    roster.revoke(row, LEFT_BY_ITSELF, "camera")
    clock.now += 50
    roster.revoke(row, "later", "uid 0")
    again = roster.federation.ledger.clients.get(client)
    assert (again.revoked_at, again.revoked_why) == (1_800_000_000.0, LEFT_BY_ITSELF)


def test_a_server_that_starts_again_knows_members_guests_and_former_members(roster):
    ticket, row = issue(roster, "one")
    member, former = PrivateKeys.generate().public, PrivateKeys.generate().public
    roster.redeem(row, member, "")
    roster.enrol_local("two", former, "uid 0")
    roster.revoke(roster.named("two"), "", "uid 0")
    fresh = Roster(roster.federation, AllowList())
    fresh.open()
    assert fresh.allow_list.is_member(member.curve)
    assert [fresh.allow_list(k) for k in (former.curve, ticket.guest_keys().public.curve)] == [
        True
    ] * 2
    assert not fresh.allow_list.is_member(former.curve)
    assert fresh.allow_list(PrivateKeys.generate().public.curve) is False


def test_a_client_is_named_by_name_or_by_the_beginning_of_its_id(roster):
    client = roster.enrol_local("camera", PrivateKeys.generate().public, "uid 0")
    assert roster.named("camera").client_id == roster.named(client[:6]).client_id == client
    for wrong in ("nobody", client[:3], ""):
        with pytest.raises(UsageError, match="no client is called"):
            roster.named(wrong)


def test_a_former_members_name_says_since_when(roster):
    for name, why, words in (("camera", "stolen", "was revoked"), ("door", LEFT_BY_ITSELF, "left")):
        roster.enrol_local(name, PrivateKeys.generate().public, "uid 0")
        roster.revoke(roster.named(name), why, "uid 0")
        with pytest.raises(UsageError, match=f"called '{name}' any more: it {words} on 2027-01-15"):
            roster.named(name)


def test_a_program_names_a_client_by_its_name_or_its_complete_id(roster):
    client = roster.enrol_local("camera", PrivateKeys.generate().public, "uid 0")
    for name in ("camera", client):
        assert roster.named(name, exact=True).client_id == client
    with pytest.raises(UsageError, match="no client is called"):
        roster.named(client[:-1], exact=True)


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb", "\x1b[31m", None, 5])
def test_a_name_is_printable_and_short(name):
    with pytest.raises(UsageError, match="1 to 128 printable"):
        check_name(name)


def test_ids_that_derive_from_names_are_the_same_in_every_federation(roster):
    roster.named_ids = True
    ids = [
        roster.enrol_local(name, PrivateKeys.generate().public, "uid 0")
        for name in ("here:swarm-000", "there:swarm-000", "here:swarm-001")
    ]
    assert len(set(ids)) == 3
    assert all(is_client_id(i) for i in ids)
    assert ids[0] == named_client_id("swarm-000")  # whatever the machine is called
    assert ids[2] == named_client_id("swarm-001")
    roster.named_ids = False
    drawn = roster.enrol_local("here:swarm-002", PrivateKeys.generate().public, "uid 0")
    assert drawn != named_client_id("swarm-002")


def rotation(row, keys):
    proof = keys.sign(PROOF, proof_text(row.curve, keys.public))
    public = keys.public
    return Rotate(
        curve=public.curve, signing=public.signing, sealing=public.sealing, proof=proof
    )  # fmt: skip


def member(roster):
    _, ticket = issue(roster)
    keys = PrivateKeys.generate()
    client = roster.redeem(ticket, keys.public, "")
    return roster.federation.ledger.clients, client, keys


def test_new_keys_take_the_place_of_the_old_ones_once(roster):
    clients, client, old = member(roster)
    new = PrivateKeys.generate()
    for _ in range(3):  # an answer may be lost
        row = clients.get(client)
        assert roster.rotate(row, rotation(row, new)) == new.public
        assert roster.allow_list.is_member(new.public.curve)
        assert not roster.allow_list.is_member(old.public.curve)
    actions = [e.action for e in roster.federation.ledger.audit.newest()]
    assert actions.count("rotate_keys") == 1, "a row that nobody can remove"


def test_a_revoked_client_gets_no_new_keys(roster):
    clients, client, _ = member(roster)
    roster.revoke(clients.get(client), "lost", "test", keep=False)
    row, new = clients.get(client), PrivateKeys.generate()
    with pytest.raises(Revoked, match="lost"):
        roster.rotate(row, rotation(row, new))
    assert not roster.allow_list.is_member(new.public.curve)


def test_keys_of_an_erased_client_become_nobodys(roster):
    clients, gone, keys = member(roster)
    roster.revoke(clients.get(gone), "", "test", keep=False)
    clients.erase(gone)
    _, ticket = issue(roster, "other")
    client = roster.redeem(ticket, PrivateKeys.generate().public, "")
    row = clients.get(client)
    with pytest.raises(UsageError):
        roster.rotate(row, rotation(row, keys))
    assert clients.get(client).curve == row.curve
