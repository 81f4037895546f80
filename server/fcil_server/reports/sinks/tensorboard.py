"""Event files for TensorBoard, written with tensorboardX."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from fcil_server.reports.sinks.contract import Options, RunFacts


class TensorBoardOptions(Options):
    """The table ``[sinks] tensorboard``."""

    log_dir: str = Field(
        "", description="folder in which each run gets a folder; empty: the run's own directory"
    )


class TensorBoardWriter:
    """One folder of event files; a new file each time that it is opened.

    Events are written immediately: tensorboardX's ``SummaryWriter`` uses a thread, whose ``flush``
    returns while the last events wait, and which a full disk ends silently.
    """

    def __init__(self, folder: Path, run: RunFacts) -> None:
        # tensorboardX imports torch if it is installed, for tensors that no sink gets: a second and
        # 200 MB for nothing.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event

        self._summary: Any = summary
        self._event: Any = Event
        folder.mkdir(parents=True, exist_ok=True)
        began = not any(file.stat().st_size for file in folder.iterdir())
        # Its default name has seconds: two processes within one second would write the same file.
        self._file: Any = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        if began:
            text = f"```\n{run.method}\n{json.dumps(dict(run.params), indent=2)}\n```"
            self._write(summary.text("run", text), 0, run.began)
            self.flush()  # before a kill: a folder that holds anything has it

    def _write(self, what: Any, step: int, at: float) -> None:
        self._file.write_event(self._event(summary=what, step=step, wall_time=at))

    def scalars(self, values: Mapping[str, float], *, step: int, at: float) -> None:
        """Write each metric under its name."""
        for name, value in values.items():
            self._write(self._summary.scalar(name, value), step, at)

    def flush(self) -> None:
        """Write buffered events to disk."""
        self._file.flush()

    def finish(self, files: Sequence[Path]) -> None:
        """Do nothing: event files have no end."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """The sink ``tensorboard``."""

    name = "tensorboard"
    packages = ("tensorboardX",)
    extra = "tensorboard"
    Options = TensorBoardOptions

    def open(self, run: RunFacts, options: TensorBoardOptions) -> TensorBoardWriter:
        """Open a run's folder."""
        base = Path(options.log_dir).expanduser() if options.log_dir else run.directory
        folder = base / (run.run if options.log_dir else "tensorboard")
        return TensorBoardWriter(folder, run)


SINK = TensorBoard()
