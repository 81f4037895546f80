"""Event files for TensorBoard, written with tensorboardX."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from fcil_server.sinks.contract import Options, RunFacts


class TensorBoardOptions(Options):
    """The table ``[sinks] tensorboard``."""

    log_dir: str = Field(
        "", description="where a folder for each run is made; empty: in the run's own directory"
    )


class TensorBoardWriter:
    """One folder of event files; a new file each time that it is opened."""

    def __init__(self, folder: Path, run: RunFacts) -> None:
        # tensorboardX imports torch where it finds it, for tensors that no sink gets: a second
        # and 200 MB for nothing.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        from tensorboardX import SummaryWriter

        began = not folder.exists()
        self._events: Any = SummaryWriter(logdir=str(folder))
        if began:
            text = json.dumps(dict(run.params), indent=2)
            self._events.add_text("run", f"```\n{run.method}\n{text}\n```", 0, run.began)

    def scalars(self, values: Mapping[str, float], *, step: int, at: float) -> None:
        """Write each figure under its name."""
        for name, value in values.items():
            self._events.add_scalar(name, value, step, walltime=at)

    def flush(self) -> None:
        """Write what is in memory."""
        self._events.flush()

    def finish(self, files: Sequence[Path]) -> None:
        """Nothing to add: event files have no end."""

    def close(self) -> None:
        """Close the file."""
        self._events.close()


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
