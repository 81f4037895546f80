"""Means and deviations over seeds, and what becomes of the papers' claims. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fcil_server.lab.experiment import Claim, Experiment, Figure
from fcil_server.lab.plan import Cell

Content = Mapping[str, Any]  # of a cell's file
Verdict = Literal["holds", "does not hold", "too close", "not measured"]
Curve = tuple[float | None, ...]


@dataclass(frozen=True)
class Stat:
    """A number over seeds.

    Attributes:
        n: how many seeds it is of.
        mean: None where no seed defines it.
        deviation: of a sample (n - 1); None for fewer than two.
    """

    n: int
    mean: float | None
    deviation: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Stat:
        """Summarise; undefined values are left out."""
        known = [float(v) for v in values if v is not None and math.isfinite(v)]
        if not known:
            return cls(0, None, None)
        spread = statistics.stdev(known) if len(known) > 1 else None
        return cls(len(known), statistics.fmean(known), spread)


@dataclass(frozen=True)
class Entry:
    """One row in one partition, over all seeds that are finished.

    Attributes:
        seeds: those that are finished; ``missing``: those that are not.
        forgetting: by definition (`metrics.FORGETTING`).
        up, down: tensor bytes of one client in one train round; ``_wire``: true bytes.
        all_up, all_down: true wire bytes of the whole run, all clients.
        curve: mean A_t over t; ``matrix``: mean S_{t,i}.
        papers: (source, figures) of all papers that speak of it.
    """

    row: str
    partition: str
    seeds: tuple[int, ...]
    missing: tuple[int, ...]
    faa: Stat
    aia: Stat
    forgetting: Mapping[str, Stat]
    up: Stat
    down: Stat
    up_wire: Stat
    down_wire: Stat
    all_up: Stat
    all_down: Stat
    by_cause: Mapping[str, tuple[Stat, Stat]]
    seconds: Stat
    cpu_s: Stat
    memory_mb: Stat
    train_images: Stat
    faults: tuple[str, ...]
    curve: Curve
    matrix: tuple[Curve, ...]
    papers: tuple[tuple[str, Figure], ...]

    @property
    def sizes(self) -> tuple[Stat, ...]:
        """All counts of bytes, up and down: tensors, wire, in all."""
        return (self.up, self.down, self.up_wire, self.down_wire, self.all_up, self.all_down)

    def metric(self, name: str) -> Stat:
        """Return one of the metrics that claims are about."""
        return {"faa": self.faa, "aia": self.aia, "forgetting": self.forgetting["max"]}[name]


@dataclass(frozen=True)
class Judged:
    """A claim and what became of it."""

    claim: Claim
    verdict: Verdict
    words: str


def entries(
    experiment: Experiment, cells: Sequence[Cell], finished: Mapping[str, Content]
) -> list[Entry]:
    """Summarise all rows and partitions, in the order of the TOML."""
    found = []
    for row in experiment.rows:
        for part in experiment.partitions:
            mine = [c for c in cells if (c.row, c.partition) == (row.title, part.name)]
            if mine:
                papers = tuple(
                    (p.source, p.figures[row.title][part.name])
                    for p in experiment.papers
                    if part.name in p.figures.get(row.title, {})
                )
                found.append(_entry(mine, finished, papers))
    return found


def _entry(
    cells: Sequence[Cell],
    finished: Mapping[str, Content],
    papers: tuple[tuple[str, Figure], ...],
) -> Entry:
    done = [(c, finished[c.name]) for c in cells if c.name in finished]
    contents = [content for _, content in done]

    def over(*path: str) -> Stat:
        return Stat.of(_at(content, path) for content in contents)

    causes = dict.fromkeys(c for content in contents for c in content["bytes"]["by_cause"])
    return Entry(
        row=cells[0].row,
        partition=cells[0].partition,
        seeds=tuple(c.seed for c, _ in done),
        missing=tuple(c.seed for c in cells if c.name not in finished),
        faa=over("faa"),
        aia=over("aia"),
        forgetting={name: over("forgetting", name) for name in ("max", "diag", "fedmammoth")},
        up=over("per_client_round", "up_tensor"),
        down=over("per_client_round", "down_tensor"),
        up_wire=over("per_client_round", "up_true_wire"),
        down_wire=over("per_client_round", "down_true_wire"),
        all_up=over("bytes", "up", "true_wire"),
        all_down=over("bytes", "down", "true_wire"),
        by_cause={
            cause: (
                over("bytes", "by_cause", cause, "up", "wire"),
                over("bytes", "by_cause", cause, "down", "wire"),
            )
            for cause in causes
        },
        seconds=over("seconds", "wall_s"),
        cpu_s=over("seconds", "cpu_s"),
        memory_mb=over("peak_memory_mb"),
        train_images=over("train_images"),
        faults=tuple(_faults(done)),
        curve=mean_curve([content["task_mean"] for content in contents]),
        matrix=mean_matrix([content["matrix"] for content in contents]),
        papers=papers,
    )


def _at(content: Content, path: Sequence[str]) -> float | None:
    found: Any = content
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return None if found is None else float(found)


def _faults(done: Sequence[tuple[Cell, Content]]) -> Iterable[str]:
    """Say where a cell's partition or rounds are not what was planned."""
    for cell, content in done:
        for note in content.get("notes", ()):
            yield f"{cell.name}: {note}"
        rounds = content["rounds"]
        if rounds["not_done"] or rounds["excluded"]:
            yield (
                f"{cell.name}: {rounds['not_done']} of {rounds['all']} rounds came up short or "
                f"were skipped, {rounds['excluded']} updates were excluded"
            )
        for reason, count in sorted(rounds["silent"].items()):
            yield f"{cell.name}: {count} times a client sent nothing: {reason}"


def mean_curve(curves: Sequence[Sequence[float | None]]) -> Curve:
    """Average curves of equal length, point by point."""
    return tuple(Stat.of(points).mean for points in zip(*curves, strict=True))


def mean_matrix(matrices: Sequence[Sequence[Sequence[float | None]]]) -> tuple[Curve, ...]:
    """Average matrices of equal shape."""
    return tuple(mean_curve(rows) for rows in zip(*matrices, strict=True))


# --- claims ---------------------------------------------------------------------------------


def judge(claim: Claim, found: Sequence[Entry]) -> Judged:
    """Say whether a claim holds in what was measured.

    It is too close where the difference is within the larger of the two rows' deviations.
    """
    by_row = {e.row: e for e in found if e.partition == claim.partition}
    sides = [by_row.get(name) for name in (claim.left, claim.right)]
    stats = [e.metric(claim.metric) if e else Stat(0, None, None) for e in sides]
    left, right = stats
    if left.mean is None or right.mean is None:
        return Judged(claim, "not measured", "not both rows are finished")
    ahead = left.mean - right.mean
    if claim.direction == "left_lower":
        ahead = -ahead
    spreads = [s.deviation for s in stats if s.deviation is not None]
    margin = max(spreads, default=0.0)
    verdict: Verdict = "holds" if ahead > 0 else "does not hold"
    if abs(ahead) <= margin:
        verdict = "too close"
    words = f"{left.mean:.1f} against {right.mean:.1f}, "
    if not spreads:
        return Judged(claim, verdict, f"{words}one seed, so no deviation")
    seeds = f"{left.n}" if left.n == right.n else f"{left.n} and {right.n}"
    return Judged(claim, verdict, f"{words}deviation {margin:.1f}, {seeds} seeds")
