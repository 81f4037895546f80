"""Shared resources of a swarm's members, and the surroundings of one member."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fcil_client.daemon.host import HostedClient, Work
from fcil_client.notes import Notes
from fcil_client.policy.sensors import Sensors, System
from fcil_client.policy.watch import PolicyWatch
from fcil_client.rounds.compute import Workplace
from fcil_client.rounds.options import ClientOptions
from fcil_client.session.events import Event, Link, Paused
from fcil_protocol.link.dial import Dial, dial
from fcil_protocol.link.zmq_link import Links

STARTS = 16  # members that may be between their connection and their list of classes
START_S = 5.0  # a member that takes longer than this does not delay the others' start


class Shared:
    """Links, worker, sensors and turns of one process, for all members of a swarm.

    Args:
        options: resources and the owner's rules.
        most: number of members.
        log: file for the worker's output.
        notes: notes that concern all members.
        said_goodbye: receives the code of every goodbye of the server.
        sensors: report if this device may work; None: its own.

    Attributes:
        place: the one worker.
        waiting: the clients that wait for their turn to start; they hold nothing yet.
        members: the clients that run now, until they begin to end.
        starts: held by a member that connects for the first time: a thousand Hellos at once would
            keep the server from its rounds.
    """

    def __init__(
        self,
        options: ClientOptions,
        most: int,
        log: Path,
        *,
        notes: Notes,
        said_goodbye: Callable[[str], None],
        sensors: Sensors | None = None,
    ) -> None:
        self.place = Workplace(options, log, remembers=True)
        self.waiting: set[HostedClient] = set()
        self.members: set[HostedClient] = set()
        self.starts = asyncio.Semaphore(STARTS)
        self.said_goodbye = said_goodbye
        self._links = Links(most)
        self.dial: Dial = partial(dial, links=self._links)
        self.watch = PolicyWatch(
            options.manners,
            sensors or System(use=options.manners.only_when_idle),
            notes,
            hold=self.place.suspend,
            feed=self._feed,
            changed=self._changed,
        )

    def _feed(self, event: Event) -> None:
        for member in list(self.members):
            member.feed(event)

    def _changed(self) -> None:
        for member in list(self.members):
            member.pause_changed()

    async def close(self) -> None:
        """End the worker and the links' threads, after all members have ended."""
        await self.place.host.stop()
        await asyncio.to_thread(self._links.close)


class SwarmHost:
    """The host of one member: shared resources, and its turn to start.

    Its folder is watched together with the others; signals and commands are for the swarm.
    """

    def __init__(self, shared: Shared) -> None:
        self.dial = shared.dial
        self.place = shared.place
        self._shared = shared
        self._client: HostedClient | None = None
        self._starts: asyncio.TimerHandle | None = None

    async def begin(self, client: HostedClient) -> None:
        """Wait for a turn to start."""
        self._shared.waiting.add(client)
        try:
            await self._shared.starts.acquire()
        finally:
            self._shared.waiting.discard(client)
        self._client = client
        self._shared.members.add(client)
        self._starts = asyncio.get_running_loop().call_later(START_S, self._started)
        if self._shared.watch.judgement.share == 0:
            client.feed(Paused(self._shared.watch.judgement.why))

    def _started(self) -> None:
        if self._starts is not None:
            self._starts.cancel()
            self._starts = None
            self._shared.starts.release()

    def background_work(self) -> Sequence[Work]:
        """Return nothing: the swarm watches folders and machine for all."""
        return ()

    def policy_status(self) -> dict[str, Any]:
        """Return the status of the swarm's watch."""
        return self._shared.watch.status()

    def client_changed(self) -> None:
        """Pass the turn to start to the next member as soon as this one's session is ready."""
        if self._client is not None and self._client.session.link is Link.READY:
            self._started()

    def goodbye(self, code: str) -> None:
        """Pass the code to the swarm."""
        self._shared.said_goodbye(code)

    def client_stopping(self) -> None:
        """Remove the member from the running ones."""
        self._started()
        if self._client is not None:
            self._shared.members.discard(self._client)

    def client_stopped(self) -> None:
        """Do nothing; the swarm releases the shared resources."""
