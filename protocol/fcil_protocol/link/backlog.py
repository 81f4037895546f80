"""Bound on the unread bytes of a connection: pure accounting.

libzmq buffers a message of many frames until its last frame has arrived, and has no limit for their
sum. So bytes are counted outside of it: those that the kernel received, less those that were handed
to the program. The rest is in a buffer, or in an incomplete message. A small frame may cost two
hundred times its bytes, so bytes count with the overhead of the frames that were read last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# Until the first message the peer is unknown: room for one message, which is one body.
UNSPOKEN_BYTES = 320 << 10
# Traffic besides messages (handshake, heartbeats of about 40 bytes) is never handed over.
FORGIVEN_BYTES_S = 256  # three heartbeats a second and more
# libzmq receives into buffers of 8 KiB. A frame that fits keeps its buffer, with 10 KiB of
# bookkeeping, until it is read: alone, if it came alone.
SMALL_FRAME_BYTES, BUFFER_BYTES = 8 << 10, 18 << 10
RECENT_BYTES = 64 << 10  # read last: frames that wait are taken to be like these
FEW_BYTES = 192 << 10  # that may always wait: a client's first window, after small messages alone


@dataclass
class UnreadBytes:
    """The unread bytes of one connection.

    Attributes:
        allowed: bytes that may be unread.
        few: of them, those whose frames do not matter: they have been requested, or are too few.
        delivered: bytes on the wire of all messages that were read.
        ahead: unread bytes at the last check.
        overhead: memory of a waiting byte besides itself, by the frames that were read last.
    """

    allowed: int = UNSPOKEN_BYTES
    few: int = FEW_BYTES
    delivered: int = 0
    ahead: int = 0
    overhead: float = 0.0
    _forgiven: float = field(default=0.0, repr=False)
    _at: float | None = field(default=None, repr=False)

    def read(self, frames: Sequence[int]) -> None:
        """Count a message that was read, by the bytes of its frames on the wire."""
        size = sum(frames)
        buffers = sum(frame < SMALL_FRAME_BYTES for frame in frames)
        share = min(1.0, size / RECENT_BYTES)
        self.overhead += share * (buffers * BUFFER_BYTES / size - self.overhead)
        self.delivered += size

    def is_over(self, received: Callable[[], int], now: float) -> bool:
        """Return True if unread bytes, with the overhead of their frames, are more than allowed.

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
        if self.ahead <= min(self.allowed, self.few):
            return False
        return self.ahead * (1 + self.overhead) > self.allowed
