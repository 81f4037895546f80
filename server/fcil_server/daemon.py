"""The server's IO shell: sockets, worker, timers, signals. It decides nothing.

Frames come in, are parsed and checked here, and go to greeting, intake, publisher or
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
from fcil_protocol.assembly import Assembly
from fcil_protocol.channel import Channel
from fcil_protocol.errors import BadSignature, FcilError, InternalError, NotNow, WireError
from fcil_protocol.frames import Received, parse
from fcil_protocol.ids import ClientId
from fcil_protocol.messages import (
    LEFT,
    RUN_DONE,
    Ack,
    Bye,
    Chunk,
    Decline,
    Enrol,
    Hello,
    Message,
    Parts,
    Progress,
    Rotate,
    Update,
    Want,
)
from fcil_protocol.payload import Payload
from fcil_protocol.service import Service
from fcil_protocol.ticket import keys_digest
from fcil_protocol.transport import Incoming, Router
from fcil_server import greeting
from fcil_server.accounts import Accounts
from fcil_server.addresses import split_address
from fcil_server.books import Books
from fcil_server.commands import answer
from fcil_server.doorkeeper import Doorkeeper
from fcil_server.federation import Federation
from fcil_server.guests import Guests
from fcil_server.intake import Accepted, Intake, nack_of
from fcil_server.journal import Journal, Note
from fcil_server.lanes import Lanes
from fcil_server.ledger_rows import Client as ClientRow
from fcil_server.ledger_rows import RoundKey
from fcil_server.live import Live
from fcil_server.page_key import make_key
from fcil_server.page_links import PageLinks
from fcil_server.peers import Peer, Peers
from fcil_server.position import Mode
from fcil_server.roster import LEFT_BY_ITSELF, REVOKED, Roster
from fcil_server.runs import OpenRun, open_run
from fcil_server.status import status_line
from fcil_server.turns import LagMeter, Turns
from fcil_server.web_process import WebProcess, figures_site, page_site

FLUSH_S = 5.0  # how often byte counts and the deadline are written while nothing closes
GOODBYE_S = 1.0  # for a goodbye to arrive before its connection is cut


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
        self.peers = Peers()
        self.journal = Journal(federation.ledger, say)
        self.note = self.journal.note
        self.began = time.monotonic()
        self.started_at = time.time()  # once: a figure that trembles looks like restarts
        self.lag = LagMeter()
        self.books = Books(self)
        self.live = Live(self)
        self.links = PageLinks()
        self.port = 0
        self._until_done = until_done
        self._new_run = new_run
        self._drain_on_term = drain_on_term
        self._service = service or Service()
        self._listening = listening
        named = federation.config.federation.ids == "named"
        self.roster = Roster(federation, Doorkeeper(), named_ids=named)
        self._stopping = asyncio.Event()
        self._failure: BaseException | None = None
        self._connections: set[int] = set()
        self._link: Lanes
        self._guests: Guests
        self._intake: Intake
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
        link = self._link = Lanes(
            self._listen(),
            self.roster,
            credit=self.config.wire.credit,
            accounts=lambda: self.accounts,
            serve=lambda p, want: self.open.publisher.serve(p, want, self.config.wire.credit),
            say=self.note,
        )
        self.roster.changed = link.tell
        self._guests = Guests(
            roster=self.roster,
            keys=self.federation.keys,
            send=link.send,
            cut=link.cut,
            addresses=self.addresses,
            say=self.note,
        )
        tasks: list[asyncio.Task[None]] = []
        door: asyncio.AbstractServer | None = None
        try:
            self.open = await open_run(self, new=self._new_run)
            self.journal.run = self.open.coordinator.kit.run
            self.accounts = Accounts(self.ledger, self.journal.run, kernel=link.take_counts)
            self._intake = self._make_intake()
            door = await control.serve(
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
            tasks = [asyncio.create_task(self.guard(w)) for w in work]
            await self._stopping.wait()
        finally:
            self.lag.stop()
            self._service.stopping()
            await self._shut_down(tasks, door)
            self.figures.close()
            self.page.close()
            self._service.over()
        if self._failure is not None:
            raise self._failure

    def _open_doors(self) -> None:
        """Listen for Prometheus and for browsers, as far as that is wanted."""
        directory, section = self.federation.directory, self.config.federation
        self.figures = WebProcess(directory, figures_site(section), self.note)
        self.page = WebProcess(directory, page_site(section), self.note)
        if self.page.served:
            make_key(directory)

    def _listen(self) -> Router:
        host, port = split_address(self.config.federation.listen)
        link = Router(
            curve_secret=self.federation.keys.curve_secret,
            curve_public=self.federation.keys.public.curve,
            admit=self.roster.door,
            heartbeat_s=self.config.federation.heartbeat_s,
        )
        try:
            self.port = link.bind(host, port)
        except BaseException:
            link.close()
            raise
        return link

    def is_up(self, relay: ClientId) -> bool:
        """Say whether a relay is connected."""
        return self._link.has(relay)

    def relays(self) -> list[ClientId]:
        """Return the relays that are connected."""
        return self._link.relays()

    def uploads(self, client: ClientId) -> list[Assembly]:
        """Return what has come of a client's envelopes, the newest first."""
        return self._intake.arriving.of(client)

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

    def drained(self) -> None:
        """No round is under way and none is to open."""
        self.note("info", "drained", "no round is under way; started again, the server goes on")
        self.stop()

    def done(self) -> None:
        """The run has come to its end."""
        for peer in self.peers:
            self.tell_done(peer)
        if self._until_done:
            self.stop()

    def tell_done(self, peer: Peer) -> None:
        """Tell a client that nothing more is asked in this run; it may stay for the next."""
        self.send(peer, Bye(code=RUN_DONE, reason="the run is done"))

    async def _shut_down(
        self, tasks: list[asyncio.Task[None]], door: asyncio.AbstractServer | None
    ) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        steps: list[Callable[[], Awaitable[None]]] = []
        if hasattr(self, "_intake"):  # the last thing that a start makes
            steps = [self._intake.drain, self._say_goodbye, self.books.end]
        if hasattr(self, "open"):
            steps.append(self.open.close)
        for step in steps:
            try:  # whatever one step meets, the others are still taken
                await step()
            except Exception as error:
                self.note("error", "shutdown", str(error))
        if door is not None:
            door.close()
            control.socket_path(self.federation.directory).unlink(missing_ok=True)
        self._link.close()

    async def _say_goodbye(self) -> None:
        turns = Turns()
        for peer in self.peers:
            self.send(peer, Bye(reason="the server stops"))
            self.ledger.touch(peer.client)
            await turns.give()
        await asyncio.sleep(0.05 + 0.0005 * len(self.peers))  # let the goodbyes leave the socket

    async def guard(self, work: Coroutine[None, None, None]) -> None:
        """Run one of the server's tasks; its failure ends the server, in words."""
        try:
            await work
        except FcilError as error:
            self._fail(error)
        except Exception as error:
            self._fail(InternalError(f"{type(error).__name__}: {error}"), cause=error)

    def _fail(self, error: FcilError, cause: BaseException | None = None) -> None:
        if cause is not None:
            error.__cause__ = cause
        self.note("error", error.code, str(error))
        self._failure = error
        self.stop()

    async def sync_ledger(self) -> None:
        """Wait until what is committed is on the disk; the server ends if it cannot be.

        Raises:
            StorageError: it cannot.
        """
        try:
            await asyncio.to_thread(self.ledger.sync)
        except FcilError as error:
            self._fail(error)
            raise

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            self.ledger.refuse_if_gone()
            await self.books.keep()
            self._intake.revive(self.peers)
            self._service.news()

    # --- messages ---------------------------------------------------------------------------

    async def _receive(self) -> None:
        turns = Turns()
        while True:
            await turns.give()
            incoming = await self._link.recv()
            try:
                await self._take(incoming)
            except FcilError as error:
                self._refuse(incoming, error)
            except Exception as error:  # our defect: the peer learns a code, the log the rest
                wrapped = InternalError(f"{type(error).__name__}: {error}")
                wrapped.__cause__ = error
                self._refuse(incoming, wrapped)

    async def _take(self, incoming: Incoming) -> None:
        if not incoming.frames:
            self._departed(incoming.conn)
            return
        if self._guests.had_its_answer(incoming):
            return
        self._guests.check_size(incoming)
        received = parse(incoming.frames)
        if isinstance(received.message, Hello):
            if not self._guests.explain(incoming, received, received.message):
                self._hello(incoming, received, received.message)
            return
        if isinstance(received.message, Enrol):
            self._guests.enrol(incoming, received, received.message)
            return
        peer = self.peers.by_conn(incoming.conn)
        if peer is None:
            raise WireError("a session begins with a Hello.")
        message = peer.channel.check(received)
        self.accounts.received(peer.client, message, incoming.frames)
        digest = getattr(message, "digest", "")
        try:
            await self._handle(peer, received, message)
        except FcilError as error:
            self._count_refusal(peer, error)
            self._intake.forget(peer, digest)
            self.send(peer, nack_of(error, digest))

    async def _handle(self, peer: Peer, received: Received, message: Message) -> None:
        coordinator = self.open.coordinator
        match message:
            case Update():
                self._must_be_ready(peer)
                await self._intake.offer(peer, received, message)
            case Chunk():
                await self._intake.chunk(peer, received, message)
            case Want():
                self.open.publisher.serve(peer, message, self.config.wire.credit)
            case Decline():
                key = RoundKey(coordinator.kit.run, message.task, message.kind, message.round)
                self.note("info", "declined", f"{peer.name}: {message.reason}", peer.client)
                peer.resting = message.reason == NotNow.code
                coordinator.declined(peer.client, key, message.reason)
            case Progress():
                peer.progress = (message.phase, message.done, message.total)
                peer.paused = message.paused
            case Rotate():
                row = self.ledger.client(peer.client)
                assert row is not None, "it has a session"
                keys = self.roster.rotate(row, message)
                self.note("info", "rotated", f"{peer.name} has new keys", peer.client)
                self.send(peer, Ack(digest=keys_digest(keys)))
                if row.via is not None:  # after the answer: the relay cuts who has an old key
                    self.roster.changed(row.via)
            case Bye(code=code) if code == LEFT:
                row = self.ledger.client(peer.client)
                assert row is not None, "it has a session"
                self.revoke(row, keep=True, actor=peer.name, why=LEFT_BY_ITSELF)
            case Bye():
                if message.code:
                    self._turn_away(peer, greeting.leaving(message))
                self._departed(peer.conn)
            case _:
                raise WireError(f"a client does not send {message.type}.")

    def _must_be_ready(self, peer: Peer) -> None:
        if not peer.ready:
            raise WireError("updates come after a Welcome that says ready.")

    def _hello(self, incoming: Incoming, received: Received, hello: Hello) -> None:
        peer = greeting.meet(self.ledger, self.federation.keys, incoming, received, hello)
        if self.peers.is_left_behind(peer):
            self._link.cut(peer.conn)  # the network kept its words while a newer one was made
            return
        if incoming.conn not in self._connections:
            self._connections.add(incoming.conn)
            if not incoming.relayed:
                self.accounts.connected(peer.client, incoming.conn)
            self.note("info", "connected", f"{peer.name} connected ({hello.device})", peer.client)
        self.accounts.received(peer.client, hello, incoming.frames)
        self.ledger.touch(peer.client, device=hello.device)
        try:
            peer.ready = greeting.check(self.open.house, hello)
        except FcilError as error:
            self._turn_away(peer, error)
            self.send(peer, nack_of(error))
            return
        if peer.ready and hello.backbone is not None:
            peer.agreement = greeting.agreement(self.open.house, hello.backbone)
            text = f"features of {peer.name} agree to {peer.agreement:.1e} on {hello.device}"
            self.note("info", "features", text, peer.client)
        self._replace(peer)
        verdict = self.open.coordinator.verdict(peer.client)
        nonce = peer.channel.nonce
        answer = greeting.welcome(
            self.open.house,
            nonce=nonce,
            ready=peer.ready,
            verdict=verdict,
            clients=len(self.peers),
            clock_s=self.ledger.now,
        )
        self.send(peer, answer)

    def _replace(self, peer: Peer) -> None:
        old = self.peers.add(peer)
        if old is not None:
            text = (
                f"{peer.name} connected again before its older connection was gone; the newer one "
                "stays. If the older was another device, its files were copied: enrol it anew."
            )
            self.note("warning", "two_links", text, peer.client)
            self.send(old, Bye(code="two_links", reason=text))
            asyncio.get_running_loop().call_later(GOODBYE_S, self._link.cut, old.conn)

    def _departed(self, conn: int) -> None:
        self._guests.departed(conn)
        self._connections.discard(conn)
        self.accounts.departed(conn)
        peer = self.peers.remove(conn)
        if peer is not None and self.peers.by_client(peer.client) is None:
            self.note("info", "left", f"{peer.name} left", peer.client)
            self.ledger.touch(peer.client)
            self.open.coordinator.left(peer.client)

    def _refuse(self, incoming: Incoming, error: FcilError) -> None:
        """Answer something that belongs to no session, as far as it can be answered."""
        row = None
        with contextlib.suppress(FcilError):
            row = self.ledger.client_by_curve(incoming.key)
        self.journal.refusal(row.client_id if row else None, error)
        peer = self.peers.by_conn(incoming.conn)
        if peer is not None:
            self.send(peer, nack_of(error))
        elif row is not None and incoming.frames:
            channel = Channel(self.federation.keys, greeting.keys_of(row))
            with contextlib.suppress(FcilError):
                hello = parse(incoming.frames).message
                if isinstance(hello, Hello):
                    channel.peer_nonce = hello.nonce
            self._link.send(incoming.route, channel.frames(nack_of(error)))
        self._guests.show_out(incoming)
        if isinstance(error, InternalError | BadSignature):
            self.note("error", error.code, error.message)

    def _turn_away(self, peer: Peer, error: FcilError) -> None:
        self._count_refusal(peer, error)
        self.peers.refused[peer.client] = error.message

    def _count_refusal(self, peer: Peer, error: FcilError) -> None:
        self.journal.refusal(peer.client, error)
        self.note("warning", error.code, f"{peer.name}: {error.message}", peer.client)

    def send(self, peer: Peer, message: Message, *blobs: bytes) -> bool:
        """Send one message; False if the client is gone (its session ends by itself)."""
        frames = peer.channel.frames(message, *blobs)
        if not self._link.send(peer.route, frames):
            return False
        tensor = 0
        if isinstance(message, Parts):
            tensor = self.open.publisher.tensor_bytes(message.digest)
        self.accounts.sent(peer.client, message, frames, tensor=tensor)
        return True

    # --- what intake and coordinator need ---------------------------------------------------

    def _make_intake(self) -> Intake:
        coordinator, wire = self.open.coordinator, self.config.wire
        return Intake(
            federation=self.federation.id,
            keys=self.federation.keys,
            incoming=self.open.directory / "incoming",
            spool=coordinator.kit.spool,
            credit=wire.credit,
            max_payload_bytes=int(wire.max_payload_mb * 1e6),
            max_classes=self.config.trust.max_classes_per_client,
            expect=coordinator.reception.expect,
            recorded=coordinator.reception.recorded,
            stored=self._stored,
            lasting=self.ledger.sync,
            announced=self._announced,
            opened=self.live.opened,
            send=self.send,
            refused=self._count_refusal,
            failed=self._fail,
        )

    def _stored(self, accepted: Accepted) -> None:
        self.open.coordinator.reception.stored(accepted)
        self.accounts.tensors_up(accepted.client, accepted.tensor_bytes)
        row = self.ledger.client(accepted.client)
        size = accepted.sealed_bytes / 1e3
        name = row.name if row else accepted.client
        self.note("info", "update", f"update from {name}, {size:.1f} kB", accepted.client)

    def _announced(self, peer: Peer, payload: Payload) -> None:
        if self.peers.by_conn(peer.conn) is not peer:
            return  # it left while its list was opened, and will announce it again
        names = [str(n) for n in payload.meta["names"]]  # type: ignore[union-attr]
        self.open.announce(peer, names, payload)

    async def drain(self) -> None:
        """Wait until every update that has come is durable or refused."""
        await self._intake.drain()

    def round_opens(self, key: RoundKey, new_parts: set[str]) -> None:
        """Charge bytes to this round from now on."""
        self.accounts.begin(key, new_parts)
        self.live.round_opens(key)

    async def round_closed(self, key: RoundKey) -> None:
        """Write what a closed round cost and brought, beside the round that follows."""
        self._intake.sweep(self.peers)
        await self.books.close_round(key)

    def revoke(self, row: ClientRow, *, keep: bool, actor: str, why: str = "") -> None:
        """Take a client off the list (`Roster.revoke`) and end its connection."""
        self.roster.revoke(row, why, actor, keep=keep)
        self.open.coordinator.revoked(row.client_id)
        peer = self.peers.by_client(row.client_id)
        if peer is not None:  # it comes back as a guest and is told why
            self._link.cut(peer.conn)
        text = f"{row.name} is off the list: {why or REVOKED}"
        self.note("warning", "revoked", text, row.client_id)

    def cut(self, peer: Peer) -> None:
        """End a client's connection, and drop what has come of its envelopes."""
        for digest in list(peer.inflow.under_way):
            self._intake.forget(peer, digest)
        self._link.cut(peer.conn)


def _raise_descriptor_limit() -> None:
    """Allow as many open files as the system permits: each client takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
