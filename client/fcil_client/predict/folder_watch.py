"""Watch of a folder: name each new image once, as soon as it is complete.

Events of the file system report a change; a file that is being written is checked until it is at
rest. At intervals all files are checked, since events can be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from watchfiles import Change, awatch

from fcil_adapters.images.folder_walk import MAX_DEPTH, depth_below
from fcil_client.data.file_names import is_about_a_name, is_text
from fcil_client.predict.images import is_image, walk
from fcil_protocol.errors import DataError

REST_S = 0.2  # without a change: a file at rest for this long counts as complete
SLOW_WRITER_S = 5.0  # a file at rest that cannot be decoded may have a slow writer: wait this long
# Events get lost: the system drops them if too many arrive at once, and rarely otherwise.
SWEEP_S = 5.0  # so all files are checked at intervals
SWEEP_SHARE = 200  # longest share of time in sweeps: 1 / this, for folders where a sweep takes long
STEP_MS = 50
DEBOUNCE_MS = 100

Mark = tuple[int, int]  # size and time of the last change, ns


@dataclass
class Settling:
    """Decides which files to read, and when (no IO).

    Attributes:
        seen: mark of each file that is done, or existed at the start.
        hot: files that changed -> (mark, time of its first sight, s).
    """

    seen: dict[Path, Mark] = field(default_factory=dict)
    hot: dict[Path, tuple[Mark, float]] = field(default_factory=dict)

    def changed(self, path: Path, mark: Mark | None, now: float) -> None:
        """Record a file's current mark; None: it is gone."""
        if mark is None:
            self.hot.pop(path, None)
            self.seen.pop(path, None)
        elif mark == self.seen.get(path):
            self.hot.pop(path, None)
        elif path not in self.hot or self.hot[path][0] != mark:
            self.hot[path] = (mark, now)

    def settled_files(self, now: float) -> list[Path]:
        """Return files that have been at rest for `REST_S`, in a stable order.

        An empty one may have a slow writer.
        """
        hot = self.hot.items()
        return sorted(p for p, (mark, since) in hot if now - since >= _rest_s(mark))

    def last_try(self, path: Path, now: float) -> bool:
        """Return True if a file that cannot be decoded has been at rest for `SLOW_WRITER_S`."""
        return now - self.hot[path][1] >= SLOW_WRITER_S

    def done(self, path: Path) -> None:
        """Ignore a file until it changes."""
        self.seen[path], _ = self.hot.pop(path)

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until the next check; None: wait for an event."""
        if not self.hot:
            return None
        left = [since + _rest_s(mark) - now for mark, since in self.hot.values()]
        return min(one if one > 0 else REST_S for one in left)


def _rest_s(mark: Mark) -> float:
    return REST_S if mark[0] else SLOW_WRITER_S


Take = Callable[[list[Path], Callable[[Path], bool]], Awaitable[list[Path]]]


class FolderWatch:
    """Watches one folder and everything below it.

    Args:
        folder: it may be removed and come back.
        take: names images at rest; returns those that it could not read yet. Its second argument
            tells for each file if this is the last try.
        notify: receives a sentence about each change of the folder itself.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        folder: Path,
        take: Take,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder.absolute()
        self._take = take
        self._notify = notify
        self._clock = clock
        self._files = Settling()
        self._sweep_at = 0.0

    async def run(self, ready: Callable[[], None]) -> None:
        """Watch until cancelled.

        Args:
            ready: called once events are received: every later image is named.

        Raises:
            DataError: the system cannot watch the folder.
        """
        for path in walk(self._folder):
            if (mark := _mark(path)) is not None:
                self._files.seen[path] = mark
        while True:
            async with FolderEvents.on(self._folder) as events:
                self._look_through()  # images that arrived before the watch began
                ready()
                await self._follow(events)
            self._notify(f"{self._folder} is gone; waiting for it.")
            self._files = Settling()
            await _back(self._folder)
            self._notify(f"{self._folder} is back.")

    async def _follow(self, events: FolderEvents) -> None:
        """Process events until the folder is gone."""
        while self._folder.is_dir():
            await self._serve()
            now = self._clock()
            until_sweep = max(0.0, self._sweep_at - now)
            wait_s = self._files.wait_s(now)
            changed = await events.wait(until_sweep if wait_s is None else min(wait_s, until_sweep))
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
        if _hidden(path, self._folder):
            return
        if path.is_dir():  # a moved folder brings no events for its content
            if path.is_symlink() and path != self._folder:
                return
            for inside in walk(path):
                self._files.changed(inside, _mark(inside), self._clock())
        elif is_image(path.name):
            self._files.changed(path, _mark(path), self._clock())

    async def _serve(self) -> None:
        ripe = self._files.settled_files(self._clock())
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
    """Return once the folder exists again."""
    while (above := _nearest(folder)) != folder:
        async with FolderEvents.on(above, recursive=False) as events:
            if _nearest(folder) == above:  # changes before the watch began bring no event
                await events.wait(None)


def _nearest(folder: Path) -> Path:
    """Return a folder, or the nearest existing one above it."""
    return next(place for place in (folder, *folder.parents) if place.is_dir())


class FolderEvents:
    """Listens for changes in a folder, also between calls of `wait`."""

    def __init__(self, folder: Path, *, recursive: bool) -> None:
        self._folder = folder
        self._recursive = recursive
        self._changes = self._begin()
        self._coming: asyncio.Task[set[tuple[Change, str]]] = self._ask()

    @classmethod
    @contextlib.asynccontextmanager
    async def on(cls, folder: Path, *, recursive: bool = True) -> AsyncIterator[FolderEvents]:
        """Listen from the moment of entry."""
        events = cls(folder, recursive=recursive)
        await asyncio.sleep(0)  # start the request before the first wait
        try:
            yield events
        finally:
            events._coming.cancel()
            await asyncio.wait({events._coming})
            await events._changes.aclose()

    def _begin(self) -> AsyncGenerator[set[tuple[Change, str]], None]:
        places = [self._folder]
        if self._recursive:  # the watcher itself would follow link cycles
            places = sorted({self._folder, *map(Path, self._below())})
        return awatch(
            *places, watch_filter=None, debounce=DEBOUNCE_MS, step=STEP_MS, recursive=False
        )

    def _below(self) -> Iterator[str]:
        for place, folders, _ in os.walk(self._folder):
            if depth_below(self._folder, place) >= MAX_DEPTH:
                folders.clear()  # as `images.walk`
            if is_text(place):
                yield place

    def _ask(self) -> asyncio.Task[set[tuple[Change, str]]]:
        async def ask() -> set[tuple[Change, str]]:
            return await anext(self._changes)

        return asyncio.get_running_loop().create_task(ask())

    async def wait(self, timeout_s: float | None) -> set[Path]:
        """Return changed paths; none if ``timeout_s`` is over without any, or the folder is gone.

        The folder itself is returned if the system cannot name the paths: all may have changed.

        Raises:
            DataError: the system cannot report changes.
        """
        done, _ = await asyncio.wait({self._coming}, timeout=timeout_s)
        if not done:
            return set()
        try:
            batch = self._coming.result()
        # Too many watches, or a name that is not valid text.
        except (OSError, RuntimeError, StopAsyncIteration, ExceptionGroup) as error:
            if not self._folder.is_dir():
                return set()
            about_a_name = isinstance(error, ExceptionGroup) and error.subgroup(is_about_a_name)
            if about_a_name or isinstance(error, FileNotFoundError):  # a folder below was removed
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
        """Listen to all folders that exist now."""
        await self._changes.aclose()
        self._changes = self._begin()
        self._coming = self._ask()
        await asyncio.sleep(0)  # start the request before the next check
