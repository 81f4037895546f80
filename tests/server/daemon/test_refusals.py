"""A refusal before a session answers the session of whoever signed the Hello, and no other."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from fcil_protocol.errors import BadSignature, UnknownClient
from fcil_protocol.link.interface import Incoming
from fcil_protocol.messages.frames import encode, parse
from fcil_protocol.messages.messages import Hello, Nack
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.daemon.sessions import ClientSessions

SERVER, CLIENT = PrivateKeys.generate(), PrivateKeys.generate()
FIELDS = {"protocol": 1, "oldest": 1, "package": "1", "federation": "f" * 32, "client": "a" * 26}


def answer_to(frames, peer=None):
    """Return the frames with which a server refuses a Hello on a connection, of a session or not."""
    sent, context = [], MagicMock()
    context.ledger.clients.by_curve = lambda _: SimpleNamespace(
        client_id="a" * 26, public_keys=CLIENT.public
    )
    context.peers.by_conn = lambda _: peer
    context.federation.keys = SERVER
    context.link.send = lambda _route, answer: sent.append(answer)
    incoming = Incoming(b"lane", 7, CLIENT.public.curve, tuple(frames), relayed=True)
    ClientSessions(context, MagicMock()).refuse(incoming, UnknownClient("no."))
    (answer,) = sent
    return parse(answer)


def test_a_client_hears_why_its_hello_is_refused():
    channel = Channel(CLIENT, SERVER.public)
    frames = channel.frames(Hello(**FIELDS))
    assert isinstance(channel.check(answer_to(frames)), Nack)


@pytest.mark.parametrize("signature", [bytes(64), bytes(16)])
def test_a_relay_gets_no_refusal_for_the_session_of_a_client_that_it_names(signature):
    """It knows the client's nonce, and a refusal with that would end the client."""
    channel = Channel(CLIENT, SERVER.public)
    forged = [encode(Hello(**FIELDS, nonce=channel.nonce)), signature]
    with pytest.raises(BadSignature, match="another session"):
        channel.check(answer_to(forged))


def test_a_second_hello_on_a_connection_is_refused_in_the_session_that_it_begins():
    """In the old one its sender could not read the answer."""
    old = Channel(SERVER, CLIENT.public)
    old.peer_nonce = bytes(16)
    channel = Channel(CLIENT, SERVER.public)
    peer = SimpleNamespace(channel=old, client="a" * 26)
    answer = answer_to(channel.frames(Hello(**FIELDS)), peer)
    assert isinstance(channel.check(answer), Nack)
