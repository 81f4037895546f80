"""The images of all clients that a worker serves: one, or the members of a swarm."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from fcil_adapters.contract import Preprocessing, Progress
from fcil_adapters.images.cache import ImageCache
from fcil_adapters.images.decoding import ImageSource, open_source
from fcil_adapters.worker.loop import Call
from fcil_adapters.worker.pipe import Fields
from fcil_client.data import manifest as manifests
from fcil_client.data import partition_file
from fcil_client.data.local_data import LocalData
from fcil_client.data.manifest import ImageManifest
from fcil_client.data.partition_file import Partition
from fcil_client.data.partition_source import SharedData
from fcil_client.data.split import Fractions
from fcil_protocol.errors import DataError

MOST_IMAGES = 200_000  # in all lists in memory: about 100 MB; others are read again from disk

_Key = tuple[str, str, bytes]


class HeldData:
    """Lists of images, by client, and one store of decoded images for all of them.

    A client's list costs about 600 bytes an image; beyond `MOST_IMAGES` the least recently used are
    dropped, and reloaded with the next call from the client's manifest on disk.
    """

    def __init__(self) -> None:
        self._manifests: OrderedDict[_Key, ImageManifest] = (
            OrderedDict()
        )  # least recently used first
        self._data: dict[_Key, LocalData] = {}
        self._parts: SharedData | None = None
        self._listed: dict[_Key, SharedData] = {}  # what each client's last scan saw
        self._cache: ImageCache | None = None
        self._cache_of: tuple[Preprocessing, int, int] | None = None

    def scan(self, call: Call) -> ImageManifest:
        """Scan a client's images; fields as in `ClientWorker.scan`."""
        key, fields = _key(call.fields), call.fields
        if self._parts is not None and self._listed.get(key) is self._parts:
            self._parts = self._parts.relisted()  # it has changed since, for all of its clients
        source, fractions = self._open(fields)
        if self._parts is not None:
            self._listed[key] = self._parts
        try:
            manifest = manifests.scan(
                source,
                manifest_path(fields),
                fields["salt"],
                fractions,
                threads=fields.get("threads", 0),
                on_progress=lambda done, total: call.progress(Progress(done, total)),
                before=self._manifests.get(key),
            )
        except BaseException:
            source.close()
            raise
        if key in self._data:
            self._data[key].refresh(source, manifest)
        else:
            source.close()
        self._manifests[key] = manifest
        self._use(key)
        return manifest

    def of(self, call: Call, preprocessing: Preprocessing) -> LocalData:
        """Return a client's images, prepared for a backbone.

        Fields: those of `scan`, ``memory_bytes`` (of decoded images, for all) and ``threads``.
        """
        key, fields = _key(call.fields), call.fields
        manifest = self._manifests.get(key) or self.scan(call)
        cache = self._cache_for(preprocessing, fields["memory_bytes"], fields.get("threads", 0))
        if key not in self._data:
            self._data[key] = LocalData(
                self._open(fields)[0],
                manifest,
                preprocessing,
                memory_bytes=fields["memory_bytes"],
                threads=fields.get("threads", 0),
                cache=cache,
            )
        self._use(key)
        self._data[key].tell(call.alive)
        return self._data[key]

    def _open(self, fields: Fields) -> tuple[ImageSource, Fractions]:
        """Open a client's images; one listing of a divided data set is for all of its clients."""
        data, partition = Path(fields["data"]), partition_of(fields)
        if partition is None:
            return open_source(data), Fractions()
        if self._parts is None or not self._parts.are(data, partition):
            self._parts = SharedData(open_source(data), partition)
        return self._parts.slot(fields["slot"]), partition.fractions

    def _cache_for(
        self, preprocessing: Preprocessing, memory_bytes: int, threads: int
    ) -> ImageCache:
        """Return the store of decoded images; another preprocessing empties it."""
        wanted = (preprocessing, memory_bytes, threads)
        if self._cache is None or self._cache_of != wanted:
            for key in list(self._data):
                self._close(key)
            if self._cache is not None:
                self._cache.close()
            self._cache, self._cache_of = ImageCache(preprocessing, memory_bytes, threads), wanted
        return self._cache

    def _use(self, key: _Key) -> None:
        self._manifests.move_to_end(key)
        images = sum(len(manifest.images) for manifest in self._manifests.values())
        while images > MOST_IMAGES and len(self._manifests) > 1:
            oldest, manifest = self._manifests.popitem(last=False)
            images -= len(manifest.images)
            self._listed.pop(oldest, None)
            self._close(oldest)

    def _close(self, key: _Key) -> None:
        data = self._data.pop(key, None)
        if data is not None:
            data.close()


def manifest_path(fields: Fields) -> Path:
    """Return the file of a client's list of images."""
    return Path(fields["cache"]) / manifests.NAME


def partition_of(fields: Fields) -> Partition | None:
    """Return the partition that divides a client's data; None: all of it is the client's.

    Raises:
        DataError: the file holds another partition than at the client's beginning.
        CorruptFile, StorageError, UsageError: as in `partition_file`.
    """
    if not fields.get("partition"):
        return None
    partition = partition_file.load(Path(fields["partition"]))
    if partition_file.seat(partition, fields["slot"]) != fields["seat"]:
        raise DataError(
            f"{fields['partition']} has changed to another partition since this client started.",
            action="Put the original back, or start the clients of the new one.",
        )
    return partition


def _key(fields: Fields) -> _Key:
    return fields["data"], fields["cache"], fields["salt"]
