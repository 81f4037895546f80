"""The client's IO shell: link, worker, outbox, folder, signals. It decides nothing.

`session.Session` says what to do; here it is done. Long work (loading the backbone, scanning
the folder, a round) runs as a task beside the loop and comes back as an event, so the daemon
answers at any moment and training goes on while the link is away.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Callable, Coroutine
from importlib.metadata import version
from typing import Any

from fcil_client import greeting, telling
from fcil_client import session_events as events
from fcil_client.connection import Connection
from fcil_client.enrolment import load_keys
from fcil_client.greeting import FATAL, Terms
from fcil_client.home import Enrolment, Home
from fcil_client.inventory import Inventory
from fcil_client.jobs import Jobs, defect
from fcil_client.manners_facts import Sensors
from fcil_client.notes import Note, Notes
from fcil_client.options import Options
from fcil_client.progress import Reports
from fcil_client.rounds import RoundWork
from fcil_client.session import Session
from fcil_client.session_events import Link, RoundKey, Work, key_of
from fcil_client.surroundings import Alone, Surroundings
from fcil_client.transfers import Transfers
from fcil_client.workplace import Workplace
from fcil_protocol.dialling import ADDRESS_S, REFUSALS, Dial, dial
from fcil_protocol.errors import (
    FcilError,
    StorageError,
    TrustError,
    WireError,
    WrongClock,
    from_code,
)
from fcil_protocol.messages import (
    Ack,
    Bye,
    Chunk,
    Decline,
    Nack,
    Parts,
    Received,
    RoundClosed,
    RoundOpen,
    Want,
    Welcome,
    parse,
)
from fcil_protocol.service import Service
from fcil_protocol.transport import LinkNews

ANSWER_S = 60.0  # for an answer to a Hello, which holds up to 130 kB, before another is said
TWO_LINKS = "two_links"  # the code of a Bye: another connection with this client's key stays


class Client:
    """One data folder's membership in one federation.

    Args:
        say: shows a note in the terminal or the log.
        make: starts a link to one of the server's addresses.
        service: signals, and what a supervisor is told.
        sensors: say whether this device may work; None: its own.
        around: what a process gives to it that many clients share; None: it is alone in it, and
            ``make``, ``service`` and ``sensors`` are its own.
    """

    def __init__(
        self,
        home: Home,
        enrolment: Enrolment,
        options: Options,
        *,
        say: Callable[[Note], None],
        make: Dial = dial,
        service: Service | None = None,
        sensors: Sensors | None = None,
        around: Surroundings | None = None,
    ) -> None:
        self.home = home
        self.enrolment = enrolment
        self.notes = Notes(say)
        self._began = time.monotonic()
        self.terms: Terms | None = None
        self.counted = 0
        self._judged = ""
        self._keys = load_keys(home.keys_path)
        self._limits = options.limits
        self._around = around or Alone(home, options, make, service, sensors)
        self._line = Connection(enrolment, self._keys, self._around.dial)
        self._work = RoundWork(home, enrolment, self._keys, options, self._around.place)
        self._jobs = Jobs(
            self._work, self.notes, feed=self._feed, fail=self._fail, progress=self._trained
        )
        self._transfers = Transfers(
            home, enrolment, self._keys, self._line, self._work.journal, self.notes, self._feed,
            self._work.outbox,
        )  # fmt: skip
        self._session = Session.resume(*self._transfers.waiting())
        self._session.patience_s = options.manners.patience_s
        self._reports = Reports(self._line, self._session)
        self._timers: dict[events.Event, asyncio.TimerHandle] = {}
        self._answer: asyncio.TimerHandle | None = None
        self._stopping = asyncio.Event()
        self._failure: FcilError | None = None

    # --- life -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take part until a signal or a refusal that trying again cannot mend.

        Raises:
            FcilError: why the client cannot take part.
        """
        await self._around.begin(self)
        self._line.open()
        for work in (self._receive(), self._transfers.watch(), *self._around.beside()):
            self._jobs.spawn(work)
        try:
            await self._stopping.wait()
        finally:
            self._around.ending()
            self._line.send(greeting.goodbye(self._failure))
            for timer in (*self._timers.values(), self._answer):
                if timer is not None:
                    timer.cancel()
            await self._jobs.stop()
            await asyncio.sleep(0.05)  # let the goodbye leave the socket
            self._line.close()
            self._around.over()
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: FcilError) -> None:
        self._failure = self._failure or error
        self._stopping.set()

    # --- events and instructions ------------------------------------------------------------

    def _feed(self, event: events.Event) -> None:
        unsettled: StorageError | None = None
        for instruction in self._session.handle(event):
            if unsettled is not None and isinstance(instruction, events.Fetch):
                # Nothing true is learned from a state that lacks its last update. The server
                # repeats its verdict, so a later round finds the state as it should be.
                key = key_of(instruction.order)
                self._feed(events.FetchFailed(key, unsettled.code, str(unsettled)))
                continue
            try:
                self._execute(instruction)
            except StorageError as error:  # what was to be removed or kept: the rest goes on
                self.notes("error", str(error))
                if isinstance(instruction, events.Settle):
                    unsettled = error
        self._around.news()

    def _execute(self, instruction: events.Instruction) -> None:
        match instruction:
            case events.Greet():
                self._greet()
            case events.EnterRun(run):
                self._enter(run)
            case events.LoadBackbone():
                self._jobs.load(self._known_terms)
            case events.Scan():
                self._jobs.scan()
            case events.Announce():
                inventory = self._jobs.inventory or Inventory()
                self._transfers.announce(self._work, inventory, self._known_terms)
            case events.HoldNothing():
                self._jobs.inventory = Inventory()
            case events.Fetch(order):
                self._reports.now = ("fetching", 0, 1)
                self._transfers.fetch(order)
            case events.Train(order):
                self._jobs.train(order, self._known_terms, self._line.server)
            case events.CancelWork(key):
                self.notes("info", f"{key}: its work is stopped")
                self._jobs.cancel_round()
                self._transfers.stop()
            case events.Offer(digest):
                self._reports.now = ("sending", 0, 1)
                self._transfers.offer(digest)
            case events.Later(event, pause_s):
                self._later(event, pause_s)
            case events.Drop(digest, reason):
                self.notes("info", f"an update was dropped: {reason}")
                self.home.drop_outgoing(digest)
                self.home.settle(digest, counted=False)
            case events.Forget(digest):
                self.home.drop_outgoing(digest)
                self._reports.now = None
            case events.Settle(verdict):
                self._settle(verdict.update, verdict.counted, verdict.reason)
            case events.Refuse(key, code, text):
                self._decline(key, code, text)

    @property
    def _known_terms(self) -> Terms:
        assert self.terms is not None, "the session asks for this after a Welcome only"
        return self.terms

    def _later(self, event: events.Event, pause_s: float) -> None:
        if event not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[event] = loop.call_later(pause_s, self._due, event)

    def _due(self, event: events.Event) -> None:
        self._timers.pop(event, None)
        try:
            self._feed(event)
        except Exception as error:
            self._fail(defect(error))

    def _enter(self, run: str) -> None:
        terms = self._known_terms
        self._work.effort.fits.clear()  # another method, another backbone
        try:
            if self.home.enter_run(run):
                self.notes("info", f"run {run}: {terms.method.name} on {terms.backbone.name}")
        except StorageError as error:  # with another run's state nothing true can be learned
            self._fail(error)

    def _settle(self, digest: str, counted: bool, reason: str) -> None:
        self.home.settle(digest, counted=counted)
        if digest == self._judged:
            return  # the server repeats its last verdict until there is another
        self._judged = digest
        self.counted += counted
        if not counted:
            self.notes("warning", f"the last update was not counted: {reason}")

    def _decline(self, key: RoundKey, code: str, text: str) -> None:
        # The sentence may name files and classes: it stays here, the server gets the code.
        self._reports.now = None
        self.notes("warning", f"declined {key}: {text}")
        self._line.send(
            Decline(run=key.run, task=key.task, kind=key.kind, round=key.round, reason=code)
        )

    # --- link -------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            news = await self._line.recv()
            if isinstance(news, LinkNews):
                await self._link_news(news)
                continue
            try:
                self._take(parse(news))
            except FcilError as error:
                level = "error" if isinstance(error, TrustError) else "warning"
                self.notes(level, f"a message was refused: {error}")

    async def _link_news(self, news: LinkNews) -> None:
        address = self._line.address
        if news.state == "up":
            self.notes.over(address)
            self.notes("info", f"connected to {address}")
            self._feed(events.LinkUp())
            return
        if news.state == "refused":
            self.notes.once(address, "error", REFUSALS[news.reason])
            return
        self._line.lose()
        self._transfers.lose()
        self._feed(events.LinkDown())
        if news.reason != "unreachable":
            self.notes("info", "the connection is gone; trying again")
            return
        self.notes.once(address, "warning", f"nobody answers at {address}; trying again")
        if self._line.has_other_addresses:
            await asyncio.sleep(ADDRESS_S)
            self._line.turn()

    def _greet(self) -> None:
        methods, faults = greeting.installed_methods()
        for text in faults:
            self.notes.once(text, "warning", text)
        self._line.begin()
        if self._answer is not None:
            self._answer.cancel()
        loop = asyncio.get_running_loop()
        self._answer = loop.call_later(ANSWER_S, self._due, events.TryAgain(Link.GREETING))
        self._line.send(
            greeting.hello(
                self.enrolment,
                nonce=self._line.nonce,
                package=version("fcil"),
                methods=methods,
                device=self._work.device or f"{platform.system()} {platform.machine()}",
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
        message = self._line.check(received)
        match message:
            case RoundOpen():
                self.notes("info", f"asked for {key_of(message)}")
                self._feed(events.RoundOpened(message))
            case RoundClosed():
                key = RoundKey(message.run, message.task, message.kind, message.round)
                if message.answer in telling.WITHOUT_US:
                    self.notes("info", f"{key}: {telling.WITHOUT_US[message.answer]}")
                self._feed(events.RoundOver(key, message.verdict))
            case Parts() | Chunk():
                self._transfers.part(received, message, self._known_terms)
                if self._session.work is Work.FETCHING:
                    self._reports.report("fetching", *self._transfers.progress)
            case Want():
                self._transfers.want(message)
            case Ack():
                self._transfers.acked(message.digest)
            case Nack():
                self._nacked(message)
            case Bye():
                self._goodbye(message)
            case _:
                raise WireError(f"a server does not send {message.type}.")

    def _welcome(self, received: Received, welcome: Welcome) -> None:
        if welcome.nonce != self._line.nonce or self._session.link is not Link.GREETING:
            return  # the answer to an earlier Hello
        try:
            server = greeting.read_server(welcome, self.enrolment)
            self.notes.over("clock")
        except WrongClock as error:
            self.notes.once("clock", "error", f"{error} Trying again")
            self._feed(events.HelloRefused())
            return
        except FcilError as error:
            self._fail(error)
            return
        self._line.accept(received, welcome, server)
        try:
            self.enrolment = self.home.keep_certificate(self.enrolment, welcome.certificate)
        except StorageError as error:  # it comes with every Welcome
            self.notes("warning", str(error))
        try:
            self.terms = greeting.read_terms(welcome)
            self._work.choose_engine(self.terms)
        except FcilError as error:
            self._fail(error)  # in a session that stands, so the server learns why
            return
        self._feed(events.Welcomed(self.terms.run, welcome.ready, welcome.verdict))

    def _nacked(self, nack: Nack) -> None:
        error = from_code(nack.code, nack.text, nack.action)
        if nack.digest:
            self._transfers.nacked(nack)
        elif nack.code in FATAL:
            self._fail(error)
        else:
            self.notes("warning", f"the server refused a message: {error}")
            self._feed(events.HelloRefused())  # what else, while a Hello waits for its answer

    def _goodbye(self, bye: Bye) -> None:
        if bye.code == TWO_LINKS:
            self._fail(greeting.looks_copied())
        self.notes("info", f"the server says goodbye: {bye.reason}")
        self._around.goodbye(bye.code)

    # --- what the surroundings ask for ------------------------------------------------------

    @property
    def session(self) -> Session:
        """Where link and work stand."""
        return self._session

    @property
    def place(self) -> Workplace:
        """Where it computes."""
        return self._work.place

    @property
    def application_bytes(self) -> tuple[int, int]:
        """Bytes of messages sent and received since the start, before encryption of the link."""
        return self._line.sent_bytes, self._line.received_bytes

    def stop(self) -> None:
        """End the client when what is being written is written."""
        self._stopping.set()

    def feed(self, event: events.Event) -> None:
        """Let the session take an event from outside."""
        self._feed(event)

    def watch_folder(self) -> Coroutine[Any, Any, None]:
        """Return what notices images that come and go."""
        return self._jobs.watch()

    def stood(self) -> None:
        """Say at once that the work stands still, or goes on."""
        self._around.news()
        self._reports.again()

    def _trained(self, done: int, total: int) -> None:
        self._reports.report("working", done, total)

    def status(self) -> dict[str, Any]:
        """Return everything that one wants to know of a running client."""
        inventory = self._jobs.inventory
        return {
            "running": True,
            "package": version("fcil"),
            "clock_s": self._line.clock_s,
            **telling.membership(self.home, self.enrolment),
            **telling.doing(self._session, self._reports.now),
            **telling.terms_of(self.terms, self._limits),
            "manners": self._around.manners(),
            "resources": self._work.resources.told,
            "up_s": round(time.monotonic() - self._began, 1),
            "device": self._work.device,
            "micro_batch": dict(self._work.effort.fits),
            "classes": inventory.counts() if inventory else None,
            "learned_before": sorted(self._jobs.learned.names),
            "counted": self.counted,
            "notes": self.notes.last(20),
        }
