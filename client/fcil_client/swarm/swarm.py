"""Many clients in one process over one worker: a swarm.

Each member is a `Client` as on a device of its own: with keys, a connection, a home, an outbox, a
journal and a membership. They share the resources of the process (`swarm.shared`). A member that
fails ends alone, with a sentence; the others continue.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fcil_client.daemon.client import Client
from fcil_client.daemon.jobs import changes, defect
from fcil_client.membership.wait_for_server import repeat_attempt
from fcil_client.notes import Note, Notes
from fcil_client.policy.sensors import Sensors
from fcil_client.rounds.options import ClientOptions
from fcil_client.session.events import FolderChanged, Link, Work
from fcil_client.state.home import Enrolment, Home
from fcil_client.swarm import status as swarm_status
from fcil_client.swarm.seats import Enroller, Seat, restart_arguments, swarm_digest, swarm_name
from fcil_client.swarm.shared import Shared, SwarmHost
from fcil_client.swarm.status import RECORD, record_bytes, swarms
from fcil_protocol.errors import FcilError, StorageError, Unreachable, UsageError, WireError
from fcil_protocol.messages.messages import RUN_DONE
from fcil_protocol.process import control_socket
from fcil_protocol.process.supervisor import Service
from fcil_protocol.storage.atomic_files import (
    DirectoryLock,
    make_private,
    storage_errors,
    write_atomic,
)

FILES_EACH = 8  # descriptors of a member: lock, two of its socket, mailboxes; a part at times
FILES_BASE = 128  # of the process itself
NOTED = 50  # new members between two writes of the record

Notify = Callable[[str, Note], None]  # the member's name, empty for notes about all


@dataclass(frozen=True)
class Ends:
    """Conditions that end a swarm besides a signal and the last member's end.

    Attributes:
        until_done: the server reports that the run is complete, or that it stops.
        together: a member takes no further part. An experiment without one of its clients measures
            something else, so it ends at once.
    """

    until_done: bool = False
    together: bool = False


@dataclass(frozen=True)
class SwarmOutcome:
    """Result of a swarm.

    Attributes:
        done: the server reported that the run is complete.
        stopped: the server stopped earlier, although the swarm was to stay until then.
        failed: member -> the error that ended it before the others.
        summary: the last one, as made by `summary_of`.
    """

    done: bool
    stopped: bool
    failed: dict[str, FcilError] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)

    def code(self, *, until_done: bool) -> int:
        """Return the exit code: 0, or 1 if a member failed or an awaited run is not complete."""
        return int(bool(self.failed) or (until_done and not self.done))


@dataclass
class SwarmMember:
    """One seat of a swarm, with its client and its error.

    Attributes:
        home: set by its enrolment.
        client: set by its start.
        error: the reason why it takes no further part.
    """

    seat: Seat
    home: Home | None = None
    client: Client | None = None
    error: FcilError | None = None
    task: asyncio.Task[None] | None = None


def summary_of(members: Sequence[SwarmMember]) -> dict[str, Any]:
    """Return the members' numbers, JSON-ready.

    ``connected`` have a session; ``fetching``, ``working`` and ``sending`` are in a round (one
    computes at a time, the others wait for their turn); ``counted`` are updates since the start;
    bytes are of messages, before the link encrypts them.
    """
    clients = [m.client for m in members if m.client is not None]
    alive = [m.client for m in members if m.client is not None and m.error is None]
    work = Counter(client.session.work for client in alive)
    keys = Counter(str(c.session.key) for c in alive if c.session.key is not None)
    runs = Counter(c.terms.run for c in alive if c.terms is not None)
    return {
        "members": len(members),
        "enrolled": sum(m.home is not None for m in members),
        "connected": sum(c.session.link is Link.READY for c in alive),
        "fetching": work[Work.FETCHING],
        "working": work[Work.WORKING],
        "sending": work[Work.SENDING],
        "counted": sum(c.counted for c in clients),
        "round": keys.most_common(1)[0][0] if keys else None,
        "run": runs.most_common(1)[0][0] if runs else None,
        "bytes_up": sum(c.application_bytes[0] for c in clients),
        "bytes_down": sum(c.application_bytes[1] for c in clients),
        "failed": {m.seat.name: str(m.error) for m in members if m.error is not None},
    }


class Swarm:
    """The members of one process, from the first enrolment to the last goodbye.

    Args:
        seats: the members' seats.
        options: the swarm's resources and rules, and each member's limits.
        enroller: enrolment of the members.
        notify: shows a note.
        service: signals, and status lines for a supervisor.
        ends: further conditions that end it; None: none.
        sensors: report if this device may work; None: its own.
    """

    def __init__(
        self,
        seats: Sequence[Seat],
        options: ClientOptions,
        enroller: Enroller,
        *,
        notify: Notify,
        service: Service | None = None,
        ends: Ends | None = None,
        sensors: Sensors | None = None,
    ) -> None:
        self.members = [SwarmMember(seat) for seat in seats]
        self.directory = swarms() / swarm_digest(seats)
        self.notes = Notes(partial(notify, ""))
        self._options = options
        self._enroller = enroller
        self._notify = notify
        self._service = service or Service()
        self._ends = ends or Ends()
        self._sensors = sensors
        self._ending = asyncio.Event()
        self._done = self._stopped = False
        self._shared: Shared
        self._beside: set[asyncio.Task[None]] = set()

    async def run(self) -> SwarmOutcome:
        """Run all members until a signal, the end of the run, or of the last member.

        Raises:
            UsageError: this process may not open enough files for all members.
            Locked: these members already run as a swarm.
            StorageError: the swarm's directory cannot be created.
        """
        raise_descriptor_limit(len(self.members))
        with storage_errors("create the swarm's directory", self.directory):
            make_private(self.directory)
        with DirectoryLock.acquire(self.directory, "swarm"):
            await self._run()
        failed = {m.seat.name: m.error for m in self.members if m.error is not None}
        return SwarmOutcome(self._done, self._stopped, failed, self.summary())

    async def _run(self) -> None:
        self._shared = Shared(
            self._options,
            len(self.members),
            self.directory / "worker.log",
            notes=self.notes,
            said_goodbye=self._goodbye,
            sensors=self._sensors,
        )
        self._service.catch(self.stop, lambda text: self.notes("info", text))
        listener = await control_socket.serve(self.directory, self._command)
        await self._shared.watch.look()
        self._service.ready(lambda: swarm_status.line(self.summary()))
        watch = self._shared.watch
        for work in (watch.run(), watch.throttle(), self._start(), *self._folder_watches()):
            task = asyncio.create_task(work)
            task.add_done_callback(self._over)
            self._beside.add(task)
        try:
            await self._ending.wait()
        finally:
            self._service.stopping()
            listener.close()
            control_socket.socket_path(self.directory).unlink(missing_ok=True)
            await self._end()
            self._service.over()

    def stop(self) -> None:
        """End all members in order: they send goodbyes and complete pending writes."""
        self._ending.set()

    def _over(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self.notes("error", str(defect(error)))
            self.stop()

    async def _end(self) -> None:
        for task in self._beside:
            task.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)
        tasks = [m.task for m in self.members if m.task is not None]
        for member in self.members:
            client = member.client
            if client is not None and client in self._shared.members:
                client.stop()
            # One that is ending by itself is left alone: it still closes its link.
            elif member.task is not None and (client is None or client in self._shared.waiting):
                member.task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._shared.close()

    # --- members ----------------------------------------------------------------------------

    async def _start(self) -> None:
        """Enrol one after the other; each starts as soon as it is a member."""
        for number, member in enumerate(self.members):
            if number % NOTED == 0:
                self._note_members()
            try:
                member.home, enrolment = await self._enrol(member.seat)
            except FcilError as error:
                self._failed(member, error)
                continue
            except Exception as error:
                self._failed(member, defect(error))
                continue
            member.task = asyncio.create_task(self._live(member, member.home, enrolment))
        self._note_members()
        tasks = [m.task for m in self.members if m.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        self.stop()  # no member is left

    async def _enrol(self, seat: Seat) -> tuple[Home, Enrolment]:
        attempt = partial(self._enroller.enrol, seat, self._shared.dial)
        if not self._enroller.waits:
            return await attempt()
        # The others would wait for the same server, so one at a time asks for it.
        return await repeat_attempt(
            attempt, lambda text: self._notify(seat.name, _note(text, "warning"))
        )

    def _note_members(self) -> None:
        """Write the record of members, so that other commands ask the swarm about them."""
        known = swarm_status.record_of(self.directory)
        homes = {m.seat.name: str(m.home.directory) for m in self.members if m.home is not None}
        seats = [m.seat for m in self.members]
        record = record_bytes(swarm_name(seats), restart_arguments(seats), {**known, **homes})
        try:
            write_atomic(self.directory / RECORD, record)
        except StorageError as error:
            self.notes("warning", str(error))

    async def _live(self, member: SwarmMember, home: Home, enrolment: Enrolment) -> None:
        name = member.seat.name
        try:
            with DirectoryLock.acquire(home.directory, "client"):
                member.client = Client(
                    home,
                    enrolment,
                    member.seat.options(self._options),
                    notify=partial(self._notify, name),
                    host=SwarmHost(self._shared),
                )
                await member.client.run()
        except FcilError as error:
            self._failed(member, error)
        except Exception as error:
            self._failed(member, defect(error))

    def _failed(self, member: SwarmMember, error: FcilError) -> None:
        member.error = error
        self._notify(member.seat.name, _note(f"takes no further part: {error}"))
        if self._ends.together and not self._ending.is_set():
            self.notes("error", "a member takes no further part: all stop (--together)")
            self.stop()

    def _goodbye(self, code: str) -> None:
        if code == RUN_DONE:
            if not self._done:
                self.notes("info", "the run is done")
            self._done = True
            if self._ends.until_done:
                self.stop()
        elif not code and self._ends.until_done and not self._done and not self._stopped:
            self._stopped = True
            self.notes("warning", "the server stops before the run is done")
            self.stop()

    # --- folders ----------------------------------------------------------------------------

    def _folder_watches(self) -> list[Any]:
        """Return one watch for each folder that holds members' folders; parts never change."""
        whole = [m for m in self.members if m.seat.partition is None]
        parents = {m.seat.data.resolve().parent for m in whole}
        return [self._watch(p, [m for m in whole if m.seat.data.resolve().parent == p])
                for p in sorted(parents)]  # fmt: skip

    async def _watch(self, parent: Path, members: list[SwarmMember]) -> None:
        names = {m.seat.data.resolve().name: m for m in members}
        async for paths in changes(parent, self.notes):
            # Changes of the parent itself (touch, chmod) concern no member.
            touched = {"".join(Path(path).relative_to(parent).parts[:1]) for path in paths}
            for name in names.keys() & touched if paths else names:
                client = names[name].client
                if client is not None and client in self._shared.members:
                    client.feed(FolderChanged())

    # --- status -----------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return the numbers of all members together."""
        told = summary_of(self.members)
        return {**told, "done": self._done, "directory": str(self.directory)}

    async def _command(self, op: str, fields: dict[str, Any]) -> dict[str, Any]:
        if op == "stop":
            self.stop()
            return {}
        if op == "status":
            return {"running": True, **self.summary(), "manners": self._shared.watch.status(),
                    "resources": self._shared.place.resources.told}  # fmt: skip
        if op == "member":
            for member in self.members:
                at = member.home and str(member.home.directory) == fields.get("home")
                if at and member.client is not None and member.error is None:
                    return member.client.status()
            raise Unreachable(
                "this client of the swarm has ended, or has not begun yet.",
                action="See why: fcil-client status",
            )
        raise WireError(f"a swarm knows no command {op!r}.")


def _note(text: str, level: str = "error") -> Note:
    made: list[Note] = []
    Notes(made.append)(level, text)
    return made[0]


def raise_descriptor_limit(members: int) -> None:
    """Let this process open as many files as its hard limit allows.

    Raises:
        UsageError: that is not enough for this many members.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_BASE + FILES_EACH * members
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < needed:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft != unlimited and soft < needed:
        raise UsageError(
            f"a swarm of {members} clients needs {needed} open files, and this process may have "
            f"{soft}.",
            action=f"Raise the limit (ulimit -n {needed}), or start fewer: --slots.",
        )
