"""How much of a connection may lie unread, without sockets."""

from __future__ import annotations

import pytest

from fcil_protocol.link.backlog import (
    BUFFER_BYTES,
    FEW_BYTES,
    FORGIVEN_BYTES_S,
    UNSPOKEN_BYTES,
    UnreadBytes,
)
from fcil_protocol.link.flood_watch import (
    GROWING_BYTES,
    HASTE_MS,
    LOOK_S,
    STEP_BYTES,
    TICK_MS,
    FloodWatch,
)
from fcil_protocol.link.zmq_link import MEMBER_BYTES
from fcil_protocol.messages.frames import MAX_BODY_BYTES

MONTH_S = 30 * 86_400


def over(unread: UnreadBytes, received: int, now: float = 0.0) -> bool:
    return unread.is_over(lambda: received, now)


def test_as_much_as_is_allowed_may_lie_unread_and_no_byte_more() -> None:
    unread = UnreadBytes(allowed=1000)
    assert not over(unread, 1000)
    assert over(unread, 1001)
    assert unread.ahead == 1001


def test_what_was_read_makes_room() -> None:
    unread = UnreadBytes(allowed=1000)
    unread.delivered += 50_000
    assert not over(unread, 51_000)
    assert over(unread, 51_001)


def test_small_frames_count_with_the_buffers_that_they_keep() -> None:
    unread = UnreadBytes(allowed=100 << 20)
    for _ in range(5000):
        unread.read([95, 95])
    each = 1 + BUFFER_BYTES / 95
    assert unread.overhead == pytest.approx(each - 1, rel=1e-3)
    assert not over(unread, 950_000 + int(0.99 * (100 << 20) / each))
    assert over(unread, 950_000 + int(1.01 * (100 << 20) / each))


def test_a_few_small_frames_may_always_wait_unless_they_are_a_guests() -> None:
    member, guest = UnreadBytes(allowed=12 << 20), UnreadBytes(allowed=16 << 10)
    for unread in (member, guest):
        for _ in range(5000):
            unread.read([95])
    assert not over(member, 475_000 + FEW_BYTES)
    assert over(member, 475_000 + FEW_BYTES + 1)
    assert not over(guest, 475_000 + 50)
    assert over(guest, 475_000 + (16 << 10) + 1)


@pytest.mark.parametrize("chunk", [128 << 10, 256 << 10])
def test_after_small_messages_alone_a_whole_window_of_chunks_may_wait(chunk: int) -> None:
    """A client says little things for hours, and then it sends an update."""
    unread = UnreadBytes(allowed=MEMBER_BYTES + (8 << 20))
    for _ in range(5000):
        unread.read([150])
    unread.read([100, 200, chunk])
    assert not over(unread, unread.delivered + (8 << 20))


def test_the_first_message_of_anybody_has_room_before_it_is_known_whose_it_is() -> None:
    assert MAX_BODY_BYTES < UNSPOKEN_BYTES
    assert not over(UnreadBytes(), MAX_BODY_BYTES)


@pytest.mark.parametrize("allowed", [16 << 10, 4 << 20])
def test_a_month_of_heartbeats_is_no_flood(allowed: int) -> None:
    unread = UnreadBytes(allowed=allowed)
    for second in range(0, MONTH_S, 1000):
        assert not over(unread, second * 40 // 2, float(second))  # one of 40 bytes every 2 s


def test_silence_earns_nothing() -> None:
    unread = UnreadBytes(allowed=1000)
    assert not over(unread, 0, 0.0)
    assert not over(unread, 0, float(MONTH_S))
    assert over(unread, 1001, float(MONTH_S))


def test_slowly_as_heartbeats_come_nothing_can_be_piled_up() -> None:
    """Bytes that are never read are forgiven at the pace of heartbeats, and no faster."""
    unread = UnreadBytes(allowed=1000)
    pace = 3 * FORGIVEN_BYTES_S
    over_at = next(s for s in range(100) if over(unread, s * pace, float(s)))
    assert over_at * (pace - FORGIVEN_BYTES_S) > 1000


def test_messages_that_are_read_while_the_kernel_is_asked_are_no_flood_now_or_later() -> None:
    unread = UnreadBytes(allowed=1000)

    def received() -> int:
        unread.delivered += 90_000  # by the event loop, of what came after the answer
        return 500

    assert not unread.is_over(received, 0.0)
    assert not over(unread, 90_000 + 1000, 0.001)
    assert over(unread, 90_000 + 1001, 0.001)


class Clockwork:
    """A clock and a memory to be set by hand."""

    def __init__(self) -> None:
        self.now, self.memory = 0.0, 100 * STEP_BYTES
        self.looks: list[float] = []
        self.flood = False
        self.tidied: list[float] = []
        self.next_ms = 0
        self.watch = FloodWatch(
            self._look,
            memory=lambda: self.memory,
            clock=lambda: self.now,
            give_back=lambda: self.tidied.append(self.now),
        )

    def tick(self, now: float, growth: int = 0) -> int:
        self.now, self.memory = now, self.memory + growth
        self.next_ms = self.watch.tick()
        return len(self.looks)

    def _look(self, now: float) -> bool:
        self.looks.append(now)
        return self.flood


def test_connections_are_looked_at_when_memory_grows_and_once_a_second() -> None:
    works = Clockwork()
    assert works.tick(0.01) == 0
    assert works.tick(0.02, STEP_BYTES - 1) == 0
    assert works.tick(0.03, 1) == 1
    assert works.tick(0.04) == 1
    assert works.tick(0.05, STEP_BYTES) == 2
    assert works.tick(0.05 + LOOK_S) == 3


def test_growth_counts_from_the_least_memory_since_the_last_look() -> None:
    works = Clockwork()
    works.tick(0.01, -5 * STEP_BYTES)
    assert works.tick(0.02, STEP_BYTES) == 1


def test_memory_is_looked_at_more_often_while_it_grows() -> None:
    works = Clockwork()
    works.tick(0.01)
    assert works.next_ms == TICK_MS
    works.tick(0.02, GROWING_BYTES)
    assert works.next_ms == HASTE_MS
    works.tick(0.03, GROWING_BYTES - 1)
    assert works.next_ms == TICK_MS


@pytest.mark.parametrize("found", ["by a look", "by its frames"])
def test_what_a_flood_left_is_given_back_once_after_its_end(found: str) -> None:
    works = Clockwork()
    if found == "by a look":
        works.flood = True
        works.tick(0.5, STEP_BYTES)
        works.flood = False
        assert works.tidied == []
    else:
        works.watch.flooded()
    works.tick(2.0)
    works.tick(4.0)
    assert works.tidied == [2.0]
