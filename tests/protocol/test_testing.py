"""The test kit itself: a link in memory that fails exactly as its script says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_protocol.errors import UsageError
from fcil_protocol.link.interface import ClientLink, Incoming, LinkNews, ServerLink
from fcil_protocol.testing import HIGH_WATER, FaultScript, MemoryDealer, MemoryRouter, flip_bit

ALICE, BOB = b"a" * 32, b"b" * 32
UP, DOWN = LinkNews("up"), LinkNews("down")


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def connected(
    router: MemoryRouter, key: bytes = ALICE, *, up: str = "", down: str = ""
) -> MemoryDealer:
    dealer = router.dealer(key, up=up, down=down)
    dealer.connect()
    assert await dealer.recv() == UP
    return dealer


async def all_of(router: MemoryRouter) -> list[Incoming]:
    return [await router.recv() for _ in range(router._queue.qsize())]


async def texts(router: MemoryRouter) -> list[bytes]:
    return [i.frames[0] if i.frames else b"<gone>" for i in await all_of(router)]


def test_the_two_halves_have_the_interface_of_a_link() -> None:
    server: ServerLink = MemoryRouter()
    client: ClientLink = MemoryDealer(MemoryRouter(), ALICE)
    assert (server, client) != (None, None)


class TestLink:
    def test_there_and_back(self) -> None:
        async def test() -> None:
            router = MemoryRouter()
            alice = await connected(router)
            assert alice.send([b"body", b"", b"blob"])
            got = await router.recv()
            assert (got.key, got.frames) == (ALICE, (b"body", b"", b"blob"))
            assert router.send(got.route, [b"answer"])
            assert await alice.recv() == (b"answer",)

        run(test)

    def test_an_answer_goes_to_the_right_client(self) -> None:
        async def test() -> None:
            router = MemoryRouter()
            dealers = [await connected(router, key) for key in (ALICE, BOB)]
            for dealer in dealers:
                dealer.send([dealer.key])
            for got in await all_of(router):
                assert got.frames == (got.key,)
                router.send(got.route, [b"you are " + got.key])
            for dealer in dealers:
                assert await dealer.recv() == (b"you are " + dealer.key,)

        run(test)

    def test_what_is_changed_after_sending_does_not_change_the_message(self) -> None:
        async def test() -> None:
            router = MemoryRouter()
            alice = await connected(router)
            buffer = bytearray(b"before")
            frames = [buffer]
            alice.send(frames)
            buffer[:] = b"after!"
            frames.clear()
            assert (await router.recv()).frames == (b"before",)

        run(test)

    def test_a_stranger_is_refused_and_may_be_let_in_later(self) -> None:
        async def test() -> None:
            allowed: set[bytes] = set()
            router = MemoryRouter(allowed.__contains__)
            alice = router.dealer(ALICE)
            alice.connect()
            assert await alice.recv() == LinkNews("refused", "unknown_client")
            assert not alice.send([b"x"])
            assert (router.refused_handshakes, router.connected) == (1, 0)
            allowed.add(ALICE)
            alice.connect()
            assert await alice.recv() == UP

        run(test)

    def test_without_a_connection_sending_says_so(self) -> None:
        router = MemoryRouter()
        assert not router.dealer(ALICE).send([b"x"])
        assert not router.send(b"nobody", [b"x"])

    def test_a_departure_comes_after_the_last_message_and_once(self) -> None:
        async def test() -> None:
            router = MemoryRouter()
            alice = await connected(router)
            alice.send([b"last words"])
            alice.disconnect()
            alice.disconnect()
            said, gone = await all_of(router)
            assert said.frames == (b"last words",)
            assert gone == Incoming(said.route, said.conn, ALICE)
            assert not router.send(said.route, [b"too late"])
            assert await alice.recv() == DOWN
            assert not alice.is_up

        run(test)

    def test_who_never_spoke_leaves_unnoticed(self) -> None:
        async def test() -> None:
            router = MemoryRouter()
            alice = await connected(router)
            alice.disconnect()
            assert await all_of(router) == []

        run(test)

    def test_a_new_connection_has_a_new_number_and_route(self) -> None:
        async def test() -> None:
            router = MemoryRouter()
            alice = await connected(router)
            alice.send([b"1"])
            alice.reconnect()
            alice.send([b"2"])
            one, gone, two = await all_of(router)
            assert (one.conn, one.route) == (gone.conn, gone.route)
            assert one.conn < two.conn
            assert one.route != two.route
            assert [await alice.recv(), await alice.recv()] == [DOWN, UP]

        run(test)

    def test_cut_ends_one_connection_and_tells_both_sides(self) -> None:
        async def test() -> None:
            router = MemoryRouter()
            alice, bob = await connected(router), await connected(router, BOB)
            alice.send([b"a"])
            router.cut((await router.recv()).conn)
            assert await alice.recv() == DOWN
            assert (await router.recv()).frames == ()
            assert bob.is_up
            router.cut(99)
            assert bob.is_up

        run(test)

    def test_a_closed_server_is_unreachable(self) -> None:
        async def test() -> None:
            router = MemoryRouter()
            alice = await connected(router)
            router.close()
            assert await alice.recv() == DOWN
            alice.connect()
            assert await alice.recv() == LinkNews("down", "unreachable")

        run(test)

    def test_connecting_twice_is_one_connection(self) -> None:
        async def test() -> None:
            router = MemoryRouter()
            alice = await connected(router)
            alice.connect()
            assert router.connected == 1
            alice.close()
            assert router.connected == 0

        run(test)

    def test_queues_are_bounded_in_both_directions_until_somebody_reads(self) -> None:
        async def test() -> None:
            router = MemoryRouter()
            alice = await connected(router)
            sent = 0
            while alice.send([b"x"]):
                sent += 1
            assert sent == HIGH_WATER
            route = (await router.recv()).route
            assert alice.send([b"room again"])
            sent = 0
            while router.send(route, [b"y"]):
                sent += 1
            assert sent == HIGH_WATER
            await alice.recv()
            assert router.send(route, [b"room again"])

        run(test)

    def test_a_key_of_another_length_is_refused(self) -> None:
        with pytest.raises(UsageError, match="32 bytes, got 3"):
            MemoryDealer(MemoryRouter(), b"abc")


class TestFaults:
    @pytest.mark.parametrize(
        ("letters", "expected"),
        [
            ("", [b"1", b"2", b"3", b"4"]),
            ("....", [b"1", b"2", b"3", b"4"]),
            ("d", [b"2", b"3", b"4"]),
            (".d.d", [b"1", b"3"]),
            ("2.", [b"1", b"1", b"2", b"3", b"4"]),
            ("r", [b"2", b"1", b"3", b"4"]),
            ("rr", [b"3", b"1", b"2", b"4"]),
            ("rd", [b"3", b"1", b"4"]),
            ("r2", [b"2", b"2", b"1", b"3", b"4"]),
            ("...r", [b"1", b"2", b"3"]),
            ("f", [b"!", b"2", b"3", b"4"]),
            (".x", [b"1", b"<gone>"]),
            ("rx", []),
        ],
    )
    def test_each_letter_does_what_it_says_on_the_way_up(
        self, letters: str, expected: list[bytes]
    ) -> None:
        async def test() -> None:
            router = MemoryRouter()
            alice = await connected(router, up=letters)
            for text in (b"1", b"2", b"3", b"4"):
                alice.send([text])
            assert await texts(router) == expected

        run(test)

    @pytest.mark.parametrize(
        ("letters", "expected"),
        [
            (".d2", [(b"1",), (b"3",), (b"3",), (b"4",)]),
            ("r.f", [(b"2",), (b"1",), (b"#",), (b"4",)]),
            ("x", [DOWN]),
        ],
    )
    def test_and_on_the_way_down(self, letters: str, expected: list[object]) -> None:
        async def test() -> None:
            router = MemoryRouter()
            alice = await connected(router, down=letters)
            alice.send([b"hello"])
            route = (await router.recv()).route
            sent = [router.send(route, [text]) for text in (b"1", b"2", b"3", b"4")]
            assert sent == ([True, False, False, False] if letters == "x" else [True] * 4)
            assert [await alice.recv() for _ in expected] == expected
            assert alice._queue.empty()

        run(test)

    def test_a_script_goes_on_after_a_reconnect(self) -> None:
        async def test() -> None:
            router = MemoryRouter()
            alice = await connected(router, up=".xd.")
            alice.send([b"1"])
            alice.send([b"2"])
            assert not alice.send([b"not seen by the script"])
            alice.connect()
            for text in (b"3", b"4"):
                alice.send([text])
            assert await texts(router) == [b"1", b"<gone>", b"4"]
            assert alice.up.finished
            assert alice.up.seen == 4

        run(test)

    def test_what_was_held_back_is_lost_with_the_connection(self) -> None:
        async def test() -> None:
            router = MemoryRouter()
            alice = await connected(router, up="r")
            alice.send([b"held"])
            alice.reconnect()
            alice.send([b"next"])
            assert await texts(router) == [b"next"]

        run(test)

    def test_an_unknown_letter_is_refused_with_those_that_are_known(self) -> None:
        with pytest.raises(UsageError, match=r"'!', 'q'.*'d' is dropped"):
            FaultScript("..q!")

    @given(st.lists(st.binary(max_size=40), min_size=1, max_size=4))
    def test_a_flip_changes_exactly_one_bit(self, frames: list[bytes]) -> None:
        changed = flip_bit(tuple(frames))
        assert [len(f) for f in changed] == [len(f) for f in frames]
        pairs = zip(b"".join(frames), b"".join(changed), strict=True)
        bits = sum((a ^ b).bit_count() for a, b in pairs)
        assert bits == (1 if any(frames) else 0)

    @settings(max_examples=60)
    @given(st.text(".d2fr", max_size=20), st.integers(0, 25))
    def test_without_a_cut_only_drops_lose_messages(self, letters: str, count: int) -> None:
        """Counts: dropped ones are missing, doubled ones twice, held ones at most delayed."""

        async def test() -> None:
            router = MemoryRouter()
            alice = await connected(router, up=letters)
            for number in range(count):
                alice.send([b"%03d" % number, b"x" * 9])
            alice.send([b"end"])
            used = (letters + "." * (count + 1))[: count + 1]
            expected = len(used) - used.count("d") + used.count("2")
            held = 0
            for letter in used:  # what was held and never followed by an arrival
                held = held + 1 if letter == "r" else held if letter == "d" else 0
            assert len(await all_of(router)) == expected - held

        run(test)
