"""The server's IO shell: sockets, worker, timers, signals. It decides nothing.

Frames come in, are parsed and checked here, and go to guests, sessions, intake, publisher or
coordinator; what those return goes out. Every failure of a message becomes a Nack and a row
in the ledger, never a traceback to a peer and never the end of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Awaitable, Callable, Coroutine

from fcil_protocol import control
from fcil_protocol.errors import BadSignature, FcilError, InternalError, NotNow, WireError
from fcil_protocol.frames import Received, parse
from fcil_protocol.ids import ClientId, RoundKey
from fcil_protocol.messages import (
    LEFT,
    Bye,
    Chunk,
    Decline,
    Enrol,
    Hello,
    Message,
    Progress,
    Rotate,
    Update,
    Want,
    nack_of,
)
from fcil_protocol.service import Service
from fcil_protocol.transport import MEMBER_BYTES, Incoming, Router
from fcil_server import greeting
from fcil_server.accounts import Accounts
from fcil_server.addresses import split_address
from fcil_server.books import Books
from fcil_server.commands import answer
from fcil_server.cut_offs import CutOffs
from fcil_server.doorkeeper import Doorkeeper
from fcil_server.federation import Federation
from fcil_server.floods import Floods
from fcil_server.guests import Guests
from fcil_server.inbox import Inbox
from fcil_server.intake import Intake
from fcil_server.journal import Journal, Note
from fcil_server.lanes import Lanes
from fcil_server.live import Live
from fcil_server.page_key import make_key
from fcil_server.page_links import PageLinks
from fcil_server.peers import Peer, Peers
from fcil_server.position import Mode
from fcil_server.roster import Roster
from fcil_server.runs import OpenRun, open_run
from fcil_server.sessions import Sessions
from fcil_server.status import status_line
from fcil_server.turns import LagMeter, Turns
from fcil_server.web_process import WebProcess, figures_site, page_site

FLUSH_S = 5.0  # how often byte counts and the deadline are written while nothing closes


class Server:
    """One federation being served.

    Args:
        say: shows a note in the terminal or the log.
        until_done: end when the run's listed tasks are learned.
        drain_on_term: the first SIGTERM lets the round under way come to its end.
        service: signals, and what a supervisor is told.
        listening: called once, when everything is loaded and clients can come.
    """

    def __init__(
        self,
        federation: Federation,
        *,
        say: Callable[[Note], None],
        until_done: bool = False,
        new_run: bool = False,
        drain_on_term: bool = False,
        service: Service | None = None,
        listening: Callable[[], None] = lambda: None,
    ) -> None:
        self.federation = federation
        self.ledger = federation.ledger
        self.config = federation.config
        named = federation.config.federation.ids == "named"
        door = Doorkeeper(credit=federation.config.wire.credit)
        self.roster = Roster(federation, door, named_ids=named)
        self.peers = Peers()
        self.journal = Journal(federation.ledger, say)
        self.note = self.journal.note
        self.began = time.monotonic()
        self.started_at = time.time()  # once: a figure that trembles looks like restarts
        self.lag = LagMeter()
        self.books = Books(self)
        self.live = Live(self)
        self.sessions = Sessions(self)
        self.cut_offs = CutOffs(self)
        self.links = PageLinks()
        self.port = 0
        self.until_done = until_done
        self._new_run = new_run
        self._drain_on_term = drain_on_term
        self._service = service or Service()
        self._listening = listening
        self._stopping = asyncio.Event()
        self._failure: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._door: asyncio.AbstractServer | None = None  # where commands come in
        self.guests: Guests
        self.link: Lanes
        self.intake: Intake
        self._inbox: Inbox
        self.accounts: Accounts
        self.figures: WebProcess
        self.page: WebProcess
        self.open: OpenRun

    # --- life -------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Serve until a signal, ``stop``, or (``until_done``) the end of the run.

        Raises:
            FcilError: the server could not start, or the run failed.
        """
        _raise_descriptor_limit()
        self.ledger.checkpoint_by_hand()
        self._open_doors()
        self.roster.open()
        self._open_link()
        try:
            await self._begin()
            await self._stopping.wait()
        finally:
            self.lag.stop()
            self._service.stopping()
            await self._shut_down()
            self.figures.close()
            self.page.close()
            self._service.over()
        if self._failure is not None:
            raise self._failure

    async def _begin(self) -> None:
        """Open the run, answer commands, and start the work that goes on until the end."""
        self.open = await open_run(self, new=self._new_run)
        self.journal.run = self.open.coordinator.kit.run
        self.accounts = Accounts(self.ledger, self.journal.run, kernel=self.link.take_counts)
        self.intake = self.open.make_intake()
        self._inbox = Inbox(
            self.intake,
            alive=lambda peer: self.peers.by_conn(peer.conn) is peer,
            refuse=self._turn_down,
            cut=self.sessions.overrun,
            most_bytes=MEMBER_BYTES + self.config.wire.credit,
        )
        self._door = await control.serve(
            self.federation.directory, lambda op, fields: answer(self, op, fields)
        )
        self.federation.leave_join_file(self.addresses())
        drain = self.drain_rounds if self._drain_on_term else None
        self._service.catch(self.stop, lambda text: self.note("info", "signal", text), drain)
        self._service.ready(lambda: status_line(self))
        self.federation.tell_lost_frames(self.note)
        self.note("info", "serving", f"listening on {', '.join(self.addresses())}")
        self._listening()
        self.lag.start()
        doors = (self.figures.run(), self.page.run())
        work = (self._receive(), self.open.drive(), self._tick(), *doors)
        self._tasks = [asyncio.create_task(self.guard(w)) for w in work]

    def _open_doors(self) -> None:
        """Listen for Prometheus and for browsers, as far as that is wanted."""
        directory, section = self.federation.directory, self.config.federation
        self.figures = WebProcess(directory, figures_site(section), self.note)
        self.page = WebProcess(directory, page_site(section), self.note)
        if self.page.served:
            make_key(directory)

    def _open_link(self) -> None:
        """Listen for clients and relays."""
        self.link = Lanes(
            self._listen(),
            self.roster,
            credit=self.config.wire.credit,
            accounts=lambda: self.accounts,
            serve=lambda p, want: self.open.publisher.serve(p, want, self.config.wire.credit),
            say=self.note,
            refused=self.relay_refused,
            must_be_heard=self.cut_offs.refuse,
        )
        self.roster.changed = self.link.tell
        self.guests = Guests(
            roster=self.roster,
            keys=self.federation.keys,
            send=self.link.send,
            cut=self.link.cut,
            addresses=self.addresses,
            say=self.note,
        )

    def _flood(self, text: str) -> None:
        self.note("warning", "flood", text)

    def _listen(self) -> Router:
        host, port = split_address(self.config.federation.listen)
        link = Router(
            curve_secret=self.federation.keys.curve_secret,
            curve_public=self.federation.keys.public.curve,
            admit=self.roster.door,
            heartbeat_s=self.config.federation.heartbeat_s,
            allow=self.roster.allow,
            flooded=Floods(self.roster.who, self._flood, self.cut_offs.flooded).cut,
        )
        try:
            self.port = link.bind(host, port)
        except BaseException:
            link.close()
            raise
        return link

    def addresses(self) -> list[str]:
        """Return the addresses that clients are told."""
        return self.config.federation.told(self.port)

    def stop(self) -> None:
        """End the server after what is being written is written."""
        self._stopping.set()

    def drain_rounds(self) -> None:
        """End the server when the round under way is over; no other one opens."""
        if self.open.coordinator.at.mode is not Mode.DRAINING:
            self.note("info", "draining", "no round opens any more; stopping when this one is over")
        self.open.coordinator.set_mode(Mode.DRAINING)

    async def _shut_down(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        steps: list[Callable[[], Awaitable[None]]] = []
        if hasattr(self, "intake"):  # the last thing that a start makes
            steps = [self.intake.drain, self.sessions.say_goodbye, self.books.end]
        if hasattr(self, "open"):
            steps.append(self.open.close)
        for step in steps:
            try:  # whatever one step meets, the others are still taken
                await step()
            except Exception as error:
                self.note("error", "shutdown", str(error))
        self.journal.write(everything=True)
        if self._door is not None:
            self._door.close()
            control.socket_path(self.federation.directory).unlink(missing_ok=True)
        self.link.close()

    async def guard(self, work: Coroutine[None, None, None]) -> None:
        """Run one of the server's tasks; its failure ends the server, in words."""
        try:
            await work
        except FcilError as error:
            self.fail(error)
        except Exception as error:
            self.fail(InternalError(f"{type(error).__name__}: {error}"), cause=error)

    def fail(self, error: FcilError, cause: BaseException | None = None) -> None:
        """End the server with an error."""
        if cause is not None:
            error.__cause__ = cause
        self.note("error", error.code, str(error))
        self._failure = error
        self.stop()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            self.ledger.refuse_if_gone()
            await self.books.keep()
            self.intake.revive(self.peers)
            self._service.news()

    # --- messages ---------------------------------------------------------------------------

    async def _receive(self) -> None:
        turns = Turns()
        while True:
            await turns.give()
            incoming = await self.link.recv()
            try:
                self._take(incoming)
            except FcilError as error:
                self._refuse(incoming, error)
            except Exception as error:  # our defect: the peer learns a code, the log the rest
                wrapped = InternalError(f"{type(error).__name__}: {error}")
                wrapped.__cause__ = error
                self._refuse(incoming, wrapped)

    def _take(self, incoming: Incoming) -> None:
        if not incoming.frames:
            self._departed(incoming.conn)
            return
        if self.guests.had_its_answer(incoming):
            return
        self.guests.check_size(incoming)
        received = parse(incoming.frames)
        if isinstance(received.message, Hello):
            if not self.guests.explain(incoming, received, received.message):
                self.sessions.begin(incoming, received, received.message)
            return
        if isinstance(received.message, Enrol):
            self.guests.enrol(incoming, received, received.message)
            return
        peer = self.peers.by_conn(incoming.conn)
        if peer is None:
            raise WireError("a session begins with a Hello.")
        message = peer.channel.check(received)
        self.accounts.received(peer.client, message, incoming.frames)
        digest = getattr(message, "digest", "")
        try:
            self._handle(peer, received, message)
        except FcilError as error:
            self._turn_down(peer, digest, error)

    def _turn_down(self, peer: Peer, digest: str, error: FcilError) -> None:
        self.sessions.count_refusal(peer, error)
        self.intake.forget(peer, digest)
        self.sessions.send(peer, nack_of(error, digest))

    def _handle(self, peer: Peer, received: Received, message: Message) -> None:
        coordinator = self.open.coordinator
        match message:
            case Update() | Chunk():
                self._inbox.put(peer, received, message)
            case Want():
                self.open.publisher.serve(peer, message, self.config.wire.credit)
            case Decline():
                key = RoundKey(coordinator.kit.run, message.task, message.kind, message.round)
                self.note("info", "declined", f"{peer.name}: {message.reason}", peer.client)
                peer.resting = message.reason == NotNow.code
                if not coordinator.declined(peer.client, key, message.reason):
                    self.cut_offs.needless(peer.client)
            case Progress():
                peer.progress = (message.phase, message.done, message.total)
                peer.paused = message.paused
            case Rotate():
                self.sessions.rotate(peer, message)
            case Bye(code=code) if code == LEFT:
                self.sessions.leave(peer)
            case Bye():
                if message.code:
                    self.sessions.turn_away(peer, greeting.leaving(message))
                self._departed(peer.conn)
            case _:
                raise WireError(f"a client does not send {message.type}.")

    def relay_refused(self, relay: ClientId, error: FcilError) -> None:
        """Count what was refused of a relay itself."""
        self.journal.refusal(relay, error)
        self.cut_offs.needless(relay)

    def _departed(self, conn: int) -> None:
        self.guests.departed(conn)
        self.sessions.end(conn)

    def _refuse(self, incoming: Incoming, error: FcilError) -> None:
        """Answer what belongs to no session; the connection of a guest ends with it."""
        self.sessions.refuse(incoming, error)
        self.guests.show_out(incoming)
        if isinstance(error, InternalError | BadSignature):
            self.note("error", error.code, error.message, origin=incoming.key.hex())

    # --- what the run tells -----------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until every update that has come is durable or refused."""
        await self.intake.drain()

    def round_opens(self, key: RoundKey, new_parts: set[str]) -> None:
        """Charge bytes to this round from now on."""
        self.accounts.begin(key, new_parts)
        self.live.round_opens(key)

    async def round_closed(self, key: RoundKey) -> None:
        """Write what a closed round cost and brought, beside the round that follows."""
        self.intake.sweep(self.peers)
        await self.books.close_round(key)

    def drained(self) -> None:
        """No round is under way and none is to open."""
        self.note("info", "drained", "no round is under way; started again, the server goes on")
        self.stop()

    def done(self) -> None:
        """The run has come to its end."""
        for peer in self.peers:
            self.sessions.tell_done(peer)
        if self.until_done:
            self.stop()


def _raise_descriptor_limit() -> None:
    """Allow as many open files as the system permits: each client takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
