"""The server's books, kept beside its work: bytes, the deadline, what closed rounds cost."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from fcil_protocol.errors import StorageError
from fcil_protocol.ids import RoundKey

if TYPE_CHECKING:
    from fcil_server.daemon import Server

SEEN_S = 15.0  # between two notes of who is connected
SEEN_AT_ONCE = 1000  # clients that one note names: the loop has other work


class Books:
    """Writes down what nobody waits for."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._refused = False  # by a full disk, and said so
        self._seen_at = 0.0
        self._closing: asyncio.Task[None] | None = None

    async def keep(self) -> None:
        """Write down counts and the deadline; what a full disk refuses is written later."""
        server = self._server
        try:
            self._keep_remaining()
            await self._keep_seen()
            await server.accounts.flush_in_turns()
            if server.ledger.long_log:
                await asyncio.to_thread(server.ledger.checkpoint)
        except StorageError as error:
            if not self._refused:
                server.note("warning", error.code, str(error))
            self._refused = True
        else:
            self._refused = False

    def _keep_remaining(self) -> None:
        """Store how much of the deadline is left: it counts server uptime only."""
        coordinator = self._server.open.coordinator
        remaining, key = coordinator.remaining_s, coordinator.at.key(coordinator.kit.run)
        if remaining is not None and key is not None:
            self._server.ledger.set_remaining(key, remaining)

    async def _keep_seen(self) -> None:
        """Store that who is connected is here: after a kill, the ledger alone knows."""
        now = time.monotonic()
        if now < self._seen_at + SEEN_S:
            return
        self._seen_at = now
        here = [peer.client for peer in self._server.peers]
        for first in range(0, len(here), SEEN_AT_ONCE):
            self._server.ledger.touch_all(here[first : first + SEEN_AT_ONCE])
            await asyncio.sleep(0)

    async def close_round(self, key: RoundKey) -> None:
        """Write what a closed round cost and brought, beside the round that follows."""
        await self.settled()
        self._closing = asyncio.create_task(self._server.guard(self._write_round(key)))

    async def _write_round(self, key: RoundKey) -> None:
        await self.keep()
        await self._server.open.write_round(key)

    async def settled(self) -> None:
        """Wait until what the closed rounds cost and brought is written."""
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def end(self) -> None:
        """Write everything down."""
        await self.settled()
        self._keep_remaining()
        self._server.accounts.flush()
