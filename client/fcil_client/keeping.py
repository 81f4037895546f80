"""A sealed update goes to the disk beside the daemon's loop, whole or not at all."""

from __future__ import annotations

import asyncio

from fcil_client.home import Home
from fcil_client.outbox import Outbox
from fcil_protocol.errors import StorageError
from fcil_protocol.payload import Payload
from fcil_protocol.stored import StoredEnvelope


class Keeping:
    """Writes updates, and the states that came with them, one at a time."""

    def __init__(self, home: Home, outbox: Outbox) -> None:
        self._home = home
        self._outbox = outbox
        self._turn = asyncio.Lock()

    async def keep(self, digest: str, envelope: StoredEnvelope, state: Payload | None) -> None:
        """Keep an update; if the round is stopped meanwhile, nothing of it stays.

        A thread cannot be stopped: its end is waited for, before the next one may begin.

        Raises:
            DiskFull, StorageError: nothing of it was kept.
        """
        async with self._turn:
            keep = asyncio.to_thread(self._write, digest, envelope, state)
            writing = asyncio.ensure_future(keep)
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait({writing})
                if writing.exception() is None:
                    await asyncio.to_thread(self._remove, digest)
                raise

    def _write(self, digest: str, envelope: StoredEnvelope, state: Payload | None) -> None:
        # All earlier updates have had their verdict: this round could not have begun otherwise.
        self._home.prune_provisional(set(self._home.outbox()))
        try:
            if state is not None:
                self._home.save_provisional(digest, state)
            self._outbox.put(digest, envelope)
        except StorageError:
            self._home.settle(digest, counted=False)
            raise

    def _remove(self, digest: str) -> None:
        self._home.drop_outgoing(digest)
        self._home.settle(digest, counted=False)
