"""A budget that fills with time, for what a peer can cause at will. Pure: times are passed in.

All times are seconds of one clock.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TokenBucket:
    """At most ``burst`` at once, and then ``per_s`` in a second.

    Attributes:
        burst: the most that it holds.
        per_s: how much comes back in a second.
        left: what it holds, as of ``at``.
        at: time of the last look.
    """

    burst: float
    per_s: float
    left: float
    at: float

    def fill(self, now: float) -> None:
        """Add the share of the time since the last look."""
        self.left = min(self.burst, self.left + (now - self.at) * self.per_s)
        self.at = now

    def draw(self, now: float) -> bool:
        """Take one; False if there is none."""
        self.fill(now)
        if self.left < 1:
            return False
        self.left -= 1
        return True
