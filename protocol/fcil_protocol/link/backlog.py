"""How far what has come on a connection may run ahead of what was read: pure accounting.

libzmq keeps a message of many frames to itself until its last frame has come, and has no limit
for their sum. So bytes are counted outside of it: those that the kernel received, less those
that were handed to the program. The rest lies in a buffer, or in half a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

# Until somebody has spoken nobody knows who it is: room for a first message, which is one body.
UNSPOKEN_BYTES = 320 << 10
# What travels beside messages (handshake, heartbeats of about 40 bytes) is never handed over.
FORGIVEN_BYTES_S = 256  # three heartbeats a second and more


@dataclass
class UnreadBytes:
    """What lies unread of one connection.

    Attributes:
        allowed: how many bytes may.
        delivered: bytes on the wire of all messages that were read.
        ahead: bytes that lay unread when it was looked at last.
    """

    allowed: int = UNSPOKEN_BYTES
    delivered: int = 0
    ahead: int = 0
    _forgiven: float = field(default=0.0, repr=False)
    _at: float | None = field(default=None, repr=False)

    def is_over(self, received: Callable[[], int], now: float) -> bool:
        """Say whether more lies unread than may.

        Args:
            received: asks for the bytes that came since the connection began. Messages may be
                read meanwhile, in another thread: those count as read, and are not forgiven.
            now: seconds of a clock that does not jump.
        """
        before, came = self.delivered, received()
        if self._at is not None:
            self._forgiven += (now - self._at) * FORGIVEN_BYTES_S
        self._at = now
        self._forgiven = min(self._forgiven, max(0, came - before))  # nothing beforehand
        self.ahead = came - self.delivered - int(self._forgiven)
        return self.ahead > self.allowed
