"""Tickets as text: what goes in comes out, and nothing else does."""

import base64
import contextlib
import hashlib
import io
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcil_protocol.errors import BadTicket, StorageError
from fcil_protocol.ids import FederationId
from fcil_protocol.trust.ticket import MAX_TICKET_CHARS, PREFIX, Ticket, read_ticket

KEY = bytes(range(32))
FEDERATION = FederationId("0123456789abcdef" * 2)
ADDRESSES = ("server.example:7710", "[2001:db8::1]:7711")


def ticket(lasts_s=3600.0, addresses=ADDRESSES):
    return Ticket.new(KEY, FEDERATION, addresses, lasts_s)


def test_a_ticket_survives_its_text():
    made = ticket()
    assert Ticket.from_text(made.to_text()) == made
    assert abs(made.expires - (time.time() + 3600)) < 60


def test_a_ticket_for_one_address_is_about_150_characters_that_a_qr_code_packs_well():
    text = ticket(addresses=("192.168.100.20:7710",)).to_text()
    assert len(text) <= 160
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")


def test_case_spaces_and_line_breaks_do_not_matter():
    made = ticket()
    text = made.to_text().lower()
    broken = "\n".join(text[i : i + 40] for i in range(0, len(text), 40)) + " \r\n"
    assert Ticket.from_text(broken) == made


def test_two_tickets_share_nothing_secret():
    one, two = ticket(), ticket()
    assert one.secret != two.secret
    assert one.guest_keys().public != two.guest_keys().public


def test_the_same_ticket_always_makes_the_same_guest():
    made = ticket()
    again = Ticket.from_text(made.to_text())
    assert made.guest_keys().public == again.guest_keys().public


def test_a_guest_of_another_server_is_another_guest():
    made = ticket()
    other = Ticket(bytes(32), FEDERATION, made.secret, made.expires, made.addresses)
    assert made.guest_keys().public != other.guest_keys().public


def test_the_repr_does_not_show_the_secret():
    made = ticket()
    shown = repr(made)
    assert made.secret.hex() not in shown
    assert repr(made.secret)[2:-1] not in shown


@given(st.data())
def test_one_changed_character_is_noticed(data):
    text = TEXT
    at = data.draw(st.integers(0, len(text) - 1))
    letter = data.draw(st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"))
    changed = text[:at] + letter + text[at + 1 :]
    if changed != text and not _same_bits(changed, text):
        with pytest.raises(BadTicket):
            Ticket.from_text(changed)


def _same_bits(a, b):
    """The last base32 character has bits that mean nothing."""
    return a[:-1] == b[:-1]


TEXT = Ticket(KEY, FEDERATION, bytes(16), 2_000_000_000, ADDRESSES).to_text()


@pytest.mark.parametrize("cut", [1, 2, 8, 40, 100])
def test_a_ticket_cut_short_says_so(cut):
    with pytest.raises(BadTicket, match="altered or cut short"):
        Ticket.from_text(TEXT[:-cut])


@given(st.text(max_size=400))
def test_any_text_never_raises_anything_else(text):
    for candidate in (text, PREFIX + text):
        with contextlib.suppress(BadTicket):
            Ticket.from_text(candidate)


def test_a_long_file_is_refused_before_it_is_decoded():
    with pytest.raises(BadTicket, match="expected a ticket"):
        Ticket.from_text(PREFIX + "A" * MAX_TICKET_CHARS)


@pytest.mark.parametrize(
    "address", ["nowhere", "host:0", "host:65536", "a b:1", "host:", "ho,st:1", "[::1", ":7710"]
)
def test_an_address_that_is_none_makes_no_ticket(address):
    with pytest.raises(BadTicket, match="HOST:PORT"):
        ticket(addresses=(address,))


@pytest.mark.parametrize("count", [0, 5])
def test_a_ticket_has_one_to_four_addresses(count):
    with pytest.raises(BadTicket, match=f"1 to 4 addresses, got {count}"):
        ticket(addresses=tuple(f"h{i}:1" for i in range(count)))


def test_a_ticket_is_read_from_a_file_or_from_standard_input(tmp_path):
    path = tmp_path / "a.ticket"
    path.write_text(TEXT + "\n")
    assert read_ticket(path, io.BytesIO()) == read_ticket(Path("-"), io.BytesIO(TEXT.encode()))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"none\.ticket"):
        read_ticket(tmp_path / "none.ticket", io.BytesIO())


def test_addresses_that_no_ticket_can_hold_are_refused_when_it_is_made():
    long = tuple(f"{'a' * 90}-{n}.example:7710" for n in range(4))
    with pytest.raises(BadTicket, match="at most 600 characters") as caught:
        Ticket.new(KEY, FEDERATION, long, 60.0)
    assert "advertise" in caught.value.action
    assert Ticket.from_text(Ticket.new(KEY, FEDERATION, long[:2], 60.0).to_text())


def test_an_image_instead_of_a_ticket_is_no_ticket():
    with pytest.raises(BadTicket, match="expected a ticket"):
        read_ticket(Path("-"), io.BytesIO(b"\x89PNG\xff\x00"))


@pytest.mark.parametrize(("via", "relay"), [(True, False), (False, True), (True, True)])
def test_what_a_ticket_is_for_survives_its_text(via, relay):
    made = Ticket.new(KEY, FEDERATION, ADDRESSES, 60.0, via=via, relay=relay)
    again = Ticket.from_text(made.to_text())
    assert (again, again.via, again.relay) == (made, via, relay)
    assert len(made.to_text()) <= len(ticket().to_text()) + 2


def test_a_plain_ticket_has_the_form_that_older_programs_read():
    assert base64.b32decode(TEXT.removeprefix(PREFIX)[:56])[:33] == b"\x01" + KEY


@pytest.mark.parametrize("head", [b"\x02\x04", b"\x03\x00", b"\x00\x00"])
def test_another_form_is_named(head):
    body = head + bytes(32 + 16 + 16 + 4) + b"a:1"
    check = hashlib.sha256(b"fcil/1/ticket" + body).digest()[:4]
    text = PREFIX + base64.b32encode(body + check).decode().rstrip("=")
    with pytest.raises(BadTicket, match=rf"has format {head[0]}\."):
        Ticket.from_text(text)
