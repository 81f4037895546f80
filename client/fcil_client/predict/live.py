"""``predict --watch``: one warm model, a camera's folder, and a line for each image."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fcil_client.predict.folder_watch import FolderEvents, FolderWatch
from fcil_client.predict.images import InputImage, batches
from fcil_client.predict.predict import Current, Means, PredictionRequest, Ready, answers
from fcil_protocol.errors import FcilError

Show = Callable[[dict[str, Any]], None]


class LivePredictions:
    """Names new images in a folder.

    Args:
        folder: the camera's.
        ready: the model.
        current: source of newer models; None: the model is a file and stays.
        means, wanted: as for `predict`.
        notify: shows messages.

    Attributes:
        ready: the current model.
    """

    def __init__(
        self,
        folder: Path,
        ready: Ready,
        current: Current | None,
        means: Means,
        wanted: PredictionRequest,
        notify: Callable[[str], None],
    ) -> None:
        self.ready = ready
        self._folder = folder
        self._current = current
        self._means = means
        self._wanted = wanted
        self._notify = notify
        self._turn = asyncio.Lock()  # one computation at a time

    async def run(self, show: Show) -> None:
        """Watch until Ctrl-C or a signal to end.

        Raises:
            FcilError: the folder cannot be watched.
        """
        loop = asyncio.get_running_loop()
        watch = FolderWatch(
            self._folder, lambda paths, last: self._take(paths, last, show), self._notify
        )
        folder = asyncio.ensure_future(watch.run(lambda: self._notify(f"watching {self._folder}")))
        model = asyncio.ensure_future(self._follow_model())
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, folder.cancel)
        try:
            await folder
        except asyncio.CancelledError:
            self._notify("stopped")
        finally:
            model.cancel()
            await asyncio.wait({model})

    async def _take(
        self, paths: list[Path], last: Callable[[Path], bool], show: Show
    ) -> list[Path]:
        """Name images; return those that cannot be read yet."""
        later = []
        size = self._means.batch
        for start in range(0, len(paths), size):  # shown batch by batch; Ctrl-C waits for one batch
            some = paths[start : start + size]
            async with self._turn:
                rows = await asyncio.to_thread(self._rows, some)
            for path, row in zip(some, rows, strict=True):
                if "error" in row and not last(path):
                    later.append(path)
                else:
                    show(row)
        return later

    def _rows(self, paths: list[Path]) -> list[dict[str, Any]]:
        pictures = [InputImage(str(path)) for path in paths]
        means = self._means
        decoded = batches(
            pictures, self.ready.preprocessing, size=means.batch, threads=means.threads
        )
        return list(answers(self.ready, decoded, self._wanted))

    async def _follow_model(self) -> None:
        """Load a newer model as soon as the client has one."""
        current = self._current
        if current is None:
            return
        try:
            async with FolderEvents.on(current.directory, recursive=False) as events:
                while current.exists():
                    if current.is_older():
                        await self._renew(current)
                    await events.wait(None)
        except FcilError as error:
            self._notify(f"newer models are not noticed: {error}")

    async def _renew(self, current: Current) -> None:
        async with self._turn:
            try:
                self.ready = await asyncio.to_thread(current.open)
            except Exception as error:  # also of torch, such as too little memory of a GPU
                self._notify(f"the newer model is not used; the previous one stays: {error}")
            else:
                self._notify(f"newer {self.ready.line}")
