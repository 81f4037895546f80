"""The signed session: only the peer's own messages, of this session, each once and in order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_protocol.errors import BadSignature, FcilError, WireError
from fcil_protocol.messages.frames import Received, encode, parse
from fcil_protocol.messages.messages import (
    NONCE_BYTES,
    Ack,
    Bye,
    Chunk,
    Hello,
    Message,
    Nack,
    Rotate,
    Update,
    Want,
    Welcome,
)
from fcil_protocol.messages.signed_session import Channel, new_nonce
from fcil_protocol.trust.keys import PrivateKeys, verify_signature
from fcil_protocol.trust.session_keys import MAC_BYTES, mac_of

CLIENT, SERVER, OTHER = (
    PrivateKeys(curve=bytes([n]) * 32, signing=bytes([n]) * 32, sealing=bytes([n]) * 32)
    for n in (1, 2, 3)
)
HEX = "ab" * 32


def hello(channel: Channel) -> Hello:
    return Hello(nonce=channel.nonce, protocol=1, oldest=1, package="", federation="f", client="c")


class Session:
    """Both ends after Hello and Welcome, as the daemons bring them there."""

    def __init__(self) -> None:
        self.client = Channel(CLIENT, SERVER.public)
        self.server = Channel(SERVER, CLIENT.public)
        got = self.to_server(hello(self.client))
        self.server.peer_nonce = got.nonce
        self.client.peer_nonce = self.server.nonce

    def to_server(self, message: Message, *blobs: bytes) -> Message:
        return self.server.check(parse(self.client.frames(message, *blobs)))

    def to_client(self, message: Message, *blobs: bytes) -> Message:
        return self.client.check(parse(self.server.frames(message, *blobs)))


def welcome(channel: Channel) -> Welcome:
    return Welcome(
        protocol=1,
        server_nonce=channel.nonce,
        certificate=b"",
        run="r",
        method="m",
        method_version="1",
        hparams="{}",
        schema_digest=HEX,
        backbone="{}",
        needs_backbone=False,
        ready=True,
        max_payload_bytes=1,
        credit=1,
    )


class Agreed(Session):
    """A session whose messages carry MACs."""

    def __init__(self) -> None:
        super().__init__()
        self.server.agree_as_server(self.client.session_key)
        self.server.frames(welcome(self.server))
        self.client.agree_as_client(self.server.session_key)


def test_messages_pass_in_both_directions() -> None:
    session = Session()
    for number in range(3):
        got = session.to_server(Want(digest=HEX, chunks=[number]))
        assert isinstance(got, Want)
        assert got.chunks == [number]
        assert isinstance(session.to_client(Ack(digest=HEX)), Ack)


def test_each_side_writes_digests_as_the_other_reads_them() -> None:
    session = Session()
    session.server.raw_digests = True
    assert HEX.encode() in session.client.frames(Ack(digest=HEX))[0]
    for message in (Ack(digest=HEX), Chunk(digest=HEX, index=0)):
        frames = session.server.frames(message, *([b"blob"] if message.type == "chunk" else []))
        assert bytes.fromhex(HEX) in frames[0]
        assert session.client.check(parse(frames)).digest == HEX  # type: ignore[attr-defined]


def test_messages_of_a_session_with_keys_have_a_mac_and_no_nonce() -> None:
    session = Agreed()
    for _ in range(2):
        for frames, channel in (
            (session.client.frames(Want(digest=HEX, chunks=[1])), session.server),
            (session.server.frames(Ack(digest=HEX)), session.client),
        ):
            assert len(frames[1]) == MAC_BYTES
            message = channel.check(parse(frames))
            assert (message.nonce, b"nonce" in frames[0]) == (bytes(NONCE_BYTES), False)


def test_a_hello_and_a_welcome_are_signed_whatever_was_agreed() -> None:
    session = Agreed()
    for frames, key in (
        (session.client.frames(hello(session.client)), CLIENT),
        (session.server.frames(welcome(session.server)), SERVER),
    ):
        verify_signature(key.public.signing, "message", frames[0], frames[1])


def test_what_the_server_sends_before_its_welcome_is_signed() -> None:
    client, server = Channel(CLIENT, SERVER.public), Channel(SERVER, CLIENT.public)
    server.peer_nonce = client.nonce
    server.agree_as_server(client.session_key)
    refusal = server.frames(Nack(code="malformed", text="no"))
    assert isinstance(client.check(parse(refusal)), Nack)
    server.frames(welcome(server))
    assert len(server.frames(Bye())[1]) == MAC_BYTES


def test_signed_messages_are_taken_in_a_session_with_keys() -> None:
    session = Agreed()
    session.server._peer_has_them = False
    assert isinstance(session.to_client(Ack(digest=HEX)), Ack)


def test_what_is_always_signed_is_refused_with_a_mac() -> None:
    session = Agreed()
    keys = CLIENT.public
    rotate = Rotate(
        curve=keys.curve, signing=keys.signing, sealing=keys.sealing, proof=bytes(64), seq=9
    )
    body = encode(rotate)
    with pytest.raises(BadSignature, match="signature of a message does not match"):
        session.server.check(parse([body, mac_of(session.client._mine, body)]))


@pytest.mark.parametrize("sender", ["client", "server"])
def test_a_mac_of_another_session_or_direction_is_refused(sender: str) -> None:
    session, other = Agreed(), Agreed()
    frames = getattr(session, sender).frames(Bye())
    for channel in (other.client, other.server, getattr(session, sender)):
        with pytest.raises(BadSignature, match="the MAC of a bye does not match"):
            channel.check(parse(frames))


def test_a_mac_in_a_session_without_keys_is_refused() -> None:
    session = Session()
    body = session.client.frames(Bye())[0]
    for mac in (bytes(MAC_BYTES), mac_of(b"", body)):
        with pytest.raises(BadSignature, match="the MAC of a bye does not match"):
            session.server.check(parse([body, mac]))


def test_a_repeated_message_with_a_mac_is_refused() -> None:
    session = Agreed()
    received = parse(session.server.frames(Ack(digest=HEX)))
    session.client.check(received)
    with pytest.raises(WireError, match="arrived twice or late"):
        session.client.check(received)


@given(place=st.integers(min_value=0), sender=st.sampled_from(["client", "server"]))
@settings(max_examples=100)
def test_fuzz_no_changed_bit_of_body_or_mac_passes(place: int, sender: str) -> None:
    session = Agreed()
    receiver = session.server if sender == "client" else session.client
    frames = getattr(session, sender).frames(Nack(code="malformed", text="of one kind"))
    whole = bytearray(frames[0] + frames[1])
    at = place % (8 * len(whole))
    whole[at // 8] ^= 1 << at % 8
    size = len(frames[0])
    with pytest.raises(FcilError):
        receiver.check(parse([bytes(whole[:size]), bytes(whole[size:])]))


def test_a_welcome_that_was_meant_for_another_client_gives_no_common_keys() -> None:
    """A member repeats another's nonce and key in its own Hello, and passes the Welcome on."""
    client = Channel(CLIENT, SERVER.public)
    server = Channel(SERVER, OTHER.public)  # it takes the member for the one that it speaks with
    server.peer_nonce = client.nonce
    server.agree_as_server(client.session_key)
    frames = server.frames(welcome(server))
    client.check(parse(frames))
    client.peer_nonce = server.nonce
    client.agree_as_client(server.session_key)
    with pytest.raises(BadSignature, match="the MAC of a bye does not match"):
        server.check(parse(client.frames(Bye())))


def test_a_relay_that_offers_its_own_key_to_both_is_found_out() -> None:
    """It can put a key of its own into neither Hello nor Welcome: both are signed."""
    client, middle = Channel(CLIENT, SERVER.public), Channel(OTHER, CLIENT.public)
    server = Channel(SERVER, CLIENT.public)
    said = hello(client).model_copy(update={"session_key": middle.session_key})
    frames = client.frames(hello(client))
    forged = [middle.frames(said)[0], frames[1]]
    with pytest.raises(BadSignature):
        server.check(parse(forged))


def test_nonces_are_fresh_and_of_the_right_length() -> None:
    nonces = {new_nonce() for _ in range(100)}
    assert len(nonces) == 100
    assert {len(n) for n in nonces} == {NONCE_BYTES}
    assert Channel(CLIENT, SERVER.public).nonce != Channel(CLIENT, SERVER.public).nonce


def test_a_message_carries_the_nonce_of_the_one_who_receives_it() -> None:
    session = Session()
    assert session.to_server(Bye()).nonce == session.server.nonce
    assert session.to_client(Bye()).nonce == session.client.nonce


def test_the_callers_message_is_not_changed_by_stamping() -> None:
    session = Session()
    message = Ack(digest=HEX)
    session.server.frames(message)
    assert message == Ack(digest=HEX)


def test_the_same_message_twice_is_refused_the_second_time() -> None:
    session = Session()
    received = parse(session.server.frames(Ack(digest=HEX)))
    session.client.check(received)
    with pytest.raises(WireError, match="arrived twice or late"):
        session.client.check(received)


def test_an_earlier_message_after_a_later_one_is_refused_and_the_session_goes_on() -> None:
    session = Session()
    first, second, third = (parse(session.server.frames(Ack(digest=HEX))) for _ in range(3))
    session.client.check(second)
    with pytest.raises(WireError, match="arrived twice or late"):
        session.client.check(first)
    assert session.client.check(third).seq > second.message.seq


def test_lost_messages_leave_gaps_that_nobody_minds() -> None:
    session = Session()
    for _ in range(5):
        session.server.frames(Ack(digest=HEX))
    assert isinstance(session.to_client(Bye()), Bye)


def test_a_message_of_another_session_of_the_same_two_is_refused() -> None:
    """A recording of yesterday says nothing today, although the signature fits."""
    old, now = Session(), Session()
    for channel, sender in ((now.server, old.client), (now.client, old.server)):
        with pytest.raises(BadSignature, match="another session"):
            channel.check(parse(sender.frames(Ack(digest=HEX))))


def test_a_message_sent_before_the_peers_nonce_is_known_is_refused() -> None:
    client, server = Channel(CLIENT, SERVER.public), Channel(SERVER, CLIENT.public)
    with pytest.raises(BadSignature, match="another session"):
        server.check(parse(client.frames(Bye())))


def test_a_message_signed_by_somebody_else_is_refused() -> None:
    session = Session()
    forger = Channel(OTHER, CLIENT.public)
    forger.peer_nonce = session.client.nonce
    with pytest.raises(BadSignature):
        session.client.check(parse(forger.frames(Ack(digest=HEX))))


def test_a_message_cannot_be_reflected_to_its_sender() -> None:
    session = Session()
    frames = session.client.frames(Ack(digest=HEX))
    with pytest.raises(BadSignature):
        session.client.check(parse(frames))


def test_a_refused_message_does_not_move_the_count() -> None:
    """Otherwise a forged number would shut the true peer out."""
    session = Session()
    forger = Channel(OTHER, CLIENT.public)
    forger.peer_nonce = session.client.nonce
    forger._sent = 10**9
    with pytest.raises(BadSignature):
        session.client.check(parse(forger.frames(Bye())))
    old = Session()
    old.server._sent = 10**9
    with pytest.raises(BadSignature):
        session.client.check(parse(old.server.frames(Bye())))
    assert isinstance(session.to_client(Bye()), Bye)


@settings(max_examples=60)
@given(st.data())
def test_fuzz_no_changed_bit_of_body_or_signature_passes(data: st.DataObject) -> None:
    session = Session()
    frames = session.server.frames(Nack(code="too_large", text="no", digest=HEX))
    which = data.draw(st.sampled_from([0, 1]))
    bit = data.draw(st.integers(0, len(frames[which]) * 8 - 1))
    changed = bytearray(frames[which])
    changed[bit // 8] ^= 1 << (bit % 8)
    frames[which] = bytes(changed)
    with pytest.raises(FcilError):
        session.client.check(parse(frames))


def test_the_signature_covers_the_bytes_as_received_with_fields_unknown_here() -> None:
    """A later version may add fields; they are signed too."""
    import msgpack

    session = Session()
    body = msgpack.packb({"t": "bye", "nonce": session.client.nonce, "seq": 5, "mood": "blue"})
    signature = SERVER.sign("message", body)
    assert isinstance(session.client.check(parse([body, signature])), Bye)
    with pytest.raises(BadSignature):
        session.client.check(parse([body.replace(b"blue", b"glad"), signature]))


def test_a_signature_for_another_purpose_does_not_serve() -> None:
    session = Session()
    body, _ = session.server.frames(Bye())
    with pytest.raises(BadSignature):
        session.client.check(parse([body, SERVER.sign("envelope", body)]))


def test_a_hello_carries_its_own_nonce_and_must_be_signed_by_its_sender() -> None:
    client, server = Channel(CLIENT, SERVER.public), Channel(SERVER, CLIENT.public)
    got = server.check(parse(client.frames(hello(client))))
    assert got.nonce == client.nonce
    forger = Channel(OTHER, SERVER.public)
    with pytest.raises(BadSignature):
        server.check(parse(forger.frames(hello(forger))))


def test_messages_before_a_second_hello_stay_refused_after_it() -> None:
    """A new Hello begins a new session with new nonces on both sides."""
    session = Session()
    late = parse(session.client.frames(Want(digest=HEX, chunks=[1])))
    second = Session()
    with pytest.raises(BadSignature):
        second.server.check(late)


def test_a_chunk_is_not_signed_and_does_not_count() -> None:
    """Its hash stands in a signed header; its body is small for the sake of the wire."""
    session = Session()
    frames = session.client.frames(Chunk(digest=HEX, index=3), b"sealed")
    assert frames[1:] == [b"", b"sealed"]
    received = parse(frames)
    for _ in range(2):
        assert session.server.check(received) == Chunk(digest=HEX, index=3)
    assert isinstance(session.to_server(Bye()), Bye)


def test_blobs_travel_beside_the_body() -> None:
    session = Session()
    received = parse(session.client.frames(Update(digest=HEX), b"header", b"signature", b"wrap"))
    assert session.server.check(received) == received.message
    assert received.blobs == (b"header", b"signature", b"wrap")


def test_a_client_believes_a_server_key_only_once_it_was_certified() -> None:
    """The key of a Welcome is taken over by `trust`, not by what the message says."""
    client = Channel(CLIENT, OTHER.public)
    server = Channel(SERVER, CLIENT.public)
    server.peer_nonce = client.nonce
    received: Received = parse(server.frames(welcome(server)))
    with pytest.raises(BadSignature):
        client.check(received)
    client.trust(SERVER.public)
    assert client.check(received) == received.message


def test_no_secret_shows_in_the_repr() -> None:
    text = repr(Channel(CLIENT, SERVER.public)) + repr(CLIENT)
    assert CLIENT.curve_secret.hex() not in text
    assert repr(CLIENT.curve_secret) not in text
