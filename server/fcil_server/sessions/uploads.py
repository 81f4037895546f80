"""Expected and accepted uploads of a round, and intake's interface to the run.

`rounds.reception` says what the open round takes; an update that comes late is refused there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
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
    """Requirements for a payload of the open round."""

    task: TaskInfo
    schema: PayloadSchema
    dims: dict[str, int]
    check: Callable[[Payload, TaskInfo], list[str]]

    @cached_property
    def max_bytes(self) -> int:
        """Size of the largest allowed payload in bytes, tensors only."""
        return self.schema.max_bytes(self.dims)


@dataclass(frozen=True)
class Accepted:
    """A validated update, or a relay's sum of several."""

    client: ClientId
    digest: str
    core: Core
    tensor_bytes: int
    sealed_bytes: int
    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)  # of its training, if it has any
    summed: tuple[Accepted, ...] = ()  # the updates in a relay's sum


@dataclass(frozen=True)
class ReceivedUpdate:
    """An update whose header and chunks an intake process has received and verified.

    Attributes:
        blobs: header, signature, wrap, and chunks.
    """

    digest: str
    blobs: tuple[bytes, ...]


class IntakePorts(Protocol):
    """Calls of intake to the run whose uploads it takes."""

    def expect(self, client: ClientId, core: Core) -> Expectation:
        """Return the requirements for an update with this core.

        Raises:
            RoundClosed, AlreadyHave, StaleUpdate: why it is not taken.
        """
        ...

    def expect_sum(self, core: Core) -> Expectation:
        """Return the requirements for a relay's sum of updates with this core.

        Raises:
            RoundClosed, StaleUpdate: why none is taken.
        """
        ...

    def summing_relay(self, peer: Peer, core: Core) -> ClientId | None:
        """Return the relay that carries a client, if it may add up its update of this core."""
        ...

    def recorded(self, digest: str) -> bool:
        """Return True if the ledger has this update, or this sum."""
        ...

    def opened(self, accepted: Accepted) -> None:
        """Note that an update is complete and valid, and not yet on disk."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Let all that is `stored` inside be committed at its end, or, on an error, nothing.

        Raises:
            CommitUnknown: at its end, if the ledger may have all of it or nothing.
        """
        ...

    def stored(self, accepted: Accepted) -> None:
        """Record an update that is safe in the spool in the ledger."""
        ...

    def committed(self, accepted: Accepted) -> None:
        """Note that an update was committed to the ledger."""
        ...

    def wait_until_durable(self) -> None:
        """Return when the commits are on disk; then the Acks leave."""
        ...

    def announced(self, peer: Peer, payload: Payload) -> None:
        """Take a client's inventory."""
        ...

    def is_here(self, peer: Peer) -> bool:
        """Return True if a session is its client's present one."""
        ...

    def send(self, peer: Peer, message: Message) -> bool:
        """Send a message; False if the client is gone."""
        ...

    def refused(self, peer: Peer, error: FcilError) -> None:
        """Count a refusal other than an error of `Intake.offer` or `chunk`."""
        ...

    def failed(self, error: FcilError) -> None:
        """Stop the server with this error."""
        ...
