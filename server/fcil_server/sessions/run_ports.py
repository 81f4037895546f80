"""The daemon's side of a run: the calls that a run makes to the process that serves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fcil_protocol.errors import FcilError
from fcil_protocol.ids import ClientId, RoundKey
from fcil_protocol.messages.messages import RUN_DONE, Bye, Message
from fcil_server.event_loop import Lag
from fcil_server.sessions.peers import Peer, Peers
from fcil_server.sessions.uploads import Accepted


@dataclass(frozen=True, kw_only=True)
class RunPorts:
    """The daemon as a run sees it; these defaults have no client and count nothing.

    Attributes:
        notify: writes a note for the operator: level, code, text, and perhaps the client it is
            about.
        peers: the connected clients.
        attended: see `RunContext`.
        serves: clients connect to it.
    """

    notify: Callable[..., None]
    peers: Peers
    attended: bool = True
    serves: bool = False

    def send(self, _peer: Peer, _message: Message, *_blobs: bytes) -> bool:
        """Send a message to a client's session; False if it is gone."""
        return False

    def tell_done(self, peer: Peer) -> None:
        """Tell a client that this run needs nothing more of it; it may stay for the next."""
        self.send(peer, Bye(code=RUN_DONE, reason="the run is done"))

    def summing_relay(self, _peer: Peer) -> ClientId | None:
        """Return the relay that carries a client, if it adds up updates."""
        return None

    def lag(self) -> Lag:
        """Return how late the loop was since the last call."""
        return Lag()

    # --- rounds -----------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until every received update is on disk or refused."""

    async def round_opens(self, key: RoundKey, new_parts: set[str]) -> None:
        """Note that a round is about to ask clients, with the digests of parts that are new."""

    async def round_closed(self, key: RoundKey) -> None:
        """Note that the results of a round are in the ledger."""

    def drained(self) -> None:
        """Note that no round is under way and none is to open."""

    def another_waits(self) -> bool:
        """Return True if another run begins after this one."""
        return False

    def done(self) -> None:
        """Note that the run has ended, and that every client was notified if no other waits."""

    async def flush_bytes(self) -> None:
        """Write the closed rounds' bytes to the ledger."""

    # --- uploads ----------------------------------------------------------------------------

    def announced(self, peer: Peer) -> None:
        """Note that a client has sent the list of its classes."""

    def opened(self, accepted: Accepted) -> None:
        """Note that an update is complete and valid, and not yet on disk."""

    def stored(self, accepted: Accepted) -> None:
        """Note that an update is in the spool and in the ledger."""

    def count_refusal(self, peer: Peer, error: FcilError) -> None:
        """Count a refusal of a client's message."""

    def fail(self, error: FcilError) -> None:
        """Stop the server with this error."""
