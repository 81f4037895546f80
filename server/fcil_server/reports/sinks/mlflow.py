"""A run of the federation as a run of MLflow, on a tracking server or in a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from fcil_server.reports.sinks.contract import Options, RunFacts

TAG = "fcil.run"  # tag that identifies a run
MOST_METRICS = 1000  # limit of MLflow per request
MOST_PARAMS = 100
# No telemetry; and after a failed request we retry ourselves, instead of blocking for minutes.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}


class MlflowOptions(Options):
    """The table ``[sinks] mlflow``."""

    tracking_uri: str = Field(
        "",
        description="address of the tracking server, or of a folder; empty: MLFLOW_TRACKING_URI",
    )
    experiment: str = Field(
        "fcil", min_length=1, description="the run belongs to; created if it does not exist"
    )
    files: bool = Field(
        False,
        description="upload the run's reports at its end; they contain names of clients and "
        "classes",
    )


class MlflowWriter:
    """One run of MLflow, found by its tag or begun."""

    def __init__(self, run: RunFacts, options: MlflowOptions) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._options = options
        self._client: Any = MlflowClient(tracking_uri=options.tracking_uri or None)
        self._metrics: list[Any] = []
        where = self._experiment()
        self._id = self._found(where, run) or self._begun(where, run)
        self._log_params(run)

    def _experiment(self) -> str:
        """Return the experiment's id; create it if it does not exist."""
        name = self._options.experiment
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _found(self, experiment: str, run: RunFacts) -> str:
        wanted = f"tags.`{TAG}` = '{run.run}'"
        runs = self._client.search_runs([experiment], wanted, max_results=1)
        return str(runs[0].info.run_id) if runs else ""

    def _begun(self, experiment: str, run: RunFacts) -> str:
        made = self._client.create_run(
            experiment,
            start_time=round(run.began * 1000),
            tags={TAG: run.run, "fcil.method": run.method},
            run_name=f"{run.method} {run.run}",
        )
        return str(made.info.run_id)

    def _log_params(self, run: RunFacts) -> None:
        """Write all parameters each time, in case of an earlier kill; repeats change nothing."""
        from mlflow.entities import Param

        params = [Param(name, str(value)) for name, value in run.params.items()]
        for some in _slices(params, MOST_PARAMS):
            self._client.log_batch(self._id, params=some)

    def scalars(self, values: Mapping[str, float], *, step: int, at: float) -> None:
        """Keep metrics until they are flushed, to save requests to the server."""
        from mlflow.entities import Metric

        when = round(at * 1000)
        self._metrics += [Metric(name, value, when, step) for name, value in values.items()]

    def flush(self) -> None:
        """Send the kept metrics."""
        for some in _slices(self._metrics, MOST_METRICS):
            self._client.log_batch(self._id, metrics=some)
        self._metrics.clear()

    def finish(self, files: Sequence[Path]) -> None:
        """Send the reports, if configured, and mark the run as finished."""
        self.flush()
        if self._options.files:
            for path in files:
                self._client.log_artifact(self._id, str(path))
        self._client.set_terminated(self._id)

    def close(self) -> None:
        """Nothing is open between requests."""


def _slices(items: Sequence[Any], most: int) -> list[Sequence[Any]]:
    return [items[i : i + most] for i in range(0, len(items), most)]


class Mlflow:
    """The sink ``mlflow``."""

    name = "mlflow"
    packages = ("mlflow",)
    extra = "mlflow"
    Options = MlflowOptions

    def open(self, run: RunFacts, options: MlflowOptions) -> MlflowWriter:
        """Find the MLflow run of this run, or create it."""
        return MlflowWriter(run, options)


SINK = Mlflow()
