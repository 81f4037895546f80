"""One-time links that admit a browser, made by the server's operator.

Only digests of their tokens are kept, in memory: a restart of the server voids them, and a crash of
the dashboard's process revives none.
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
    """The open links of a server; ``now`` is of a clock that never goes back, seconds."""

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
        """Refuse a token of no open link.

        Wrong tries are not counted: 256 bits need no count, and it would only keep right ones out.

        Args:
            token: of the link, as a browser gave it.
            now: seconds.

        Raises:
            TrustError: the link does not exist, or no longer.
        """
        self._forget_old(now)
        if not self._found(token):
            raise TrustError(
                "this link was used already, has expired, or was never issued.",
                action="Make a new one on the server's machine: fcil-server page",
            )

    def remove(self, token: str) -> None:
        """Void an open link."""
        for digest in self._found(token):
            del self._open[digest]

    def _found(self, token: str) -> list[bytes]:
        # All are compared, so that the time reveals nothing.
        asked = _digest(token)
        return [digest for digest in self._open if hmac.compare_digest(digest, asked)]

    def void(self) -> None:
        """Void all links."""
        self._open.clear()

    def _forget_old(self, now: float) -> None:
        self._open = {digest: ends for digest, ends in self._open.items() if ends > now}


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
