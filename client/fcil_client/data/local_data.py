"""Views of a client's images: learner and evaluator, kept apart.

Each view shows one side of the split and only the requested classes, so the learner never receives
a test image nor an image of an earlier task; those of earlier tasks that a method keeps as
exemplars have a view of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from fcil_adapters.contract import Preprocessing
from fcil_adapters.images.cache import CachedImages, ImageCache, ImageStore
from fcil_adapters.images.decoding import ImageSource
from fcil_adapters.images.sources import LooseSource
from fcil_client.data import unlabelled
from fcil_client.data.manifest import Image, ImageManifest
from fcil_client.data.split import Side
from fcil_protocol.payloads.schema import class_key


class LocalData:
    """One client's images, decoded for one backbone and kept across rounds."""

    def __init__(
        self,
        source: ImageSource,
        manifest: ImageManifest,
        preprocessing: Preprocessing,
        *,
        memory_bytes: int,
        threads: int = 0,
        cache: ImageCache | None = None,
    ) -> None:
        """Keep at most ``memory_bytes`` of decoded images; beyond that decode on access.

        Clients that share a ``cache`` share its bound and its threads.
        """
        self.manifest = manifest
        self.preprocessing = preprocessing
        self._threads = threads
        self._store = ImageStore(
            source, preprocessing, memory_bytes=memory_bytes, threads=threads, cache=cache
        )

    @property
    def faults(self) -> list[str]:
        """One sentence per image that vanished, changed or broke since the scan."""
        return self._store.faults

    def tell(self, alive: Callable[[], None]) -> None:
        """Set the callback for each decoded or requested image: a sign of life."""
        self._store.alive = alive

    def refresh(self, source: ImageSource, manifest: ImageManifest) -> None:
        """Continue with a newer scan; images with known content stay decoded."""
        if source is not self._store.source:
            self._store.source.close()
        self._store.source, self.manifest = source, manifest
        self._store.faults.clear()

    def close(self) -> None:
        """Release threads, files and memory."""
        self._store.close()

    def learner_images(
        self, class_ids: Mapping[str, int], least: int = 1, only: Collection[str] | None = None
    ) -> CachedImages:
        """Open the train images of exactly these classes.

        Args:
            class_ids: class name -> global id; names are matched as the federation does.
            least: classes with fewer images are left out, so that the method learns nothing about
                them.
            only: names of the images that this round may show; None: all.
        """
        images = self._images("train", class_ids)
        if only is not None:
            images = [(image, label) for image, label in images if image.entry.name in only]
        return self._store.view(_enough(images, least))

    def uncounted_images(
        self,
        class_ids: Mapping[str, int],
        counted: frozenset[str],
        least: int = 1,
        only: Collection[str] | None = None,
    ) -> CachedImages:
        """Open the train images whose content is not counted yet, each content once.

        One that breaks later is an error when it is read.

        Args:
            class_ids: class name -> global id.
            counted: digests (hex) of images that stay shut.
            least: classes with fewer uncounted images wait until there are enough.
            only: names of the images that this round may show; None: all.
        """
        first: dict[str, tuple[Image, int]] = {}
        for image, label in self._images("train", class_ids):
            if image.digest not in counted and (only is None or image.entry.name in only):
                first.setdefault(image.digest, (image, label))
        return self._store.view(_enough(list(first.values()), least), exact=True)

    def exemplar_images(
        self, class_ids: Mapping[str, int], digests: Sequence[str], least: int = 1
    ) -> CachedImages:
        """Open the train images with these contents, in this order, each once.

        Args:
            class_ids: names of past classes -> global ids; images of others stay shut.
            digests: SHA-256 (hex); images that no longer exist are left out.
            least: classes with fewer remaining images are left out as well.
        """
        found = {image.digest: (image, label) for image, label in self._images("train", class_ids)}
        wanted = [found[one] for one in dict.fromkeys(digests) if one in found]
        return self._store.view(_enough(wanted, least))

    def unlabelled_images(
        self, folder: Path, most: int, counted: frozenset[str], rng: np.random.Generator
    ) -> tuple[CachedImages, tuple[str, ...]]:
        """Open images of a folder without classes, under the label -1.

        Args:
            folder: the folder.
            most: the largest number of images; of more, some are drawn at random.
            counted: digests (hex) of images that stay shut, besides those that were ever in a
                class folder.
            rng: draws them.

        Returns:
            The images, and one sentence per file that cannot be used.

        Raises:
            DataError: there is no such image.
        """
        source = LooseSource(folder)
        store = self._store.beside(source)
        used = counted | self.manifest.ever
        offer = unlabelled.choose(source, most, used, rng, store.alive, self._threads)
        return store.view([(image, -1) for image in offer.images]), offer.faults

    def test_images(self, class_ids: Mapping[str, int]) -> CachedImages:
        """Open the test images of exactly these classes."""
        return self._store.view(self._images("test", class_ids))

    def _images(self, side: Side, class_ids: Mapping[str, int]) -> list[tuple[Image, int]]:
        ids = {class_key(name): number for name, number in class_ids.items()}
        keyed = ((image, class_key(image.entry.class_name)) for image in self.manifest.images)
        return [(i, ids[key]) for i, key in keyed if i.side == side and key in ids]


def _enough(wanted: Sequence[tuple[Image, int]], least: int) -> list[tuple[Image, int]]:
    """Return the images of classes with at least ``least`` of them."""
    counts = Counter(number for _, number in wanted)
    return [(image, number) for image, number in wanted if counts[number] >= least]
