"""The daemon's side of a run: what a run asks of the process that serves it, and tells it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fcil_protocol.errors import FcilError
from fcil_protocol.ids import RoundKey
from fcil_protocol.messages.messages import RUN_DONE, Bye, Message
from fcil_server.event_loop import Lag
from fcil_server.sessions.peers import Peer, Peers
from fcil_server.sessions.uploads import Accepted


@dataclass(frozen=True, kw_only=True)
class RunPorts:
    """The daemon as a run sees it; as it is here, nobody is connected and nothing is counted.

    Attributes:
        notify: tells the operator: level, code, text, and perhaps which client it is about.
        peers: who is connected.
        attended: see `RunContext`.
    """

    notify: Callable[..., None]
    peers: Peers
    attended: bool = True

    def send(self, _peer: Peer, _message: Message, *_blobs: bytes) -> bool:
        """Send a message to a client's session; False if it is gone."""
        return False

    def tell_done(self, peer: Peer) -> None:
        """Tell a client that nothing more is asked in this run; it may stay for the next."""
        self.send(peer, Bye(code=RUN_DONE, reason="the run is done"))

    def lag(self) -> Lag:
        """Return how late the loop was since the last call."""
        return Lag()

    # --- rounds -----------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until every update that has come is durable or refused."""

    def round_opens(self, key: RoundKey, new_parts: set[str]) -> None:
        """A round is about to ask clients; ``new_parts`` are the digests that it introduces."""

    async def round_closed(self, key: RoundKey) -> None:
        """The results of a round are in the ledger."""

    def drained(self) -> None:
        """No round is under way and none is to open."""

    def done(self) -> None:
        """The run has come to its end, and every client was told."""

    async def flush_bytes(self) -> None:
        """Write to the ledger what the closed rounds cost."""

    # --- uploads ----------------------------------------------------------------------------

    def announced(self, peer: Peer) -> None:
        """A client has sent the list of its classes."""

    def opened(self, accepted: Accepted) -> None:
        """An update is whole and valid, and not yet on the disk."""

    def stored(self, accepted: Accepted) -> None:
        """An update is in the spool and in the ledger."""

    def count_refusal(self, peer: Peer, error: FcilError) -> None:
        """Something of a client was refused."""

    def fail(self, error: FcilError) -> None:
        """The server cannot go on with this."""
