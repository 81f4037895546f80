"""Messages that wait for one socket, in order, with what they come to kept as they come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

MAX_BYTES = 64 << 20
# A round's news to 4,000 clients is a few messages for each; an empty one costs some 300 bytes.
MAX_MESSAGES = 65_536


class SendQueue:
    """A queue that knows its size without a look at what is in it."""

    def __init__(self) -> None:
        self._messages: deque[Sequence[bytes]] = deque()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def full(self) -> bool:
        """Whether so much waits that whoever should read it does not."""
        return self.bytes > MAX_BYTES or len(self._messages) >= MAX_MESSAGES

    @property
    def first(self) -> Sequence[bytes]:
        """The message that is next."""
        return self._messages[0]

    def add(self, message: Sequence[bytes]) -> None:
        """Put a message behind the others."""
        self._messages.append(message)
        self.bytes += sum(map(len, message))

    def drop(self) -> None:
        """Take the next message away: it was sent."""
        self.bytes -= sum(map(len, self._messages.popleft()))

    def clear(self) -> None:
        """Drop everything."""
        self._messages.clear()
        self.bytes = 0
