"""The interface of a client's process to the client: links, signals, control socket, manners.

A client with a process of its own is `StandaloneHost`; a member of a swarm shares one with others
(`swarm.shared`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fcil_client.daemon import status as telling
from fcil_client.notes import Notes
from fcil_client.policy.sensors import Sensors, System
from fcil_client.policy.watch import PolicyWatch
from fcil_client.rounds.options import ClientOptions
from fcil_client.session.events import Event
from fcil_client.session.machine import ClientSession
from fcil_client.state.home import Home
from fcil_protocol.errors import WireError
from fcil_protocol.link.dial import Dial
from fcil_protocol.process import control_socket
from fcil_protocol.process.supervisor import Service

if TYPE_CHECKING:
    from fcil_client.rounds.compute import Workplace

Work = Coroutine[Any, Any, None]


class HostedClient(Protocol):
    """A client as the process around it uses it.

    Attributes:
        counted: updates that were counted since its start.
        notes: notes for the client's user.
    """

    counted: int
    notes: Notes

    @property
    def place(self) -> Workplace:
        """The worker that it computes with."""
        ...

    @property
    def session(self) -> ClientSession:
        """The session's state machine."""
        ...

    def status(self) -> dict[str, Any]:
        """Return the client's status for ``fcil-client status``."""
        ...

    def feed(self, event: Event) -> None:
        """Pass an external event to the session."""
        ...

    def pause_changed(self) -> None:
        """Report at once that work has been suspended or resumed."""
        ...

    def watch_folder(self) -> Work:
        """Return the coroutine that watches the data folder for changes."""
        ...

    def stop(self) -> None:
        """End the client once pending writes are complete."""
        ...


class ClientHost(Protocol):
    """Services of the process to a client that runs in it.

    Attributes:
        dial: starts links.
    """

    dial: Dial

    @property
    def place(self) -> Workplace | None:
        """The worker that many clients share; None: the client has its own."""
        ...

    async def begin(self, client: HostedClient) -> None:
        """Prepare the services that the client needs before it connects; may wait for a turn."""
        ...

    def background_work(self) -> Sequence[Work]:
        """Return the coroutines to run next to the client, which has begun to connect."""
        ...

    def policy_status(self) -> dict[str, Any]:
        """Return the status of the owner's rules for this device."""
        ...

    def client_changed(self) -> None:
        """Handle a change of the client's status."""
        ...

    def goodbye(self, code: str) -> None:
        """Handle the end of a session by the server's goodbye."""
        ...

    def client_stopping(self) -> None:
        """Handle the start of the client's end; running work is finished first."""
        ...

    def client_stopped(self) -> None:
        """Handle the end of the client."""
        ...


class StandaloneHost:
    """The host of a client that has a process of its own.

    Args:
        home: directory of its control socket.
        options: include the owner's rules.
        make: starts a link to one of the server's addresses.
        service: signals, and status lines for a supervisor.
        sensors: report if this device may work; None: its own.
    """

    def __init__(
        self,
        home: Home,
        options: ClientOptions,
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
        self._watch: PolicyWatch
        self._listener: asyncio.AbstractServer

    async def begin(self, client: HostedClient) -> None:
        """Install signal handlers and the control socket, and read the sensors."""
        self._client = client
        self._service.catch(client.stop, lambda text: client.notes("info", text))
        self._listener = await control_socket.serve(self._home.directory, self._command)
        self._watch = PolicyWatch(
            self._rules,
            self._sensors,
            client.notes,
            hold=client.place.suspend,
            feed=client.feed,
            changed=client.pause_changed,
        )
        await self._watch.look()  # before any request can arrive

    def background_work(self) -> Sequence[Work]:
        """Notify the supervisor, and return the coroutines that watch folder and machine."""
        client = self._client
        # At once: a client whose server is away is ready too; its work is to wait.
        self._service.ready(lambda: telling.line(client.session, client.counted))
        return client.watch_folder(), self._watch.run(), self._watch.throttle()

    def policy_status(self) -> dict[str, Any]:
        """Return the watch's status."""
        return self._watch.status()

    def client_changed(self) -> None:
        """Update the supervisor's status line."""
        self._service.news()

    def goodbye(self, code: str) -> None:
        """Stay connected: the server may come back."""

    def client_stopping(self) -> None:
        """Accept no more commands."""
        self._service.stopping()
        self._listener.close()
        control_socket.socket_path(self._home.directory).unlink(missing_ok=True)

    def client_stopped(self) -> None:
        """Release the service."""
        self._service.over()

    async def _command(self, op: str, _fields: dict[str, Any]) -> dict[str, Any]:
        if op == "stop":
            self._client.stop()
            return {}
        if op == "status":
            return self._client.status()
        raise WireError(f"this client knows no command {op!r}.")
