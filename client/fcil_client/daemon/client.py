"""The client's IO shell: link, worker, outbox, folder, signals. It decides nothing.

`session.machine.ClientSession` returns instructions; this module executes them. Long work (loading
the backbone, scanning the folder, a round) runs as a task next to the loop and returns as an event,
so the daemon answers at any moment and training continues while the link is down.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from importlib.metadata import version
from typing import Any

from fcil_client.daemon import status as telling
from fcil_client.daemon.conversation import Conversation, Reports
from fcil_client.daemon.host import ClientHost, StandaloneHost
from fcil_client.daemon.jobs import Jobs, defect
from fcil_client.daemon.tracing import RoundSpans, SpanSender
from fcil_client.daemon.transfers import Transfers
from fcil_client.data.inventory import Inventory
from fcil_client.link import handshake
from fcil_client.link.connection import Connection
from fcil_client.link.handshake import Terms
from fcil_client.notes import Note, Notes
from fcil_client.policy.sensors import Sensors
from fcil_client.rounds.compute import Workplace
from fcil_client.rounds.options import ClientOptions
from fcil_client.rounds.round_work import RoundWork
from fcil_client.session import events
from fcil_client.session.machine import ClientSession
from fcil_client.state.home import Enrolment, Home
from fcil_protocol.errors import (
    DataError,
    FcilError,
    MethodMismatch,
    NothingLeft,
    StorageError,
)
from fcil_protocol.ids import RoundKey
from fcil_protocol.link.dial import Dial, dial
from fcil_protocol.messages.messages import Decline, RoundOpen
from fcil_protocol.process.supervisor import Service
from fcil_protocol.trust.keys import PrivateKeys


class Client:
    """One data folder's membership in one federation.

    Args:
        notify: shows a note in the terminal or the log.
        make: starts a link to one of the server's addresses.
        service: signals, and status lines for a supervisor.
        sensors: report if this device may work; None: its own.
        host: process services shared by many clients; None: the client is alone in its process,
            and ``make``, ``service`` and ``sensors`` are its own.
    """

    def __init__(
        self,
        home: Home,
        enrolment: Enrolment,
        options: ClientOptions,
        *,
        notify: Callable[[Note], None],
        make: Dial = dial,
        service: Service | None = None,
        sensors: Sensors | None = None,
        host: ClientHost | None = None,
    ) -> None:
        self.home = home
        self.notes = Notes(notify)
        self._began = time.monotonic()
        self.counted = 0
        self._judged = ""
        self._keys = PrivateKeys.load_or_new(home.keys_path)
        self._limits = options.limits
        self._host = host or StandaloneHost(home, options, make, service, sensors)
        self._line = Connection(enrolment, self._keys, self._host.dial)
        self._work = RoundWork(
            home, enrolment, self._keys, options, self._host.place,
            notify=lambda text: self.notes("warning", text),
        )  # fmt: skip
        self._jobs = Jobs(
            self._work, self.notes, feed=self._feed, fail=self._fail, progress=self._trained
        )
        self._transfers = Transfers(
            home, enrolment, self._keys, self._line, self._work.journal, self.notes, self._feed,
            self._work.outbox, link_only=options.link_only,
            advanced=self._fetching, spawn=self._jobs.spawn,
        )  # fmt: skip
        self._session = ClientSession.resume(*self._transfers.waiting())
        self._session.patience_s = options.manners.patience_s
        self._reports = Reports(self._line, self._session)
        self._timers: dict[events.Event, asyncio.TimerHandle] = {}
        self._talk = Conversation(
            home, enrolment, self._line, self._session, self._work, self._transfers,
            self._reports, self.notes, feed=self._feed, due=self._due, fail=self._fail,
            goodbye=self._host.goodbye,
        )  # fmt: skip
        self._spans = RoundSpans(enrolment.client_id, lambda: self._transfers.progress[1])
        self._tracing: SpanSender | None = None
        self._otlp = options.otlp
        self._stopping = asyncio.Event()
        self._failure: FcilError | None = None

    # --- lifecycle --------------------------------------------------------------------------

    async def run(self) -> None:
        """Take part until a signal or an error that no retry can fix.

        Raises:
            FcilError: the reason why the client cannot take part.
        """
        await self._host.begin(self)
        if self._otlp:
            self._tracing = SpanSender(self._otlp, self._note_from_thread())
        self._line.open()
        for work in (self._talk.run(), self._transfers.watch(), *self._host.background_work()):
            self._jobs.spawn(work)
        try:
            await self._stopping.wait()
        finally:
            self._host.client_stopping()
            await self._transfers.close()
            self._line.send(handshake.goodbye(self._failure))
            for timer in self._timers.values():
                timer.cancel()
            self._talk.stop_waiting()
            await self._jobs.stop()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)
            await asyncio.sleep(0.05)  # let the goodbye leave the socket
            self._line.close()
            self._host.client_stopped()
        if self._failure is not None:
            raise self._failure

    def _note_from_thread(self) -> Callable[[str, str], None]:
        loop = asyncio.get_running_loop()

        def note(level: str, text: str) -> None:
            with contextlib.suppress(RuntimeError):  # the client has ended meanwhile
                loop.call_soon_threadsafe(self.notes, level, text)

        return note

    def _fail(self, error: FcilError) -> None:
        self._failure = self._failure or error
        self._stopping.set()

    # --- events and instructions ------------------------------------------------------------

    def _feed(self, event: events.Event) -> None:
        unsettled: StorageError | None = None
        instructions = self._session.handle(event)
        if self._tracing is not None:
            self._tracing.put(self._spans.after(event, self._session, time.time()))
        for instruction in instructions:
            if unsettled is not None and isinstance(instruction, events.Fetch):
                # A state that lacks its last update would train a wrong model. The server repeats
                # its verdict, so a later round finds the correct state.
                key = instruction.order.key
                self._feed(events.FetchFailed(key, unsettled.code, str(unsettled)))
                continue
            try:
                self._execute(instruction)
            except StorageError as error:  # a file could not be removed or kept: the rest continues
                self.notes("error", str(error))
                if isinstance(instruction, events.Settle):
                    unsettled = error
        self._host.client_changed()

    def _execute(self, instruction: events.Instruction) -> None:
        match instruction:
            case events.Greet():
                self._talk.greet()
            case events.EnterRun(run):
                self._enter(run)
            case events.LoadBackbone():
                self._jobs.load(self._talk.known_terms)
            case events.Scan():
                self._jobs.scan()
            case events.Announce():
                inventory = self._jobs.inventory or Inventory()
                self._transfers.announce(self._work, inventory, self._talk.known_terms)
            case events.HoldNothing():
                self._jobs.inventory = Inventory()
            case events.Fetch(order):
                self._fetch(order)
            case events.Train(order):
                self._jobs.train(order, self._talk.known_terms, self._line.server)
            case events.CancelWork(key):
                self.notes("info", f"{key}: work stopped")
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
                self.home.settle_provisional(digest, counted=False)
            case events.Forget(digest):
                self.home.drop_outgoing(digest)
                self._reports.now = None
            case events.Settle(verdict):
                self._settle(verdict.update, verdict.counted, verdict.reason)
            case events.Refuse(key, code, text):
                self._decline(key, code, text)
            case events.FetchModel(model):
                self._transfers.fetch_model(model)
            case events.KeepModel(model):
                self._jobs.keep_model(model, self._talk.known_terms, self._line.server)

    def _fetch(self, order: RoundOpen) -> None:
        """Fetch the parts of an order, unless this client cannot take part in such a round."""
        try:
            self._work.check_able(order.kind, self._talk.known_terms)
        except (MethodMismatch, DataError) as error:
            self._feed(events.FetchFailed(order.key, error.code, str(error)))
            return
        self._reports.now = ("fetching", 0, 1)
        self._transfers.fetch(order)

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
        terms = self._talk.known_terms
        self.place.enter(run)
        try:
            if self.home.enter_run(run):
                self.notes("info", f"run {run}: {terms.method.name} on {terms.backbone.name}")
        except StorageError as error:  # another run's state would train a wrong model
            self._fail(error)

    def _settle(self, digest: str, counted: bool, reason: str) -> None:
        self.home.settle_provisional(digest, counted=counted)
        if digest == self._judged:
            return  # the server repeats its last verdict until there is another
        self._judged = digest
        self.counted += counted
        if not counted:
            self.notes("warning", f"the last update was not counted: {reason}")

    def _decline(self, key: RoundKey, code: str, text: str) -> None:
        terms = self._talk.terms
        exchange = None if terms is None else terms.exchange(key.kind)
        optional = exchange is not None and (exchange.unlabelled > 0 or exchange.late)
        # Normal: most clients have no unlabelled images and no late ones.
        level = "info" if optional and code in (DataError.code, NothingLeft.code) else "warning"
        # The sentence may name files and classes: it stays here; the server receives the code.
        self._reports.now = None
        self.notes(level, f"declined {key}: {text}")
        self._line.send(
            Decline(run=key.run, task=key.task, kind=key.kind, round=key.round, reason=code)
        )

    # --- for the surroundings --------------------------------------------------------------

    @property
    def enrolment(self) -> Enrolment:
        """Identity and federation of the client, with the server's newest certificate."""
        return self._talk.enrolment

    @property
    def terms(self) -> Terms | None:
        """Terms of the last Welcome; None before the first."""
        return self._talk.terms

    @property
    def session(self) -> ClientSession:
        """The session's state machine."""
        return self._session

    @property
    def place(self) -> Workplace:
        """The worker that it computes with."""
        return self._work.place

    @property
    def application_bytes(self) -> tuple[int, int]:
        """Bytes of messages sent and received since the start, before encryption of the link."""
        return self._line.sent_bytes, self._line.received_bytes

    def stop(self) -> None:
        """End the client once pending writes are complete."""
        self._stopping.set()

    def feed(self, event: events.Event) -> None:
        """Pass an external event to the session."""
        self._feed(event)

    def watch_folder(self) -> Coroutine[Any, Any, None]:
        """Return the coroutine that watches the data folder for changes."""
        return self._jobs.watch()

    def pause_changed(self) -> None:
        """Report at once that work has been suspended or resumed."""
        self._host.client_changed()
        self._reports.report_now()

    def _fetching(self) -> None:
        self._talk.report_fetching()

    def _trained(self, done: int, total: int) -> None:
        self._reports.report("working", done, total)

    def status(self) -> dict[str, Any]:
        """Return the client's status for ``fcil-client status``."""
        inventory = self._jobs.inventory
        return {
            "running": True,
            "package": version("fcil"),
            "clock_s": self._line.clock_s,
            **telling.membership(self.home, self.enrolment),
            **telling.doing(self._session, self._reports.now),
            **telling.terms_of(self.terms, self._limits),
            "manners": self._host.policy_status(),
            "resources": self._work.resources.told,
            "up_s": round(time.monotonic() - self._began, 1),
            "device": self._work.device,
            "micro_batch": dict(self._work.effort.fits),
            "classes": inventory.counts() if inventory else None,
            "learned_before": sorted(self._jobs.learned.names),
            "counted": self.counted,
            "notes": self.notes.last(20),
        }
