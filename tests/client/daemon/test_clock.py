"""Clocks that are wrong or jump: a client says so, loses nothing and goes on when they are right."""

import os
import time

import pytest

from client.daemon_kit import order
from client.round_kit import FED, KEYS, SERVER
from client.state.test_outbox import envelope
from fcil_client.daemon import conversation
from fcil_client.link import handshake
from fcil_client.link.connection import Connection
from fcil_client.state.home import Enrolment, Home
from fcil_client.state.outbox import Outbox
from fcil_protocol.errors import TrustError
from fcil_protocol.ids import ClientId
from fcil_protocol.messages.messages import Ack, Hello
from fcil_protocol.trust.certificate import RootKey

YEAR_S = 365 * 86_400
NOW = time.time


@pytest.mark.parametrize("years", [-50, 11])
def test_a_client_whose_clock_is_wrong_says_so_once_and_joins_when_it_is_right(
    play, monkeypatch, years
):
    async def scenario(server, running):
        await server.hear(Hello)
        monkeypatch.setattr(handshake.time, "time", lambda: NOW() + years * YEAR_S)
        server.welcome(ready=False)
        await server.hear(Hello)
        server.welcome(ready=False)
        await server.hear(Hello)
        (note,) = running.said("this clock says")
        assert note.level == "error"
        monkeypatch.setattr(handshake.time, "time", NOW)
        server.welcome(ready=False)
        await server.hear(Hello)
        server.welcome(ready=True)
        server.say(Ack(digest=await server.inventory(names=["cat"])))
        server.say(order())
        await server.envelope()
        assert len(running.said("this clock says")) == 1

    play(scenario)


def test_a_hello_that_gets_no_answer_is_said_again(play, monkeypatch):
    monkeypatch.setattr(conversation, "ANSWER_S", 0.05)

    async def scenario(server, running):
        first = await server.hear(Hello)
        second = await server.hear(Hello)
        assert first.nonce != second.nonce
        monkeypatch.setattr(conversation, "ANSWER_S", 60)
        await server.hear(Hello)
        server.welcome(ready=False)
        await server.hear(Hello)

    play(scenario)


def enrolment_of(root):
    certificate = root.certify(SERVER.public).to_bytes().hex()
    return Enrolment(ClientId("a" * 26), "c", root.federation, certificate, ("a:1",), "data")


def test_a_device_that_starts_before_it_knows_the_time_begins_all_the_same(monkeypatch):
    root = RootKey.generate()
    enrolment = enrolment_of(root)
    monkeypatch.setattr(time, "time", lambda: 1000.0)  # no battery, no network time yet
    assert Connection(enrolment, KEYS).server == SERVER.public


def test_a_wrong_clock_lets_no_forged_certificate_pass(monkeypatch):
    root = RootKey.generate()
    enrolment = enrolment_of(root)
    altered = bytearray.fromhex(enrolment.certificate)
    altered[-1] ^= 1
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    with pytest.raises(TrustError, match="signature"):
        Connection(Enrolment(**{**vars(enrolment), "certificate": altered.hex()}), KEYS)


def test_the_newest_update_is_known_by_its_state_and_not_by_the_clock(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    home = Home.of(FED, tmp_path / "images")
    digests = []
    for number, base in ((0, 5), (1, 6)):
        digest, sealed = envelope(number, base=base)
        Outbox(home).put(digest, sealed)
        digests.append(digest)
    for digest, age_s in zip(digests, (0, 9000), strict=True):  # the clock was set back between
        os.utime(home.outbox_path(digest), (NOW() - age_s, NOW() - age_s))
    assert Outbox(home).waiting()[1] == digests[1]
    assert home.outbox() == [digests[1]]
