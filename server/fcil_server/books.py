"""The server's books, kept beside its work: bytes, the deadline, what closed rounds cost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fcil_protocol.errors import StorageError
from fcil_server.ledger_rows import RoundKey

if TYPE_CHECKING:
    from fcil_server.daemon import Server


class Books:
    """Writes down what nobody waits for."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._refused = False  # by a full disk, and said so
        self._closing: asyncio.Task[None] | None = None

    async def keep(self) -> None:
        """Write down counts and the deadline; what a full disk refuses is written later."""
        server = self._server
        try:
            self._keep_remaining()
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
