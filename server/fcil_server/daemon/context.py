"""The finished parts of a running server, for modules that read or command it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol

from fcil_protocol.errors import FcilError, StorageError, as_fcil_error
from fcil_server.daemon.journal import Journal
from fcil_server.event_loop import LagMeter
from fcil_server.federation.config import Config
from fcil_server.federation.directory import Federation
from fcil_server.federation.roster import Roster
from fcil_server.ledger.ledger import Ledger
from fcil_server.runs.active_run import OpenRun
from fcil_server.sessions.byte_meter import ByteMeter
from fcil_server.sessions.intake import Intake
from fcil_server.sessions.intake_pool.pool import IntakePool
from fcil_server.sessions.peers import Peers
from fcil_server.sessions.relayed import RelayedLink
from fcil_server.web.page.access.links import PageLinks
from fcil_server.web.supervisor import WebProcess


@dataclass(frozen=True)
class ServerContext:
    """A server whose run is open: its passive parts, all finished.

    Attributes:
        link: connections of clients, behind relays or not.
        intake_pool: holds the connections, if there are intake processes.
        links: open links to the dashboard.
        byte_meter: counts bytes.
        run: the open run.
        metrics: the process that serves Prometheus. page: the one that serves browsers.
        api: the one that serves other programs.
        port: the port on which the server listens for clients.
        began: when the server was made, on the monotonic clock.
        started_at: the same, in unix seconds; read once, since a value that varies looks like
            restarts.
    """

    federation: Federation
    journal: Journal
    peers: Peers
    roster: Roster
    lag: LagMeter
    links: PageLinks
    link: RelayedLink
    intake_pool: IntakePool | None
    byte_meter: ByteMeter
    intake: Intake
    run: OpenRun
    metrics: WebProcess
    page: WebProcess
    api: WebProcess
    port: int
    began: float
    started_at: float

    @property
    def ledger(self) -> Ledger:
        """The federation's ledger."""
        return self.federation.ledger

    @property
    def config(self) -> Config:
        """The configuration that the server was started with."""
        return self.federation.config

    def addresses(self) -> list[str]:
        """Return the addresses that the server gives its clients."""
        return self.config.federation.told(self.port)

    def audit_done(self, actor: str, action: str, detail: str = "") -> None:
        """Add a completed act to the audit log; if that fails, it is a warning.

        An error would say that nothing was changed, and its caller would do it again.
        """
        try:
            self.ledger.audit.add(actor, action, detail)
        except StorageError as error:
            what = f"{action} ({detail})" if detail else action
            text = f"{what} by {actor} is done and is not in the audit log: {error}"
            self.journal.note("warning", error.code, text)


class ServerActions(Protocol):
    """Operations of commands on the server as a whole."""

    def stop(self) -> None:
        """End the server after pending writes."""
        ...

    def begin_next(self) -> bool:
        """End this run's work and begin the next run of the queue; False if none waits.

        True again if that is under way.
        """
        ...

    def is_between_runs(self) -> bool:
        """Return True if this run's work is ending and the next run of the queue begins."""
        ...

    def drain_rounds(self) -> None:
        """End the server when the round under way is over; no further round opens."""
        ...

    def fail(self, error: FcilError) -> None:
        """End the server with an error."""
        ...


def start_guarded(
    work: Coroutine[None, None, None], fail: Callable[[FcilError], None]
) -> asyncio.Task[None]:
    """Start one piece of the server's work; its failure goes to ``fail``, as an `FcilError`."""

    async def guard() -> None:
        try:
            await work
        except Exception as error:
            fail(as_fcil_error(error))

    task = asyncio.create_task(guard())
    task.add_done_callback(lambda _: work.close())  # cancelled at once, it has not begun
    return task
