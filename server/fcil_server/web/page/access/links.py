"""One-time links that let a browser in: made by who may command the server, burnt by use.

Only digests of their tokens are kept, in memory: a restart of the server voids them, and a crash
of the process that serves the page revives none.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from fcil_protocol.errors import TrustError

TOKEN_BYTES = 32  # 256 bits, 43 characters
LIFE_S = 86_400.0
MAX_OPEN = 32  # links; one more voids the oldest


class PageLinks:
    """The links of a server that are open; ``now`` is of a clock that never goes back, seconds."""

    def __init__(self) -> None:
        self._open: dict[bytes, float] = {}  # digest -> when it expires, the oldest first

    def make(self, now: float) -> str:
        """Return the token of a new link; beyond `MAX_OPEN` the oldest link is void."""
        self._forget_old(now)
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._open[_digest(token)] = now + LIFE_S
        while len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]
        return token

    def check(self, token: str, now: float) -> None:
        """Refuse what is no open link; 256 bits need no count of wrong tries.

        Such a count would only keep right ones out.

        Args:
            token: of the link, as a browser gave it.
            now: seconds.

        Raises:
            TrustError: there is no such link, any more.
        """
        self._forget_old(now)
        if not self._found(token):
            raise TrustError(
                "this link was used, is too old, or was never made.",
                action="Make a fresh one on the server's machine: fcil-server page",
            )

    def burn(self, token: str) -> None:
        """Make an open link good no more."""
        for digest in self._found(token):
            del self._open[digest]

    def _found(self, token: str) -> list[bytes]:
        # All are compared, so that the time tells nothing.
        asked = _digest(token)
        return [digest for digest in self._open if hmac.compare_digest(digest, asked)]

    def void(self) -> None:
        """Burn all links."""
        self._open.clear()

    def _forget_old(self, now: float) -> None:
        self._open = {digest: ends for digest, ends in self._open.items() if ends > now}


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
