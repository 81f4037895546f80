"""The client's IO shell: link, worker, outbox, folder, signals. It decides nothing.

`session.Session` says what to do; here it is done. Long work (loading the backbone, scanning
the folder, a round) runs as a task beside the loop and comes back as an event, so the daemon
answers at any moment and training goes on while the link is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from watchfiles import awatch

from fcil_client import greeting, session
from fcil_client.downloads import Downloads
from fcil_client.enrolment import load_keys
from fcil_client.greeting import Terms
from fcil_client.home import Enrolment, Home
from fcil_client.outbox import Outbox
from fcil_client.rounds import Inventory, Options, RoundWork
from fcil_client.session import Link, RoundKey, Session, key_of
from fcil_protocol import control
from fcil_protocol.channel import Channel
from fcil_protocol.errors import (
    BackboneMismatch,
    FcilError,
    MethodMismatch,
    StaleUpdate,
    TrustError,
    UnknownClient,
    VersionMismatch,
    WireError,
    from_code,
)
from fcil_protocol.keys import Certificate, PublicKeys
from fcil_protocol.messages import (
    Ack,
    Bye,
    Chunk,
    Decline,
    Message,
    Nack,
    Parts,
    Progress,
    Received,
    RoundClosed,
    RoundOpen,
    Want,
    Welcome,
    parse,
)
from fcil_protocol.transport import ClientLink, Dealer, LinkNews

RETRY_S = 10  # before an update is offered again to a server that could not keep it
PROGRESS_S = 1.0  # the server hears at most this often how far the work is

# Refusals that trying again cannot mend.
FATAL = (VersionMismatch, MethodMismatch, BackboneMismatch, TrustError)


@dataclass(frozen=True)
class Note:
    """One line for the person at the terminal."""

    at: float
    level: str
    text: str


class Client:
    """One data folder's membership in one federation.

    Args:
        say: shows a note in the terminal or the log.
    """

    def __init__(
        self,
        home: Home,
        enrolment: Enrolment,
        options: Options,
        *,
        say: Callable[[Note], None],
    ) -> None:
        self.home = home
        self.enrolment = enrolment
        self.options = options
        self.notes: deque[Note] = deque(maxlen=100)
        self.started_at = time.time()
        self.terms: Terms | None = None
        self.inventory: Inventory | None = None
        self.progress: tuple[str, int, int] | None = None
        self.counted = 0
        self._say = say
        self._keys = load_keys(home)
        self._server = self._pinned()
        self._channel = Channel(self._keys, self._server)
        self._work = RoundWork(home, enrolment, self._keys, options)
        self._outbox = Outbox(home)
        self._downloads = Downloads(home, enrolment, self._keys, self._send)
        self._session = self._resume()
        self._tasks: set[asyncio.Task[None]] = set()
        self._job: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._failure: FcilError | None = None
        self._last_progress = 0.0
        self._trouble = ""
        self._link: ClientLink

    def _pinned(self) -> PublicKeys:
        certificate = Certificate.from_bytes(bytes.fromhex(self.enrolment.certificate))
        return certificate.verify(self.enrolment.federation, time.time())

    def _resume(self) -> Session:
        order, digest = self._outbox.waiting()
        return Session.resume(order, digest)

    # --- life -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take part until a signal or a refusal that trying again cannot mend.

        Raises:
            FcilError: why the client cannot take part.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stopping.set)
        self._link = self._connect()
        door = await control.serve(self.home.directory, self._command)
        self._spawn(self._receive())
        self._spawn(self._watch())
        try:
            await self._stopping.wait()
        finally:
            door.close()
            control.socket_path(self.home.directory).unlink(missing_ok=True)
            if self._session.link is not Link.OFFLINE:
                self._send(Bye(reason="the client stops"))
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._work.close()
            await asyncio.sleep(0.05)  # let the goodbye leave the socket
            self._link.close()
        if self._failure is not None:
            raise self._failure

    def _connect(self) -> ClientLink:
        host, _, port = self.enrolment.addresses[0].rpartition(":")
        link = Dealer(
            curve_secret=self._keys.curve_secret,
            curve_public=self._keys.public.curve,
            server_key=self._server.curve,
        )
        link.connect(host.strip("[]"), int(port))
        return link

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except FcilError as error:
            self._fail(error)

    def _fail(self, error: FcilError) -> None:
        self._failure = error
        self._stopping.set()

    def note(self, level: str, text: str) -> None:
        """Tell the person at the terminal."""
        note = Note(time.time(), level, text)
        self.notes.append(note)
        self._say(note)

    # --- events and instructions ------------------------------------------------------------

    def _feed(self, event: session.Event) -> None:
        for instruction in self._session.handle(event):
            self._execute(instruction)

    def _execute(self, instruction: session.Instruction) -> None:
        match instruction:
            case session.Greet():
                self._greet()
            case session.LoadBackbone():
                self._spawn(self._load_backbone())
            case session.Announce():
                self._spawn(self._announce())
            case session.Fetch(order):
                self.progress = ("fetching", 0, 1)
                if self._downloads.start(order.parts):
                    self._feed(session.PartsReady(key_of(order)))
            case session.Train(order):
                self._job = self._spawn(self._round(order))
            case session.CancelWork(key):
                self.note("info", f"{key} is over; its work is stopped")
                if self._job is not None:
                    self._job.cancel()
                self._downloads.stop()
            case session.Offer(digest):
                self._offer(digest)
            case session.OfferLater(digest):
                self.note("warning", f"the server cannot keep the update now; again in {RETRY_S} s")
                loop = asyncio.get_running_loop()
                loop.call_later(RETRY_S, lambda: self._feed(session.RetryDue(digest)))
            case session.Drop(digest, reason):
                self.note("info", f"an update was dropped: {reason}")
                self.home.drop_outgoing(digest)
                self.home.settle(digest, counted=False)
            case session.Forget(digest):
                self.home.drop_outgoing(digest)
                self.progress = None
            case session.Settle(verdict):
                self._settle(verdict.update, verdict.counted, verdict.reason)
            case session.Refuse(key, reason):
                self._decline(key, reason)

    def _settle(self, digest: str, counted: bool, reason: str) -> None:
        if self.home.settle(digest, counted=counted):
            self.counted += counted
            if not counted:
                self.note("warning", f"the last update was not counted: {reason}")

    def _decline(self, key: RoundKey, reason: str) -> None:
        self.progress = None
        self.note("warning", f"declined {key}: {reason}")
        self._send(
            Decline(
                run=key.run, task=key.task, kind=key.kind, round=key.round, reason=reason[:2000]
            )
        )

    # --- link -------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            news = await self._link.recv()
            if isinstance(news, LinkNews):
                self._link_news(news)
                continue
            try:
                self._take(parse(news))
            except TrustError as error:
                self.note("error", f"a message was refused: {error}")
            except FcilError as error:
                self.note("warning", f"a message was refused: {error.message}")

    def _link_news(self, news: LinkNews) -> None:
        address = self.enrolment.addresses[0]
        if news.state == "up":
            self._trouble = ""
            self.note("info", f"connected to {address}")
            self._feed(session.LinkUp())
        elif news.state == "down":
            if news.reason != "unreachable":
                self.note("info", "the connection is gone; trying again")
            elif self._trouble != news.reason:  # said once, not at every attempt
                self._trouble = news.reason
                self.note("warning", f"nobody answers at {address}; trying again")
            self._feed(session.LinkDown())
        else:
            self._refused(news.reason)

    def _refused(self, reason: str) -> None:
        if self._trouble == reason:
            return
        self._trouble = reason
        sentences = {
            "unknown_client": f"the server does not admit this client's key. "
            f"{UnknownClient.default_action()}",
            "wrong_server_key": "the server's key is not the one from the enrolment: it is another "
            "server, or its keys were replaced. Compare fingerprints, then enrol again.",
            "not_fcil": "the program at this address is not an fcil server. Check the address.",
        }
        self.note("error", sentences[reason])

    def _send(self, message: Message, *blobs: bytes) -> None:
        self._link.send(self._channel.frames(message, *blobs))

    def _greet(self) -> None:
        self._channel = Channel(self._keys, self._server)
        self._send(
            greeting.hello(
                self.enrolment,
                nonce=self._channel.nonce,
                package=version("fcil"),
                device=self._work.device or f"{platform.system()} {platform.machine()}",
                run=self.terms.run if self.terms else "",
                terms=self.terms,
                claim=self._work.claim,
                ready=self._session.backbone_ready,
            )
        )

    def _take(self, received: Received) -> None:
        message = received.message
        if isinstance(message, Welcome):
            self._welcome(received, message)
            return
        message = self._channel.check(received)
        match message:
            case RoundOpen():
                self.note("info", f"asked for {key_of(message)}")
                self._feed(session.RoundOpened(message))
            case RoundClosed():
                key = RoundKey(message.run, message.task, message.kind, message.round)
                self._feed(session.RoundOver(key, message.verdict))
            case Parts():
                assert self.terms is not None
                self._downloads.header(received, message, self.terms, self._server)
            case Chunk():
                self._chunk(received, message)
            case Want():
                self._outbox.send_chunks(message.digest, message.chunks, self._send)
            case Ack():
                self._acked(message.digest)
            case Nack():
                self._nacked(message)
            case Bye():
                self.note("info", f"the server says goodbye: {message.reason}")
            case _:
                raise WireError(f"a server does not send {message.type}.")

    def _chunk(self, received: Received, message: Chunk) -> None:
        done = self._downloads.chunk(received, message)
        here, total = self._downloads.progress
        self._report("fetching", here, total)
        if done and self._session.key is not None:
            self._feed(session.PartsReady(self._session.key))

    def _welcome(self, received: Received, welcome: Welcome) -> None:
        if welcome.nonce != self._channel.nonce:
            return  # the answer to an earlier Hello
        try:
            terms, server = greeting.read_welcome(welcome, self.enrolment)
        except FcilError as error:
            self._fail(error)
            return
        self._server = server
        self._channel.trust(server)
        self._channel.check(received)
        self._channel.peer_nonce = welcome.server_nonce
        if self.terms is not None and self.terms.run != terms.run:
            self._session.backbone_ready = False
        self.terms = terms
        if self.home.enter_run(terms.run):
            self.note("info", f"run {terms.run}: {terms.method.name} on {terms.backbone.name}")
        self._feed(session.Welcomed(welcome.ready, welcome.verdict))

    def _acked(self, digest: str) -> None:
        if self.inventory is not None and digest == self.inventory.digest:
            self._feed(session.Announced())
            return
        self.note("info", "the server has the update")
        self._feed(session.Acked(digest))

    def _nacked(self, nack: Nack) -> None:
        error = from_code(nack.code, nack.text, nack.action)
        if nack.digest in self._downloads.refs and self._session.key is not None:
            self._downloads.stop()
            self._feed(session.WorkFailed(self._session.key, f"a part is not to be had: {error}"))
        elif nack.digest and not (self.inventory and nack.digest == self.inventory.digest):
            self.note("warning", f"the server refused the update: {error}")
            self._feed(session.Nacked(nack.digest, nack.code))
        elif isinstance(error, FATAL):
            self._fail(error)
        else:
            self.note("warning", f"the server refused a message: {error}")

    # --- long work --------------------------------------------------------------------------

    async def _load_backbone(self) -> None:
        assert self.terms is not None
        self.note("info", f"loading {self.terms.backbone.name}")
        await self._work.load(self.terms)
        self.note("info", f"ready on {self._work.device}")
        self._feed(session.BackboneReady())

    async def _announce(self) -> None:
        assert self.terms is not None
        inventory = await self._work.scan(self.terms)
        for text in inventory.changes:
            self.note("info", text)
        for text in inventory.faults:
            self.note("warning", text)
        sealed = self._work.seal_inventory(self.terms, self._server, inventory)
        self.inventory = inventory
        self._outbox.hold(inventory.digest, sealed)
        self._outbox.offer(inventory.digest, self._send, self.terms.credit)

    async def _round(self, order: RoundOpen) -> None:
        assert self.terms is not None
        key = key_of(order)
        started = time.monotonic()
        try:
            digest = await self._work.run(order, self.terms, self._server, self._trained)
        except asyncio.CancelledError:
            await self._work.cancel()
            raise
        except StaleUpdate as error:
            self.note("warning", error.message)
            self._feed(session.PartsLost(key))
        except FcilError as error:
            self._feed(session.WorkFailed(key, str(error)))
        else:
            for text in self._work.faults:
                self.note("warning", text)
            self.note("info", f"{key} done in {time.monotonic() - started:.1f} s")
            self._feed(session.WorkDone(key, digest))

    def _trained(self, done: int, total: int) -> None:
        self._report("working", done, total)

    def _report(self, phase: str, done: int, total: int) -> None:
        self.progress = (phase, done, total)
        now = time.monotonic()
        key = self._session.key
        online = self._session.link is Link.READY
        if key is None or not online or now - self._last_progress < PROGRESS_S:
            return
        self._last_progress = now
        self._send(
            Progress(
                run=key.run,
                task=key.task,
                kind=key.kind,
                round=key.round,
                phase=phase,  # type: ignore[arg-type]
                done=done,
                total=total,
            )
        )

    def _offer(self, digest: str) -> None:
        assert self.terms is not None
        self.progress = ("sending", 0, 1)
        try:
            self._outbox.offer(digest, self._send, self.terms.credit)
        except FcilError as error:  # the file in the outbox is damaged: train again
            self.note("warning", error.message)
            self._feed(session.Nacked(digest, "corrupt_file"))

    async def _watch(self) -> None:
        """Notice images that come and go while the client runs."""
        with contextlib.suppress(FileNotFoundError):
            async for _ in awatch(self.options.data, debounce=2000, step=500):
                self._feed(session.FolderChanged())

    # --- commands ---------------------------------------------------------------------------

    async def _command(self, op: str, _fields: dict[str, Any]) -> dict[str, Any]:
        if op == "stop":
            self._stopping.set()
            return {}
        if op == "status":
            return self.status()
        raise WireError(f"this client knows no command {op!r}.")

    def status(self) -> dict[str, Any]:
        """Return everything that one wants to know of a running client."""
        key = self._session.key
        return {
            "running": True,
            "client": self.enrolment.client_id,
            "name": self.enrolment.name,
            "federation": self.enrolment.federation,
            "server": list(self.enrolment.addresses),
            "data": self.enrolment.data,
            "directory": str(self.home.directory),
            "up_s": round(time.time() - self.started_at, 1),
            "link": self._session.link.value,
            "work": self._session.work.value,
            "round": str(key) if key else None,
            "progress": list(self.progress) if self.progress else None,
            "run": self.terms.run if self.terms else None,
            "method": self.terms.method.name if self.terms else None,
            "backbone": self.terms.backbone.name if self.terms else None,
            "device": self._work.device,
            "classes": self.inventory.counts() if self.inventory else None,
            "outbox": len(self.home.outbox()),
            "counted": self.counted,
            "notes": [{"at": n.at, "level": n.level, "text": n.text} for n in self.notes][-20:],
        }
