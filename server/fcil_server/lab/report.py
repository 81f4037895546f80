"""The report of an experiment: its results, next to the papers' numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fcil_protocol.formats import NOTHING, duration, format_bytes
from fcil_protocol.storage.atomic_files import write_atomic
from fcil_server.lab.blocks import (
    Block,
    Code,
    Curves,
    Heading,
    Items,
    Matrix,
    Table,
    Text,
    html,
    markdown,
)
from fcil_server.lab.experiment import ClaimSection, Experiment, Figure
from fcil_server.lab.plan import Cell
from fcil_server.lab.records import cells_csv
from fcil_server.lab.summary import Content, RowSummary, Stat, entries, judge_claim, look
from fcil_server.reports.charts.spec import STYLES

FILES = ("report.md", "report.html", "cells.csv")


def write(
    folder: Path,
    experiment: Experiment,
    cells: Sequence[Cell],
    finished: Mapping[str, Content],
    failed: Mapping[str, str],
    command: str,
) -> list[Path]:
    """Rewrite all files and return their paths.

    Args:
        folder: the results'.
        experiment: the experiment.
        cells: all of it.
        finished: contents of cells by name.
        failed: names of cells without a result, and why.
        command: the command that makes it again.
    """
    blocks = list(report(experiment, cells, finished, failed, command))
    content = (
        markdown(experiment.title, blocks),
        html(experiment.title, blocks),
        cells_csv(cells, finished),
    )
    for path, text in zip(paths(folder), content, strict=True):
        write_atomic(path, text.encode())
    return paths(folder)


def paths(folder: Path) -> list[Path]:
    """Return the paths of a report's files."""
    return [folder / name for name in FILES]


def report(
    experiment: Experiment,
    cells: Sequence[Cell],
    finished: Mapping[str, Content],
    failed: Mapping[str, str],
    command: str,
) -> Iterator[Block]:
    """Yield the blocks of a report."""
    found = entries(experiment, cells, finished)
    if experiment.about:
        yield Text(experiment.about)
    yield Text(_how_measured(experiment))
    yield from _progress(cells, finished, failed)
    yield from _accuracy(experiment, found)
    yield from _claims(experiment, found)
    yield from _differences(experiment)
    measured = [e for e in found if e.seeds]
    if measured:
        yield from _bytes(measured)
        yield from _effort(measured, finished)
        yield from _curves(experiment, measured)
        yield from _matrices(measured)
    yield from _environment(finished, command)


def _how_measured(experiment: Experiment) -> str:
    data, setting = experiment.data, experiment.setting
    sizes = [
        f"{n or 'all'} {what} images of a class"
        for n, what in ((data.train_per_class, "training"), (data.test_per_class, "test"))
    ]
    order = {
        "pycil": "PyCIL's class order (seed 1993), the same for all seeds",
        "natural": "classes in alphabetical order",
        "shuffled": "another class order for each seed",
    }[data.order]
    pixels = f" at {setting.image_size} px" if setting.image_size else ""
    return (
        f"{data.name}: {data.classes} classes in {data.tasks} tasks, {' and '.join(sizes)}, "
        f"{order}. {setting.clients} clients, {_rounds(setting.rounds_per_task)} per task where a "
        f"row does not say otherwise, backbone {setting.backbone}{pixels}, seeds "
        f"{', '.join(map(str, setting.seeds))}: a seed draws the partition, the images where not "
        "all are taken, and every start. Each cell is a server and its clients as processes that "
        "speak over sockets. The server's model is judged after the last round of each task on "
        "test images that no client has, over all classes seen so far and without a task id; no "
        "round is chosen by its result. FAA is the mean over tasks after the last one, AIA the "
        "mean of that over all tasks, forgetting the mean drop from a task's best to its last."
    )


def _rounds(count: int) -> str:
    return f"{count} round{'' if count == 1 else 's'}"


def _progress(
    cells: Sequence[Cell], finished: Mapping[str, Content], failed: Mapping[str, str]
) -> Iterator[Block]:
    missing = [c.name for c in cells if c.name not in finished]
    if missing:
        yield Text(f"Not complete: {len(missing)} of {len(cells)} cells have no result yet.")
    if failed:
        yield Items([f"failed: {name}: {why}" for name, why in failed.items()])


def _seeds(stat: Stat) -> str:
    return f"{stat.n} seed{'' if stat.n == 1 else 's'}"


def _cell(stat: Stat) -> str:
    if stat.mean is None:
        return NOTHING
    spread = "" if stat.deviation is None else f" ± {stat.deviation:.1f}"
    return f"{stat.mean:.1f}{spread}"


def _accuracy(experiment: Experiment, found: Sequence[RowSummary]) -> Iterator[Block]:
    yield Heading("Accuracy")
    counts = sorted({e.faa.n for e in found if e.faa.n})
    n = f"{' or '.join(map(str, counts)) or 'no'} seed{'' if counts == [1] else 's'}"
    spread = "± is the deviation over seeds (n - 1)" if max(counts, default=0) > 1 else ""
    yield Text(
        f"Percent, n = {n}{f'; {spread}' if spread else ', so without a deviation'}. "
        "In brackets what a paper says, in its own setting (below)."
    )
    if any(row.joint for row in experiment.rows):
        yield Text("A joint row has one task, so it has neither AIA nor forgetting.")
    empty = _empty_rows(found)
    if empty:
        yield Text(f"No result yet, in no partition: {', '.join(empty)}.")
    for title, metric, paper in (
        ("FAA", lambda e: e.faa, lambda f: f.faa),
        ("AIA", lambda e: e.aia, lambda f: f.aia),
        ("Forgetting (points, from the best)", _max, lambda f: f.forgetting),
    ):
        yield Heading(title, 3)
        yield _grid(experiment, found, metric, paper)


def _empty_rows(found: Sequence[RowSummary]) -> list[str]:
    """Return the rows without a number from any cell or paper."""
    filled = {e.row for e in found if e.seeds or e.papers}
    return list(dict.fromkeys(e.row for e in found if e.row not in filled))


def _max(entry: RowSummary) -> Stat:
    return entry.forgetting["max"]


def _grid(
    experiment: Experiment,
    found: Sequence[RowSummary],
    metric: Callable[[RowSummary], Stat],
    paper: Callable[[Figure], float | None],
) -> Table:
    """Return a table with one line per row that has a number, one column per partition."""
    empty = _empty_rows(found)
    at = {(e.row, e.partition): e for e in found}
    names = [p.name for p in experiment.partitions]
    several = len({source for e in found for source, _ in e.papers}) > 1
    marks = {p.source: f" [{i}]" for i, p in enumerate(experiment.papers, 1)}
    lines = []
    for row in (row for row in experiment.rows if row.title not in empty):
        line = [row.title]
        for name in names:
            entry = at.get((row.title, name))
            if entry is None:
                line.append("")
                continue
            said = [
                f"{value:.1f}{marks[source] if several else ''}"
                for source, figures in entry.papers
                if (value := paper(figures)) is not None
            ]
            line.append(_cell(metric(entry)) + (f" ({'; '.join(said)})" if said else ""))
        lines.append(line)
    return Table(["", *names], lines)


def _claims(experiment: Experiment, found: Sequence[RowSummary]) -> Iterator[Block]:
    if not experiment.claims:
        return
    yield Heading("Claims of the papers")
    yield Text(
        "A claim holds here if the difference has the direction that it says. Differences are "
        "taken seed by seed, over the seeds of both rows; it is too close where their mean is "
        "within their deviation. With one seed, a difference of FAA is too close if it is at most "
        "the standard error due to the number of test images; another seed may differ by more."
    )
    judged = [judge_claim(claim, found) for claim in experiment.claims]
    rows = [
        (
            j.verdict,
            j.claim.text,
            _compared(j.claim),
            j.words,
            j.claim.source,
        )
        for j in judged
        if j.verdict != "not measured"
    ]
    if rows:
        yield Table(("here", "claim", "compared", "measured", "source"), rows, text=5)
    rest = [f"{j.claim.text} ({_compared(j.claim)})" for j in judged if j.verdict == "not measured"]
    if rest:
        yield Text("Not measured, since no seed of both rows is finished:")
        yield Items(rest)


def _compared(claim: ClaimSection) -> str:
    return f"{claim.left} / {claim.right}, {claim.partition}, {claim.metric.upper()}"


def _differences(experiment: Experiment) -> Iterator[Block]:
    if experiment.papers:
        yield Heading("The papers' settings")
        yield Items([f"[{i}] {p.source}: {p.setting}" for i, p in enumerate(experiment.papers, 1)])
    if experiment.differences:
        yield Heading("How this differs from papers")
        yield Items(experiment.differences)


def _size(stat: Stat) -> str:
    return NOTHING if stat.mean is None else format_bytes(stat.mean)


def _bytes(found: Sequence[RowSummary]) -> Iterator[Block]:
    yield Heading("Bytes")
    yield Text(
        "A client's mean in a train round: tensors alone, as papers count, and on the wire "
        "(TCP payload, by the kernel's count where it was asked). In all: the whole run with "
        "handshakes, heartbeats and catching up, all clients. MB = 1,000,000 bytes."
    )
    ways = ("tensors up", "down", "wire up", "down", "in all up", "down")
    rows = [(e.row, e.partition, *map(_size, e.sizes)) for e in found]
    yield Table(("row", "partition", *ways), rows, text=2)
    # The kernel counts connections, which have no share in the predicted bytes by cause.
    causes = list(
        dict.fromkeys(
            c for e in found for c, ways in e.by_cause.items() if any(s.mean for s in ways)
        )
    )
    if causes:
        yield Text("What the bytes in all were spent on, up / down (predicted exactly):")
        none = Stat.of([])
        lines = []
        for e in found:
            pairs = [e.by_cause.get(c, (none, none)) for c in causes]
            lines.append((e.row, e.partition, *(f"{_size(u)} / {_size(d)}" for u, d in pairs)))
        yield Table(("row", "partition", *causes), lines, text=2)


def _effort(found: Sequence[RowSummary], finished: Mapping[str, Content]) -> Iterator[Block]:
    yield Heading("Time, memory, images")
    reading = sum(bool(look(c, ("features", "read"))) for c in finished.values())
    if reading:
        yield Text(
            f"{reading} of {len(finished)} cells read frozen features that other cells had "
            "computed, which saved their time; cells.csv has the numbers of both."
        )
    head = ("row", "partition", "seeds", "time of a cell", "of a core", "memory of all processes",
            "training images", "forgetting: best", "diag", "fed-mammoth")  # fmt: skip
    lines = [
        (
            e.row,
            e.partition,
            ", ".join(map(str, e.seeds)),
            *(NOTHING if s.mean is None else duration(s.mean) for s in (e.seconds, e.cpu_s)),
            NOTHING if e.memory_mb.mean is None else f"{e.memory_mb.mean:.0f} MB",
            NOTHING if e.train_images.mean is None else f"{e.train_images.mean:.0f}",
            *(_cell(e.forgetting[name]) for name in ("max", "diag", "fedmammoth")),
        )
        for e in found
    ]
    yield Table(head, lines, text=3)
    faults = [fault for e in found for fault in e.faults]
    if faults:
        yield Text("What did not go as planned:")
        yield Items(faults)


def _curves(experiment: Experiment, found: Sequence[RowSummary]) -> Iterator[Block]:
    drawn = [e for e in found if len(e.curve) > 1]
    if not drawn:
        return
    yield Heading("Accuracy over tasks")
    for part in experiment.partitions:
        lines = [(e.row, e.curve) for e in drawn if e.partition == part.name]
        for start in range(0, len(lines), len(STYLES)):
            title = f"{part.name}: accuracy over all classes seen, mean over seeds, percent"
            yield Curves(title, lines[start : start + len(STYLES)])


def _matrices(found: Sequence[RowSummary]) -> Iterator[Block]:
    yield Heading("Accuracy matrices")
    yield Text("Rows: after which task. Columns: on whose classes. Percent, mean over seeds.")
    yield from (Matrix(f"{e.row}, {e.partition} ({_seeds(e.faa)})", e.matrix) for e in found)


def _sources(finished: Mapping[str, Content]) -> Iterator[Block]:
    """Yield which code made the cells."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, content in finished.items():
        digest = str(content["environment"].get("source_digest", ""))
        key = str(content.get("revision", "")), digest[:16]
        found.setdefault(key, []).append(name)
    if len(found) > 1:
        yield Text(
            f"{len(found)} revisions of the code made these cells. A cell is computed again when "
            "the code of its method changes, so within a row they agree on that."
        )
    yield Items(
        [
            f"code: {len(names)} cells by "
            + (f"revision {revision or 'unknown'}, digest {digest}" if digest else "unknown")
            for (revision, digest), names in sorted(found.items())
        ]
    )


def _environment(finished: Mapping[str, Content], command: str) -> Iterator[Block]:
    yield Heading("Environment and digests")
    yield Text("To make it again:")
    yield Code(command)
    environments = {c["environment_digest"]: c["environment"] for c in finished.values()}
    for digest, facts in environments.items():
        count = sum(c["environment_digest"] == digest for c in finished.values())
        packages = ", ".join(f"{k} {v}" for k, v in facts.get("packages", {}).items())
        words = [facts.get(k) for k in ("python", "platform", "cpu")]
        words.append((facts.get("device") or {}).get("text"))
        told = [f"Python {words[0]}", *(str(w) for w in words[1:] if w)]
        yield Text(
            f"{count} cells with environment {digest[:12]}: {', '.join(told)}, "
            f"{facts.get('cores')} cores, {facts.get('threads')} threads; {packages}."
        )
    yield from _sources(finished)
    backbones = {
        f"{c['backbone'].get('name')}, digest {str(c['backbone'].get('digest'))[:16]}"
        for c in finished.values()
    }
    yield Items([f"backbone: {text}" for text in sorted(backbones)])
    files = [
        (name, c["key"], c["identity"]["partition"][:16], c["method_version"])
        for name, c in finished.items()
    ]
    title = ("cell", "cells/KEY.json", "partition", "method's version")
    yield Table(title, files, text=4)
