"""One client's uploads wait in order while it is busy; nothing else does, and nothing piles up."""

import asyncio
from types import SimpleNamespace

import pytest

from fcil_protocol.errors import DiskFull
from fcil_protocol.messages.frames import Received
from fcil_protocol.messages.messages import Chunk, Update
from fcil_server.sessions.inbox import MESSAGE_BYTES, Inbox

ANN, BOB = "a" * 26, "b" * 26
MOST = 100_000
DIGEST = "0" * 64


class Intake:
    """Writes down what it is handed; the test says who is busy."""

    def __init__(self):
        self.busy, self.taken, self.fault = set(), [], None
        self.room = None

    def is_busy(self, client):
        return client in self.busy

    def offer(self, peer, _received, _message):
        self.chunk(peer, None, SimpleNamespace(index="header"))

    def chunk(self, peer, _received, message):
        if self.fault:
            raise self.fault
        self.taken.append((peer.client[0], message.index))


class Scene:
    def __init__(self):
        self.intake, self.over, self.cut, self.refused = Intake(), set(), [], []
        self.inbox = Inbox(
            self.intake,
            alive=lambda peer: peer.conn not in self.over,
            refuse=lambda peer, digest, error: self.refused.append((peer.client, digest, error)),
            cut=self._cut,
            most_bytes=MOST,
        )

    def _cut(self, peer):
        self.cut.append(peer.conn)

    def put(self, peer, index, size=0):
        message = Chunk(digest=DIGEST, index=index)
        self.inbox.put(peer, Received(message, b"", b"", (bytes(size),)))

    async def idle(self):
        for _ in range(1000):
            await asyncio.sleep(0)


def peer(client=ANN, conn=1, ready=True):
    return SimpleNamespace(client=client, conn=conn, ready=ready)


@pytest.fixture
def scene():
    return Scene()


def play(story):
    asyncio.run(story())


def test_who_is_not_busy_is_served_at_once(scene):
    scene.put(peer(), 0)
    assert scene.intake.taken == [("a", 0)]


def test_who_is_busy_waits_in_order_and_nobody_else_does(scene):
    async def story():
        scene.intake.busy.add(ANN)
        ann, bob = peer(), peer(BOB, 2)
        for index in range(3):
            scene.put(ann, index)
            scene.put(bob, index)
        assert scene.intake.taken == [("b", 0), ("b", 1), ("b", 2)]
        scene.intake.taken.clear()
        scene.intake.busy.clear()
        scene.put(ann, 3)  # not before those that wait
        scene.intake.room(ANN)
        await scene.idle()
        assert scene.intake.taken == [("a", n) for n in range(4)]
        scene.put(ann, 4)
        assert scene.intake.taken[-1] == ("a", 4), "nothing waits any more"

    play(story)


def test_who_becomes_busy_again_waits_again(scene):
    async def story():
        scene.intake.busy.add(ANN)
        for index in range(3):
            scene.put(peer(), index)
        scene.intake.busy.clear()
        chunk = scene.intake.chunk

        def one(*args):
            chunk(*args)
            scene.intake.busy.add(ANN)

        scene.intake.chunk = one
        for expected in range(1, 4):
            scene.intake.busy.clear()
            scene.intake.room(ANN)
            await scene.idle()
            assert len(scene.intake.taken) == expected

    play(story)


def test_what_waits_of_a_session_that_is_over_is_dropped(scene):
    async def story():
        scene.intake.busy.add(ANN)
        scene.put(peer(conn=1), 0)
        scene.put(peer(conn=2), 1)
        scene.over.add(1)
        scene.intake.busy.clear()
        scene.intake.room(ANN)
        await scene.idle()
        assert scene.intake.taken == [("a", 1)]

    play(story)


def test_who_sends_more_than_may_wait_is_cut_and_what_waited_is_dropped(scene):
    async def story():
        scene.intake.busy.add(ANN)
        room = MOST // (10_000 + MESSAGE_BYTES)
        for index in range(room):
            scene.put(peer(), index, 10_000)
        assert scene.cut == []
        scene.put(peer(), room, 10_000)
        assert scene.cut == [1]
        scene.intake.busy.clear()
        scene.intake.room(ANN)
        await scene.idle()
        assert scene.intake.taken == []

    play(story)


def test_empty_messages_are_bounded_too(scene):
    async def story():
        scene.intake.busy.add(ANN)
        for index in range(MOST // MESSAGE_BYTES + 1):
            scene.put(peer(), index)
        assert scene.cut == [1]

    play(story)


def test_what_older_sessions_left_does_not_cut_the_newest(scene):
    async def story():
        scene.intake.busy.add(ANN)
        for conn in range(1, 10):
            scene.put(peer(conn=conn), conn, MOST // 2)
            scene.over.add(conn)
        scene.put(peer(conn=10), 10, MOST // 2)
        assert scene.cut == []
        scene.intake.busy.clear()
        scene.intake.room(ANN)
        await scene.idle()
        assert scene.intake.taken == [("a", 10)]

    play(story)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("fault", "code"), [(DiskFull("full."), "disk_full"), (ValueError("x"), "internal")]
)
def test_what_cannot_be_taken_is_answered_now_or_later(scene, late, fault, code):
    async def story():
        scene.intake.fault = fault
        if late:
            scene.intake.busy.add(ANN)
        scene.put(peer(), 0)
        assert bool(scene.refused) != late
        scene.intake.busy.clear()
        scene.intake.room(ANN)
        await scene.idle()
        ((client, digest, error),) = scene.refused
        assert (client, digest, error.code) == (ANN, DIGEST, code)

    play(story)


def test_an_update_before_a_welcome_is_refused(scene):
    message = Update(digest=DIGEST)
    scene.inbox.put(peer(ready=False), Received(message, b"", b"", ()))
    ((_, _, error),) = scene.refused
    assert "Welcome" in error.message
