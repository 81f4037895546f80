"""Periodic writes to the ledger: bytes, the deadline, the cost of closed rounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fcil_protocol.errors import FcilError, StorageError
from fcil_protocol.ids import RoundKey
from fcil_server.daemon.context import ServerContext, start_guarded

SEEN_S = 15.0  # between two records of connected clients
SEEN_AT_ONCE = 1000  # clients in one such record: the loop has other work
MOST_OF_LOOP = 1 / 30  # of the loop's time for counts, while no round closes


class LedgerFlusher:
    """Writes records that no other work waits for.

    Args:
        context: the server.
        fail: receives errors that end the server.
    """

    def __init__(self, context: ServerContext, fail: Callable[[FcilError], None]) -> None:
        self._context = context
        self._fail = fail
        self._refused = False  # by a full disk, already reported
        self._seen_at = 0.0
        self._counts_due = 0.0
        self._closing: asyncio.Task[None] | None = None

    async def run(self, *, counts: bool = True) -> None:
        """Write the deadline and the counts; if the disk is full, they are written later.

        Args:
            counts: also if it took long the last time, as it does with thousands of clients.
        """
        context = self._context
        try:
            self._keep_remaining()
            await self._keep_seen()
            if counts or time.monotonic() >= self._counts_due:
                took_s = await context.byte_meter.flush_in_turns()
                self._counts_due = time.monotonic() + took_s / MOST_OF_LOOP
            if context.ledger.long_log:
                await asyncio.to_thread(context.ledger.checkpoint)
        except StorageError as error:
            if not self._refused:
                context.journal.note("warning", error.code, str(error))
            self._refused = True
        else:
            self._refused = False

    def _keep_remaining(self) -> None:
        """Store the time left until the deadline: it counts server uptime only."""
        coordinator = self._context.run.coordinator
        remaining, key = coordinator.remaining_s, coordinator.progress.key(coordinator.context.run)
        if remaining is not None and key is not None:
            self._context.ledger.rounds.set_remaining(key, remaining)

    async def _keep_seen(self) -> None:
        """Store that connected clients and relays are here: after a kill, only the ledger knows."""
        now = time.monotonic()
        if now < self._seen_at + SEEN_S:
            return
        self._seen_at = now
        here = [peer.client for peer in self._context.peers]
        here += self._context.link.relays()
        for first in range(0, len(here), SEEN_AT_ONCE):
            self._context.ledger.clients.touch_all(here[first : first + SEEN_AT_ONCE])
            await asyncio.sleep(0)

    async def close_round(self, key: RoundKey) -> None:
        """Write the cost and the results of a closed round during the round that follows."""
        await self.wait_until_settled()
        self._closing = start_guarded(self._write_round(key), self._fail)

    async def _write_round(self, key: RoundKey) -> None:
        await self.run()
        await self._context.run.write_round(key)

    async def wait_until_settled(self) -> None:
        """Wait until the cost and the results of the closed rounds are written."""
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def end(self) -> None:
        """Write all pending records."""
        await self.wait_until_settled()
        self._keep_remaining()
        await self._context.byte_meter.flush_settled()
