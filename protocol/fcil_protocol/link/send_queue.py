"""Messages for one connection: those that its socket does not take at once wait, in order.

Many clients share a relay's connection, whose socket holds a few hundred messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

FLUSH_S = 0.005  # between attempts to empty a queue
MAX_QUEUED_BYTES = 64 << 20
# A round's messages to 4,000 clients are a few for each; an empty one costs some 300 bytes.
MAX_QUEUED_MESSAGES = 65_536

Message = Sequence[bytes]


class SendQueue:
    """Sends messages in order, now or later; it knows its size without inspecting them.

    Args:
        send: sends a message; False if the socket has no room for it now.
        most_bytes: of messages that wait, about; the default is for a relay.

    Attributes:
        bytes: of the messages that wait.
        most_bytes: may be changed.
    """

    def __init__(self, send: Callable[[Message], bool], most_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._send = send
        self.most_bytes = most_bytes
        self._messages: deque[Message] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def full(self) -> bool:
        """True if the queue is so long that its reader must have stopped reading."""
        return self.bytes > self.most_bytes or len(self._messages) >= MAX_QUEUED_MESSAGES

    def send_now(self, message: Message) -> bool:
        """Send a message if none waits; False if that is not possible now."""
        return not self._messages and self._send(message)

    def put(self, message: Message) -> bool:
        """Send a message, or let it wait; False if the queue is full."""
        if self.send_now(message):
            return True
        if self.full:
            return False
        self._messages.append(message)
        self.bytes += sum(map(len, message))
        if self._timer is None:
            self._flush_later()
        return True

    def _flush_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._timer = None
        while self._messages and self._send(self._messages[0]):
            self.bytes -= sum(map(len, self._messages.popleft()))
        if self._messages:
            self._flush_later()

    def clear(self) -> None:
        """Drop everything, and send nothing more of it."""
        self._messages.clear()
        self.bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
