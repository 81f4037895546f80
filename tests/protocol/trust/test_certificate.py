"""Certificates: what the root key said, for whom, until when, and nothing else."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcil_protocol.errors import BadSignature, FcilError, TooLarge, TrustError, WrongFederation
from fcil_protocol.ids import FederationId
from fcil_protocol.trust.canonical import pack_map
from fcil_protocol.trust.certificate import MAX_CERTIFICATE_BYTES, Certificate, RootKey
from fcil_protocol.trust.keys import PrivateKeys


def test_a_certificate_gives_the_servers_keys_to_members():
    root, server = RootKey.generate(), PrivateKeys.generate().public
    certificate = Certificate.from_bytes(root.certify(server).to_bytes())
    assert certificate.verify(root.federation, time.time()) == server
    assert certificate.federation == root.federation
    assert len(certificate.to_bytes()) < 2048


def test_a_certificate_of_another_federation_is_refused_with_both_names():
    root, other = RootKey.generate(), RootKey.generate()
    certificate = other.certify(PrivateKeys.generate().public)
    with pytest.raises(WrongFederation, match=f"{other.federation}, expected {root.federation}"):
        certificate.verify(root.federation, time.time())


def test_a_certificate_is_good_from_a_day_before_it_was_made_until_its_end():
    root = RootKey.generate()
    before = time.time()
    certificate = root.certify(PrivateKeys.generate().public, valid_days=10)
    day = 86_400
    for now in (before - 0.9 * day, before, before + 9.9 * day):
        certificate.verify(root.federation, now)
    for now in (0.0, before - 1.1 * day, before + 10.1 * day, 1e15):
        with pytest.raises(TrustError, match=r"valid from \d{4}-\d\d-\d\d to .* clock says"):
            certificate.verify(root.federation, now)


def test_a_later_certificate_has_a_higher_serial(monkeypatch):
    root, server = RootKey.generate(), PrivateKeys.generate().public
    monkeypatch.setattr(time, "time", lambda: 1.8e9)
    first = root.certify(server)
    monkeypatch.setattr(time, "time", lambda: 1.8e9 + 0.01)
    assert root.certify(server).serial > first.serial


def test_a_certificate_follows_the_one_before_also_on_a_clock_that_was_set_back(monkeypatch):
    root, server = RootKey.generate(), PrivateKeys.generate().public
    first = root.certify(server)
    monkeypatch.setattr(time, "time", lambda: 1e9)
    later = root.certify(server, after=first.serial)
    later.refuse_older(first)
    assert later.serial == first.serial + 1


def test_a_flipped_bit_anywhere_in_a_certificate_is_refused():
    root = RootKey.generate()
    data = root.certify(PrivateKeys.generate().public).to_bytes()
    for position in range(0, len(data), 3):
        changed = bytearray(data)
        changed[position] ^= 1 << (position % 8)
        with pytest.raises(FcilError):
            Certificate.from_bytes(bytes(changed)).verify(root.federation, time.time())


def test_fields_of_a_certificate_are_those_that_are_signed():
    """`replace` cannot put other keys beside a valid signature: they are read from the body."""
    root = RootKey.generate()
    certificate = root.certify(PrivateKeys.generate().public)
    with pytest.raises((ValueError, TypeError), match="init=False"):  # by the version of Python
        replace(certificate, keys=PrivateKeys.generate().public)


def test_a_server_cannot_certify_itself():
    """A certificate that names the right root but is signed by the server's own key."""
    root, server = RootKey.generate(), PrivateKeys.generate()
    body = root.certify(server.public).body
    with pytest.raises(BadSignature):
        Certificate(body, server.sign("certificate", body)).verify(root.federation, time.time())


def test_an_oversized_certificate_is_refused_before_it_is_parsed():
    with pytest.raises(TooLarge):
        Certificate.from_bytes(b"\x81" + bytes(MAX_CERTIFICATE_BYTES))


@given(st.binary(max_size=300))
def test_random_bytes_as_a_certificate_raise_only_named_errors(data):
    with pytest.raises(FcilError):
        Certificate.from_bytes(data)
    with pytest.raises(FcilError):
        Certificate.from_bytes(pack_map({"body": data, "signature": bytes(64)})).verify(
            FederationId("0" * 32), 0.0
        )
