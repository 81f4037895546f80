"""The server: composes its parts, starts their work and ends it. It decides nothing.

The parts are made in three steps: the listeners, the run, and the parts that serve the run. A part
calls one of a later step only once all are made: the calls come from messages, rounds and commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fcil_protocol.errors import FcilError
from fcil_protocol.ids import ClientId
from fcil_protocol.link.descriptors import allow_many_files
from fcil_protocol.link.interface import ServerLink
from fcil_protocol.link.zmq_link import Router
from fcil_protocol.messages.frames import Received
from fcil_protocol.messages.messages import Chunk, Release, Update
from fcil_protocol.process import control_socket
from fcil_protocol.process.supervisor import Service
from fcil_server.daemon.commands import Commands
from fcil_server.daemon.context import ServerContext, start_guarded
from fcil_server.daemon.cut_offs import CutOffs
from fcil_server.daemon.dispatch import Dispatch
from fcil_server.daemon.flush import LedgerFlusher
from fcil_server.daemon.journal import Journal
from fcil_server.daemon.live import LiveReports, LiveStatus
from fcil_server.daemon.parts import ServerParts, ServerPorts
from fcil_server.daemon.sessions import ClientSessions
from fcil_server.event_loop import LagMeter
from fcil_server.federation.addresses import split_address
from fcil_server.federation.allow_list import AllowList
from fcil_server.federation.directory import Federation
from fcil_server.federation.page_key import make_key
from fcil_server.federation.roster import Roster
from fcil_server.rounds.coordinator import Coordinator
from fcil_server.rounds.position import Mode
from fcil_server.runs.active_run import OpenRun, open_run
from fcil_server.runs.export_jobs import ExportJobs
from fcil_server.runs.run_queue import RunQueue
from fcil_server.sessions.byte_meter import ByteMeter
from fcil_server.sessions.conduct import Floods
from fcil_server.sessions.guests import Guests
from fcil_server.sessions.intake_pool.pool import IntakePool
from fcil_server.sessions.peers import Peer, Peers
from fcil_server.sessions.relayed import RelayedLink
from fcil_server.web.page.access.links import PageLinks
from fcil_server.web.supervisor import WebProcess, api_site, figures_site, page_site

FAREWELL_S = 5.0  # for clients of the run before to come back, if no further run could begin
FLUSH_S = 5.0  # between writes of byte counts and the deadline while no round closes


@dataclass(frozen=True)
class _Listening:
    """The parts made before the run: clients connect, and their messages are not read yet."""

    roster: Roster
    link: RelayedLink
    pool: IntakePool | None
    guests: Guests
    cut_offs: CutOffs
    port: int


class Server:
    """One run of a federation being served; a queued run gets the next server.

    Attributes:
        goes_on: the next run of the queue is to be served, by another server.
        port: the port that clients know; 0 before it listens.

    Args:
        journal: takes the notes for the operator; servers of one process share it.
        until_done: end when the run's listed tasks are learned and no other run waits.
        follows: another server of this process served the run before.
        drain_on_term: the first SIGTERM lets the round under way finish.
        service: signals, and the reports to a supervisor.
        listening: called once, when everything is loaded and clients can come.
    """

    def __init__(
        self,
        federation: Federation,
        journal: Journal,
        *,
        until_done: bool = False,
        new_run: bool = False,
        follows: bool = False,
        drain_on_term: bool = False,
        service: Service | None = None,
        listening: Callable[[ServerContext], None] = lambda _: None,
    ) -> None:
        self.federation = federation
        self.ledger = federation.ledger
        self.config = federation.config
        self.journal = journal
        self.note = self.journal.note
        self.peers = Peers()
        self.lag = LagMeter()
        self.until_done = until_done
        self._began, self._started_at = time.monotonic(), time.time()
        self._new_run, self._follows = new_run, follows
        self._drain_on_term = drain_on_term
        self._service = service or Service()
        self._listening = listening
        self._stopping = asyncio.Event()
        self._leaving = asyncio.Event()  # no further run begins
        self._failure: FcilError | None = None
        self._queue = RunQueue(federation.directory)
        self._coordinator: Coordinator | None = None
        self.goes_on = False
        self.port = 0

    # --- life -------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Serve until a signal, ``stop``, or (``until_done``) the end of the run.

        Raises:
            FcilError: the server could not start, or the run failed.
        """
        allow_many_files()
        self.ledger.database.checkpoint_by_hand()
        work: list[asyncio.Task[None]] = []
        async with contextlib.AsyncExitStack() as ends:  # closes the parts, the last one first
            ends.callback(self._over)
            try:
                work += await self._start(ends)
                await self._stopping.wait()
            finally:
                self.lag.stop()
                self.journal.write()  # streams of the API end after the last notes
                if self.goes_on:  # for the supervisor it never stops
                    self._service.ready(lambda: "the next run begins")
                else:
                    self._service.stopping()
                for task in work:
                    task.cancel()
                await asyncio.gather(*work, return_exceptions=True)
        if self._failure is not None:
            raise self._failure

    async def _start(self, ends: contextlib.AsyncExitStack) -> list[asyncio.Task[None]]:
        """Make all parts, and start the work that lasts until the end."""
        parts: ServerParts

        def made() -> ServerParts:
            return parts

        if self.federation.variables:
            names = ", ".join(self.federation.variables)
            self.note("info", "environment", f"set by environment variables: {names}")
        doors = self._open_doors(ends)
        listening = self._open_link(ends, made)
        commands = ends.enter_context(contextlib.ExitStack())
        ends.callback(self.journal.write, everything=True)
        ports = ServerPorts(
            notify=self.note,
            peers=self.peers,
            attended=not self.until_done,
            serves=True,
            meter=self.lag,
            stop=self.stop,
            failed=self.fail,
            ended=self._run_ended,
            queue=self._queue,
            parts=made,
        )
        run = await open_run(self.federation, self.config, ports, new=self._new_run)
        ends.push_async_callback(self._last, lambda: run.close(next_run=self.goes_on))
        ends.callback(self.journal.write)  # before it: the sinks and webhooks get the last notes
        self.journal.begin_run(run.coordinator.context.run)
        context = self._context(listening, run, doors)
        parts = self._compose(context, listening)
        self.port = listening.port

        async def say_goodbye() -> None:
            await parts.sessions.say_goodbye(next_run=self.goes_on)

        async def end_exports() -> None:
            if self.goes_on:
                await parts.exports.finish(self._leaving)
            await parts.exports.close()

        for step in (parts.flusher.end, say_goodbye, context.intake.drain, end_exports):
            ends.push_async_callback(self._last, step)
        await parts.exports.tidy()
        await self._answer(commands, parts)
        return self._begin(parts)

    def _context(
        self, listening: _Listening, run: OpenRun, doors: tuple[WebProcess, ...]
    ) -> ServerContext:
        """Assemble the passive parts, with the two that need a run."""
        metrics, page, api = doors
        return ServerContext(
            federation=self.federation,
            journal=self.journal,
            peers=self.peers,
            roster=listening.roster,
            lag=self.lag,
            links=PageLinks(),
            link=listening.link,
            intake_pool=listening.pool,
            byte_meter=ByteMeter(
                self.ledger,
                run.coordinator.context.run,
                kernel=listening.link.take_counts,
                settle=listening.link.settle_counts,
                elsewhere=listening.pool.take_flows if listening.pool else tuple,
                tensor_bytes=run.publisher.tensor_bytes,
            ),
            intake=run.make_intake(),
            run=run,
            metrics=metrics,
            page=page,
            api=api,
            port=listening.port,
            began=self._began,
            started_at=self._started_at,
        )

    def _compose(self, context: ServerContext, listening: _Listening) -> ServerParts:
        """Make the active parts, each from finished ones."""
        sessions = ClientSessions(context, listening.cut_offs)
        return ServerParts(
            context=context,
            sessions=sessions,
            cut_offs=listening.cut_offs,
            dispatch=Dispatch(context, sessions, listening.guests, listening.cut_offs),
            live=LiveReports(context),
            flusher=LedgerFlusher(context, self.fail),
            exports=ExportJobs(self.federation.directory, self.ledger, self.note),
        )

    async def _answer(self, ends: contextlib.ExitStack, parts: ServerParts) -> None:
        """Answer commands and signals."""
        context, directory = parts.context, self.federation.directory
        self._coordinator = context.run.coordinator
        commands = Commands(context, self, parts.sessions, parts.live, parts.exports)
        listener = await control_socket.serve(directory, commands.answer)
        ends.callback(control_socket.remover(directory))
        ends.callback(listener.close)
        self.federation.leave_join_file(context.addresses())
        drain = self.drain_rounds if self._drain_on_term else None
        self._service.catch(self.stop, lambda text: self.note("info", "signal", text), drain)
        self._service.ready(lambda: LiveStatus.of(context).line())

    def _begin(self, parts: ServerParts) -> list[asyncio.Task[None]]:
        """Start the work that lasts until the end."""
        context = parts.context
        self.federation.tell_lost_frames(self.note)
        self.federation.tell_if_open(self.note)
        where = context.config.federation.describe_doors(context.port)
        self.note("info", "serving", f"listening on {where}")
        self._listening(context)
        self.lag.start()
        work = (
            parts.dispatch.receive(),
            context.run.drive(),
            self._tick(parts),
            context.metrics.run(),
            context.page.run(),
            context.api.run(),
        )
        return [start_guarded(one, self.fail) for one in work]

    async def _last(self, step: Callable[[], Awaitable[None]]) -> None:
        """Take one step of the shutdown; if it fails, the others still follow."""
        try:
            await step()
        except Exception as error:
            self.note("error", "shutdown", str(error))

    # --- listeners --------------------------------------------------------------------------

    def _open_doors(self, ends: contextlib.AsyncExitStack) -> tuple[WebProcess, ...]:
        """Listen for Prometheus, for browsers and for programs, if configured."""
        directory, section = self.federation.directory, self.config.federation
        doors = []
        for site in (figures_site(section), page_site(section), api_site(section)):
            door = WebProcess(directory, site, self.note)
            ends.callback(door.close)
            doors.append(door)
        if section.page:
            make_key(directory)
        return tuple(doors)

    def _open_link(
        self, ends: contextlib.AsyncExitStack, parts: Callable[[], ServerParts]
    ) -> _Listening:
        """Listen for clients and relays.

        Args:
            ends: takes the callback that closes the link.
            parts: returns the parts that take their messages.
        """
        credit = self.config.wire.credit

        def changed(relay: ClientId) -> None:  # these five call parts that are made below
            link.send_lists(relay)

        def flooded(key: bytes) -> None:
            cut_offs.flooded(key)

        def must_be_heard(relay: ClientId) -> None:
            cut_offs.refuse(relay)

        def refused(relay: ClientId, error: FcilError) -> None:
            self.journal.refusal(relay, error)
            cut_offs.count_needless(relay)

        def summed(relay: Peer, received: Received, message: Update | Chunk | Release) -> None:
            parts().dispatch.take_sum(relay, received, message)

        def greets(relay: ClientId) -> None:
            cut_offs.count_needless(relay)

        roster = self._roster(changed)
        router, port = self._listen(roster, flooded)
        link = RelayedLink(
            router,
            roster,
            credit=credit,
            byte_meter=lambda: parts().context.byte_meter,
            serve=lambda p, want: parts().context.run.publisher.serve(p, want, credit),
            summed=summed,
            notify=self.note,
            refused=refused,
            greets=greets,
            must_be_heard=must_be_heard,
        )
        ends.callback(link.close)
        guests = self._guests(roster, link, port)
        cut_offs = CutOffs(
            roster,
            self.peers,
            notify=self.note,
            speaker=lambda: parts().sessions,
            dismiss=guests.dismiss,
            silence=link.silence,
        )
        pool = router if isinstance(router, IntakePool) else None
        return _Listening(roster, link, pool, guests, cut_offs, port)

    def _guests(self, roster: Roster, link: RelayedLink, port: int) -> Guests:
        return Guests(
            roster=roster,
            keys=self.federation.keys,
            send=link.send,
            cut=link.cut,
            addresses=lambda: self.config.federation.told(port),
            notify=self.note,
        )

    def _roster(self, changed: Callable[[ClientId], None]) -> Roster:
        """Admit the clients that the ledger knows."""
        named = self.config.federation.ids == "named"
        allow_list = AllowList(credit=self.config.wire.credit)
        roster = Roster(self.federation, allow_list, changed, named_ids=named)
        roster.open()
        return roster

    def _listen(self, roster: Roster, flooded: Callable[[bytes], None]) -> tuple[ServerLink, int]:
        """Open the socket; return it and its port."""
        host, port = split_address(self.config.federation.listen)
        floods = Floods(roster.who, lambda text: self.note("warning", "flood", text), flooded)
        keys, section = self.federation.keys, self.config.federation
        link: Router | IntakePool
        if section.intake:
            link = IntakePool(
                section.intake,
                curve_secret=keys.curve_secret,
                curve_public=keys.public.curve,
                allow_list=roster.allow_list,
                heartbeat_s=section.heartbeat_s,
                credit=self.config.wire.credit,
                allow=roster.allow,
                flooded=floods.cut,
                notify=lambda level, text: self.note(level, "intake", text),
            )
        else:
            link = Router(
                curve_secret=keys.curve_secret,
                curve_public=keys.public.curve,
                admit=roster.allow_list,
                heartbeat_s=section.heartbeat_s,
                allow=roster.allow,
                flooded=floods.cut,
            )
        try:
            return link, link.bind(host, port)
        except BaseException:
            link.close()
            raise

    # --- the end ----------------------------------------------------------------------------

    def stop(self) -> None:
        """End the server after pending writes; no further run begins."""
        self.goes_on = False
        self._stopping.set()
        self._leaving.set()

    def drain_rounds(self) -> None:
        """End the server when the round under way is over; no further round opens."""
        coordinator = self._coordinator
        assert coordinator is not None, "commands and signals come once the run is open"
        if coordinator.progress.mode is not Mode.DRAINING:
            text = "no further round opens; stopping after the current one"
            self.journal.note("info", "draining", text)
        coordinator.set_mode(Mode.DRAINING)

    def begin_next(self) -> bool:
        """End this run's parts if another run waits, which another server begins."""
        try:
            entry = self._queue.next()
        except FcilError as error:
            self.note("error", error.code, str(error))
            return False
        if self._stopping.is_set():
            return self.goes_on
        if entry is None:
            return False
        self.note("info", "next_run", f"submitted {entry.name} is next")
        self.goes_on = True
        self._stopping.set()
        return True

    def is_between_runs(self) -> bool:
        """Return True if the next run of the queue is about to begin."""
        return self.goes_on and self._stopping.is_set()

    def fail(self, error: FcilError) -> None:
        """End the server with an error."""
        self.note("error", error.code, str(error))
        self._failure = error
        self.stop()

    def _run_ended(self) -> None:
        assert self._coordinator is not None, "it drove the run"
        mode = self._coordinator.progress.mode
        if mode is Mode.DRAINING:
            self.stop()
        elif mode is Mode.PAUSED and self._queue.next():
            text = "the run is complete; the next one begins at: fcil-server resume"
            self.note("info", mode.value, text)
        elif not self.begin_next() and self.until_done:
            # Clients that come back after an earlier run hear that it is over, and end.
            asyncio.get_running_loop().call_later(FAREWELL_S if self._follows else 0, self.stop)

    def _over(self) -> None:
        if not self.goes_on:
            self._service.over()

    async def _tick(self, parts: ServerParts) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            self.ledger.database.check_still_in_place()
            await parts.flusher.run(counts=False)
            parts.context.intake.revive([*self.peers, *parts.context.link.summing_relays()])
            self._service.news()
