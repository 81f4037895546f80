"""Certificates only ever become newer."""

import pytest

from fcil_client.link.handshake import read_server
from fcil_client.state.home import Enrolment, Home
from fcil_protocol.errors import TrustError
from fcil_protocol.messages.messages import NONCE_BYTES, Welcome
from fcil_protocol.trust.certificate import RootKey
from fcil_protocol.trust.keys import PrivateKeys

WELCOME = Welcome(
    protocol=1, server_nonce=bytes(NONCE_BYTES), certificate=b"", run="", method="", hparams="{}",
    method_version="1", schema_digest="0" * 64, backbone="{}", needs_backbone=False, ready=True,
    max_payload_bytes=1, credit=1,
)  # fmt: skip


@pytest.fixture
def servers():
    """A federation's server before and after a change of keys: (root, old, new) certificates."""
    root, old, new = RootKey.generate(), PrivateKeys.generate(), PrivateKeys.generate()
    first = second = root.certify(old.public)
    while second.serial <= first.serial:  # a serial is a time in milliseconds
        second = root.certify(new.public)
    return root, first, second


def enrolment(root, certificate):
    text = certificate.to_bytes().hex()
    return Enrolment("a" * 26, "camera", root.federation, text, ("127.0.0.1:1",), "data")


def test_the_copy_of_a_servers_old_keys_is_not_believed(servers):
    root, first, second = servers
    old = WELCOME.model_copy(update={"certificate": first.to_bytes()})
    with pytest.raises(TrustError, match="is known here"):
        read_server(old, enrolment(root, second))


def test_a_newer_certificate_is_believed_and_kept(servers, tmp_path):
    root, first, second = servers
    known = enrolment(root, first)
    newer = WELCOME.model_copy(update={"certificate": second.to_bytes()})
    assert read_server(newer, known) == second.keys
    home = Home(tmp_path)
    kept = home.keep_certificate(known, second.to_bytes())
    assert kept == home.enrolment() == enrolment(root, second)
    (tmp_path / "client.json").unlink()
    assert home.keep_certificate(kept, second.to_bytes()) is kept  # nothing new, nothing written
    assert home.enrolment() is None
