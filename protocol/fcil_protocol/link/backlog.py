"""Bound on the unread bytes of a connection: pure accounting.

libzmq buffers a message of many frames until its last frame has arrived, and has no limit for their
sum. So bytes are counted outside of it: those that the kernel received, less those that were handed
to the program. The rest is in a buffer, or in an incomplete message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

# Until the first message the peer is unknown: room for one message, which is one body.
UNSPOKEN_BYTES = 320 << 10
# Traffic besides messages (handshake, heartbeats of about 40 bytes) is never handed over.
FORGIVEN_BYTES_S = 256  # three heartbeats a second and more


@dataclass
class UnreadBytes:
    """The unread bytes of one connection.

    Attributes:
        allowed: bytes that may be unread.
        delivered: bytes on the wire of all messages that were read.
        ahead: unread bytes at the last check.
    """

    allowed: int = UNSPOKEN_BYTES
    delivered: int = 0
    ahead: int = 0
    _forgiven: float = field(default=0.0, repr=False)
    _at: float | None = field(default=None, repr=False)

    def is_over(self, received: Callable[[], int], now: float) -> bool:
        """Return True if more bytes are unread than allowed.

        Args:
            received: returns the bytes received since the connection began. Messages may be read
                meanwhile, in another thread: those count as read, and are not forgiven.
            now: seconds of a monotonic clock.
        """
        before, came = self.delivered, received()
        if self._at is not None:
            self._forgiven += (now - self._at) * FORGIVEN_BYTES_S
        self._at = now
        self._forgiven = min(self._forgiven, max(0, came - before))  # never more than is unread
        self.ahead = came - self.delivered - int(self._forgiven)
        return self.ahead > self.allowed
