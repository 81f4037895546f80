"""What a false server, or somebody between client and server, cannot make a client believe.

CURVE with a pinned key keeps such people out; here they are let in, as through a relay.
"""

from dataclasses import replace

import pytest

from client.daemon_kit import DIGEST, RUN, order
from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes.envelope import Core, seal, wrap_key
from fcil_protocol.errors import VersionMismatch, WrongFederation
from fcil_protocol.messages.frames import parse
from fcil_protocol.messages.messages import Ack, Chunk, Decline, Hello, PartRef, Parts, Want
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.trust.certificate import RootKey
from fcil_protocol.trust.keys import PrivateKeys

REFUSED = "a message was refused"
OTHER = PrivateKeys(curve=b"\x07" * 32, signing=b"\x08" * 32, sealing=b"\x09" * 32)


async def sending(server, running):
    """Bring a client to where it waits for the Ack of its update; return the digest."""
    await server.take_in()
    server.say(order())
    digest, _ = await server.envelope()
    assert running.home.outbox() == [digest]
    return digest


async def refused(running, times=1):
    await running.until(lambda: len(running.said(REFUSED)) >= times)


# --- an Ack lets a client forget ------------------------------------------------------------


def test_an_ack_of_a_false_server_does_not_empty_the_outbox(play):
    async def scenario(server, running):
        digest = await sending(server, running)
        false = Channel(OTHER, server.client)
        false.peer_nonce = server.channel.peer_nonce
        false._sent = 1000  # it knows nonce and number, as a relay does
        server.router.send(server.route, false.frames(Ack(digest=digest)))
        await refused(running)
        assert running.home.outbox() == [digest]
        server.say(Ack(digest=digest))
        await running.until(lambda: not running.home.outbox())

    play(scenario)


def test_an_ack_of_an_earlier_session_does_not_empty_the_outbox(play):
    async def scenario(server, running):
        digest = await sending(server, running)
        old = server.channel.frames(Ack(digest=digest))
        running.dealer.reconnect()
        await server.hear(Hello)
        server.welcome()
        server.say(Ack(digest=await server.inventory(names=["cat"])))
        await server.envelope()  # it offers its update again
        server.router.send(server.route, old)
        await refused(running)
        assert running.home.outbox() == [digest]

    play(scenario)


def test_an_ack_of_another_update_does_not_empty_the_outbox(play):
    async def scenario(server, running):
        digest = await sending(server, running)
        server.say(Ack(digest="5" * 64))
        server.say(Ack(digest=digest[:-1] + ("0" if digest[-1] != "0" else "1")))
        server.say(Want(digest=digest, chunks=[0]))
        await server.hear(Chunk)  # both were heard, and it still has what to send
        assert running.home.outbox() == [digest]

    play(scenario)


# --- reflection, downgrade, another federation ----------------------------------------------


def test_what_a_client_said_has_no_effect_when_it_comes_back(play):
    """A Want could come from either side; only signature and nonce say from whom it is."""

    async def scenario(server, running):
        said = []
        await sending(server, running)
        send = running.client._line._link.send
        running.client._line._link.send = lambda frames: said.append(frames) or send(frames)
        named, *_ = sealed_part(server)
        server.say(order(1, parts=[ref(named)]))
        await server.hear(Want)
        assert [parse(frames).message.type for frames in said] == ["want"]
        server.router.send(server.route, said[0])
        await refused(running)
        assert running.said("signature")

    play(scenario)


def test_an_older_protocol_is_not_spoken(play):
    async def scenario(server, running):
        await server.hear(Hello)
        server.welcome(protocol=PROTOCOL_VERSION - 1)
        assert isinstance(await running.end(), VersionMismatch)

    play(scenario)


def test_a_server_of_another_federation_is_not_joined(play):
    async def scenario(server, running):
        await server.hear(Hello)
        server.welcome(certificate=RootKey.generate().certify(server.keys.public).to_bytes())
        assert isinstance(await running.end(), WrongFederation)
        assert running.client.status()["run"] is None

    play(scenario)


# --- parts ----------------------------------------------------------------------------------


def sealed_part(server, *, plain=b"x", keys=None, reader=None, **changes):
    """Return a part as `server` would seal it, but for the changes: envelope and wrap."""
    keys = keys or server.keys
    core = Core(
        protocol=PROTOCOL_VERSION, federation=server.root.federation, run=RUN,
        direction="broadcast", sender="server", sender_key=keys.public.fingerprint,
        recipient="client", method="running_mean", schema=DIGEST, task=0, round=0, kind="train",
        base=0, part="current",
    )  # fmt: skip
    sealed, key = seal(plain, replace(core, **changes), keys, chunk_bytes=65536)
    return sealed, wrap_key(key, sealed.header, reader or server.client)


def ref(sealed):
    return PartRef(name="current", digest=sealed.parsed.update_id, sealed_bytes=len(sealed.body))


def old_part(server):
    """Of state 0, under the name and digest of the part that the order names."""
    new, _ = sealed_part(server, plain=b"state 5", base=5)
    return ref(new), *sealed_part(server, plain=b"state 0")


def swapped_wrap(server):
    """The key of another part, wrapped for this very client."""
    sealed, _ = sealed_part(server)
    _, wrap = sealed_part(server, plain=b"y")
    return ref(sealed), sealed, wrap


def alone(**changes):
    def make(server):
        sealed, wrap = sealed_part(server, **changes)
        return ref(sealed), sealed, wrap

    return make


FALSE_PARTS = {
    "an old one for a newcomer": (old_part, "malformed"),
    "of another run": (alone(run="r20200101-000000-abcd"), "malformed"),
    "of another federation": (alone(federation="0" * 32), "malformed"),
    "with another name": (alone(part="task/3"), "malformed"),
    "of a false server": (alone(keys=OTHER), "bad_signature"),
    "sealed for another client": (alone(reader=OTHER.public), "cannot_open"),
    "with the key of another one": (swapped_wrap, "cannot_open"),
}


@pytest.mark.parametrize("what", FALSE_PARTS)
def test_a_part_that_is_not_the_one_the_order_names_declines_the_round(play, what):
    make, code = FALSE_PARTS[what]

    async def scenario(server, running):
        await server.take_in()
        named, sealed, wrap = make(server)
        server.say(order(parts=[named]))
        want = await server.hear(Want)
        assert want.header
        server.say(Parts(digest=want.digest), sealed.header, sealed.signature, wrap)
        declined, _ = await server.receive()
        assert isinstance(declined, Decline)
        assert declined.reason == code
        assert not running.home.part_path(named.digest).exists()

    play(scenario)


def test_a_clients_own_update_does_not_come_back_as_a_part(play):
    async def scenario(server, running):
        await server.take_in()
        sealed, wrap = sealed_part(
            server, keys=running.client._keys, direction="update", part="",
            sender=running.client.enrolment.client_id, recipient="server",
        )  # fmt: skip
        server.say(order(parts=[ref(sealed)]))
        want = await server.hear(Want)
        server.say(Parts(digest=want.digest), sealed.header, sealed.signature, wrap)
        assert (await server.hear(Decline)).reason == "bad_signature"

    play(scenario)


def test_chunks_of_an_old_part_do_not_pass_under_a_new_header(play):
    async def scenario(server, running):
        await server.take_in()
        sealed, wrap = sealed_part(server, plain=b"state 5")
        old, _ = sealed_part(server, plain=b"state 0")
        server.say(order(parts=[ref(sealed)]))
        want = await server.hear(Want)
        assert (want.header, want.chunks) == (True, [0])
        server.say(Parts(digest=want.digest), sealed.header, sealed.signature, wrap)
        server.say(Chunk(digest=want.digest, index=0), old.body)
        await refused(running)
        assert not running.home.part_path(want.digest).exists()
        server.say(Chunk(digest=want.digest, index=0), sealed.body)
        await running.until(running.home.part_path(want.digest).exists)
        await running.until(running.home.outbox)  # and the round goes on

    play(scenario)
