"""Looks what is new, as long as somebody looks at the page: at most once a second, for all.

The server answers one short question; everything else is read from its files. While no page is
open nothing is asked and nothing is read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fcil_protocol.errors import FcilError
from fcil_protocol.ids import RunId
from fcil_server.reports.charts.history import History
from fcil_server.reports.sections.params import Params
from fcil_server.web.child import Fresh
from fcil_server.web.page.access.errors import DEFECT, Faults
from fcil_server.web.page.board import Board, Boards, Live, Piece
from fcil_server.web.page.event_stream import HELLO, Hub, Stream, event
from fcil_server.web.page.thread_pool import Pool

LOOK_S = 1.05  # between two looks; what is a second old is looked at anew
PATIENCE_S = 1.0  # that a page which is opened waits for a server that does not answer
PEERS_S = 5.0  # at most between two questions of how each client is
UNTIL_MOVES_S = 1.5  # a deadline that moved by less is the same
_TROUBLE = "gone"

Ask = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Told:
    """What the server said of itself last.

    Attributes:
        live: what it said; None: it does not answer.
        why: it does not, as a sentence.
    """

    live: Live | None = None
    why: str = "The server has not answered yet."


class Questions:
    """Asks the server how it is, in one thread.

    Args:
        ask: ``ask(op, **fields)``.
        clock: seconds that only grow.
    """

    def __init__(self, ask: Ask, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._peers: dict[str, Any] = {}
        self._asked_at = -PEERS_S  # for its peers
        self._here: tuple[int, int] | None = None  # as it was when they were asked for
        self._until: float | None = None

    def look(self) -> Told:
        """Ask; how each client is, only if one came or went, or some time passed."""
        peers = self._here is None or self._clock() - self._asked_at >= PEERS_S
        try:
            live = self._ask("live", peers=peers)
        except FcilError as error:
            self._here = None
            return Told(None, f"The server does not answer: {error}")
        here = (live["connected"], live["ready"])
        if peers:
            self._peers = {name: live[name] for name in ("peers", "relays")}
            self._here, self._asked_at = here, self._clock()
        elif here != self._here:
            self._here = None  # ask for all the next time
        if live["round"] is not None:
            live["round"]["until"] = self._steady(live)
        return Told({**live, **_as_in_round(self._peers, live["round"])}, "")

    def _steady(self, live: Live) -> float | None:
        """Return when the round's time is over, the same as long as it is not moved."""
        remaining = live["round"]["remaining_s"]
        until = live["now"] + remaining if remaining is not None else None
        if until is None or self._until is None or abs(until - self._until) >= UNTIL_MOVES_S:
            self._until = until if until is None else float(round(until))
        return self._until


def _as_in_round(told: dict[str, Any], at: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return how each client is, with what the round under way says of those at work in it.

    They are asked for more seldom; two sections would tell two things of one client.
    """
    peers, changed = told.get("peers", {}), {}
    for one in at["clients"] if at else ():
        if (peer := peers.get(one["id"])) is not None:
            works = one["answer"] == "none"
            now = {"progress": one["progress"] if works else None, "paused": one["paused"]}
            changed[one["id"]] = {**peer, **now}
    return {**told, "peers": {**peers, **changed}} if changed else told


class Watch:
    """Keeps what the page shows fresh, and tells the open pages.

    Args:
        boards: makes what the page shows, in a thread of its own.
        ask: asks the server: ``ask(op, **fields)``, blocking.
        hub: of the open pages.
        greeting: what each page is told first, but for its CSRF token.
        faults: is told of our own defects.
    """

    def __init__(
        self, boards: Boards, ask: Ask, hub: Hub, greeting: dict[str, Any], faults: Faults
    ) -> None:
        self._boards = boards
        self._hub = hub
        self._greeting = greeting
        self._faults = faults
        self._ledger = Pool("ledger")
        self._asking: Fresh[Told] = Fresh(Questions(ask).look)
        self._looking: Fresh[Board] = Fresh(self._look, self._ledger.threads)
        self._told = Told()
        self._board = Board()
        self._gone = ""  # why what the open pages show is old, as they were told

    @property
    def trouble(self) -> str:
        """Why what is shown is not the newest, as a sentence; or empty."""
        return self._board.trouble or self._told.why

    def shows(self, board: Board) -> bool:
        """Say whether this is the newest run's board."""
        return board.run == self._board.run

    @property
    def live(self) -> bool:
        """Whether the server answers."""
        return self._told.live is not None

    async def board(self) -> Board:
        """Return what the newest run's page shows, at most a second old."""
        await self._ask_server(PATIENCE_S)
        return await self._read()

    async def board_of(self, run: RunId) -> Board:
        """Return what the page of a run shows, be it the newest or an older one.

        Raises:
            FcilError: there is no such run, or the ledger cannot be read; or too many ask.
        """
        newest = await self.board()
        return newest if run == newest.run else await self._ledger.do(self._boards.of, run)

    async def part(self, name: str, run: RunId | None, params: Params) -> str:
        """Return one section as somebody wants to see it.

        Raises:
            FcilError: there is no such run, or the ledger cannot be read; or too many ask.
        """
        newest = await self.board()
        live = self._told.live if run is None or run == newest.run else None
        return await self._ledger.do(self._boards.part, name, run, live, params)

    async def history(self, run: RunId | None) -> tuple[History, Live | None]:
        """Return a run, and what the server says if that is the newest.

        Raises:
            FcilError: there is no such run, or the ledger cannot be read; or too many ask.
        """
        newest = await self.board()
        live = self._told.live if run is None or run == newest.run else None
        return await self._ledger.do(self._boards.history, run), live

    async def open(self, csrf: str, run: RunId | None, since: int) -> Stream | None:
        """Return the stream of a page; None if too many are open.

        Args:
            csrf: of its session.
            run: that it shows; None: it follows the newest.
            since: the version of what it has.

        Raises:
            FcilError: there is no such run, or the ledger cannot be read.
        """
        board = await (self.board() if run is None else self.board_of(run))
        follows = run is None or run == self._board.run
        stream = Stream(csrf, follows=follows, pinned=run is not None)
        first = [(HELLO, self._hello(board.run, csrf, live=follows and self.live))]
        if follows and self.trouble:
            first.append((_TROUBLE, _gone(self.trouble)))
        # In the order of their versions: who comes again says the highest that it has.
        pieces = sorted(board.pieces.items(), key=lambda named: named[1].version)
        first += [(name, piece.event) for name, piece in pieces if piece.version > since]
        return stream if self._hub.open(stream, first) else None

    async def warm_up(self) -> None:
        """Read a long ledger before somebody waits for it: the first time takes longest."""
        try:
            while (await self._ledger.do(self._boards.history, None)).unread:
                pass  # who asks meanwhile has a turn, and sees what there is
        except FcilError:
            return  # whoever opens the page is told
        except Exception as error:
            self._faults.tell(error, "the first look")

    async def run(self) -> None:
        """Look again and again while a page follows; until cancelled."""
        while True:
            await self._hub.followed.wait()
            try:
                await self._ask_server(None)
                await self._read()
            except Exception as error:  # a defect is told once, and the next look may do better
                self._faults.tell(error, "a look at what is new")
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Close the ledger."""
        await self._ledger.do(self._boards.close)

    async def _ask_server(self, patience_s: float | None) -> None:
        """Ask the server; who has no patience goes on with what it said before."""
        try:
            async with asyncio.timeout(patience_s):
                self._told = await self._asking.get()
        except TimeoutError:
            return
        except Exception as error:  # the ledger is shown all the same
            self._faults.tell(error, "what the server says")
            self._told = Told(None, DEFECT)

    def _look(self) -> Board:
        return self._boards.newest(self._told.live)

    async def _read(self) -> Board:
        now = await self._looking.get()
        before = self._board
        if now is before:
            return now  # another request has told the pages already
        self._board = now
        if before.run != now.run:
            self._hub.turn(lambda csrf: self._hello(before.run, csrf, live=False))
            self._greet()
        for name, piece in now.pieces.items():
            if _is_new(piece, before.pieces.get(name)):
                self._hub.publish(name, piece.event)
        self._tell_trouble()
        return now

    def _tell_trouble(self) -> None:
        """Tell open pages that what they show is old now, or no longer."""
        if self.trouble == self._gone:
            return
        if self.trouble:
            self._hub.publish(_TROUBLE, _gone(self.trouble))
        else:
            self._greet()
        self._gone = self.trouble

    def _greet(self) -> None:
        run = self._board.run
        self._hub.greet(lambda csrf: self._hello(run, csrf, live=self.live))

    def _hello(self, run: str, csrf: str, *, live: bool) -> bytes:
        said = {**self._greeting, "csrf": csrf, "run": run, "live": live, "now": time.time()}
        return event(HELLO, said)


def _gone(why: str) -> bytes:
    return event(_TROUBLE, {"says": why})


def _is_new(piece: Piece, before: Piece | None) -> bool:
    return before is None or piece.version > before.version
