"""A relay fetches once, keeps what is sealed, and is caught when it lies."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fcil_protocol.envelopes.window import TOTAL_BYTES
from fcil_protocol.errors import BadSignature, CorruptFile, DiskFull, WireError
from fcil_protocol.link.interface import LinkNews
from fcil_protocol.messages.frames import encode, parse
from fcil_protocol.messages.messages import Ack, Chunk, Nack, Parts, Progress, RoundClosed, Want
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.payloads.builtin import REGISTRY
from fcil_protocol.testing import HIGH_WATER, flip_bit
from fcil_server.sessions.relay import relay as relay_module
from fcil_server.sessions.relay import session as relay_session
from fcil_server.sessions.relay.session import MAX_OUT
from server.relay_kit import CHUNK, CREDIT, opens, play, until


class Clock:
    """Stands in for the module `time` in the relay."""

    def __init__(self):
        self.now = time.time()

    def time(self):
        return self.now


def closed(number=0):
    return RoundClosed(run="r", task=0, kind="train", round=number, outcome="done")


# --- once ------------------------------------------------------------------------------------


def test_three_clients_get_a_part_that_crossed_the_uplink_once(tmp_path):
    async def story(center, site):
        part = center.publish()
        clients = [site.client(tmp_path, f"c{i}") for i in range(3)]
        for client in clients:
            await client.greet()
        await asyncio.gather(*(c.fetch(part) for c in clients))
        assert sorted(center.given.values()) == [1] * 9
        assert dict(center.by) == {site.id: 9}  # to the relay, not to a client
        counts = site.relay.counts
        assert counts["fetched"] == 9
        assert counts["fanned_out"] + counts["from_cache"] == 27
        for client in clients:
            ((header, wrap),) = client.wraps
            assert opens(client.keys, header, wrap)
            assert not opens(site.keys, header, wrap)
            assert client.home.part_path(part.digest).exists()
            assert not client.errors

    play(tmp_path, story)


def test_a_late_client_is_served_from_the_cache_also_by_a_new_process(tmp_path):
    async def story(center, site):
        part = center.publish()
        first, second = site.client(tmp_path, "first"), site.client(tmp_path, "second")
        await first.greet()
        await first.fetch(part)
        site.relay.stop()
        await until(lambda: center.left)  # the uplink ended, and the client's lane with it
        again = site.relay = site.make()
        task = asyncio.create_task(again.run())
        await site.up()
        await second.greet()
        await second.fetch(part)
        assert again.counts["from_cache"] == 9
        assert again.counts["fetched"] == 0
        assert sum(center.given.values()) == 9
        again.stop()
        await task

    play(tmp_path, story)


def test_a_damaged_file_is_fetched_again_and_never_given_out(tmp_path):
    async def story(center, site):
        part = center.publish()
        first, second = site.client(tmp_path, "first"), site.client(tmp_path, "second")
        await first.greet()
        await first.fetch(part)
        kept = sorted(site.directory.iterdir())
        assert len(kept) == 9
        kept[3].write_bytes(flip_bit((kept[3].read_bytes(),))[0])
        await second.greet()
        await second.fetch(part)
        assert center.given[part.digest, 3] == 2
        assert sum(center.given.values()) == 10
        assert not second.errors

    play(tmp_path, story)


def test_chunks_are_given_in_a_session_alone(tmp_path):
    """Of wants without one the server hears: chunks wait in the relay's memory until they are read."""

    async def story(center, site):
        part = center.publish()
        first, thief = site.client(tmp_path, "first"), site.client(tmp_path, "thief")
        await first.greet()
        await first.fetch(part)
        await thief.connect()
        want = Want(digest=part.digest, chunks=[0, 1, 2])
        thief.link.send(Channel(thief.keys, thief.server).frames(want))
        await until(lambda: center.strays)
        assert [m.chunks for m in center.strays] == [[0, 1, 2]]
        assert site.relay._session._spans.keys() == {1}

    play(tmp_path, story)


def test_a_newer_session_of_a_client_is_given_chunks_and_an_older_one_is_cut(tmp_path):
    async def story(center, site):
        part = center.publish()
        old = site.client(tmp_path, "c")
        await old.greet()
        await old.fetch(part)
        session = site.relay._session
        (lane,) = session.lanes.values()
        session.lanes[2] = replace(lane, conn=lane.conn + 1000)  # the same key again
        session._spans[1] = 1
        session._cut_older(2)
        await until(lambda: old.news == [LinkNews("down")])
        del session.lanes[2]

    play(tmp_path, story)


def test_a_part_of_one_client_alone_passes_and_is_not_kept(tmp_path):
    async def story(center, site):
        part = center.publish(REGISTRY)
        client = site.client(tmp_path, "c")
        await client.greet()
        await client.fetch(part)
        assert dict(center.by) == {client.id: 9}
        assert list(site.directory.iterdir()) == []

    play(tmp_path, story)


def test_who_leaves_does_not_take_the_others_chunks_along(tmp_path):
    async def story(center, site):
        part = center.publish()
        gone, stays = site.client(tmp_path, "gone"), site.client(tmp_path, "stays")
        await gone.greet()
        await stays.greet()
        center.giving.clear()
        for client in (gone, stays):
            client.downloads.start([part])
        waiting = site.relay._session._fetches._parts
        await until(lambda: waiting and len(waiting[part.digest].waiting.get(3, ())) == 2)
        gone.link.disconnect()
        await until(lambda: gone.keys.public.curve in center.left)
        center.giving.set()
        await until(lambda: stays.complete)
        counts = site.relay.counts
        assert counts["fanned_out"] + counts["from_cache"] == 9  # none for who has left
        assert max(center.given.values()) == 1

    play(tmp_path, story)


def test_what_the_server_does_not_give_ends_the_sessions_that_wait_for_it(tmp_path):
    async def story(center, site):
        part = center.publish()
        client = site.client(tmp_path, "c")
        await client.greet()
        center.refuse = True
        client.downloads.start([part])
        await until(lambda: client.news == [LinkNews("down")])

    play(tmp_path, story)


def test_a_chunk_that_does_not_fit_is_not_kept_and_who_waits_begins_anew(tmp_path):
    async def story(center, site):
        part = center.publish()
        client = site.client(tmp_path, "c")
        await client.greet()
        center.spoil = lambda data: flip_bit((data,))[0]
        client.downloads.start([part])
        await until(lambda: client.news == [LinkNews("down")])
        assert list(site.directory.iterdir()) == []
        assert client.errors == []  # it was not given one

    play(tmp_path, story)


def test_the_cache_stays_within_its_limit(tmp_path):
    async def story(center, site):
        first, second = center.publish(), center.publish("other")
        client = site.client(tmp_path, "c")
        await client.greet()
        await client.fetch(first, second)
        status = site.relay.status()
        assert status["cached_bytes"] <= 5 * CHUNK
        assert status["cached_bytes"] == sum(p.stat().st_size for p in site.directory.iterdir())

    play(tmp_path, story, limit=5 * CHUNK)


def test_who_connects_first_may_speak_last(tmp_path):
    async def story(center, site):
        first, second = site.client(tmp_path, "first"), site.client(tmp_path, "second")
        await first.connect()
        await second.greet()
        await first.greet(connected=True)
        assert len(center.channels) == 2

    play(tmp_path, story)


# --- the gate ---------------------------------------------------------------------------------


def test_only_clients_that_were_enrolled_behind_it_get_in(tmp_path):
    async def story(center, site):
        direct, _ = center.member("direct")
        site.client(tmp_path, "c")
        link = site.router.dealer(direct.public.curve)
        link.connect()
        assert await link.recv() == LinkNews("refused", "unknown_client")

    play(tmp_path, story)


def test_a_client_that_is_revoked_is_cut_at_the_relay_and_may_only_ask_why(tmp_path):
    async def story(center, site):
        client, other = site.client(tmp_path, "c"), site.client(tmp_path, "other")
        await client.greet()
        await other.greet()
        row = center.ledger.clients.get(client.id)
        center.roster.revoke(row, "lost", "test")
        await until(lambda: client.news == [LinkNews("down")])
        client.link.connect()  # as a guest: of what is too long for one, the server hears nothing
        client.link.send([bytes(9000)])
        await until(lambda: len(client.news) == 3)
        assert client.news[1:] == [LinkNews("up"), LinkNews("down")]
        assert other.news == []
        center.say(other.keys.public.curve, closed())
        await until(lambda: [m.type for m in other.heard] == ["round_closed"])

    play(tmp_path, story)


def test_without_an_uplink_nothing_listens_and_clients_come_back_after_it(tmp_path):
    async def story(center, site):
        client = site.client(tmp_path, "c")
        await client.greet()
        door = site.router
        site.dealer.disconnect()
        await until(lambda: client.news == [LinkNews("down")])
        assert not site.relay.status()["up"]
        client.link.connect()
        await until(lambda: client.news[1:] == [LinkNews("down", "unreachable")])
        assert center.left == [client.keys.public.curve]
        site.dealer.connect()
        await site.up()
        assert site.router is not door
        client.task.cancel()
        await client.greet()
        assert len(center.channels) == 1

    play(tmp_path, story)


def test_a_server_that_sends_a_relay_more_than_was_asked_for_is_named(tmp_path):
    async def story(center, site):
        client = site.client(tmp_path, "c")
        await client.greet()
        # Its own window, and those of all clients behind it.
        assert site.dealer.allowed == CREDIT + TOTAL_BYTES
        site.dealer._queue.put_nowait(LinkNews("flooded"))
        await until(lambda: any("more than was asked for" in text for _, text in site.notes))

    play(tmp_path, story)


def test_while_the_uplink_is_full_clients_are_not_read_and_nothing_is_lost(tmp_path):
    async def story(center, site):
        client = site.client(tmp_path, "c")
        await client.greet()
        center.reading.clear()
        client.say(closed())  # the server stops at its next look, after one more message
        most = 4 * HIGH_WATER
        sent = still = 0
        while sent < most and still < 100:
            said = Progress(
                run="r", task=0, kind="train", round=0, phase="working", done=sent, total=most
            )
            still += 1
            if client.link.send(client.channel.frames(said)):
                sent, still = sent + 1, 0
            await asyncio.sleep(0)
        assert HIGH_WATER < sent < most
        assert len(site.relay._session._out) <= MAX_OUT
        center.reading.set()
        await until(lambda: len(center.heard) == sent + 1)
        assert [m.done for m in center.heard[1:]] == list(range(sent))

    play(tmp_path, story)


def test_what_has_room_at_last_does_not_overtake_what_waits(tmp_path):
    async def story(center, site):
        client = site.client(tmp_path, "c")
        await client.greet()
        session = site.relay._session
        session._out.append(["first"])
        client.say(closed())
        await until(lambda: len(session._out) == 2)
        assert session._out.popleft() == ["first"]
        await until(lambda: center.heard)

    play(tmp_path, story)


# --- lies -------------------------------------------------------------------------------------


def kind(frames):
    return type(parse(frames).message)


def altered(which, blob):
    def lie(frames):
        if kind(frames) is not which:
            return [frames]
        changed = flip_bit((frames[blob],))[0]
        return [(*frames[:blob], changed, *frames[blob + 1 :])]

    return lie


def test_an_altered_chunk_is_refused_and_the_part_never_complete(tmp_path):
    async def story(center, site):
        part = center.publish()
        client = site.client(tmp_path, "c")
        await client.greet()
        client.downloads.start([part])
        await until(lambda: len(client.errors) >= 4)
        assert {type(e) for e in client.errors} == {WireError}
        assert not client.home.part_path(part.digest).exists()

    play(tmp_path, story, lie=altered(Chunk, 2))


@pytest.mark.parametrize(("blob", "error"), [(2, BadSignature), (3, BadSignature), (4, Exception)])
def test_an_altered_header_signature_or_key_is_refused(tmp_path, blob, error):
    async def story(center, site):
        part = center.publish()
        client = site.client(tmp_path, "c")
        await client.greet()
        client.downloads.start([part])
        await until(lambda: client.errors)
        assert isinstance(client.errors[0], error)
        assert not center.by  # not one chunk was asked for

    play(tmp_path, story, lie=altered(Parts, blob))


def test_an_altered_message_is_refused(tmp_path):
    async def story(center, site):
        client = site.client(tmp_path, "c")
        await client.greet()
        center.say(client.keys.public.curve, closed())
        await until(lambda: client.errors)
        assert not isinstance(client.errors[0], CorruptFile)
        assert client.heard == []

    play(tmp_path, story, lie=altered(RoundClosed, 0))


def test_a_message_that_is_repeated_is_refused(tmp_path):
    async def story(center, site):
        client = site.client(tmp_path, "c")
        await client.greet()
        center.say(client.keys.public.curve, closed(0))
        center.say(client.keys.public.curve, closed(1))
        await until(lambda: len(client.errors) == 3)
        assert [m.round for m in client.heard] == [0, 1]

    told = []

    def lie(frames):
        if kind(frames) is not RoundClosed:
            return [frames]
        told.append(frames)
        return [frames, told[0]] if len(told) == 1 else [frames, frames, told[0]]

    play(tmp_path, story, lie=lie)


def test_a_message_of_another_client_is_refused(tmp_path):
    async def story(center, site):
        one, two = site.client(tmp_path, "one"), site.client(tmp_path, "two")
        await one.greet()
        await two.greet()
        center.say(one.keys.public.curve, closed())
        await until(lambda: one.heard)
        center.say(two.keys.public.curve, closed())
        await until(lambda: two.errors)
        assert two.heard == []

    told = []

    def lie(frames):
        if kind(frames) is RoundClosed:
            told.append(frames)
        return [told[0]] if kind(frames) is RoundClosed else [frames]

    play(tmp_path, story, lie=lie)


def test_an_ack_that_a_relay_made_is_refused(tmp_path):
    async def story(center, site):
        client = site.client(tmp_path, "c")
        await client.greet()
        forged.append(Channel(site.keys, client.keys.public))
        forged[0].peer_nonce = client.channel.nonce  # it has read everything
        center.say(client.keys.public.curve, closed())
        await until(lambda: client.errors)
        assert isinstance(client.errors[0], BadSignature)
        assert client.heard == []

    forged = []

    def lie(frames):
        return [tuple(forged[0].frames(Ack(digest="0" * 64)))] if forged else [frames]

    play(tmp_path, story, lie=lie)


def test_what_a_client_says_arrives_as_it_was_said_or_is_refused(tmp_path):
    async def story(center, site):
        client = site.client(tmp_path, "c")
        await client.greet()
        said = Progress(run="r", task=0, kind="train", round=0, phase="working", done=1, total=2)
        frames = client.channel.frames(said)
        client.link.send(frames)
        await until(lambda: center.heard)
        assert center.heard[0].model_copy(update={"nonce": said.nonce, "seq": 0}) == said
        client.link.send(frames)  # as a relay that repeats it
        client.link.send(flip_bit(tuple(client.channel.frames(Want(digest="0" * 64, chunks=[])))))
        await until(lambda: len(center.heard) == 3)
        assert isinstance(center.heard[1], WireError)
        assert isinstance(center.heard[2], BadSignature | WireError)

    play(tmp_path, story)


def test_a_nack_that_ends_a_relay_ends_it_in_words(tmp_path):
    async def story(center, site):
        row = center.ledger.clients.get(site.id)
        center.roster.revoke(row, "stolen", "test")
        await until(lambda: not site.relay.status()["up"])
        site.dealer.connect()
        await until(lambda: site.relay._failure)
        assert site.relay._failure.code == "revoked"
        assert "stolen" in site.relay._failure.message
        site.relay._failure = None  # as `play` expects

    play(tmp_path, story)


def test_the_kinds_of_lies_are_told_at_all():
    """`altered` changes what it says, else the tests above would show nothing."""
    frames = (encode(Chunk(digest="0" * 64, index=0)), b"", b"data")
    assert altered(Chunk, 2)(frames) == [(*frames[:2], flip_bit((b"data",))[0])]
    assert altered(Nack, 2)(frames) == [frames]


# --- its own defects --------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["receive", "flow", "watch"])
def test_a_defect_in_any_of_its_tasks_ends_the_relay_and_is_said(tmp_path, monkeypatch, task):
    """One that died silently would leave clients that wait for ever."""
    monkeypatch.setattr(relay_session, "WATCH_S", 0.0)

    def defect(*_args):
        raise ZeroDivisionError("planned")

    async def story(center, site):
        failed, session = [], site.relay._session
        session._fail = failed.append
        client = site.client(tmp_path, "c")
        await client.connect()
        if task == "receive":
            session._numbers = SimpleNamespace(get=defect, pop=lambda *_: None)
            client.link.send([b"x"])
        elif task == "flow":
            session._uplink = defect
            session._out.append([b"x"])
            session._flowing.set()
        else:
            session._fetches.revive = defect
        await until(lambda: failed)
        assert "ZeroDivisionError: planned" in failed[0].message

    play(tmp_path, story)


# --- the server's keys -----------------------------------------------------------------------


def test_a_newer_certificate_is_kept_and_an_older_one_is_not_believed(tmp_path):
    async def story(center, site):
        federation = center.federation
        old = federation.certificate
        while federation.certificate.serial <= old.serial:  # a serial is a time in milliseconds
            federation.certificate = federation.root.certify(federation.keys.public)
        await site.client(tmp_path, "c").greet()
        site.relay.stop()
        await until(lambda: center.left)
        site.relay = site.make(old)
        task = asyncio.create_task(site.relay.run())
        await site.up()
        assert [r.certificate for r in site.records] == [federation.certificate.to_bytes().hex()]
        site.relay.stop()
        await task
        newest, federation.certificate = federation.certificate, old
        site.relay = site.make(newest)
        task = asyncio.create_task(site.relay.run())
        await until(lambda: any("is known here" in text for _, text in site.notes))
        assert site.relay.status()["up"] is False
        site.relay.stop()
        await task

    play(tmp_path, story)


def test_a_full_disk_costs_a_relay_no_service_and_the_certificate_is_saved_later(tmp_path):
    async def story(center, site):
        federation, old = center.federation, center.federation.certificate
        while federation.certificate.serial <= old.serial:
            federation.certificate = federation.root.certify(federation.keys.public)
        site.relay.stop()
        await until(lambda: not center.lanes.has(site.id))
        disk = [DiskFull("cannot write relay.json."), DiskFull("cannot write relay.json."), None]

        def keep(record):
            fault = disk.pop(0)
            if fault is not None:
                raise fault
            site.records.append(record)

        site.relay = site.make(old)
        site.relay._keep = keep
        task = asyncio.create_task(site.relay.run())
        for left in (2, 1, 0, 0):
            await site.up()
            assert len(disk) == left
            site.dealer.reconnect()
            await until(lambda: not site.relay.status()["up"])
        await site.up()
        assert [r.certificate for r in site.records] == [federation.certificate.to_bytes().hex()]
        (warning,) = [text for _, text in site.notes if "cannot write" in text]
        assert "tries again at its next session" in warning
        site.relay.stop()
        await task

    play(tmp_path, story)


def test_a_relay_starts_before_its_clock_is_set_and_connects_until_it_is(tmp_path, monkeypatch):
    """It says why once; connected without a session, it would pass for one that serves."""
    monkeypatch.setattr(relay_module, "RETRY_S", 0.0)

    async def story(center, site):
        site.relay.stop()
        await until(lambda: center.left or not center.lanes.has(site.id))
        clock, dealers, dial = Clock(), [], site._dial

        def note_dealer(*whom):
            dealers.append(dial(*whom))
            return dealers[-1]

        monkeypatch.setattr(relay_module, "time", clock)
        monkeypatch.setattr(site, "_dial", note_dealer)
        site.notes.clear()
        clock.now = 0.0
        site.relay = site.make()
        task = asyncio.create_task(site.relay.run())
        await until(lambda: len(dealers) == 4)
        assert [d.is_up for d in dealers[:3]] == [False] * 3
        assert site.relay.status()["up"] is False
        clock.now = time.time()
        await site.up()
        assert dealers[-1].is_up
        assert center.lanes.has(site.id)
        assert [text for level, text in site.notes if level == "error"] == [
            next(text for _, text in site.notes if "but this clock says 1970-01-01" in text)
        ]
        site.relay.stop()
        await task

    play(tmp_path, story)


# --- connections out of order ----------------------------------------------------------------


def test_what_an_older_connection_says_after_a_newer_one_is_not_passed_on(tmp_path):
    async def story(center, site):
        client = site.client(tmp_path, "c")
        await client.connect()
        old = client.link  # silent so far: the network keeps what it says
        await client.greet()
        assert len(center.channels) == 1
        old.send([b"late", b""])
        assert await old.recv() == LinkNews("down")
        assert len(site.relay._session.lanes) == 1
        assert len(center.channels) == 1
        assert not client.news, "the newer one lives"

    play(tmp_path, story)
