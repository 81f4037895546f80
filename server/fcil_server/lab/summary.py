"""Means and deviations over seeds, and verdicts on the papers' claims. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fcil_server.lab.experiment import ClaimSection, Experiment, Figure
from fcil_server.lab.plan import Cell

Content = Mapping[str, Any]  # of a cell's file
Verdict = Literal["holds", "does not hold", "too close", "not measured"]
Curve = tuple[float | None, ...]
METRICS = {"faa": ("faa",), "aia": ("aia",), "forgetting": ("forgetting", "max")}  # of claims


@dataclass(frozen=True)
class Stat:
    """A number over seeds.

    Attributes:
        n: number of seeds.
        mean: None if no seed defines it.
        deviation: of a sample (n - 1); None for fewer than two.
    """

    n: int
    mean: float | None
    deviation: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Stat:
        """Summarise; undefined values are excluded."""
        known = [float(v) for v in values if v is not None and math.isfinite(v)]
        if not known:
            return cls(0, None, None)
        spread = statistics.stdev(known) if len(known) > 1 else None
        return cls(len(known), statistics.fmean(known), spread)


@dataclass(frozen=True)
class RowSummary:
    """One row in one partition, over all finished seeds.

    Attributes:
        seeds: the finished ones; ``missing``: the others.
        forgetting: by definition (`metrics.FORGETTING`).
        by_seed: metric of a possible claim -> seed -> value, where it is defined.
        chance: seed -> standard error of its FAA due to the number of test images, in points.
        up, down: tensor bytes of one client in one train round; ``_wire``: true bytes.
        all_up, all_down: true wire bytes of the whole run, all clients.
        curve: mean A_t over t; ``matrix``: mean S_{t,i}.
        papers: (source, figures) of all papers with numbers for it.
    """

    row: str
    partition: str
    seeds: tuple[int, ...]
    missing: tuple[int, ...]
    faa: Stat
    aia: Stat
    forgetting: Mapping[str, Stat]
    by_seed: Mapping[str, Mapping[int, float]]
    chance: Mapping[int, float]
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
        """All byte counts, up and down: tensors, wire, in all."""
        return (self.up, self.down, self.up_wire, self.down_wire, self.all_up, self.all_down)


@dataclass(frozen=True)
class Judged:
    """A claim and its verdict."""

    claim: ClaimSection
    verdict: Verdict
    words: str


def entries(
    experiment: Experiment, cells: Sequence[Cell], finished: Mapping[str, Content]
) -> list[RowSummary]:
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
                found.append(_entry(mine, finished, papers, joint=row.joint))
    return found


def _entry(
    cells: Sequence[Cell],
    finished: Mapping[str, Content],
    papers: tuple[tuple[str, Figure], ...],
    *,
    joint: bool,
) -> RowSummary:
    done = [(c, finished[c.name]) for c in cells if c.name in finished]
    contents = [content for _, content in done]

    def over(*path: str) -> Stat:
        return Stat.of(_at(content, path) for content in contents)

    def over_tasks(*path: str) -> Stat:
        # A joint row has one task: a mean that compares with no other's, and nothing to forget.
        return Stat.of([]) if joint else over(*path)

    causes = dict.fromkeys(c for content in contents for c in content["bytes"]["by_cause"])
    return RowSummary(
        row=cells[0].row,
        partition=cells[0].partition,
        seeds=tuple(c.seed for c, _ in done),
        missing=tuple(c.seed for c in cells if c.name not in finished),
        faa=over("faa"),
        aia=over_tasks("aia"),
        forgetting={name: over_tasks("forgetting", name) for name in ("max", "diag", "fedmammoth")},
        by_seed={
            name: {} if joint and name != "faa" else _by_seed(done, path)
            for name, path in METRICS.items()
        },
        chance={
            cell.seed: math.sqrt(c["faa"] * (100 - c["faa"]) / c["test_images"]) for cell, c in done
        },
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


def _by_seed(done: Sequence[tuple[Cell, Content]], path: Sequence[str]) -> dict[int, float]:
    values = {cell.seed: _at(content, path) for cell, content in done}
    return {seed: v for seed, v in values.items() if v is not None and math.isfinite(v)}


def _at(content: Content, path: Sequence[str]) -> float | None:
    found = look(content, path)
    return None if found is None else float(found)


def look(content: Content, path: Sequence[str]) -> Any:
    """Return the value at a path in a cell's file; None: there is none."""
    found: Any = content
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _faults(done: Sequence[tuple[Cell, Content]]) -> Iterable[str]:
    """Yield deviations of a cell's partition or rounds from the plan."""
    for cell, content in done:
        for note in content.get("notes", ()):
            yield f"{cell.name}: {note}"
        rounds = content["rounds"]
        if rounds["not_done"] or rounds["excluded"]:
            yield (
                f"{cell.name}: {rounds['not_done']} of {rounds['all']} rounds missed their quorum "
                f"or were skipped, {rounds['excluded']} updates were excluded"
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


def judge_claim(claim: ClaimSection, found: Sequence[RowSummary]) -> Judged:
    """Judge a claim by the results.

    Differences are taken seed by seed: a seed gives both rows the same images and partition. The
    verdict is too close if their mean is within their deviation. One seed has none: there a
    difference of FAA is too close within the standard error of two accuracies on this number of
    test images. Other metrics have no error that is known.
    """
    by_row = {e.row: e for e in found if e.partition == claim.partition}
    if claim.left not in by_row or claim.right not in by_row:
        return Judged(claim, "not measured", "it has no such rows in this partition")
    rows = [by_row[name] for name in (claim.left, claim.right)]
    left, right = (e.by_seed[claim.metric] for e in rows)
    common = sorted(left.keys() & right.keys())
    ahead = Stat.of(left[seed] - right[seed] for seed in common)
    if ahead.mean is None:
        return Judged(claim, "not measured", "no seed of both rows is finished")
    lower = claim.direction == "left_lower"
    verdict: Verdict = "holds" if (ahead.mean < 0 if lower else ahead.mean > 0) else "does not hold"
    values = [statistics.fmean(side[seed] for seed in common) for side in (left, right)]
    words = "{:.1f} against {:.1f}, ".format(*values)
    if ahead.deviation is None and claim.metric != "faa":
        return Judged(claim, verdict, f"{words}one seed, so no deviation")
    if ahead.deviation is None:
        error = math.hypot(*(e.chance[common[0]] for e in rows))
        apart = f"one seed; standard error of the test images {error:.1f}"
    else:
        error = ahead.deviation
        apart = f"{ahead.mean:+.1f} ± {error:.1f} over {ahead.n} seeds"
    if abs(ahead.mean) <= error:
        verdict = "too close"
    return Judged(claim, verdict, f"{words}{apart}")
