"""Parts that come from the server's object store, until they are complete or the store fails.

A part begins here once its signed header has come over the link, with an address. What does not
arrive from there is requested from the server, chunk by chunk, and for a while no other part is
looked for in the store, by any client of this process.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from fcil_client.link.url_fetch import fetch_chunks
from fcil_protocol.envelopes.assembly import Assembly
from fcil_protocol.envelopes.transfer import OBJECT_BYTES
from fcil_protocol.errors import FcilError, LinkError, StorageError

PAUSE_S = 600.0  # after a failure, before the store is used again
_PAUSED: dict[str, float] = {}  # what addresses begin with -> when that pause is over


@dataclass(frozen=True)
class ObjectEnd:
    """A part that no more chunks of come from the object store.

    Attributes:
        blobs: header, signature and wrap, as received.
        assembly: its chunks so far.
        error: why not all came; None: all did.
    """

    blobs: Sequence[bytes]
    assembly: Assembly
    error: FcilError | None


class ObjectDownloads:
    """Fetches parts from addresses that begin as the server has announced.

    Args:
        base: what all addresses begin with.
        arrived: called after each step.
        ended: takes a part's end.
        came: takes the digest of a part and the bytes of it that came, however it ended.
        spawn: starts a task; what escapes from it ends the client.
        clock: seconds, never set back.

    Attributes:
        plain_http: addresses without TLS are used too.
        under_way: digest -> its chunks so far.
    """

    def __init__(
        self,
        base: str,
        *,
        plain_http: bool,
        arrived: Callable[[], None],
        ended: Callable[[ObjectEnd], None],
        came: Callable[[str, int], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.base = base
        self.plain_http = plain_http
        self._arrived = arrived
        self._ended = ended
        self._came = came
        self._spawn = spawn
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.under_way: dict[str, Assembly] = {}

    def may_hold(self, sealed_bytes: int) -> bool:
        """Return True if a part of this size may come with an address that is to be used."""
        return sealed_bytes >= OBJECT_BYTES and not self._paused

    @property
    def _paused(self) -> bool:
        return self._clock() < _PAUSED.get(self.base, float("-inf"))

    def usable(self, url: str) -> bool:
        """Return True if an address is one of the store's, and the store is not failing."""
        schemes = ("https://", "http://") if self.plain_http else ("https://",)
        known = bool(self.base) and url.startswith(self.base) and url.startswith(schemes)
        return known and url.isascii() and url.isprintable() and not self._paused

    def begin(self, url: str, blobs: Sequence[bytes], assembly: Assembly) -> None:
        """Fetch the missing chunks of a part."""
        digest = assembly.header.update_id
        self.under_way[digest] = assembly
        self._tasks[digest] = self._spawn(self._fetch(url, digest, blobs, assembly))

    async def _fetch(
        self, url: str, digest: str, blobs: Sequence[bytes], assembly: Assembly
    ) -> None:
        error: FcilError | None = None
        size = 0

        def take(index: int, data: bytes) -> None:
            nonlocal size
            size += len(data)  # even if it does not fit
            assembly.put(index, data)
            self._arrived()

        try:
            missing = assembly.missing(len(assembly.header.hashes))
            if not await fetch_chunks(url, assembly.header, missing, take):
                error = LinkError("it is not there any more.")  # as of a state just replaced
        except FcilError as caught:
            error = caught
            if not isinstance(error, StorageError):
                _PAUSED[self.base] = self._clock() + PAUSE_S
        finally:
            if size:
                self._came(digest, size)
        del self.under_way[digest], self._tasks[digest]
        self._ended(ObjectEnd(blobs, assembly, error))

    def keep_only(self, digests: Collection[str]) -> None:
        """Stop fetching all parts but these; what came of them stays on disk."""
        for digest in list(self._tasks):
            if digest not in digests:
                self._tasks.pop(digest).cancel()
                del self.under_way[digest]

    async def close(self) -> None:
        """Stop fetching, and count what came."""
        tasks = list(self._tasks.values())
        self.keep_only(())
        await asyncio.gather(*tasks, return_exceptions=True)


def is_local(address: str) -> bool:
    """Return True if a HOST:PORT is on this very machine."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
