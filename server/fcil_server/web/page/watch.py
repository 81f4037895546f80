"""Watch for news while a dashboard is open: at most once a second, for all.

The server answers one short question; everything else is read from its files. While no dashboard is
open, nothing is asked and nothing is read.
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
from fcil_server.web.errors import Faults
from fcil_server.web.event_stream import event
from fcil_server.web.page.access.guard import DEFECT
from fcil_server.web.page.board import Board, BoardPiece, Boards, Live
from fcil_server.web.page.event_stream import HELLO, Hub, Stream
from fcil_server.web.requests import Pool, RefusedRequest

LOOK_S = 1.05  # between two looks; after a second, values are read again
SERVER_WAIT_S = 1.0  # that a new dashboard waits for a server that does not answer
PEERS_S = 5.0  # at most between two questions about each client
UNTIL_MOVES_S = 1.5  # a deadline that moved by less counts as unchanged
_TROUBLE = "gone"

Ask = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class ServerNews:
    """The server's last answer about itself.

    Attributes:
        live: the answer; None: it does not answer.
        why: the reason for that, as a sentence.
    """

    live: Live | None = None
    why: str = "The server has not answered yet."


class Questions:
    """Asks the server for its status, in one thread.

    Args:
        ask: ``ask(op, **fields)``.
        clock: seconds that only grow.
    """

    def __init__(self, ask: Ask, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._peers: dict[str, Any] = {}
        self._asked_at = -PEERS_S  # time of the last question about its peers
        self._here: tuple[int, int] | None = None  # clients at that time
        self._until: float | None = None

    def look(self) -> ServerNews:
        """Ask the server; about each client only if one came or left, or some time has passed."""
        peers = self._here is None or self._clock() - self._asked_at >= PEERS_S
        try:
            live = self._ask("live", peers=peers)
        except FcilError as error:
            self._here = None
            return ServerNews(None, f"The server does not answer: {error}")
        here = (live["connected"], live["ready"])
        if peers:
            self._peers = {name: live[name] for name in ("peers", "relays")}
            self._here, self._asked_at = here, self._clock()
        elif here != self._here:
            self._here = None  # ask about all the next time
        if live["round"] is not None:
            live["round"]["until"] = self._steady(live)
        return ServerNews({**live, **_as_in_round(self._peers, live["round"])}, "")

    def _steady(self, live: Live) -> float | None:
        """Return when the round's time is over, unchanged as long as it does not move."""
        remaining = live["round"]["remaining_s"]
        until = live["now"] + remaining if remaining is not None else None
        if until is None or self._until is None or abs(until - self._until) >= UNTIL_MOVES_S:
            self._until = until if until is None else float(round(until))
        return self._until


def _as_in_round(told: dict[str, Any], at: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return each client's status, updated from the round under way for those at work in it.

    The clients are asked about less often; without this, two sections could contradict each other.
    """
    peers, changed = told.get("peers", {}), {}
    for one in at["clients"] if at else ():
        if (peer := peers.get(one["id"])) is not None:
            works = one["answer"] == "none"
            now = {"progress": one["progress"] if works else None, "paused": one["paused"]}
            changed[one["id"]] = {**peer, **now}
    return {**told, "peers": {**peers, **changed}} if changed else told


class PageWatch:
    """Keeps the dashboard's content fresh, and sends the news to open dashboards.

    Args:
        boards: makes the content, in a thread of its own.
        ask: asks the server: ``ask(op, **fields)``, blocking.
        hub: of the open dashboards.
        greeting: first event to each dashboard, except for its CSRF token.
        faults: logs our own defects.
    """

    def __init__(
        self, boards: Boards, ask: Ask, hub: Hub, greeting: dict[str, Any], faults: Faults
    ) -> None:
        self._boards = boards
        self._hub = hub
        self._greeting = greeting
        self._faults = faults
        self._ledger = Pool("ledger")
        self._asking: Fresh[ServerNews] = Fresh(Questions(ask).look)
        self._looking: Fresh[Board] = Fresh(self._look, self._ledger.threads)
        self._told = ServerNews()
        self._board = Board()
        self._gone = ""  # reason, last sent to open dashboards, why their content is old

    @property
    def stale_reason(self) -> str:
        """Reason why the content is not the newest, as a sentence; or empty."""
        return self._board.trouble or self._told.why

    def is_newest_run(self, board: Board) -> bool:
        """Return True if this is the newest run's board."""
        return board.run == self._board.run

    @property
    def live(self) -> bool:
        """True if the server answers."""
        return self._told.live is not None

    async def board(self) -> Board:
        """Return the newest run's board, at most a second old."""
        await self._ask_server(SERVER_WAIT_S)
        return await self._read()

    async def board_of(self, run: RunId) -> Board:
        """Return a run's board, the newest run's or an older one's.

        Raises:
            FcilError: there is no such run, or the ledger cannot be read.
            RefusedRequest: too many ask.
        """
        newest = await self.board()
        return newest if run == newest.run else await self._ledger.do(self._boards.of, run)

    async def part(self, name: str, run: RunId | None, params: Params) -> str:
        """Return one section with the visitor's parameters.

        Raises:
            FcilError: there is no such run, or the ledger cannot be read.
            RefusedRequest: too many ask.
        """
        newest = await self.board()
        live = self._told.live if run is None or run == newest.run else None
        return await self._ledger.do(self._boards.part, name, run, live, params)

    async def history(self, run: RunId | None) -> tuple[History, Live | None]:
        """Return a run's history, and the server's answer if the run is the newest.

        Raises:
            FcilError: there is no such run, or the ledger cannot be read.
            RefusedRequest: too many ask.
        """
        newest = await self.board()
        live = self._told.live if run is None or run == newest.run else None
        return await self._ledger.do(self._boards.history, run), live

    async def open(self, csrf: str, run: RunId | None, since: int) -> Stream | None:
        """Return the stream of a dashboard; None if too many are open.

        Args:
            csrf: of its session.
            run: the run that it shows; None: it follows the newest.
            since: the version of its content.

        Raises:
            FcilError: there is no such run, or the ledger cannot be read.
        """
        board = await (self.board() if run is None else self.board_of(run))
        follows = run is None or run == self._board.run
        stream = Stream(csrf, follows=follows, pinned=run is not None)
        first = [(HELLO, self._hello(board.run, csrf, live=follows and self.live))]
        if follows and self.stale_reason:
            first.append((_TROUBLE, _gone(self.stale_reason)))
        # In the order of their versions: a reconnecting browser names the highest that it has.
        pieces = sorted(board.pieces.items(), key=lambda named: named[1].version)
        first += [(name, piece.event) for name, piece in pieces if piece.version > since]
        return stream if self._hub.open(stream, first) else None

    async def warm_up(self) -> None:
        """Read a long ledger before the first visitor: the first time takes longest."""
        try:
            while (await self._ledger.do(self._boards.history, None)).unread:
                pass  # a visitor meanwhile gets a turn, and sees the partial result
        except (FcilError, RefusedRequest):
            return  # visitors get the error
        except Exception as error:
            self._faults.tell(error, "the first look")

    async def run(self) -> None:
        """Look repeatedly while a dashboard follows; until cancelled."""
        while True:
            await self._hub.followed.wait()
            try:
                await self._ask_server(None)
                await self._read()
            except Exception as error:  # a defect is logged once, and the next look may succeed
                self._faults.tell(error, "a look at what is new")
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Close the ledger."""
        await self._ledger.do(self._boards.close)

    async def _ask_server(self, patience_s: float | None) -> None:
        """Ask the server; after ``patience_s`` seconds, keep its last answer."""
        try:
            async with asyncio.timeout(patience_s):
                self._told = await self._asking.get()
        except TimeoutError:
            return
        except Exception as error:  # the ledger is shown all the same
            self._faults.tell(error, "what the server says")
            self._told = ServerNews(None, DEFECT)

    def _look(self) -> Board:
        return self._boards.newest(self._told.live)

    async def _read(self) -> Board:
        now = await self._looking.get()
        before = self._board
        if now is before:
            return now  # another request has sent the news already
        self._board = now
        if before.run != now.run:
            self._hub.switch_run(lambda csrf: self._hello(before.run, csrf, live=False))
            self._greet()
        for name, piece in now.pieces.items():
            if _is_new(piece, before.pieces.get(name)):
                self._hub.publish(name, piece.event)
        self._tell_trouble()
        return now

    def _tell_trouble(self) -> None:
        """Tell open dashboards that their content is old now, or no longer."""
        if self.stale_reason == self._gone:
            return
        if self.stale_reason:
            self._hub.publish(_TROUBLE, _gone(self.stale_reason))
        else:
            self._greet()
        self._gone = self.stale_reason

    def _greet(self) -> None:
        run = self._board.run
        self._hub.greet(lambda csrf: self._hello(run, csrf, live=self.live))

    def _hello(self, run: str, csrf: str, *, live: bool) -> bytes:
        said = {**self._greeting, "csrf": csrf, "run": run, "live": live, "now": time.time()}
        return event(HELLO, said)


def _gone(why: str) -> bytes:
    return event(_TROUBLE, {"says": why})


def _is_new(piece: BoardPiece, before: BoardPiece | None) -> bool:
    return before is None or piece.version > before.version
