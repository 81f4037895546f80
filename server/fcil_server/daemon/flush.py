"""The server's books, kept beside its work: bytes, the deadline, what closed rounds cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fcil_protocol.errors import FcilError, StorageError
from fcil_protocol.ids import RoundKey
from fcil_server.daemon.context import ServerContext, guard

SEEN_S = 15.0  # between two notes of who is connected
SEEN_AT_ONCE = 1000  # clients that one note names: the loop has other work


class Books:
    """Writes down what nobody waits for.

    Args:
        context: the server.
        fail: told of what the server cannot go on with.
    """

    def __init__(self, context: ServerContext, fail: Callable[[FcilError], None]) -> None:
        self._context = context
        self._fail = fail
        self._refused = False  # by a full disk, and said so
        self._seen_at = 0.0
        self._closing: asyncio.Task[None] | None = None

    async def keep(self) -> None:
        """Write down counts and the deadline; what a full disk refuses is written later."""
        context = self._context
        try:
            self._keep_remaining()
            await self._keep_seen()
            await context.accounts.flush_in_turns()
            if context.ledger.long_log:
                await asyncio.to_thread(context.ledger.checkpoint)
        except StorageError as error:
            if not self._refused:
                context.journal.note("warning", error.code, str(error))
            self._refused = True
        else:
            self._refused = False

    def _keep_remaining(self) -> None:
        """Store how much of the deadline is left: it counts server uptime only."""
        coordinator = self._context.run.coordinator
        remaining, key = coordinator.remaining_s, coordinator.at.key(coordinator.kit.run)
        if remaining is not None and key is not None:
            self._context.ledger.set_remaining(key, remaining)

    async def _keep_seen(self) -> None:
        """Store that who is connected is here: after a kill, the ledger alone knows."""
        now = time.monotonic()
        if now < self._seen_at + SEEN_S:
            return
        self._seen_at = now
        here = [peer.client for peer in self._context.peers]
        for first in range(0, len(here), SEEN_AT_ONCE):
            self._context.ledger.touch_all(here[first : first + SEEN_AT_ONCE])
            await asyncio.sleep(0)

    async def close_round(self, key: RoundKey) -> None:
        """Write what a closed round cost and brought, beside the round that follows."""
        await self.settled()
        self._closing = asyncio.create_task(guard(self._write_round(key), self._fail))

    async def _write_round(self, key: RoundKey) -> None:
        await self.keep()
        await self._context.run.write_round(key)

    async def settled(self) -> None:
        """Wait until what the closed rounds cost and brought is written."""
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def end(self) -> None:
        """Write everything down."""
        await self.settled()
        self._keep_remaining()
        self._context.accounts.flush()
