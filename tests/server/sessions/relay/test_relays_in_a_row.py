"""A relay behind another one: what crosses each uplink, who is believed, and what an end ends."""

import asyncio
from math import inf

import pytest

from fcil_protocol.errors import UsageError
from fcil_protocol.link.interface import LinkNews
from fcil_protocol.link.socket_reader import MAX_FRAMES
from fcil_protocol.messages import relay_frames
from fcil_protocol.messages.frames import MAX_BLOBS
from fcil_protocol.messages.messages import Progress, RoundClosed, Uplink, Want
from fcil_protocol.messages.relay_frames import MOST_RELAYS
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.testing import HIGH_WATER
from fcil_server.federation.allow_list import RELAY_BYTES
from fcil_server.ledger.enums import Role
from fcil_server.sessions.relay.session import MAX_PASSED_BYTES
from server.relay_kit import ADDRESS, Site, opens, play, until


class Row:
    """Relays one behind the other; the first is the one that `play` makes."""

    def __init__(self, first):
        self.sites, self.tasks = [first], []

    async def add(self, center, directory):
        """Enrol a relay behind the last one, and wait until it listens."""
        site = Site(center, directory, f"site{len(self.sites)}", via=self.sites[-1])
        key = site.keys.public.curve
        await until(lambda: site.via.relay._session._allow_list.is_member(key))
        self.tasks.append(asyncio.create_task(site.relay.run()))
        await site.up()
        self.sites.append(site)

    async def down(self):
        for site in self.sites[1:]:
            site.relay.stop()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def in_a_row(tmp_path, story, count=2):
    """Run ``async story(center, *sites)``, the outermost first."""

    async def with_row(center, first):
        row = Row(first)
        try:
            for _ in range(1, count):
                await row.add(center, tmp_path)
            await story(center, *row.sites)
        finally:
            await row.down()

    play(tmp_path, with_row)


def progress(done):
    return Progress(run="r", task=0, kind="train", round=0, phase="working", done=done, total=9)


def closed(number):
    return RoundClosed(run="r", task=0, kind="train", round=number, outcome="done")


def not_trusted(center):
    """Return text and relay of each such note."""
    return [(note[2], note[3]) for note in center.notes if note[1] == "not_trusted"]


@pytest.mark.parametrize("count", [2, MOST_RELAYS])
def test_a_part_crosses_every_uplink_once(tmp_path, count):
    async def story(center, *sites):
        part = center.publish()
        clients = [sites[-1].client(tmp_path, f"c{i}") for i in range(3)]
        clients.append(sites[0].client(tmp_path, "d"))
        for client in clients:
            await client.greet()
        await asyncio.gather(*(c.fetch(part) for c in clients))
        assert sorted(center.given.values()) == [1] * 9
        assert dict(center.by) == {sites[0].id: 9}
        assert [site.relay.counts["fetched"] for site in sites] == [9] * count
        for client in clients:
            ((header, wrap),) = client.wraps
            assert opens(client.keys, header, wrap)
            assert not any(opens(site.keys, header, wrap) for site in sites)
            assert not client.errors

    in_a_row(tmp_path, story, count)


def test_what_a_client_says_passes_every_relay_and_is_answered(tmp_path):
    async def story(center, *sites):
        client = sites[-1].client(tmp_path, "c")
        await client.greet()
        client.say(progress(3))
        await until(lambda: center.heard)
        assert center.heard[0].done == 3
        (incoming, _, _) = next(iter(center.channels.values()))
        assert incoming.relayed
        assert center.lanes.carrier(incoming.conn) == sites[-1].id

    in_a_row(tmp_path, story, MOST_RELAYS)


def test_the_end_of_a_relay_ends_what_is_behind_it_alone(tmp_path):
    async def story(center, outer, inner):
        far, near = inner.client(tmp_path, "far"), outer.client(tmp_path, "near")
        await far.greet()
        await near.greet()
        inner.relay.stop()
        await until(lambda: center.left)
        assert center.left == [far.keys.public.curve]
        assert center.lanes.relays() == [outer.id]
        near.say(progress(5))
        await until(lambda: center.heard)

    in_a_row(tmp_path, story)


def test_without_the_outer_relay_the_inner_one_does_not_listen_and_clients_come_back(tmp_path):
    async def story(center, outer, inner):
        client = inner.client(tmp_path, "c")
        await client.greet()
        outer.dealer.disconnect()
        await until(lambda: center.left and client.news == [LinkNews("down")])
        assert not inner.relay.status()["up"]
        assert center.left == [client.keys.public.curve]
        assert center.lanes.relays() == []
        assert center.lanes._lanes == {}
        outer.dealer.connect()
        await outer.up()
        client.task.cancel()
        inner.relay.stop()  # the links of these tests do not find a new socket by themselves
        again = inner.relay = inner.make()
        task = asyncio.create_task(again.run())
        await inner.up()
        await client.greet()
        assert len(center.channels) == 1
        again.stop()
        await task

    in_a_row(tmp_path, story)


def test_a_revoked_inner_relay_is_cut_at_the_outer_one(tmp_path):
    async def story(center, outer, inner):
        client = inner.client(tmp_path, "c")
        await client.greet()
        row = center.ledger.clients.get(inner.id)
        assert center.roster.behind(center.ledger.clients.get(outer.id)) == ["site1", "c"]
        center.roster.revoke(row, "", "test")
        await until(lambda: center.left)
        assert center.lanes.relays() == [outer.id]
        assert not inner.relay.status()["up"]

    in_a_row(tmp_path, story)


def test_a_relay_that_the_server_cuts_has_no_lanes_from_then_on(tmp_path):
    async def story(center, outer, inner):
        client = inner.client(tmp_path, "c")
        await client.greet()
        (conn,) = [c for c, r in center.lanes._kinds.items() if r and r.row.client_id == inner.id]
        route = next(iter(center.channels.values()))[0].route
        center.lanes.cut(conn)
        assert center.lanes.relays() == [outer.id]
        assert len(center.lanes._lanes) == 1, "that of the relay, until the outer one says its end"
        assert not center.lanes.send(route, [b"answer", b""]), "nothing more goes there"
        await until(lambda: center.left and not center.lanes._lanes)
        assert not inner.relay.status()["up"]

    in_a_row(tmp_path, story)


def test_a_revoked_inner_relay_has_no_lanes_whatever_the_outer_one_does(tmp_path):
    async def story(center, outer, inner):
        client, near = inner.client(tmp_path, "c"), outer.client(tmp_path, "near")
        await client.greet()
        await near.greet()
        outer.relay._session.on_admit = lambda message: None
        outer.relay._session.on_server_message = lambda laned: None
        center.roster.revoke(center.ledger.clients.get(inner.id), "", "test")
        assert center.lanes.relays() == [outer.id]
        client.say(progress(3))
        inner.relay._session.send(Want(digest="0" * 64, chunks=[0]))
        near.say(progress(5))
        await until(lambda: center.heard)
        assert [message.done for message in center.heard] == [5]
        assert center.left == [client.keys.public.curve]
        assert not center.by, "its Want was not answered"

    in_a_row(tmp_path, story)


def test_a_second_uplink_of_an_inner_relay_ends_the_lanes_of_the_first(tmp_path):
    async def story(center, outer, inner):
        client = inner.client(tmp_path, "c")
        await client.greet()
        key, channel = inner.keys.public.curve, inner.relay._channel
        uplink = Uplink(
            nonce=channel.nonce, protocol=1, oldest=1, package="0",
            federation=center.federation.id, relay=inner.id, address=ADDRESS,
        )  # fmt: skip
        frames = Channel(inner.keys, center.federation.keys.public).frames(uplink)
        for number in range(50, 60):
            outer.relay._session._push(relay_frames.up(number, key, frames))
        await until(lambda: center.left)
        await until(lambda: len(center.lanes.relays()) == 2)
        sessions = [r for r in center.lanes._kinds.values() if r and r.row.client_id == inner.id]
        assert len([r for r in sessions if r.peer is not None]) == 1
        assert sum(len(r.lanes) for r in sessions) == 0

    in_a_row(tmp_path, story)


def test_a_part_that_is_gone_does_not_end_an_inner_relay(tmp_path):
    async def story(center, outer, inner):
        part = center.publish()
        far, idle = inner.client(tmp_path, "far"), inner.client(tmp_path, "idle")
        near = outer.client(tmp_path, "near")
        for client in (far, idle, near):
            await client.greet()
        center.giving.clear()
        for client in (far, near):
            client.downloads.start([part])
        await until(lambda: far.wraps and near.wraps)
        await until(lambda: len(outer.relay._session._fetches._awaited) == 1)
        outer.relay._session.on_part_refused(part.digest)
        await until(lambda: near.news)
        assert inner.relay.status()["up"]
        assert not idle.news
        center.refuse = True  # what the inner one asks for again reaches the server
        assert inner.relay._session._fetches.revive(inf)
        inner.relay._session._ask()
        await until(lambda: far.news)
        assert not idle.news

    in_a_row(tmp_path, story)


@pytest.mark.parametrize(
    "frames",
    [
        relay_frames.up(1, bytes(32), [b"body", b"signature"]),
        [b""] * (2 + MAX_BLOBS + 1),
        [b"", b"", bytes(1 << 20), bytes(1 << 20), bytes(MAX_PASSED_BYTES - (2 << 20) + 1)],
    ],
    ids=["head", "frames", "bytes"],
)
def test_a_client_whose_message_the_next_one_would_not_read_is_cut_alone(tmp_path, frames):
    async def story(center, outer, inner):
        for site in (inner, outer):
            liar, other = (
                site.client(tmp_path, f"l{site.name}"),
                site.client(tmp_path, f"o{site.name}"),
            )
            await other.greet()
            await liar.connect()
            assert liar.link.send(frames)
            assert await liar.link.recv() == LinkNews("down")
            other.say(progress(3))
            await until(lambda: center.heard)
            center.heard.clear()
            assert center.strays == []
        assert inner.relay.status()["up"]

    in_a_row(tmp_path, story)


def test_an_inner_relay_with_more_heads_than_fit_is_cut_and_the_outer_one_is_not(tmp_path):
    async def story(center, outer, inner):
        heads = [relay_frames.up(n, bytes(32))[0] for n in range(MOST_RELAYS)]
        inner.relay._session._uplink([*heads, b"body", b"signature"])
        await until(lambda: not inner.relay.status()["up"])
        assert outer.relay.status()["up"]

    in_a_row(tmp_path, story)


def test_more_messages_than_a_socket_takes_wait_for_an_inner_relay(tmp_path):
    async def story(center, outer, inner):
        clients = [inner.client(tmp_path, f"c{i}") for i in range(4)]
        for client in clients:
            await client.greet()
        channels = {row.curve: channel for _, channel, row in center.channels.values()}
        (outer_lane,) = outer.relay._session._queues
        for number in range(3 * HIGH_WATER):  # no other task has a turn
            lanes = inner.relay._session.lanes.items()
            lane, key = [(n, lane.key) for n, lane in lanes][number % len(clients)]
            frames = channels[key].frames(closed(number))
            laned = relay_frames.down(outer_lane, relay_frames.down(lane, frames))
            outer.relay._session.on_server_message(relay_frames.read_down(laned))
        await until(lambda: all(len(c.heard) == 3 * HIGH_WATER / 4 for c in clients))
        heard = sorted(message.round for client in clients for message in client.heard)
        assert heard == list(range(3 * HIGH_WATER))
        for client in clients:
            rounds = [message.round for message in client.heard]
            assert rounds == sorted(rounds)
            assert not client.news

    in_a_row(tmp_path, story)


def test_with_an_outer_relay_all_tickets_through_inner_ones_end(tmp_path):
    async def story(center, outer, inner):
        center.roster.issue("open", 3600, (ADDRESS,), "test", via=inner.name)
        row = center.ledger.clients.get(outer.id)
        assert center.roster.relays_of(outer.id) == [inner.keys.public.curve]
        assert center.roster.revoke(row, "", "test") == ["open"]
        with pytest.raises(UsageError, match="no longer is one"):
            center.roster.issue("late", 3600, (ADDRESS,), "test", via=inner.name)
        center.roster.revoke(center.ledger.clients.get(inner.id), "", "test")
        assert center.roster.relays_of(outer.id) == []

    in_a_row(tmp_path, story)


def test_a_relay_does_not_speak_for_those_behind_another(tmp_path):
    async def story(center, outer, inner):
        far, near = inner.client(tmp_path, "far"), outer.client(tmp_path, "near")
        for site, client in ((outer, far), (inner, near)):
            key = client.keys.public.curve
            site.relay._session._push(relay_frames.up(99, key, [b"body", b"signature"]))
        await until(lambda: len(not_trusted(center)) > 1)
        text = "it speaks for a key that is not enrolled behind it."
        assert sorted(not_trusted(center)) == sorted(
            [(f"relay site: {text}", outer.id), (f"relay site1: {text}", inner.id)]
        )
        assert not center.channels

    in_a_row(tmp_path, story)


def test_a_row_has_at_most_three_relays(tmp_path):
    async def story(center, *sites):
        with pytest.raises(UsageError, match="the last of 3 relays in a row"):
            center.member("one-more", via=sites[-1].name, role=Role.RELAY)
        center.member("beside", via=sites[-2].name, role=Role.RELAY)
        center.member("c", via=sites[-1].name)

    in_a_row(tmp_path, story, MOST_RELAYS)


def test_a_message_has_room_for_the_head_of_every_relay():
    assert MAX_FRAMES == 1 + MOST_RELAYS + 2 + MAX_BLOBS  # a route, heads, a body, its signature


def test_a_relay_lets_another_have_the_windows_of_all_its_clients_unread(tmp_path):
    async def story(center, outer, inner):
        client = outer.client(tmp_path, "c")
        await client.greet()
        listed = outer.relay._session._allow_list
        key = inner.keys.public.curve
        assert listed.allow(key) == listed.allow(client.keys.public.curve) + RELAY_BYTES

    in_a_row(tmp_path, story)
