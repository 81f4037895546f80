"""Ordered queue of messages that wait for one socket, with a running total of their bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

MAX_BYTES = 64 << 20
# A round's messages to 4,000 clients are a few for each; an empty one costs some 300 bytes.
MAX_MESSAGES = 65_536


class SendQueue:
    """A queue that knows its size without inspecting its messages."""

    def __init__(self) -> None:
        self._messages: deque[Sequence[bytes]] = deque()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def full(self) -> bool:
        """True if the queue is so long that its reader must have stopped reading."""
        return self.bytes > MAX_BYTES or len(self._messages) >= MAX_MESSAGES

    @property
    def first(self) -> Sequence[bytes]:
        """Next message."""
        return self._messages[0]

    def add(self, message: Sequence[bytes]) -> None:
        """Append a message."""
        self._messages.append(message)
        self.bytes += sum(map(len, message))

    def drop(self) -> None:
        """Remove the next message after it was sent."""
        self.bytes -= sum(map(len, self._messages.popleft()))

    def clear(self) -> None:
        """Drop everything."""
        self._messages.clear()
        self.bytes = 0
