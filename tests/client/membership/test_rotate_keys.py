"""Certificates only ever become newer, and a change of keys is finished before a connection."""

import asyncio

import pytest

from fcil_client.link.handshake import read_server
from fcil_client.membership import rotate_keys
from fcil_client.state.home import Enrolment, Home
from fcil_client.state.mask_secrets import MaskFile
from fcil_protocol.errors import TrustError, Unreachable
from fcil_protocol.ids import RoundKey
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


@pytest.mark.parametrize(
    ("said", "starts"),
    [(Unreachable("nobody."), False), (TrustError("unknown."), True), (None, True)],
)
def test_a_client_whose_server_may_know_only_its_new_keys_waits_for_it(
    servers, tmp_path, monkeypatch, said, starts
):
    """The old ones would be refused for as long as the daemon runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    root, first, _ = servers
    home, known = Home.of(root.federation, tmp_path), enrolment(root, first)
    home.save_enrolment(known)
    PrivateKeys.generate().save(home.next_keys_path)

    async def rotate(changed, _):
        if said is not None:
            raise said
        changed.next_keys_path.unlink()

    async def enrol():
        return home, known

    monkeypatch.setattr(rotate_keys, "rotate", rotate)
    start = rotate_keys.finish_first(tmp_path, "", enrol)
    if starts:
        assert asyncio.run(start) == (home, known)
    else:
        with pytest.raises(Unreachable, match="a change of this client's keys was interrupted"):
            asyncio.run(start)


def test_the_old_keys_stay_for_the_masked_round_under_way_before_the_server_hears_of_new_ones(
    servers, tmp_path, monkeypatch
):
    root, first, _ = servers
    home, known = Home(tmp_path), enrolment(root, first)
    old = PrivateKeys.load_or_new(home.keys_path)
    masks = MaskFile(tmp_path)
    masks.begin(RoundKey("r20261127-120000-0000", 0, "mask_keys", 0))

    def visit(*_):
        raise Unreachable("nobody.")

    monkeypatch.setattr(rotate_keys, "visit", visit)
    with pytest.raises(Unreachable):
        asyncio.run(rotate_keys.rotate(home, known))
    assert masks.signer(old.public.signing, PrivateKeys.generate()).public == old.public
