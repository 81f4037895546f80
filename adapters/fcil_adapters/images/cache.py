"""Decoded images for learners and evaluators: kept up to a bound, decoded again beyond it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Preprocessing
from fcil_adapters.images.decoding import ImageEntry, ImageSource, decode, digest, preprocess
from fcil_adapters.resources import machine
from fcil_protocol.errors import DataError

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]


class HashedImage(Protocol):
    """An image file and the SHA-256 of its content (hex)."""

    @property
    def entry(self) -> ImageEntry:
        """The image's file in its source."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 of the content (hex), which identifies the image under any name."""
        ...


class ImageCache:
    """Decoded images up to one bound, and the threads that decode them.

    The key of an image is its content, so stores with the same preprocessing can share a cache.
    """

    def __init__(self, preprocessing: Preprocessing, memory_bytes: int, threads: int = 0) -> None:
        """Decode with ``threads`` threads (0: one per core, at most 8); keep ``memory_bytes``."""
        self.kept = _DecodedImages(memory_bytes // (3 * preprocessing.size**2))
        self.pool = ThreadPoolExecutor(threads or min(8, machine.cores()))

    def close(self) -> None:
        """Release threads and memory."""
        self.pool.shutdown(cancel_futures=True)
        self.kept = _DecodedImages(0)


class ImageStore:
    """The images of one source, decoded for one backbone.

    Attributes:
        source: reads the files; may be replaced by a newer listing of the same images.
        faults: one sentence per image that vanished, changed or broke since it was listed.
        alive: called for every image decoded for a `CachedImages`, and at every request for images;
            a worker uses it to report progress to its daemon.
    """

    def __init__(
        self,
        source: ImageSource,
        preprocessing: Preprocessing,
        *,
        memory_bytes: int,
        threads: int = 0,
        cache: ImageCache | None = None,
    ) -> None:
        """Keep decoded images on a shelf of its own (see `ImageCache`), or on a shared one."""
        self.source = source
        self.preprocessing = preprocessing
        self.faults: list[str] = []
        self.alive: Callable[[], None] = _nobody
        self._cache = cache or ImageCache(preprocessing, memory_bytes, threads)
        self._owns = cache is None

    @property
    def _kept(self) -> _DecodedImages:
        return self._cache.kept

    def close(self) -> None:
        """Release files, and threads and memory that no other store shares."""
        if self._owns:
            self._cache.close()
        self.source.close()

    def beside(self, source: ImageSource) -> ImageStore:
        """Return a store of another source that shares the decoded images and their bound."""
        store = ImageStore(source, self.preprocessing, memory_bytes=0, cache=self._cache)
        store.alive = self.alive
        return store

    def view(
        self, wanted: Sequence[tuple[HashedImage, int]], *, exact: bool = False
    ) -> CachedImages:
        """Open labelled images; missing or changed ones are left out and named in the faults.

        Args:
            wanted: the images, each with its label.
            exact: no other image takes the place of one that breaks later.
        """
        good = self._warm([picture for picture, _ in wanted])
        pairs = [pair for pair, fine in zip(wanted, good, strict=True) if fine]
        labels = np.array([label for _, label in pairs], dtype=np.int64)
        return CachedImages(self, [picture for picture, _ in pairs], labels, exact=exact)

    def _warm(self, pictures: Sequence[HashedImage]) -> list[bool]:
        """Decode as many as fit, and check that the rest still exist."""
        self._kept.start_view()
        missing = dict.fromkeys(i.digest for i in pictures if not self._kept.touch(i.digest))
        room = set(list(missing)[: self._kept.free_images()])
        first = {i.digest: i for i in reversed(pictures) if i.digest in room}
        for one, array in self._decoded(first.values()):
            self.alive()
            if array is not None:
                self._kept.put(one.digest, array)
        return [self._kept.has(i.digest) or self._still_there(i, room) for i in pictures]

    def _still_there(self, picture: HashedImage, tried: set[str]) -> bool:
        if picture.digest in tried:
            return False
        if self.source.unchanged(picture.entry):
            return True
        self._fault(f"image {picture.entry.name!r} is gone or has changed since it was listed.")
        return False

    def arrays(self, pictures: Sequence[HashedImage]) -> list[U8 | None]:
        """Return decoded images (S, S, 3), kept or decoded now; None for unreadable ones."""
        self.alive()
        found = {i.digest: self._kept.get(i.digest) for i in pictures}
        missing = {i.digest: i for i in pictures if found[i.digest] is None}
        found.update((one.digest, array) for one, array in self._decoded(missing.values()))
        return [found[i.digest] for i in pictures]

    def _decoded(
        self, pictures: Collection[HashedImage]
    ) -> Iterator[tuple[HashedImage, U8 | None]]:
        """Decode several at once; those that do not fit into memory so, one by one."""
        large = []
        tried = self._cache.pool.map(self._decode_if_it_fits, pictures)
        for one, (array, fits) in zip(pictures, tried, strict=True):
            if fits:
                yield one, array
            else:
                large.append(one)
        for one in large:
            array, fits = self._decode_if_it_fits(one)
            if not fits:
                self._fault(f"image {one.entry.name!r} does not fit into memory.")
            yield one, array

    def _decode_if_it_fits(self, picture: HashedImage) -> tuple[U8 | None, bool]:
        try:
            return self._decode(picture), True
        except MemoryError:
            return None, False

    def _decode(self, picture: HashedImage) -> U8 | None:
        try:
            data = self.source.read(picture.entry)
        except DataError as error:
            self._fault(error.message)
            return None
        if digest(data).hex() != picture.digest:
            self._fault(f"image {picture.entry.name!r} changed since it was listed.")
            return None
        try:
            return preprocess(decode(data), self.preprocessing)
        except DataError as error:
            self._fault(f"image {picture.entry.name!r}: {error.message}")
            return None

    def _fault(self, sentence: str) -> None:
        if sentence not in self.faults:
            self.faults.append(sentence)


def _nobody() -> None:
    return None


class CachedImages:
    """An `ImageSet`: labelled images in a fixed order."""

    def __init__(
        self,
        store: ImageStore,
        pictures: Sequence[HashedImage],
        labels: I64,
        *,
        exact: bool = False,
    ) -> None:
        self._store = store
        self._exact = exact
        self._pictures = pictures
        self._labels = labels

    @property
    def labels(self) -> I64:
        """Global class ids, (N,)."""
        return self._labels

    @property
    def size(self) -> int:
        """Side of the images in pixels, S."""
        return self._store.preprocessing.size

    @property
    def faults(self) -> list[str]:
        """One sentence per image of its store that vanished, changed or broke."""
        return self._store.faults

    @property
    def digests(self) -> list[str]:
        """SHA-256 (hex) of each image's content, N of them."""
        return [picture.digest for picture in self._pictures]

    def __len__(self) -> int:
        return len(self._pictures)

    def take(self, index: I64) -> U8:
        """Return images (len(index), S, S, 3).

        The next readable image of the same class replaces one that broke after opening; the faults
        name the broken image.

        Raises:
            DataError: a class has no readable image left, the image is unlabelled, or each is to be
                counted once.
        """
        out = np.empty((len(index), self.size, self.size, 3), dtype=np.uint8)
        arrays = self._store.arrays([self._pictures[i] for i in index])
        for row, (i, array) in enumerate(zip(index, arrays, strict=True)):
            out[row] = self._instead_of(int(i)) if array is None else array
        return out

    def _instead_of(self, broken: int) -> U8:
        if self._labels[broken] < 0:  # its label is still to be found: no other has the same
            raise DataError(
                f"the unlabelled image {self._pictures[broken].entry.name!r} is gone or broke "
                "during the round.",
                action="Leave the folder's images in place; the next task's round takes them.",
            )
        if self._exact:
            name = self._pictures[broken].entry.name
            raise DataError(
                f"image {name!r} is gone or broke during the round, and each is counted once.",
                action="Restore it; a later round asks this client again.",
            )
        same = np.flatnonzero(self._labels == self._labels[broken])
        for i in np.roll(same, -int(np.searchsorted(same, broken))).tolist():
            (array,) = self._store.arrays([self._pictures[i]])
            if array is not None:
                return array
        raise DataError(
            f"class {self._pictures[broken].entry.class_name!r} has no readable image left.",
            action="Restore its images; the client scans again when the folder changes.",
        )


class _DecodedImages:
    """Decoded images by digest, least recently used first, at most ``capacity``.

    Images of the current `CachedImages` are never evicted for one another: a set larger than the
    bound is visited in turns, and strict eviction would then lose each image just before its next
    use.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._arrays: OrderedDict[str, U8] = OrderedDict()
        self._current: set[str] = set()

    def start_view(self) -> None:
        """Let every kept image give way to the next `CachedImages`."""
        self._current.clear()

    def has(self, key: str) -> bool:
        """Return True if an image is kept."""
        return key in self._arrays

    def touch(self, key: str) -> bool:
        """Claim an image for the current `CachedImages`; return False if it is not kept."""
        if key not in self._arrays:
            return False
        self._arrays.move_to_end(key)
        self._current.add(key)
        return True

    def get(self, key: str) -> U8 | None:
        """Return an image if it is kept."""
        return self._arrays.get(key)

    def free_images(self) -> int:
        """Return how many more images the current `CachedImages` may keep."""
        return self._capacity - len(self._current)

    def put(self, key: str, array: U8) -> None:
        """Keep an image for the current `CachedImages`, in place of the oldest of earlier ones."""
        self._arrays[key] = array
        self._current.add(key)
        while len(self._arrays) > self._capacity:
            # Images of the current view were moved to the end, so the first is an older one.
            self._arrays.popitem(last=False)
