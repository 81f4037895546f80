"""The forms of what a client may send in a round, what it sent, and where that goes.

`rounds.reception` says what the open round takes; an update that comes late is refused there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fcil_adapters.contract import TaskInfo
from fcil_protocol.envelopes.envelope import Core
from fcil_protocol.errors import FcilError
from fcil_protocol.ids import ClientId
from fcil_protocol.messages.messages import Message
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import PayloadSchema
from fcil_server.sessions.peers import Peer


@dataclass(frozen=True)
class Expectation:
    """What a payload of the open round must be."""

    task: TaskInfo
    schema: PayloadSchema
    dims: dict[str, int]
    check: Callable[[Payload, TaskInfo], list[str]]


@dataclass(frozen=True)
class Accepted:
    """A validated upload: an update to be made durable, or an inventory."""

    client: ClientId
    digest: str
    core: Core
    tensor_bytes: int
    sealed_bytes: int
    samples: int


class IntakePorts(Protocol):
    """What intake asks of the run whose uploads it takes, and tells it."""

    def expect(self, client: ClientId, core: Core) -> Expectation:
        """Return what is expected of an update with this core.

        Raises:
            RoundClosed, AlreadyHave, StaleUpdate: why it is not taken.
        """
        ...

    def recorded(self, client: ClientId, core: Core, digest: str) -> bool:
        """Say whether the ledger has this update."""
        ...

    def opened(self, accepted: Accepted) -> None:
        """An update is whole and valid, and not yet on the disk."""
        ...

    def stored(self, accepted: Accepted) -> None:
        """Commit an update to the ledger that is in the spool for good."""
        ...

    def lasting(self) -> None:
        """Return when what `stored` has committed is on the disk; then the Ack leaves."""
        ...

    def announced(self, peer: Peer, payload: Payload) -> None:
        """Take a client's inventory."""
        ...

    def send(self, peer: Peer, message: Message) -> bool:
        """Send a message; False if the client is gone."""
        ...

    def refused(self, peer: Peer, error: FcilError) -> None:
        """Something is refused here, other than by an error of `Intake.offer` or `chunk`."""
        ...

    def failed(self, error: FcilError) -> None:
        """The server cannot go on with this."""
        ...
