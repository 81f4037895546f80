"""Runs side by side: accuracy against bytes, their headlines, and their differences."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from fcil_protocol.errors import FcilError, NotYet, UsageError
from fcil_protocol.ids import RunId
from fcil_server.ledger.enums import RunStatus
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.ledger.rows import RunRow
from fcil_server.reports.charts.charts import cost, figure
from fcil_server.reports.charts.render import template
from fcil_server.reports.results.run_data import COMPARISON_HEAD, locate_run
from fcil_server.web.page.compared import Compared, compared, differences, warnings
from fcil_server.web.page.reader import HistoryReader

MAX_RUNS = 12
MAX_OWN = 100  # of this federation's runs, the newest are listed
AT_HAND = 8  # of these, visible at once
MAX_CHOSEN = 4  # default number of runs in the comparison
MAX_DIFFERENCES = 200
LEDGERS_WAIT_S = 5.0  # for ledgers to be read, less than the time limit of a request
FRESH_S = 10.0  # an active run is read at most this often
KEPT_S = 300.0  # and a finished one this often: a client may be erased from it
BESIDE = "@"  # before the short name of another directory; no run's id begins with it
_MAX_KEY = 200  # characters


@dataclass(frozen=True)
class RunPlace:
    """Location of a run that can be chosen.

    Attributes:
        key: its name in a browser's request.
        run: its id; None: the newest of its federation.
    """

    key: str
    directory: Path
    run: RunId | None


@dataclass(frozen=True)
class RunChoice:
    """A line of the form.

    Attributes:
        at_hand: True if it is visible at once; others are folded away.
        problem: why it cannot be shown.
    """

    key: str
    name: str
    about: str
    chosen: bool
    at_hand: bool
    problem: str = ""


class Comparison:
    """Compares runs of this federation and of other directories; several threads may use it.

    Args:
        directory: of this federation.
        beside: other federations' directories, or directories of their runs.
        patience_s: how long one request waits for ledgers to be read.
        clock: seconds that only ever grow.
    """

    def __init__(
        self,
        directory: Path,
        beside: Sequence[Path] = (),
        patience_s: float = LEDGERS_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._beside = _short_names(beside)
        self._patience_s = patience_s
        self._runs = Runs(clock)

    def html(self, wanted: Sequence[str]) -> Markup:
        """Return the comparison of some runs, with a form to choose others.

        Args:
            wanted: keys of runs: ids, or names of other directories; none: a few of the newest.

        Raises:
            UsageError: one of them is unknown, or they are too many.
            FcilError: this federation's ledger cannot be read.
        """
        with Ledger(self._directory / LEDGER_NAME, read_only=True) as ledger:
            own = ledger.runs.all()
        newest = own[::-1][:MAX_OWN]
        places = {str(r.run_id): RunPlace(r.run_id, self._directory, r.run_id) for r in own}
        keys = _checked(wanted, [*places, *self._beside]) or self._usual(newest)
        shown, problems = self._read(keys, places)
        listed = [r for r in own[::-1] if r in newest or r.run_id in keys]
        choices = list(_choices_of(listed, keys, problems))
        choices += [self._choice_beside(key, keys, shown, problems) for key in self._beside]
        return _compared_html(shown, choices, len(own) - len(listed))

    def _usual(self, newest: Sequence[RunRow]) -> list[str]:
        """Return the default choice of runs."""
        own = [str(run.run_id) for run in newest[:MAX_CHOSEN]]
        return [*own[:1], *list(self._beside)[: MAX_CHOSEN - 1], *own[1:]][:MAX_CHOSEN]

    def _choice_beside(
        self,
        key: str,
        keys: Sequence[str],
        shown: Mapping[str, Compared],
        problems: Mapping[str, str],
    ) -> RunChoice:
        found = shown.get(key)
        about = f"{found.method}, {found.status.value} ({found.run})" if found else ""
        problem = problems.get(key) or _missing(self._beside[key])
        return RunChoice(key, key.removeprefix(BESIDE), about, key in keys, True, problem)

    def _read(
        self, keys: Iterable[str], places: Mapping[str, RunPlace]
    ) -> tuple[dict[str, Compared], dict[str, str]]:
        """Return the compared data of each run, and the problems of those that cannot be read."""
        shown: dict[str, Compared] = {}
        problems: dict[str, str] = {}
        until = time.monotonic() + self._patience_s
        for key in keys:
            try:
                place = places.get(key) or _place_beside(key, self._beside[key])
                shown[key] = self._runs.get(place, until - time.monotonic())
            except FcilError as error:
                problems[key] = str(error)
        return shown, problems


@dataclass(frozen=True)
class _CachedRun:
    """Data read of a run, and the end of its freshness."""

    found: Compared
    until: float


class Runs:
    """Data of compared runs, read by one separate thread and kept for a while.

    Args:
        clock: seconds that only ever grow.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # for the two below, never held during a read
        self._kept: dict[str, tuple[tuple[object, ...], _CachedRun]] = {}
        self._under_way: dict[tuple[object, ...], Future[Compared]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compare")

    def get(self, place: RunPlace, patience_s: float) -> Compared:
        """Return a run's data, perhaps a short while old.

        Raises:
            NotYet: its ledger is long, and still being read.
            FcilError: there is no such run, or its ledger cannot be read.
        """
        path = place.directory / LEDGER_NAME
        with Ledger(path, read_only=True) as ledger:
            run = _run_at(ledger, place)
            stamp = (place.key, ledger.database.identity(), run.run_id, run.status)
        with self._lock:
            of, kept = self._kept.get(place.key, (None, None))
            if of != stamp:
                kept = None
            if kept is not None and self._clock() < kept.until:
                return kept.found
            reading = self._under_way.get(stamp)
            if reading is None:
                reading = self._thread.submit(self._read, path, run, stamp)
                self._under_way[stamp] = reading
        try:
            return reading.result(max(0.0, patience_s))
        except TimeoutError:
            if kept is not None:
                return kept.found
            raise NotYet(
                "its ledger is long, and still being read.", action="Try again in a moment."
            ) from None

    def _read(self, path: Path, run: RunRow, stamp: tuple[object, ...]) -> Compared:
        began = self._clock()
        try:
            with HistoryReader(path) as reader:
                found = compared(reader.read(run.run_id))
            now = self._clock()
            fresh_s = FRESH_S if run.status is RunStatus.RUNNING else KEPT_S
            # Slow reads are repeated less often.
            kept = _CachedRun(found, now + max(fresh_s, 10 * (now - began)))
            with self._lock:
                self._kept[str(stamp[0])] = stamp, kept
            return found
        finally:
            with self._lock:
                del self._under_way[stamp]


def _run_at(ledger: Ledger, place: RunPlace) -> RunRow:
    run = ledger.runs.newest() if place.run is None else ledger.runs.get(place.run)
    if run is None:
        missing = "any run yet" if place.run is None else f"the run {place.run!r}"
        raise UsageError(f"the ledger {ledger.path} does not have {missing}.")
    return run


def _short_names(beside: Sequence[Path]) -> dict[str, Path]:
    """Name each directory by its last part, with a number if two have the same."""
    named: dict[str, Path] = {}
    for place in beside:
        short = place.name or str(place)
        key, number = f"{BESIDE}{short}", 1
        while key in named:
            number += 1
            key = f"{BESIDE}{short}-{number}"
        named[key] = place
    return named


def _missing(place: Path) -> str:
    try:
        locate_run(place)
    except UsageError as error:
        return str(error)
    return ""


def _place_beside(key: str, place: Path) -> RunPlace:
    directory, run = locate_run(place)
    return RunPlace(key, directory, None if run is None else RunId(run))


def _checked(wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the requested keys, each once.

    Raises:
        UsageError: they are too many, or one of them is unknown.
    """
    keys = list(dict.fromkeys(wanted))
    if len(keys) > MAX_RUNS:
        raise UsageError(
            f"at most {MAX_RUNS} runs are compared at a time, got {len(keys)}.",
            action="Choose fewer.",
        )
    for key in keys:
        if len(key) > _MAX_KEY or key not in known:
            raise UsageError(
                f"there is no run {key[:40]!r} here, nor another directory of this name.",
                action="Choose one of those that the comparison lists.",
            )
    return keys


def _choices_of(
    runs: Iterable[RunRow], keys: Sequence[str], problems: Mapping[str, str]
) -> Iterator[RunChoice]:
    for place, run in enumerate(runs):
        key, chosen = str(run.run_id), run.run_id in keys
        about = f"{run.method}, {run.status.value}"
        at_hand = chosen or place < AT_HAND
        yield RunChoice(key, key, about, chosen, at_hand, problems.get(key, ""))


def _compared_html(
    shown: Mapping[str, Compared], choices: Sequence[RunChoice], older: int
) -> Markup:
    runs = list(shown.values())
    names = _names(shown)
    different = differences(runs) if len(runs) > 1 else []
    lines = [(name, run.points) for name, run in zip(names, runs, strict=True) if run.points]
    return template(
        "compare.html",
        choices=choices,
        older=older,
        most=MAX_RUNS,
        names=names,
        head=COMPARISON_HEAD,
        rows=[(name, *run.cells) for name, run in zip(names, runs, strict=True)],
        chart=figure(cost(lines, "compare")) if lines else "",
        different=different[:MAX_DIFFERENCES],
        more=max(0, len(different) - MAX_DIFFERENCES),
        warnings=warnings(runs) if len(runs) > 1 else [],
    )


def _names(shown: Mapping[str, Compared]) -> list[str]:
    """Return the runs' labels: the method, with the key if two share it."""
    methods = [run.method for run in shown.values()]
    short = [key.removeprefix(BESIDE) for key in shown]
    called = [k if short.count(s) > 1 else s for k, s in zip(shown, short, strict=True)]
    return [
        m if methods.count(m) == 1 else f"{m} {name}"
        for m, name in zip(methods, called, strict=True)
    ]
