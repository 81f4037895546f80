"""Long work next to the daemon's loop: each job is a task that ends in an event."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from watchfiles import Change, awatch

from fcil_adapters.contract import BackboneInfo
from fcil_adapters.images.folder_walk import FolderWalk
from fcil_adapters.images.shard_source import expanded
from fcil_client.data.file_names import is_about_a_name, is_text
from fcil_client.data.inventory import Inventory
from fcil_client.link.handshake import Terms
from fcil_client.notes import Notes
from fcil_client.rounds.class_ids import Learned
from fcil_client.rounds.round_work import RoundWork
from fcil_client.session import events
from fcil_protocol.errors import (
    BackboneMismatch,
    ConfigError,
    DataError,
    FcilError,
    InternalError,
    StaleUpdate,
    UsageError,
    WorkerError,
)
from fcil_protocol.messages.messages import RoundOpen, UseModel
from fcil_protocol.payloads.builtin import LATE
from fcil_protocol.trust.keys import PublicKeys

LOG = logging.getLogger("fcil_client")
STILL_S = 10.0  # between two notes that a backbone is still being loaded
# A folder some of whose events were lost is compared with its state after so long, or without
# events for as long.
QUIET_S = 5.0


def defect(error: Exception) -> InternalError:
    """Return an unexpected exception as an error with a sentence; log its traceback."""
    LOG.error("an unexpected failure", exc_info=error)
    internal = InternalError(
        f"{type(error).__name__}: {error}.", action=InternalError.default_action()
    )
    internal.__cause__ = error
    return internal


async def changes(data: Path, notes: Notes) -> AsyncIterator[set[str]]:
    """Yield the paths that changed in a folder; an empty set if they are unknown.

    It ends with a note when the folder cannot be watched (any more).
    """
    places = await asyncio.to_thread(_folders, data)
    found = _watch(places)
    seen: int | None = None  # state of the places at the last scan after lost events
    lost = False  # events were lost since
    due = 0.0  # when the comparison is, if they never pause
    while True:
        try:
            paths = {path for _, path in await anext(found)}
        except StopAsyncIteration:
            return
        except ExceptionGroup as group:
            if not group.subgroup(is_about_a_name):
                raise
            found = _watch(places)
            if not lost:
                lost, due = True, time.monotonic() + QUIET_S
            if time.monotonic() < due:
                continue
            paths = set()
        # Removed, or the system's limit of watches is reached.
        except (OSError, RuntimeError) as error:
            before, places = places, await asyncio.to_thread(_folders, data)
            if places == before:
                notes(
                    "warning",
                    f"the folder cannot be watched ({error}); added and removed images are "
                    "noticed when the client is restarted",
                )
                return
            found = _watch(places)  # a folder was removed before it was watched
            yield set()
            continue
        if paths:
            yield paths
            again = _about_folders(paths, places)
        else:
            # A scan opens folders, which ends the events of one whose name is no text. Only a
            # change asks for a scan, or each would cause the next.
            again = lost and await asyncio.to_thread(_state, places) != seen
            lost = False
        if again:
            await found.aclose()
            places = await asyncio.to_thread(_folders, data)
            seen = await asyncio.to_thread(_state, places)
            found = _watch(places)
            yield set()  # files that were added to a new folder before it was watched


def _folders(data: Path) -> list[str]:
    """Return all folders of images; the watcher itself would follow link cycles endlessly."""
    names = ("/".join(parts) for parts, _ in FolderWalk(data))
    files = [path for path in expanded(data) if path.exists()] or [data]
    return sorted({*map(str, files), *(str(data / name) for name in names if is_text(name))})


def _about_folders(paths: set[str], places: list[str]) -> bool:
    """Return True if a folder was added or removed; a recreated one is not watched yet."""
    return not paths.isdisjoint(places) or any(Path(path).is_dir() for path in paths)


def _state(places: list[str]) -> int:
    """Return a fingerprint of folders and files; it opens no folder but the given ones."""
    return hash(tuple(row for place in places for row in _rows(Path(place))))


def _rows(place: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the name and times of a file, or of each entry of a folder, in a fixed order."""
    try:
        paths = sorted(place.iterdir())
    except OSError:  # a file, or gone
        paths = [place]
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            yield str(path), 0, 0
        else:
            yield str(path), status.st_mtime_ns, status.st_ctime_ns


def _watch(places: list[str]) -> AsyncGenerator[set[tuple[Change, str]], None]:
    """Return the events of places, and an empty set whenever there are none for a while."""
    # Without a filter: its own one is silent below a folder called node_modules, .venv or .git.
    return awatch(
        *places, watch_filter=None, debounce=2000, step=500, recursive=False,
        rust_timeout=round(1000 * QUIET_S), yield_on_timeout=True,
    )  # fmt: skip


class Jobs:
    """Starts the worker's jobs and feeds their results to the session.

    Args:
        feed: takes an event.
        fail: ends the daemon with an error.
        progress: receives the progress of a round's work.

    Attributes:
        inventory: result of the last scan; None before the first one.
        learned: classes with images that arrived after the class was learned.
    """

    def __init__(
        self,
        work: RoundWork,
        notes: Notes,
        *,
        feed: Callable[[events.Event], None],
        fail: Callable[[FcilError], None],
        progress: Callable[[int, int], None],
    ) -> None:
        self.inventory: Inventory | None = None
        self.learned = Learned()
        self._work = work
        self._notes = notes
        self._feed = feed
        self._fail = fail
        self._progress = progress
        self._run = ""  # whose backbone was requested last
        self._loading: asyncio.Task[None] | None = None  # of the backbone requested last
        self._backbone: BackboneInfo | None = None  # that one
        self._loaded = False  # a backbone was loaded before
        self._round: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task; an error that escapes it ends the daemon."""
        task = asyncio.get_running_loop().create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # it has not begun if `stop` came first
        return task

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except FcilError as error:
            self._fail(error)
        except Exception as error:
            self._fail(defect(error))

    async def stop(self) -> None:
        """Cancel all tasks and end the worker."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._work.close()

    # --- backbone and folder ----------------------------------------------------------------

    def load(self, terms: Terms) -> None:
        """Load the backbone that the server names; a load under way for its run is kept.

        A client that reconnects meanwhile requests it again; the end of the load is news for the
        new connection as for the old one.
        """
        wanted, same = (terms.run, terms.backbone), (self._run, self._backbone)
        if self._loading is not None and not self._loading.done() and wanted == same:
            return
        self._run, self._backbone = wanted
        self._loading = self.spawn(self._load(terms))

    async def _load(self, terms: Terms) -> None:
        if terms.method.needs_backbone:
            self._notes("info", f"loading {terms.backbone.name}")
        slow = asyncio.ensure_future(self._say_while_loading(terms.backbone.name))
        try:
            await self._work.load(terms)
        except FcilError as error:
            mine = terms.run == self._run  # and not of an earlier run
            if mine and not self._passes(error):
                raise
            self._notes.once("backbone", "error", f"the backbone cannot be loaded: {error}")
            self._feed(events.BackboneFailed(terms.run))
        else:
            self._loaded = True
            self._notes.over("backbone")
            self._notes("info", f"ready on {self._work.device}")
            self._feed(events.BackboneReady(terms.run))
        finally:
            slow.cancel()

    async def _say_while_loading(self, name: str) -> None:
        """Say at intervals that a backbone is still being loaded."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(STILL_S)
            waited = time.monotonic() - began
            self._notes("info", f"still loading {name}: {waited:.0f} s")

    def _passes(self, error: FcilError) -> bool:
        """Return True to retry: without any success before, the request itself is wrong."""
        if isinstance(error, BackboneMismatch | ConfigError | UsageError):
            return False
        return self._loaded or isinstance(error, WorkerError)

    def scan(self) -> None:
        """Scan the data folder."""
        self.spawn(self._scan())

    async def _scan(self) -> None:
        try:
            inventory = await self._work.scan()
        except DataError as error:
            if self.inventory is None:
                raise  # the folder never had the layout of images
            self.inventory = Inventory()
            self._unscanned(error)
        except FcilError as error:
            self._unscanned(error)
        else:
            for text in inventory.changes:
                self._notes("info", text)
            said = set() if self.inventory is None else {*self.inventory.faults}
            for text in inventory.faults:
                if text not in said:
                    self._notes("warning", text)
            self.inventory = inventory
            self._notes.over("scan")
            self._feed(events.Scanned())

    def _unscanned(self, error: FcilError) -> None:
        self._notes.once("scan", "error", f"the folder cannot be scanned: {error}")
        self._feed(events.ScanFailed())

    async def watch(self) -> None:
        """Feed an event for each change of the data folder."""
        async for _ in changes(self._work.data, self._notes):
            self._feed(events.FolderChanged())

    # --- a round ----------------------------------------------------------------------------

    def train(self, order: RoundOpen, terms: Terms, server: PublicKeys) -> None:
        """Do the work of a round."""
        self._round = self.spawn(self._train(order, terms, server))

    def cancel_round(self) -> None:
        """Stop the work of the current round; a worker that is busy with it ends."""
        if self._round is not None:
            self._round.cancel()
            self._round = None

    async def _train(self, order: RoundOpen, terms: Terms, server: PublicKeys) -> None:
        key = order.key
        started = time.monotonic()
        try:
            digest = await self._work.run(order, terms, server, self._progress)
        except StaleUpdate as error:
            self._notes("warning", error.message)
            self._feed(events.PartsLost(key, error.message))
        except FcilError as error:
            self._feed(events.WorkFailed(key, error.code, str(error)))
        except Exception as error:
            internal = defect(error)
            self._feed(events.WorkFailed(key, internal.code, str(internal)))
        else:
            for text in self._work.faults:
                self._notes("warning", text)
            self._notes("info", f"{key} done in {time.monotonic() - started:.1f} s")
            exchange, counts_late = terms.exchange(order.kind), terms.exchange(LATE) is not None
            if not counts_late and (exchange is None or not exchange.unlabelled):
                self._tell_learned(order)
            self._feed(events.WorkDone(key, digest))

    # --- a model outside of rounds ----------------------------------------------------------

    def keep_model(self, model: UseModel, terms: Terms, server: PublicKeys) -> None:
        """Make a fetched model the current one."""
        self.spawn(self._keep_model(model, terms, server))

    async def _keep_model(self, model: UseModel, terms: Terms, server: PublicKeys) -> None:
        try:
            text = await asyncio.to_thread(self._work.keep_model, model, terms, server)
        except FcilError as error:
            self._notes("warning", f"the model of state {model.base} cannot be kept: {error}")
            self._feed(events.ModelFailed(model))
        else:
            self._notes("info", text)
            self._feed(events.ModelKept(model))

    def _tell_learned(self, order: RoundOpen) -> None:
        held = self.inventory.train if self.inventory is not None else {}
        late = self.learned.unreported_names(order, self._work.names, held)
        if late:
            names = ", ".join(late[:8]) + (f" and {len(late) - 8} more" if len(late) > 8 else "")
            text = "learned in an earlier task; new images of it serve for tests, not for training"
            self._notes("info", f"{names}: {text}")
