"""What an enrolled client, or whoever holds its files, cannot do to a real server.

Two clients are asked for the same round: the victim, who is honest, and the thief, who has
everything that ever left the victim, and its own keys. What a false server could try is in
`client/test_attacks.py`; `docs/security.md` lists which attack is tried where.
"""

import asyncio

import msgpack
import numpy as np
import pytest

from fcil_protocol.envelopes.envelope import Sealed
from fcil_protocol.ids import RoundKey
from fcil_protocol.link.zmq_link import LinkNews
from fcil_protocol.messages.frames import parse
from fcil_protocol.messages.messages import (
    TO_SERVER,
    Ack,
    Bye,
    Hello,
    Nack,
    Progress,
    Update,
    Want,
)
from fcil_protocol.payloads.builtin import REGISTRY
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.process import control_socket
from fcil_protocol.trust.certificate import RootKey
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.lab.local.federation import LocalFederation
from sealed_header import header_of
from system.kit import open_ledger, settings
from system.raw_client import WAIT_S, RawClient, good_update

pytestmark = pytest.mark.processes

HOLDINGS = {"victim": {"0": 5}, "thief": {"0": 5, "1": 5}}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """One server for all stories; its rounds are closed by the operator after each."""
    with LocalFederation(tmp_path_factory.mktemp("attacks")) as running:
        quick = {"run__evaluate": False, "tasks__classes": [["0", "1"]]}
        running.serve(*settings(round__rounds_per_task=1000, **quick))
        yield running


@pytest.fixture
def play(federation):
    """Run ``async story(victim, thief)`` with two clients that were asked for one round."""

    async def main(story, clients):
        for client in clients:
            await client.connect()
            await client.greet()
            assert isinstance(await client.announce(HOLDINGS[client.part]), Ack)
        for client in clients:
            client.order = await client.asked()
        try:
            await story(*clients)
        finally:
            for client in clients:
                client.close()

    def run(story):
        clients = []
        for part in HOLDINGS:
            client = RawClient(federation, part)
            client.part = part
            clients.append(client)
        try:
            asyncio.run(main(story, clients))
        finally:
            for _ in clients:
                federation.until("left")
            control_socket.ask(federation.federation, "close_round")
        assert "Traceback" not in federation.log("server").read_text()

    return run


def honest(client, value=0.5):
    """Return what an honest client would send in its round, sealed and wrapped."""
    tensors = {k: v for k, v in good_update(client.order).items() if k != "classes"}
    tensors["mean"] = np.full_like(tensors["mean"], value)
    return client.sealed(Payload(tensors), client.update_core(client.order))


def progress(client, done=1):
    order = client.order
    return Progress(
        run=order.run, task=order.task, kind=order.kind, round=order.round,
        phase="working", done=done, total=9,
    )  # fmt: skip


def stored(federation, order):
    """Return client -> digest of what the ledger holds for the order's round."""
    with open_ledger(federation) as ledger:
        key = RoundKey(order.run, order.task, order.kind, order.round)
        return {u.client: u.update_id for u in ledger.updates.of_round(key)}


async def refused(client, *frames):
    """Send messages as they are; return the code of the refusal."""
    for message in frames:
        assert client.link.send(message)
    return (await client.hear(Nack, Ack)).code


# --- replay and reflection ------------------------------------------------------------------


def test_a_message_that_comes_twice_is_refused_the_second_time(play):
    async def story(victim, _thief):
        frames = victim.frames(progress(victim))
        assert await refused(victim, frames, frames) == "malformed"

    play(story)


def test_a_message_of_an_earlier_session_is_refused(play):
    async def story(victim, _thief):
        old = victim.frames(progress(victim))
        await victim.greet()
        assert await refused(victim, old) == "bad_signature"
        assert await refused(victim, victim.frames(progress(victim)), old) == "bad_signature"

    play(story)


def test_a_message_of_another_client_is_refused(play):
    """Who taps one client may say the same again, but not as that client."""

    async def story(victim, thief):
        assert await refused(thief, victim.frames(progress(victim))) == "bad_signature"
        hello = Hello(
            nonce=victim.channel.nonce, protocol=1, oldest=1, package="",
            federation=victim.certificate.federation, client=victim.client,
        )  # fmt: skip
        assert await refused(thief, victim.frames(hello)) == "unknown_client"
        relabelled = hello.model_copy(update={"client": thief.client})
        assert await refused(thief, victim.frames(relabelled)) == "bad_signature"

    play(story)


def test_the_servers_own_messages_are_refused_when_they_come_back(play):
    async def story(victim, thief):
        for client in (victim, thief):  # what was said to the one, and to the other
            heard = list(victim.heard)
            assert {parse(f).message.type for f in heard} >= {"welcome", "ack", "round_open"}
            for frames in heard:
                both_send_it = type(parse(frames).message) in TO_SERVER
                code = "bad_signature" if both_send_it else "malformed"  # before its signature
                assert await refused(client, frames) == code

    play(story)


def test_an_update_that_was_counted_does_nothing_in_a_later_round(play, federation):
    async def story(victim, thief):
        first, wrap = honest(victim)
        assert isinstance(await victim.upload(first, wrap), Ack)
        assert isinstance(await thief.upload(*honest(thief)), Ack)
        victim.order, thief.order = await victim.asked(), await thief.asked()
        assert victim.order.round == thief.order.round
        assert victim.order.base > 0
        # What made the newest state is kept, so its sender hears once more that it is there.
        assert isinstance(await victim.upload(first, wrap), Ack)
        assert (await thief.upload(first, wrap)).code == "bad_signature"
        assert stored(federation, victim.order) == {}
        new, wrap = honest(victim)
        assert isinstance(await victim.upload(new, wrap), Ack)
        assert stored(federation, victim.order) == {victim.client: new.parsed.update_id}

    play(story)


# --- what belongs to somebody else ----------------------------------------------------------


def resigned(sealed, thief, *, core=None, chunk_bytes=65536):
    """Return the victim's ciphertext under a header of the thief."""
    header = sealed.parsed
    core_bytes = core.to_bytes() if core else header.core_bytes
    made = header_of(core_bytes, sealed.body, header.plain_bytes, chunk_bytes)
    return Sealed(made, thief.keys.sign("envelope", made), sealed.body)


def as_it_is(sealed, _victim, _thief):
    return sealed


def signed_anew(sealed, _victim, thief):
    return Sealed(sealed.header, thief.keys.sign("envelope", sealed.header), sealed.body)


def under_a_header_of_its_own(sealed, _victim, thief):
    return resigned(sealed, thief, core=thief.update_core(thief.order))


def with_the_core_that_the_cipher_knows(sealed, _victim, thief):
    return resigned(sealed, thief, chunk_bytes=32768)


def in_the_victims_name(sealed, victim, thief):
    core = thief.update_core(thief.order, sender=victim.client)
    return resigned(sealed, thief, core=core)


@pytest.mark.parametrize(
    ("take", "code"),
    [
        (as_it_is, "bad_signature"),
        (signed_anew, "bad_signature"),
        (under_a_header_of_its_own, "cannot_open"),
        (with_the_core_that_the_cipher_knows, "bad_signature"),
        (in_the_victims_name, "wrong_federation"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_ciphertext_of_another_client_cannot_be_sent_as_ones_own(play, federation, take, code):
    """It would count twice, or under a name that did not send it."""

    async def story(victim, thief):
        sealed, wrap = honest(victim)
        answer = await thief.upload(take(sealed, victim, thief), wrap)
        assert isinstance(answer, Nack)
        assert answer.code == code
        assert isinstance(await victim.upload(sealed, wrap), Ack)
        assert stored(federation, victim.order) == {victim.client: sealed.parsed.update_id}

    play(story)


def test_an_envelope_of_another_federation_is_refused_by_name_and_by_key(play):
    async def story(victim, _thief):
        member = victim.twin()  # the same client, as a member of another federation too
        member.server = PrivateKeys.generate().public
        theirs = RootKey.generate().federation
        core = victim.update_core(victim.order, federation=theirs)
        answer = await victim.upload(*member.sealed(b"x", core))
        assert answer.code == "wrong_federation"
        answer = await victim.upload(*member.sealed(b"x", victim.update_core(victim.order)))
        assert answer.code == "cannot_open"

    play(story)


def test_the_names_of_another_client_are_not_given_away(play):
    """A registry is sealed for the clients that hold these classes; others have its digest."""

    async def story(victim, thief):
        (theirs,) = (p.digest for p in victim.order.parts if p.name == REGISTRY)
        assert theirs not in {p.digest for p in thief.order.parts}
        for want in (Want(digest=theirs, chunks=[], header=True), Want(digest=theirs, chunks=[0])):
            thief.say(want)
            answer = await thief.hear(Nack)
            assert (answer.code, answer.digest) == ("malformed", theirs)

    play(story)


# --- downgrade ------------------------------------------------------------------------------


def test_an_older_protocol_is_not_spoken(play):
    async def story(victim, _thief):
        answer = await victim.twin().greet(protocol=0, oldest=0)
        assert answer.code == "version_mismatch"
        assert "Install fcil" in answer.action

    play(story)


def test_an_envelope_of_an_older_protocol_is_refused(play):
    async def story(victim, _thief):
        sealed, wrap = honest(victim)
        fields = msgpack.unpackb(sealed.parsed.core_bytes)
        core_bytes = msgpack.packb(fields | {"v": 0})
        header = header_of(core_bytes, sealed.body, sealed.parsed.plain_bytes, 65536)
        signature = victim.keys.sign("envelope", header)
        victim.say(Update(digest=sealed.parsed.update_id), header, signature, wrap)
        assert (await victim.hear(Ack, Nack)).code == "version_mismatch"

    play(story)


# --- a copied device ------------------------------------------------------------------------


def test_of_two_links_with_one_key_the_newer_stays_and_both_sides_are_told(play, federation):
    async def story(victim, _thief):
        copy = victim.twin()
        await copy.connect()
        await copy.greet()
        goodbye = await victim.hear(Bye)
        assert goodbye.code == "two_links"
        assert "enrol it again" in goodbye.reason
        while await asyncio.wait_for(victim.link.recv(), WAIT_S) != LinkNews("down"):
            pass
        await asyncio.to_thread(federation.until, "two_links", text="victim")
        assert isinstance(await copy.announce(HOLDINGS["victim"]), Ack)
        copy.close()

    play(story)
