"""Files in which large envelopes are assembled: few for each client, none for long.

They outlive sessions and the process, so that an upload goes on where it was interrupted.
Without a bound, a client that begins envelopes and never ends them would fill the disk.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from fcil_protocol.files import storage_errors
from fcil_protocol.ids import ClientId


class IncomingFiles:
    """The files of a directory, by client and digest.

    Args:
        directory: holds nothing else.
        per_client: how many files one client may have.
    """

    def __init__(self, directory: Path, per_client: int) -> None:
        self._directory = directory
        self._per_client = per_client
        self._of: dict[ClientId, dict[str, None]] = {}  # digests, the newest last

    def place(self, client: ClientId, digest: str) -> Path:
        """Return the file for a client's envelope; its oldest ones give way.

        Raises:
            StorageError: an old one cannot be removed.
        """
        files = self._of.setdefault(client, {})
        files.pop(digest, None)
        files[digest] = None
        while len(files) > self._per_client:
            oldest = next(iter(files))
            del files[oldest]
            self._remove(self._directory / oldest)
        return self._directory / digest

    def gone(self, client: ClientId, digest: str) -> None:
        """Note that an envelope needs its file no more and has removed it."""
        self._of.get(client, {}).pop(digest, None)

    def sweep(self, keep: Container[str]) -> None:
        """Remove all files but these digests', also those that an earlier process left.

        Raises:
            StorageError: one cannot be removed.
        """
        with storage_errors("list", self._directory):
            names = [path.name for path in self._directory.iterdir()]
        for name in names:
            if name not in keep:
                self._remove(self._directory / name)

    @staticmethod
    def _remove(path: Path) -> None:
        with storage_errors("remove", path):
            path.unlink(missing_ok=True)
