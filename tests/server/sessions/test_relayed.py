"""What the server believes of a relay: who connected to it, among those enrolled behind it."""

import asyncio

import pytest

from fcil_protocol.errors import CutOff, UnknownClient, WireError
from fcil_protocol.link import send_queue
from fcil_protocol.link.interface import LinkNews
from fcil_protocol.messages import relay_frames
from fcil_protocol.messages.frames import parse
from fcil_protocol.messages.messages import Admit, Hello, Nack, Update, Uplink, Want
from fcil_protocol.messages.signed_session import Channel
from fcil_server.ledger.enums import Role
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.sessions.handshake import identify
from server.relay_kit import ADDRESS, Center


class Raw:
    """A relay that says what no honest one says."""

    def __init__(self, center, name="site"):
        self.center = center
        self.name = name
        self.keys, self.id = center.member(name, role=Role.RELAY)
        self.link = center.router.dealer(self.keys.public.curve)
        self.link.connect()

    async def greet(self, **changes):
        self.channel = Channel(self.keys, self.center.federation.keys.public)
        fields = {
            "nonce": self.channel.nonce, "protocol": 1, "oldest": 1, "package": "0",
            "federation": self.center.federation.id, "relay": self.id, "address": ADDRESS,
        }  # fmt: skip
        self.say(Uplink(**fields | changes))
        await self.turn()

    def say(self, message, *blobs):
        assert self.link.send(self.channel.frames(message, *blobs))

    async def turn(self):
        """Let the server take what was sent to it."""
        while self.center.router._queue.qsize():
            self.center.lanes._sort(await self.center.router.recv())

    async def frames(self):
        while isinstance(frames := await self.link.recv(), LinkNews):
            pass
        return frames

    async def hear(self):
        received = parse(await self.frames())
        message = self.channel.check(received)
        if isinstance(message, Admit):
            self.channel.peer_nonce = message.server_nonce
        return message

    async def lane(self, number, key, *frames):
        assert self.link.send(relay_frames.up(number, key, frames))
        await self.turn()


@pytest.fixture
def play(tmp_path):
    """Run ``async story(center, relay, key of a client behind it)``; the relay was greeted."""

    async def main(story):
        with Ledger(tmp_path / LEDGER_NAME) as ledger:
            center = Center(ledger)
            relay = Raw(center)
            await relay.greet()
            assert isinstance(await relay.hear(), Admit)
            keys, _ = center.member("c", via="site")
            assert (await relay.hear()).guests  # the open ticket
            assert (await relay.hear()).members == [keys.public.curve]
            await story(center, relay, keys.public.curve)

    return lambda story: asyncio.run(main(story))


def ready(center):
    """Return what the daemon would get, as (key, frames)."""
    return [(i.key, i.frames, i.relayed) for i in center.lanes._ready]


def test_a_lane_is_a_connection_from_its_first_message_to_its_end(play):
    async def story(center, relay, key):
        await relay.lane(7, key, b"body", b"signature")
        await relay.lane(7, key)
        await relay.lane(7, key, b"more")  # of a lane that has ended
        assert await relay.frames() == tuple(
            relay_frames.down(7)
        )  # whoever says so must begin anew
        assert ready(center) == [(key, (b"body", b"signature"), True), (key, (), True)]
        first, last = center.lanes._ready
        assert first.conn == last.conn
        assert center.lanes.carrier(first.conn) is None, "it has ended"

    play(story)


def test_answers_go_down_the_lane_until_it_ends(play):
    async def story(center, relay, key):
        await relay.lane(7, key, b"body", b"")
        route = center.lanes._ready[0].route
        assert center.lanes.send(route, [b"answer", b""])
        assert await relay.frames() == tuple(relay_frames.down(7, [b"answer", b""]))
        assert center.lanes.carrier(center.lanes._ready[0].conn) == relay.id
        await relay.lane(7, key)
        assert not center.lanes.send(route, [b"answer", b""])

    play(story)


@pytest.mark.parametrize("address", ["site", "a,b:1", "a:0", "a:1\n", "[:1"])
def test_an_address_that_no_ticket_can_name_is_refused_as_it_is_reported(play, address):
    """Later the server would blame its own configuration for it."""

    async def story(center, relay, _key):
        await relay.greet(address=address)
        answer = await relay.hear()
        assert (answer.code, "expected an address HOST:PORT" in answer.text) == ("malformed", True)
        assert "--advertise" in answer.action
        assert not center.lanes.has(relay.id)
        assert center.ledger.clients.get(relay.id).address == ADDRESS

    play(story)


def test_a_relay_speaks_for_those_behind_it_alone(play):
    async def story(center, relay, key):
        other, _ = center.member("elsewhere", role=Role.RELAY)
        direct, _ = center.member("direct")
        for number, stranger in enumerate((other.public.curve, direct.public.curve, bytes(32))):
            await relay.lane(number, stranger, b"body", b"")
            assert await relay.frames() == tuple(relay_frames.down(number))
            assert isinstance(await relay.hear(), Nack)
        assert ready(center) == []
        assert {code for _, code, _, _ in center.notes[1:]} == {"not_trusted"}

    play(story)


def test_the_key_of_a_lane_does_not_change(play):
    async def story(center, relay, key):
        second, _ = center.member("second", via="site")
        await relay.lane(1, key, b"body", b"")
        await relay.lane(1, second.public.curve, b"body", b"")
        assert len(ready(center)) == 1

    play(story)


def test_a_client_that_is_no_relay_has_no_lanes(play):
    async def story(center, relay, key):
        direct, _ = center.member("direct")
        link = center.router.dealer(direct.public.curve)
        link.connect()
        link.send(relay_frames.up(1, key, [b"body", b""]))
        await relay.turn()
        (incoming,) = center.lanes._ready
        assert incoming.key == direct.public.curve
        assert not incoming.relayed
        with pytest.raises(WireError, match="only the connection of a relay"):
            parse(incoming.frames)

    play(story)


def test_a_relay_takes_no_part_itself(play):
    async def story(center, relay, _key):
        hello = Hello(
            nonce=relay.channel.nonce, protocol=1, oldest=1, package="0",
            federation=center.federation.id, client=relay.id,
        )  # fmt: skip
        for message, blobs in ((hello, ()), (Update(digest="0" * 64), (b"h", b"s", b"w"))):
            relay.say(message, *blobs)
            await relay.turn()
        with pytest.raises(UnknownClient, match="a relay takes part in no round"):
            identify(center.ledger, relay.keys.public.curve, hello)
        texts = [text for _, _, text, _ in center.notes]
        assert any("a relay does not send hello" in t for t in texts)
        assert any("a relay does not send update" in t for t in texts)
        assert ready(center) == []

    play(story)


def test_a_relay_gets_chunks_and_never_a_key(play):
    async def story(center, relay, _key):
        part = center.publish()
        relay.say(Want(digest=part.digest, chunks=[], header=True))
        await relay.turn()
        answer = await relay.hear()
        assert (answer.type, answer.code) == ("nack", "not_trusted")
        assert center.tasks == []
        want = Want(digest=part.digest, chunks=[0])
        relay.link.send(Channel(center.federation.keys, relay.keys.public).frames(want))
        await relay.turn()
        assert (await relay.hear()).code == "bad_signature"
        assert center.tasks == []
        relay.say(want)
        await relay.turn()
        await asyncio.gather(*center.tasks)
        assert (await relay.hear()).index == 0

    play(story)


def test_a_relay_that_leaves_takes_its_lanes_along(play):
    async def story(center, relay, key):
        for number in range(3):
            await relay.lane(number, key, b"body", b"")
        relay.link.disconnect()
        await relay.turn()
        assert [frames for _, frames, _ in ready(center)][3:] == [()] * 3
        assert not center.lanes.has(relay.id)

    play(story)


def test_a_lane_that_was_cut_is_not_heard_any_more(play):
    async def story(center, relay, key):
        await relay.lane(1, key, b"body", b"")
        (incoming,) = center.lanes._ready
        center.lanes.cut(incoming.conn)
        assert await relay.frames() == tuple(relay_frames.down(1))
        await relay.lane(1, key, b"body", b"")
        assert len(ready(center)) == 1
        assert not center.lanes.send(incoming.route, [b"answer"])
        await relay.lane(1, key)
        assert ready(center)[1:] == [(key, (), True)]

    play(story)


def test_before_its_uplink_a_relay_is_not_heard(play):
    async def story(center, relay, key):
        relay.link.reconnect()
        await relay.turn()
        await relay.lane(1, key, b"body", b"")
        assert ready(center) == []
        relay.say(Want(digest="0" * 64, chunks=[0]))
        await relay.turn()
        assert "begins with an uplink" in center.notes[-1][2]

    play(story)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"federation": "0" * 32}, "wrong_federation"),
        ({"relay": "a" * 26}, "wrong_federation"),
        ({"protocol": 0, "oldest": 0}, "version_mismatch"),
    ],
)
def test_an_uplink_that_does_not_fit_is_refused(play, changes, code):
    async def story(center, relay, _key):
        await relay.greet(**changes)
        answer = await relay.hear()
        assert (answer.type, answer.code) == ("nack", code)
        assert not center.lanes.has(relay.id)

    play(story)


def test_an_uplink_signed_by_somebody_else_is_refused(play):
    async def story(center, relay, _key):
        relay.link.reconnect()
        await relay.turn()
        keys, _ = center.member("other", role=Role.RELAY)
        relay.keys = keys
        await relay.greet()
        assert relay.link._waiting == 0
        assert center.notes[-1][1] == "bad_signature"
        assert not center.lanes.has(relay.id)

    play(story)


def test_of_two_connections_of_a_relay_the_newer_stays(play):
    async def story(center, relay, key):
        await relay.lane(1, key, b"body", b"")
        again = Raw.__new__(Raw)
        again.__dict__ |= relay.__dict__
        again.link = center.router.dealer(relay.keys.public.curve)
        again.link.connect()
        await again.greet()
        assert isinstance(await again.hear(), Admit)
        assert not relay.link.is_up
        assert again.link.is_up
        assert ready(center)[1:] == [(key, (), True)]

    play(story)


def test_a_full_queue_keeps_the_order(play):
    async def story(center, relay, key):
        await relay.lane(1, key, b"body", b"")
        route = center.lanes._ready[0].route
        for number in range(600):  # more than a socket takes
            assert center.lanes.send(route, [str(number).encode()])
        got = [await relay.frames() for _ in range(100)]
        for number in range(600, 700):  # there is room again, but others were first
            assert center.lanes.send(route, [str(number).encode()])
        got += [await relay.frames() for _ in range(600)]
        assert got == [tuple(relay_frames.down(1, [str(n).encode()])) for n in range(700)]

    play(story)


def test_after_the_end_nothing_is_sent_to_a_relay(play, monkeypatch):
    monkeypatch.setattr(send_queue, "FLUSH_S", 0.001)

    async def story(center, relay, key):
        await relay.lane(1, key, b"body", b"")
        route = center.lanes._ready[0].route
        for number in range(600):  # more than a socket takes
            assert center.lanes.send(route, [str(number).encode()])
        center.lanes.close()
        late = []
        monkeypatch.setattr(center.router, "send", lambda *sent: late.append(sent))
        await asyncio.sleep(0.02)
        assert not late

    play(story)


def test_a_relay_that_does_not_read_is_cut(play, monkeypatch):
    monkeypatch.setattr(send_queue, "MAX_QUEUED_BYTES", 1000)

    async def story(center, relay, key):
        await relay.lane(1, key, b"body", b"")
        route = center.lanes._ready[0].route
        while center.lanes.send(route, [bytes(500)]):
            pass
        assert not relay.link.is_up

    play(story)


def test_lists_hold_those_behind_the_relay_and_no_others(play):
    async def story(center, relay, key):
        center.member("direct")
        center.roster.issue("open", 3600, (ADDRESS,), "test", via="site")
        members, guests, invited = center.roster.lists(relay.id)
        assert members == [key]
        assert invited == 1
        assert center.ledger.tickets.get(guests[-1]).name == "open"
        assert len(guests) == 2  # the used ticket, which may be shown again, and the open one

    play(story)


def test_errors_here_are_the_relays_and_not_the_servers(play, monkeypatch):
    async def story(center, relay, key):
        monkeypatch.setattr(center.roster, "is_behind", lambda *_: 1 / 0)
        await relay.lane(1, key, b"body", b"")
        assert center.notes[-1][1] == "internal"

    play(story)


def test_lanes_for_strangers_are_counted_as_the_relays_and_it_is_silenced(play):
    async def story(center, relay, key):
        refused = []
        center.lanes._refused = lambda who, error: refused.append((who, error.code))
        for number in range(5):
            await relay.lane(number, bytes([number]) * 32, b"body", b"")
        assert refused == [(relay.id, "not_trusted")] * 5
        assert {note[3] for note in center.notes[-5:]} == {relay.id}, "they have the relay's budget"
        center.lanes.silence(relay.id)
        await relay.lane(9, key, b"body", b"")
        assert ready(center) == []
        assert len(refused) == 5

    play(story)


def test_a_relay_that_is_cut_off_hears_so(play):
    async def story(center, relay, _key):
        def refuse(_):
            raise CutOff("too much of it was refused; heard again in 60 s.")

        center.lanes._must_be_heard = refuse
        await relay.greet()
        answer = await relay.hear()
        assert (type(answer), answer.code) == (Nack, "cut_off")

    play(story)
