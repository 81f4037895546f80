"""Steps of one experiment, from its TOML to its report; a command and a Python call share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fcil_adapters.contract import source_code
from fcil_adapters.worker import feature_folder
from fcil_adapters.worker.feature_folder import FeatureFolder
from fcil_protocol.formats import format_bytes
from fcil_protocol.storage.atomic_files import DirectoryLock
from fcil_server.lab import data, plan, report, runner
from fcil_server.lab.cell import CellInputs
from fcil_server.lab.experiment import Experiment
from fcil_server.lab.plan import Cell
from fcil_server.lab.progress import Show, TimeBudget, describe_plan
from fcil_server.lab.results import Known, Results

RESULTS = Path("results")  # in the current directory; a folder of the experiment's name in it


@dataclass(frozen=True)
class Engine:
    """Runs one experiment and writes its report.

    Attributes:
        cells: all of them; ``chosen``: the selected ones.
        command: the command in the report that makes it again.
    """

    experiment: Experiment
    cells: Sequence[Cell]
    chosen: Sequence[Cell]
    results: Results
    command: str

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        folder: Path | None,
        *,
        only: Sequence[str] = (),
        seeds: Sequence[int] = (),
        command: str = "",
    ) -> Engine:
        """Check an experiment's methods, options and settings, and list its cells.

        Args:
            experiment: the experiment.
            folder: of its results; None: ``results/NAME``.
            only: ``ROW`` or ``ROW/PARTITION`` each; empty: all.
            seeds: of the experiment's; empty: all.
            command: for the report.

        Raises:
            ConfigError: one message that names every fault.
        """
        cells = plan.make(experiment)
        chosen = plan.choose(cells, only, seeds)
        results = Results(folder or RESULTS / experiment.name)
        return cls(experiment, cells, chosen, results, command)

    def write_report(self) -> list[Path]:
        """Write the report of all finished cells; nothing runs.

        Raises:
            NotYet: the experiment never ran. StorageError: it cannot be written.
        """
        return self._write(self.results.known(), {})

    def run(self, data_path: Path | None, jobs: int, show: Show) -> dict[str, str]:
        """Run the chosen cells that have no result yet; the report is written after each.

        Args:
            data_path: folder or zip of the images, if the experiment needs one.
            jobs: cells at the same time.
            show: shows progress to the user.

        Returns:
            The failed cells' names, each with its reason.

        Raises:
            ConfigError, DataError: before any cell begins.
            Locked: another process runs it. StorageError: results cannot be written.
            KeyboardInterrupt: the user interrupted it; the same call resumes.
        """
        self.results.make()
        with DirectoryLock.acquire(self.results.folder, "experiment"):
            return self._run(data_path, jobs, show)

    def _run(self, data_path: Path | None, jobs: int, show: Show) -> dict[str, str]:
        setting = self.experiment.setting
        weights = data.weights_of(setting)
        images = data.find(self.experiment, data_path, self.results.data)
        show.say(f"partitions: {len({c.split.slug for c in self.chosen})} of {images.source}")
        parts = data.partitions(images, self.chosen, self.results.data)
        known = self.results.add_sources(data.backbone_digest(setting, weights), parts)
        work = self._work(images, parts, weights)
        pending = runner.pending_cells(self.chosen, known, self.results, work)
        for item in pending:  # every server's complete configuration, before any of them starts
            test = str(item.work.test)
            plan.server_config(item.cell, item.work.tasks, weights=weights, central_test=test)
        budget = self._budget(known, jobs)
        left = budget.left([item.cell for item in pending])
        # Results are counted, not cells: joint rows share theirs between partitions.
        different = len({known.key(c) for c in self.chosen})
        show.say(describe_plan(len(pending), different, left, jobs))
        feature_folder.remove_replaced(self.results.features)
        failed: dict[str, str] = {}
        try:
            runner.run(
                pending,
                known,
                self.results,
                budget,
                show,
                failed,
                after=lambda: self._write(known, failed),
            )
        except KeyboardInterrupt:
            show.close()
            show.say("interrupted; run it again to resume")
            raise
        finally:
            show.close()
            self._write(known, failed)
        self._say_features([item.key for item in pending], show)
        if failed:
            show.say(f"{len(failed)} of {len(pending)} cells failed: {', '.join(failed)}")
        return failed

    def _work(
        self, images: data.Images, parts: dict[str, data.PartitionImages], weights: str
    ) -> Callable[[Cell, str], CellInputs]:
        most_bytes = self.experiment.budget.feature_cache_mb * 1_000_000
        source = source_code.tree_digest()

        def work(cell: Cell, key: str) -> CellInputs:
            one = parts[cell.split.slug]
            room = self.results.cell_directory(key)
            counts = room / "features.jsonl"
            features = FeatureFolder(self.results.features, most_bytes, counts)
            return CellInputs(
                data=images.source,
                partition=one.path,
                tasks=one.tasks,
                test=images.test,
                weights=weights,
                room=room,
                source=source,
                limit_s=self.experiment.budget.limit_s,
                features=features if most_bytes else None,
            )

        return work

    def _say_features(self, keys: Sequence[str], show: Show) -> None:
        """Say how often the cells that have just run found frozen features in the cache."""
        found = [(content or {}).get("features") for content in map(self.results.load, keys)]
        counts = [one for one in found if one and (one["read"] or one["computed"])]
        read, computed, removed = (
            sum(one[name] for one in counts) for name in ("read", "computed", "removed")
        )
        if counts:
            size = format_bytes(feature_folder.bytes_used(self.results.features))
            most = f"{self.experiment.budget.feature_cache_mb:,} MB"
            gone = f"; {removed:,} of the least used made room for others" if removed else ""
            show.say(
                f"frozen features of {len(counts)} cells: {read:,} read from the cache, "
                f"{computed:,} computed; it has {size} of at most {most}{gone}"
            )

    def _budget(self, known: Known, jobs: int) -> TimeBudget:
        """Return the expected times of cells, learned from finished ones."""
        budget = TimeBudget(jobs)
        done = self.results.finished(self.chosen, known)
        for cell in self.chosen:
            if cell.name in done:
                budget.measured(cell, done[cell.name]["seconds"]["wall_s"])
        return budget

    def _write(self, known: Known, failed: dict[str, str]) -> list[Path]:
        done = self.results.finished(self.cells, known)
        folder = self.results.folder
        return report.write(folder, self.experiment, self.cells, done, failed, self.command)
