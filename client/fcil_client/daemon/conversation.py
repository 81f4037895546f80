"""The messages between a client and its server, apart from the contents of envelopes."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Callable
from importlib.metadata import version

from fcil_client.daemon import status as telling
from fcil_client.daemon.transfers import Transfers
from fcil_client.link import handshake
from fcil_client.link.connection import Connection
from fcil_client.link.handshake import FATAL, Terms
from fcil_client.membership.enrol import with_current_addresses
from fcil_client.notes import Notes
from fcil_client.rounds.round_work import RoundWork
from fcil_client.session import events
from fcil_client.session.events import Link, Work
from fcil_client.session.machine import ClientSession
from fcil_client.state.home import Enrolment, Home
from fcil_protocol.errors import (
    FcilError,
    StorageError,
    TrustError,
    WireError,
    WrongClock,
    from_code,
)
from fcil_protocol.link.dial import ADDRESS_S, REFUSALS, flooded
from fcil_protocol.link.interface import COME_AGAIN
from fcil_protocol.link.zmq_link import LinkNews
from fcil_protocol.messages.frames import Received, parse
from fcil_protocol.messages.messages import (
    RUN_DONE,
    Ack,
    Bye,
    Chunk,
    Nack,
    Parts,
    Progress,
    Pull,
    RoundClosed,
    RoundOpen,
    UseModel,
    Want,
    Welcome,
)

ANSWER_S = 60.0  # for an answer to a Hello, which holds up to 130 kB, before it is repeated
PROGRESS_S = 1.0  # shortest interval between two reports of progress to the server
TWO_LINKS = "two_links"  # code of a Bye: another connection with this client's key stays


class Reports:
    """Reports a client's progress to the server.

    Attributes:
        now: phase, done and total; None: no work is running.
    """

    def __init__(self, line: Connection, session: ClientSession) -> None:
        self.now: tuple[str, int, int] | None = None
        self._line = line
        self._session = session
        self._last = float("-inf")

    def report(self, phase: str, done: int, total: int) -> None:
        """Record the progress, and report it to the server if the last report is old enough."""
        self.now = (phase, done, total)
        moment, key = time.monotonic(), self._session.key
        online = self._session.link is Link.READY
        if key is None or not online or moment - self._last < PROGRESS_S:
            return
        self._last = moment
        said = {**key._asdict(), "phase": phase, "done": done, "total": total}
        self._line.send(
            Progress.model_validate({**said, "paused": bool(self._session.pause_reason)})
        )

    def report_now(self) -> None:
        """Report at once that work has been suspended or resumed."""
        if self.now is not None:
            self._last = float("-inf")
            self.report(*self.now)


class Conversation:
    """Greets the server, receives messages and link news, and feeds them to the session.

    Args:
        feed: takes an event.
        due: the same, for a timer's event.
        fail: ends the client with an error.
        goodbye: receives the code of the server's goodbye.

    Attributes:
        enrolment: identity of the client, with the server's newest certificate.
        terms: terms of the last Welcome; None before the first.
    """

    def __init__(
        self,
        home: Home,
        enrolment: Enrolment,
        line: Connection,
        session: ClientSession,
        work: RoundWork,
        transfers: Transfers,
        reports: Reports,
        notes: Notes,
        *,
        feed: Callable[[events.Event], None],
        due: Callable[[events.Event], None],
        fail: Callable[[FcilError], None],
        goodbye: Callable[[str], None],
    ) -> None:
        self.enrolment = enrolment
        self.terms: Terms | None = None
        self._home = home
        self._line = line
        self._session = session
        self._work = work
        self._transfers = transfers
        self._reports = reports
        self._notes = notes
        self._feed = feed
        self._due = due
        self._fail = fail
        self._said_goodbye = goodbye
        self._answer: asyncio.TimerHandle | None = None

    @property
    def known_terms(self) -> Terms:
        """The terms; they exist only after a Welcome."""
        assert self.terms is not None, "the session asks for this after a Welcome only"
        return self.terms

    def stop_waiting(self) -> None:
        """Stop waiting for an answer."""
        if self._answer is not None:
            self._answer.cancel()

    async def run(self) -> None:
        """Process link news and messages for ever."""
        while True:
            news = await self._line.recv()
            if isinstance(news, LinkNews):
                await self._link_news(news)
                continue
            try:
                self._take(parse(news))
            except FcilError as error:
                level = "error" if isinstance(error, TrustError) else "warning"
                self._notes.now_and_then("refused", level, f"a message was refused: {error}")

    async def _link_news(self, news: LinkNews) -> None:
        address = self._line.address
        if news.state == "up":
            self._notes.over(address)
            self._notes("info", f"connected to {address}")
            self._feed(events.LinkUp())
            return
        if news.state == "refused":
            again = " The client retries automatically." if news.reason == COME_AGAIN else ""
            self._notes.once(address, "error", REFUSALS[news.reason] + again)
            return
        if news.state == "flooded":
            self._notes.now_and_then("flood", "warning", flooded(address))
            return
        self._line.on_connection_lost()
        self._transfers.on_connection_lost()
        self._feed(events.LinkDown())
        if news.reason != "unreachable":
            self._notes("info", "the connection was lost; trying again")
            return
        if self._follow():
            return
        self._notes.once(address, "warning", f"no server answers at {address}; trying again")
        if self._line.has_other_addresses:
            await asyncio.sleep(ADDRESS_S)
            self._line.try_next_address()

    def _follow(self) -> bool:
        """Follow a server of this machine and user that has recorded a new address."""
        try:
            fresh = with_current_addresses(self._home, self.enrolment)
        except StorageError as error:  # retried with the next failure, or at the next start
            self._notes.once("moved", "warning", str(error))
            return False
        if fresh is None:
            return False
        self.enrolment = fresh
        self._notes("info", f"the server is at {', '.join(fresh.addresses)} now")
        self._line.use_addresses(fresh.addresses)
        return True

    def greet(self) -> None:
        """Send Hello, and repeat it if no answer comes."""
        methods, faults = handshake.installed_methods()
        for text in faults:
            self._notes.once(text, "warning", text)
        self._line.begin()
        self.stop_waiting()
        loop = asyncio.get_running_loop()
        self._answer = loop.call_later(ANSWER_S, self._due, events.TryAgain(Link.GREETING))
        self._line.send(
            handshake.hello(
                self.enrolment,
                nonce=self._line.nonce,
                session_key=self._line.session_key,
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
                self._notes("info", f"asked to take part in {message.key}")
                self._feed(events.RoundOpened(message))
            case UseModel():
                if not message.promoted:  # at once: rounds may replace the model before it is here
                    self._release_model(message.run, -1)
                # It is offered again with each connection.
                self._feed(events.ModelOffered(message, held=self._work.has_model(message)))
            case RoundClosed():
                if message.answer in telling.WITHOUT_US:
                    self._notes("info", f"{message.key}: {telling.WITHOUT_US[message.answer]}")
                self._feed(events.RoundOver(message.key, message.verdict))
            case Parts() | Chunk():
                self._transfers.part(received, message, self.known_terms)
                self.report_fetching()
            case Want():
                self._transfers.send_requested(message)
            case Pull() if self.terms is not None and self.terms.relay is not None:
                self._transfers.send_requested(message)
            case Ack():
                self._transfers.acked(message.digest)
            case Nack():
                self._nacked(message)
            case Bye():
                self._goodbye(message)
            case _:
                raise WireError(f"a server does not send {message.type}.")

    def report_fetching(self) -> None:
        """Report how far the parts of a round have come."""
        if self._session.work is Work.FETCHING:
            self._reports.report("fetching", *self._transfers.progress)

    def _welcome(self, received: Received, welcome: Welcome) -> None:
        if welcome.nonce != self._line.nonce or self._session.link is not Link.GREETING:
            return  # the answer to an earlier Hello
        try:
            server = handshake.read_server(welcome, self.enrolment)
            self._notes.over("clock")
        except WrongClock as error:
            self._notes.once("clock", "error", f"{error} Trying again")
            self._feed(events.HelloRefused())
            return
        except FcilError as error:
            self._fail(error)
            return
        self._line.accept(received, welcome, server)
        try:
            self.enrolment = self._home.keep_certificate(self.enrolment, welcome.certificate)
        except StorageError as error:  # it comes with every Welcome
            self._notes("warning", str(error))
        try:
            self.terms = handshake.read_terms(welcome)
            handshake.check_relay(self.terms, self.enrolment.link_key)
            self._work.choose_engine(self.terms)
        except FcilError as error:
            self._fail(error)  # the session is open, so the server learns the reason
            return
        if self.terms.relay is not None:
            self._notes.once("relay_sums", "info", f"relay {self.terms.relay_name} opens this "
                             "client's updates and sends the server their sum")  # fmt: skip
        self._release_model(self.terms.run, welcome.promoted)
        self._transfers.use_object_store(self.terms.object_store)
        self._feed(events.Welcomed(self.terms.run, welcome.ready, welcome.verdict))

    def _release_model(self, run: str, promoted: int) -> None:
        try:
            self._work.release_model(run, promoted)
        except StorageError as error:  # it comes with every Welcome
            self._notes("warning", str(error))

    def _nacked(self, nack: Nack) -> None:
        error = from_code(nack.code, nack.text, nack.action)
        if nack.digest:
            self._transfers.on_nack(nack)
        elif nack.code in FATAL:
            self._fail(error)
        else:
            self._notes("warning", f"the server refused a message: {error}")
            self._feed(events.HelloRefused())  # if a Hello waits for its answer, it was refused

    def _goodbye(self, bye: Bye) -> None:
        if bye.code == TWO_LINKS:
            self._fail(handshake.looks_copied())
        stays = bye.code == RUN_DONE  # another run may begin
        what = "says" if stays else "is closing the connection"
        self._notes("info", f"the server {what}: {bye.reason}")
        self._said_goodbye(bye.code)
