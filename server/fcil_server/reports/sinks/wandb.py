"""A run of the federation as a run of Weights & Biases, in a folder or on its server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fcil_protocol.errors import ConfigError
from fcil_server.reports.sinks.contract import Options, RunFacts

STEP = "step"  # the axis of all curves; W&B's own step counts what is sent, and never goes back
UPLOAD_S = 30.0  # of a flush; after a failure we retry ourselves
# No reports to its makers about use and errors; its greetings would hide the last line of an error.
ENVIRONMENT = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
# A run is its numbers: no output, code, packages, repository, hardware or name of this machine.
SETTINGS: dict[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "host": "",
    "finish_timeout": UPLOAD_S,
    "finish_timeout_raises": True,
    "init_timeout": UPLOAD_S,
    "login_timeout": UPLOAD_S,
    "program": "",
    "save_code": False,
    "silent": True,
    "symlink": False,
    "use_dot_wandb": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class WandbOptions(Options):
    """The table ``[sinks] wandb``."""

    mode: Literal["offline", "online"] = Field(
        "offline",
        description="offline: a folder in the run's directory, for `wandb sync`, and no network; "
        "online: sent after each round",
    )
    project: str = Field(
        "fcil", min_length=1, description="the run belongs to; created if it does not exist"
    )


class WandbWriter:
    """One run of W&B, whose id is the run's.

    A kill loses what wandb has not written yet, so each flush begins and finishes a session.
    Online, a session resumes the run. Offline it cannot: each folder has the whole run, and takes
    the place of the one before.
    """

    def __init__(self, run: RunFacts, options: WandbOptions) -> None:
        forced = os.environ.get("WANDB_MODE", options.mode)
        if options.mode == "online" and forced != "online":
            raise ConfigError(
                f"sinks.wandb.mode is online, but WANDB_MODE is {forced}.",
                action="Remove one of the two.",
            )
        for name, value in ENVIRONMENT.items():
            os.environ[name] = value
        os.environ.setdefault("WANDB_CACHE_DIR", str(run.directory / "wandb" / "cache"))
        import wandb

        self._wandb: Any = wandb
        self._run = run
        self._options = options
        self._rows: list[dict[str, float]] = []
        self.from_start = options.mode == "offline"

    def scalars(self, values: Mapping[str, float], *, step: int, at: float) -> None:
        """Keep metrics until they are flushed."""
        self._rows.append({**values, STEP: step, "_timestamp": at})

    def flush(self) -> None:
        """Write the kept metrics, and wait until they are on the disk or the server."""
        run = self._wandb.init(
            id=self._run.run,
            resume=None if self.from_start else "allow",
            name=f"{self._run.method} {self._run.run}",
            project=self._options.project,
            config=dict(self._run.params),
            mode=self._options.mode,
            dir=str(self._run.directory),
            settings=self._wandb.Settings(**SETTINGS),
        )
        run.define_metric("*", step_metric=STEP)
        for row in self._rows:
            run.log(row)
        run.finish()
        self._wandb.teardown()  # its process may still hold the run's id, and need not wait with us
        self._keep_only(Path(run.dir).parent)
        if not self.from_start:
            self._rows.clear()

    def _keep_only(self, folder: Path) -> None:
        """Remove the folders of earlier sessions."""
        for other in folder.parent.glob("*run-*"):
            if other.name != folder.name:
                shutil.rmtree(other)

    def finish(self, files: Sequence[Path]) -> None:
        """Do nothing: each session ends complete."""

    def close(self) -> None:
        """Nothing is open between sessions."""


class Wandb:
    """The sink ``wandb``."""

    name = "wandb"
    packages = ("wandb",)
    extra = "wandb"
    Options = WandbOptions

    def open(self, run: RunFacts, options: WandbOptions) -> WandbWriter:
        """Begin or resume the W&B run of this run."""
        return WandbWriter(run, options)


SINK = Wandb()
