"""One-time links that let a browser in: made by who may command the server, burnt by use.

Only digests of their tokens are kept, in memory: a restart of the server voids them, and a crash
of the process that serves the page revives none.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import deque

from fcil_protocol.errors import TrustError

TOKEN_BYTES = 32  # 256 bits, 43 characters
LIFE_S = 86_400.0
MAX_OPEN = 32  # links; one more voids the oldest
MAX_WRONG = 10  # tries from one address within `WINDOW_S`; then none is looked at for so long
WINDOW_S = 60.0
MAX_ADDRESSES = 1000  # that are remembered for their wrong tries


class PageLinks:
    """The links of a server that are open; ``now`` is of a clock that never goes back, seconds."""

    def __init__(self) -> None:
        self._open: dict[bytes, float] = {}  # digest -> when it expires, the oldest first
        self._wrong: dict[str, deque[float]] = {}  # address -> its last tries, the newest last

    def make(self, now: float) -> str:
        """Return the token of a new link; beyond `MAX_OPEN` the oldest link is void."""
        self._forget_old(now)
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._open[_digest(token)] = now + LIFE_S
        while len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]
        return token

    def use(self, token: str, now: float, address: str = "") -> None:
        """Burn a link.

        Args:
            token: of the link, as a browser gave it.
            now: seconds.
            address: of who gave it; each has its own count of wrong tries.

        Raises:
            TrustError: there is no such link, any more, or this address tried too often.
        """
        self._forget_old(now)
        tries = self._wrong.get(address, ())
        if sum(now - at < WINDOW_S for at in tries) >= MAX_WRONG:
            raise TrustError(
                f"{MAX_WRONG} links from this address were no good within a minute.",
                action="Wait a minute; then use a fresh link: fcil-server page",
            )
        # All are compared, so that the time tells nothing.
        asked = _digest(token)
        found = [digest for digest in self._open if hmac.compare_digest(digest, asked)]
        if not found:
            self._count(address, now)
            raise TrustError(
                "this link was used, is too old, or was never made.",
                action="Make a fresh one on the server's machine: fcil-server page",
            )
        del self._open[found[0]]

    def void(self) -> None:
        """Burn all links."""
        self._open.clear()

    def _forget_old(self, now: float) -> None:
        self._open = {digest: ends for digest, ends in self._open.items() if ends > now}

    def _count(self, address: str, now: float) -> None:
        tries = self._wrong.pop(address, None) or deque(maxlen=MAX_WRONG)
        tries.append(now)
        self._wrong[address] = tries
        while len(self._wrong) > MAX_ADDRESSES:
            del self._wrong[next(iter(self._wrong))]


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
