"""Name the images that appear in a folder, each once, as soon as it is whole.

Events of the file system say that something happened; a file that is being written is looked at
until it is at rest. Now and then everything is looked at, since events can be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from watchfiles import Change, awatch

from fcil_client.data.file_names import is_about_a_name, is_text
from fcil_client.predict.images import is_image, walk
from fcil_protocol.errors import DataError

REST_S = 0.2  # without a change: a file that was not touched for so long is taken to be whole
PATIENCE_S = 5.0  # a file at rest that cannot be decoded may have a slow writer: so long
# Events get lost: the system drops them when too many come at once, and rarely without that.
SWEEP_S = 5.0  # so all files are looked at now and then
SWEEP_SHARE = 200  # and longer than that apart where it takes so long that it would be felt
STEP_MS = 50
DEBOUNCE_MS = 100

Mark = tuple[int, int]  # size and time of the last change, ns


@dataclass
class Settling:
    """Decides which files are to be looked at, and when (no IO).

    Attributes:
        seen: the mark with which each file was done, or was there at the start.
        hot: files that changed -> (mark, since when it has that mark, s).
    """

    seen: dict[Path, Mark] = field(default_factory=dict)
    hot: dict[Path, tuple[Mark, float]] = field(default_factory=dict)

    def changed(self, path: Path, mark: Mark | None, now: float) -> None:
        """Take note of a file as it is now; None: it is gone."""
        if mark is None:
            self.hot.pop(path, None)
            self.seen.pop(path, None)
        elif mark == self.seen.get(path):
            self.hot.pop(path, None)
        elif path not in self.hot or self.hot[path][0] != mark:
            self.hot[path] = (mark, now)

    def ripe(self, now: float) -> list[Path]:
        """Return files that have been at rest for `REST_S`, in a stable order."""
        hot = self.hot.items()
        return sorted(p for p, (mark, since) in hot if mark[0] and now - since >= REST_S)

    def last_try(self, path: Path, now: float) -> bool:
        """Say whether a file that cannot be decoded has been at rest for too long to wait on."""
        return now - self.hot[path][1] >= PATIENCE_S

    def done(self, path: Path) -> None:
        """Leave a file alone until it changes."""
        self.seen[path], _ = self.hot.pop(path)

    def wait_s(self, now: float) -> float | None:
        """Return when to look again; None: at the next event."""
        since = [s for mark, s in self.hot.values() if mark[0]]
        if not since:
            return None
        left = [s + REST_S - now for s in since]
        return min(one if one > 0 else REST_S for one in left)


Take = Callable[[list[Path], Callable[[Path], bool]], Awaitable[list[Path]]]


class FolderWatch:
    """Watches one folder and everything below it.

    Args:
        folder: it may go, and come back.
        take: names images at rest; returns those that it could not read yet. It is told of each
            file whether this is the last try.
        say: told in words what happens to the folder.
        clock: seconds, never set back.
    """

    def __init__(
        self,
        folder: Path,
        take: Take,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder.absolute()
        self._take = take
        self._say = say
        self._clock = clock
        self._files = Settling()
        self._sweep_at = 0.0

    async def run(self, ready: Callable[[], None]) -> None:
        """Watch until cancelled.

        Args:
            ready: called once events are heard: what appears from now on is named.

        Raises:
            DataError: the system cannot watch the folder.
        """
        for path in walk(self._folder):
            if (mark := _mark(path)) is not None:
                self._files.seen[path] = mark
        while True:
            async with Ears.on(self._folder) as ears:
                self._look_through()  # what came before anybody listened
                ready()
                await self._follow(ears)
            self._say(f"{self._folder} is gone; waiting for it.")
            self._files = Settling()
            await _back(self._folder)
            self._say(f"{self._folder} is there again.")

    async def _follow(self, ears: Ears) -> None:
        """Take what comes until the folder is gone."""
        while self._folder.is_dir():
            await self._serve()
            now = self._clock()
            until_sweep = max(0.0, self._sweep_at - now)
            wait_s = self._files.wait_s(now)
            changed = await ears.hear(until_sweep if wait_s is None else min(wait_s, until_sweep))
            for path in changed or [*self._files.hot]:
                self._note(path)
            if self._clock() >= self._sweep_at:
                self._look_through()

    def _look_through(self) -> None:
        began = self._clock()
        for path in walk(self._folder):
            self._note(path)
        took = self._clock() - began
        self._sweep_at = began + took + max(SWEEP_S, SWEEP_SHARE * took)

    def _note(self, path: Path) -> None:
        if path.is_dir():  # moved here whole: of what is in it there was no event
            for inside in walk(path):
                self._files.changed(inside, _mark(inside), self._clock())
        elif is_image(path.name) and not _hidden(path, self._folder):
            self._files.changed(path, _mark(path), self._clock())

    async def _serve(self) -> None:
        ripe = self._files.ripe(self._clock())
        if not ripe:
            return
        now = self._clock()
        last = {path: self._files.last_try(path, now) for path in ripe}
        again = set(await self._take(ripe, last.__getitem__))
        for path in ripe:
            if path not in again:
                self._files.done(path)


def _mark(path: Path) -> Mark | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _hidden(path: Path, folder: Path) -> bool:
    inside = path.is_relative_to(folder)
    return not inside or any(part.startswith(".") for part in path.relative_to(folder).parts)


async def _back(folder: Path) -> None:
    """Return when a folder is there again."""
    while (above := _nearest(folder)) != folder:
        async with Ears.on(above, recursive=False) as ears:
            if _nearest(folder) == above:  # what came before anybody listened is not heard
                await ears.hear(None)


def _nearest(folder: Path) -> Path:
    """Return a folder, or the one above it that is there."""
    return next(place for place in (folder, *folder.parents) if place.is_dir())


class Ears:
    """Hears what changes in a folder, also while nobody asks."""

    def __init__(self, folder: Path, *, recursive: bool) -> None:
        self._folder = folder
        self._recursive = recursive
        self._changes = self._begin()
        self._coming: asyncio.Task[set[tuple[Change, str]]] = self._ask()

    @classmethod
    @contextlib.asynccontextmanager
    async def on(cls, folder: Path, *, recursive: bool = True) -> AsyncIterator[Ears]:
        """Listen from the moment on that this is entered."""
        ears = cls(folder, recursive=recursive)
        await asyncio.sleep(0)  # the system is asked for events before the first wait
        try:
            yield ears
        finally:
            ears._coming.cancel()
            await asyncio.wait({ears._coming})
            await ears._changes.aclose()

    def _begin(self) -> AsyncGenerator[set[tuple[Change, str]], None]:
        places = [self._folder]
        if self._recursive:  # the watcher itself would follow links, and round in circles
            below = (place for place, _, _ in os.walk(self._folder) if is_text(place))
            places = sorted({self._folder, *map(Path, below)})
        return awatch(
            *places, watch_filter=None, debounce=DEBOUNCE_MS, step=STEP_MS, recursive=False
        )

    def _ask(self) -> asyncio.Task[set[tuple[Change, str]]]:
        async def ask() -> set[tuple[Change, str]]:
            return await anext(self._changes)

        return asyncio.get_running_loop().create_task(ask())

    async def hear(self, timeout_s: float | None) -> set[Path]:
        """Return what has changed; nothing if nothing has for so long, or the folder is gone.

        The folder itself is returned where the system cannot say what: everything may have.

        Raises:
            DataError: the system cannot tell.
        """
        done, _ = await asyncio.wait({self._coming}, timeout=timeout_s)
        if not done:
            return set()
        try:
            batch = self._coming.result()
        # It watches too much already, or there is a name that is no text.
        except (OSError, RuntimeError, StopAsyncIteration, ExceptionGroup) as error:
            if not self._folder.is_dir():
                return set()
            about_a_name = isinstance(error, ExceptionGroup) and error.subgroup(is_about_a_name)
            if about_a_name or isinstance(error, FileNotFoundError):  # a folder below went
                await self._anew()
                return {self._folder}
            raise DataError(
                f"{self._folder} cannot be watched ({error}).",
                action="See how many files may be watched: sysctl fs.inotify.max_user_watches.",
            ) from error
        paths = {Path(name) for _, name in batch}
        if self._recursive and any(path.is_dir() for path in paths):
            await self._anew()
        else:
            self._coming = self._ask()
        return paths

    async def _anew(self) -> None:
        """Listen to all folders that are there now."""
        await self._changes.aclose()
        self._changes = self._begin()
        self._coming = self._ask()
        await asyncio.sleep(0)  # the system is asked for events before anybody looks
