"""What a client's process gives it: links, signals, a control socket, manners.

A client that has a process to itself is `Alone`; a member of a swarm shares one with others
(`swarm.shared`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fcil_client.daemon import status as telling
from fcil_client.notes import Notes
from fcil_client.policy.sensors import Sensors, System
from fcil_client.policy.watch import Watch
from fcil_client.rounds.options import Options
from fcil_client.session.events import Event
from fcil_client.session.machine import Session
from fcil_client.state.home import Home
from fcil_protocol.errors import WireError
from fcil_protocol.link.dial import Dial
from fcil_protocol.process import control_socket
from fcil_protocol.process.supervisor import Service

if TYPE_CHECKING:
    from fcil_client.rounds.compute import Workplace

Work = Coroutine[Any, Any, None]


class HostedClient(Protocol):
    """A client as the process that it runs in uses it.

    Attributes:
        counted: updates that were counted since its start.
        notes: takes what its user is to know.
    """

    counted: int
    notes: Notes

    @property
    def place(self) -> Workplace:
        """Where it computes."""
        ...

    @property
    def session(self) -> Session:
        """Where link and work stand."""
        ...

    def status(self) -> dict[str, Any]:
        """Return everything that one wants to know of a running client."""
        ...

    def feed(self, event: Event) -> None:
        """Let the session take an event from outside."""
        ...

    def stood(self) -> None:
        """Say at once that the work stands still, or goes on."""
        ...

    def watch_folder(self) -> Work:
        """Return what notices images that come and go."""
        ...

    def stop(self) -> None:
        """End the client when what is being written is written."""
        ...


class Surroundings(Protocol):
    """What the process gives to a client that runs in it.

    Attributes:
        dial: starts links.
    """

    dial: Dial

    @property
    def place(self) -> Workplace | None:
        """The worker that many clients share; None: the client has its own."""
        ...

    async def begin(self, client: HostedClient) -> None:
        """Prepare what must stand before the client connects; it may have to wait for its turn."""
        ...

    def beside(self) -> Sequence[Work]:
        """Return what is to run beside the client, which has begun to connect."""
        ...

    def manners(self) -> dict[str, Any]:
        """Return what one wants to know of when this device may work."""
        ...

    def news(self) -> None:
        """Something happened to the client."""
        ...

    def goodbye(self, code: str) -> None:
        """The server ends the session on purpose."""
        ...

    def ending(self) -> None:
        """The client ends; what is under way is finished first."""
        ...

    def over(self) -> None:
        """The client has ended."""
        ...


class Alone:
    """The surroundings of a client that has a process to itself.

    Args:
        home: where its control socket is.
        options: hold the owner's rules.
        make: starts a link to one of the server's addresses.
        service: signals, and what a supervisor is told.
        sensors: say whether this device may work; None: its own.
    """

    def __init__(
        self,
        home: Home,
        options: Options,
        make: Dial,
        service: Service | None,
        sensors: Sensors | None,
    ) -> None:
        self.dial = make
        self.place: Workplace | None = None
        self._home = home
        self._rules = options.manners
        self._service = service or Service()
        self._sensors = sensors or System(use=options.manners.only_when_idle)
        self._client: HostedClient
        self._watch: Watch
        self._door: asyncio.AbstractServer

    async def begin(self, client: HostedClient) -> None:
        """Take signals and commands, and read the sensors."""
        self._client = client
        self._service.catch(client.stop, lambda text: client.notes("info", text))
        self._door = await control_socket.serve(self._home.directory, self._command)
        self._watch = Watch(
            self._rules,
            self._sensors,
            client.notes,
            hold=client.place.hold,
            feed=client.feed,
            changed=client.stood,
        )
        await self._watch.look()  # before anybody can ask for anything

    def beside(self) -> Sequence[Work]:
        """Tell the supervisor, and return what watches over folder and machine."""
        client = self._client
        # At once: a client whose server is away does its work all the same, which is to wait.
        self._service.ready(lambda: telling.line(client.session, client.counted))
        return client.watch_folder(), self._watch.run(), self._watch.pace()

    def manners(self) -> dict[str, Any]:
        """Return what the watch says."""
        return self._watch.status()

    def news(self) -> None:
        """Bring the supervisor's line up to date."""
        self._service.news()

    def goodbye(self, code: str) -> None:
        """Stay: the server may come back."""

    def ending(self) -> None:
        """Take no more commands."""
        self._service.stopping()
        self._door.close()
        control_socket.socket_path(self._home.directory).unlink(missing_ok=True)

    def over(self) -> None:
        """Nothing is left to do."""
        self._service.over()

    async def _command(self, op: str, _fields: dict[str, Any]) -> dict[str, Any]:
        if op == "stop":
            self._client.stop()
            return {}
        if op == "status":
            return self._client.status()
        raise WireError(f"this client knows no command {op!r}.")
