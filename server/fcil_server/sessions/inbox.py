"""Ordered uploads of each client; a client that is ahead of intake waits alone.

One receive loop serves all clients. It never waits: an upload that intake cannot take now is held
here, for its client alone, while all other messages (a Hello, a Decline, a Want, also of that
client) pass.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fcil_protocol.errors import FcilError, WireError, as_fcil_error
from fcil_protocol.ids import ClientId
from fcil_protocol.messages.frames import Received
from fcil_protocol.messages.messages import Chunk, Update
from fcil_server.sessions.intake import Intake
from fcil_server.sessions.peers import Peer
from fcil_server.sessions.uploads import ReceivedUpdate

Upload = Received | ReceivedUpdate
MESSAGE_BYTES = 2048  # cost of a waiting message in addition to its blobs


@dataclass
class _WaitingMessages:
    """Waiting messages of one client, the oldest first."""

    messages: deque[tuple[Peer, Upload]] = field(default_factory=deque)
    size: int = 0
    due: bool = False  # the next message is about to be taken


class Inbox:
    """Hands uploads to intake, at once or when it has room for more of their client.

    Args:
        intake: takes them.
        alive: returns True if a peer's session is still the one of its connection.
        refuse: receives an envelope that cannot be taken: its peer, its digest, the error.
        cut: ends the connection of a peer with more waiting bytes than allowed.
        most_bytes: bytes of one client that may wait. A client that sends only on request stays
            below.
    """

    def __init__(
        self,
        intake: Intake,
        *,
        alive: Callable[[Peer], bool],
        refuse: Callable[[Peer, str, FcilError], None],
        cut: Callable[[Peer], None],
        most_bytes: int,
    ) -> None:
        self._intake = intake
        self._alive = alive
        self._refuse = refuse
        self._cut = cut
        self._most_bytes = most_bytes
        self._held: dict[ClientId, _WaitingMessages] = {}
        intake.room = self.process_waiting

    def put(self, peer: Peer, upload: Upload) -> None:
        """Take an update's header, some of its chunks, or all of it, now or in its turn."""
        held = self._held.get(peer.client)
        if held is None:
            if not self._intake.is_busy(peer.client):
                self._take(peer, upload)
                return
            held = self._held[peer.client] = _WaitingMessages()
        held.messages.append((peer, upload))
        held.size += _size(upload)
        if held.size > self._most_bytes:
            self._shed(held, peer)

    def _shed(self, held: _WaitingMessages, peer: Peer) -> None:
        """Drop messages of ended sessions; if that is too little, of this one too."""
        if sum(_size(u) for p, u in held.messages if self._alive(p)) > self._most_bytes:
            self._cut(peer)
            held.messages.clear()
        held.messages = deque(one for one in held.messages if self._alive(one[0]))
        held.size = sum(_size(upload) for _, upload in held.messages)

    def process_waiting(self, client: ClientId) -> None:
        """Take a client's waiting messages, one in each turn of the loop."""
        held = self._held.get(client)
        if held is not None and not held.due:
            held.due = True
            asyncio.get_running_loop().call_soon(self._next, client, held)

    def _next(self, client: ClientId, held: _WaitingMessages) -> None:
        held.due = False
        if self._intake.is_busy(client):
            return  # intake calls again
        if held.messages:
            peer, upload = held.messages.popleft()
            held.size -= _size(upload)
            if self._alive(peer):
                self._take(peer, upload)
        if held.messages:
            self.process_waiting(client)
        else:
            del self._held[client]

    def _take(self, peer: Peer, upload: Upload) -> None:
        message = upload if isinstance(upload, ReceivedUpdate) else upload.message
        try:
            if isinstance(upload, ReceivedUpdate):
                self._intake.take_whole(peer, upload)
            elif isinstance(message, Chunk):
                self._intake.chunk(peer, upload, message)
            elif isinstance(message, Update) and peer.ready:
                self._intake.offer(peer, upload, message)
            else:
                raise WireError("updates come after a Welcome that says ready.")
        except Exception as error:
            self._refuse(peer, getattr(message, "digest", ""), as_fcil_error(error))


def _size(upload: Upload) -> int:
    return MESSAGE_BYTES + sum(map(len, upload.blobs))
