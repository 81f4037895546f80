"""Partially received envelopes, bounded per client and in time.

They outlive connections, and those in files outlive the process, so an upload resumes where it was
interrupted. Without bounds, a client that begins envelopes and never ends them would fill memory
and disk.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from fcil_protocol.envelopes.assembly import Assembly
from fcil_protocol.envelopes.header import Header
from fcil_protocol.ids import ClientId, RoundKey
from fcil_protocol.storage.atomic_files import storage_errors

IN_MEMORY_BYTES = 1 << 20  # larger envelopes are assembled in a file, and survive a restart
MEMORY_BYTES = 128 << 20  # of all others together; beyond that they are in files too


class Arriving:
    """The assemblies of all clients, by client and digest.

    Args:
        directory: for the files; holds nothing else.
        per_client: envelopes of one client that are kept.
        memory_bytes: most bytes of all those in memory together.
    """

    def __init__(
        self, directory: Path, per_client: int, *, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self._directory = directory
        self._per_client = per_client
        self._free = memory_bytes
        self._of: dict[ClientId, dict[str, Assembly]] = {}  # for each, the newest last
        self._in_memory: dict[str, int] = {}  # digest -> bytes taken from `_free`

    def take(self, client: ClientId, header: Header) -> Assembly:
        """Return a client's partial envelope, perhaps empty; its oldest ones give way.

        Complete ones stay: they are about to be opened.

        Args:
            client: the sender.
            header: its verified header.

        Raises:
            DiskFull, StorageError: there is no room for it, or an old one cannot be removed.
        """
        digest, own = header.update_id, self._of.setdefault(client, {})
        assembly = own.pop(digest, None)
        partial = [d for d, held in own.items() if not held.complete]
        for oldest in partial[: max(0, len(partial) + 1 - self._per_client)]:
            self._discard(own.pop(oldest))
        if assembly is None or digest not in self._in_memory:  # a file may have changed
            assembly = Assembly(header, path=self._place(digest, header.sealed_bytes))
        own[digest] = assembly
        return assembly

    def of(self, client: ClientId) -> list[Assembly]:
        """Return a client's kept envelopes, the newest first."""
        return list(reversed(self._of.get(client, {}).values()))

    def _place(self, digest: str, size: int) -> Path | None:
        path = self._directory / digest
        if size > IN_MEMORY_BYTES or size > self._free or path.exists():
            return path
        self._free -= size
        self._in_memory[digest] = size
        return None

    def drop(self, client: ClientId, digest: str) -> None:
        """Forget a partially received envelope.

        Raises:
            StorageError: its file cannot be removed.
        """
        assembly = self._of.get(client, {}).pop(digest, None)
        if assembly is not None:
            self._discard(assembly)

    def _discard(self, assembly: Assembly) -> None:
        self._free += self._in_memory.pop(assembly.header.update_id, 0)
        assembly.discard()

    def of_kind(self, key: RoundKey) -> set[str]:
        """Return the digests of envelopes for rounds of a round's task and kind."""
        cores = ((d, a.header.core) for own in self._of.values() for d, a in own.items())
        return {d for d, c in cores if (c.run, c.task, c.kind) == key[:3]}

    def sweep(self, keep: Container[str], *, files: bool = True) -> None:
        """Forget all but these digests.

        Args:
            keep: the others.
            files: also of an earlier process, whose clients may not be back.

        Raises:
            StorageError: a file cannot be removed.
        """
        for own in self._of.values():
            for digest in [d for d in own if d not in keep]:
                self._discard(own.pop(digest))
        self._of = {client: own for client, own in self._of.items() if own}
        if not files:
            return
        with storage_errors("list", self._directory):
            left = [path for path in self._directory.iterdir() if path.name not in keep]
        for path in left:
            with storage_errors("remove", path):
                path.unlink(missing_ok=True)
