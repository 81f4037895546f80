"""Runs that wait for their turn: one file each in the federation's directory, oldest first.

A server begins the first when its run is complete or stopped. An entry's settings become facts of
the run that it begins, in the ledger, before its file is removed: after a kill in between, the next
start finds its id there and removes the file, so that no entry begins two runs.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from fcil_adapters.contract import registry
from fcil_adapters.contract.source_code import blaming
from fcil_protocol.errors import ConfigError, FcilError, UsageError
from fcil_protocol.ids import RunId
from fcil_protocol.process.overrides import apply_override
from fcil_protocol.process.terminal import printable
from fcil_protocol.storage.atomic_files import (
    make_private,
    storage_errors,
    sync_directory,
    write_atomic,
)
from fcil_server.federation.config import Config, validate
from fcil_server.federation.first_start import check_method
from fcil_server.federation.partition_plan import PartitionPlan, check_fits
from fcil_server.ledger.enums import RunStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import RunRow
from fcil_server.reports import run_directory
from fcil_server.runs.frozen_config import FREE_KEYS
from fcil_server.runs.run_record import check_places

FACT = "submitted"  # in a run's environment
FORMAT = 1
MAX_QUEUED = 1000
MAX_NUMBER = 999_999
MAX_TITLE = 128
MOST_DEPTH = 8  # of tables and lists in the settings
SECTIONS = ("run", "method", "tasks", "round", "wire", "privacy", "trust")
WHOLE = ("method", "tasks")  # options of one method, or classes of one order, do not suit another

QUEUE = "queue"  # its folder in the federation's directory
LAST = "last"  # a file in it: the highest number that was given

_NAME = re.compile(r"(\d{6})\.json")
Settings = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class QueuedRun:
    """A run that waits.

    Attributes:
        number: its place; operators name it by this, and it is not given again.
        id: random, to recognise the run that it began.
        title: what its submitter calls it.
        at: when it was submitted, in unix seconds.
        by: its submitter, as in the audit log.
        settings: sections of a configuration (`SECTIONS`); `with_settings` applies them.
        refused: why it could not begin; empty: it waits.
    """

    number: int
    id: str
    title: str
    at: float
    by: str
    settings: Settings
    refused: str = ""

    @classmethod
    def parse(cls, text: bytes, number: int) -> Self:
        """Read the entry of a number.

        Raises:
            ValueError, TypeError, KeyError: it is none, is another's, or has another format.
        """
        fields = json.loads(text)
        if fields.pop("format") != FORMAT:
            raise ValueError("it is of another version of fcil")
        entry = cls(**fields)
        for name, kind in _TYPES.items():
            if not isinstance(getattr(entry, name), kind):
                raise TypeError(f"{name} is of another type")
        if not all(isinstance(section, dict) for section in entry.settings.values()):
            raise TypeError("a section has no keys")
        if entry.number != number:
            raise ValueError(f"its number is {entry.number}")
        return entry

    @property
    def name(self) -> str:
        """Number and title, for operators."""
        return f"run {self.number}" + (f" ({self.title})" if self.title else "")

    def facts(self) -> dict[str, Any]:
        """Return what the run's environment says of its submission."""
        return {name: value for name, value in asdict(self).items() if name != "refused"}


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "number": int, "id": str, "title": str, "at": (int, float), "by": str, "settings": dict,
    "refused": str,
}  # fmt: skip


class RunQueue:
    """The queue of a federation; the holder of the federation's lock changes it, others read it.

    Args:
        directory: the federation's.
    """

    def __init__(self, directory: Path) -> None:
        self._folder = directory / QUEUE

    def entries(self) -> list[QueuedRun]:
        """Return all entries by number, refused ones too; a damaged file is one of these.

        Raises:
            StorageError: they cannot be read.
        """
        return [_read(name, text) for name, text in self.files()]

    def files(self) -> list[tuple[str, bytes]]:
        """Return name, below the federation's directory, and content of each file.

        Raises:
            StorageError: they cannot be read.
        """
        return list(self._files())

    def _files(self) -> Iterator[tuple[str, bytes]]:
        with storage_errors("read the queue in", self._folder):
            if not self._folder.is_dir():
                return
            for path in sorted(self._folder.iterdir()):
                if _NAME.fullmatch(path.name):
                    with contextlib.suppress(FileNotFoundError):  # its run begins just now
                        yield f"{QUEUE}/{path.name}", path.read_bytes()

    def waiting(self) -> list[QueuedRun]:
        """Return the entries that can begin, in their order."""
        return [entry for entry in self.entries() if not entry.refused]

    def next(self) -> QueuedRun | None:
        """Return the entry that begins next; reads no more than it must.

        Raises:
            StorageError: they cannot be read.
        """
        entries = (_read(name, text) for name, text in self._files())
        return next((entry for entry in entries if not entry.refused), None)

    def append(self, title: str, settings: Settings, by: str) -> QueuedRun:
        """Append a run that `check_whole` has passed.

        Raises:
            UsageError: the queue is full.
            DiskFull, StorageError: nothing was submitted.
        """
        entries = self.entries()
        if len(entries) >= MAX_QUEUED:
            raise UsageError(
                f"{MAX_QUEUED} runs wait already, which is the most.",
                action="Cancel some: fcil-server run cancel NUMBER",
            )
        number = 1 + max((entry.number for entry in entries), default=0)
        number = max(number, self._last() + 1)
        if number > MAX_NUMBER:
            raise UsageError("the numbers are used up.", action=f"Remove {self._folder / LAST}.")
        text = printable(title.strip())[:MAX_TITLE]
        entry = QueuedRun(number, secrets.token_hex(16), text, time.time(), by, settings)
        make_private(self._folder)
        write_atomic(self._folder / LAST, str(number).encode())  # first: numbers are given once
        self._write(entry)
        return entry

    def cancel(self, number: int) -> QueuedRun:
        """Remove an entry.

        Raises:
            UsageError: there is none with this number. StorageError: it is still there.
        """
        entries = {entry.number: entry for entry in self.entries()}
        if number not in entries:
            known = ", ".join(map(str, entries)) or "none"
            raise UsageError(
                f"no run with the number {number} waits.", action=f"There are: {known}."
            )
        self._remove(number)
        return entries[number]

    def refuse(self, entry: QueuedRun, error: FcilError) -> None:
        """Keep an entry that could not begin, with the reason, until it is cancelled."""
        self._write(QueuedRun(**{**asdict(entry), "refused": str(error)[:2000]}))

    def begun(self, entry: QueuedRun) -> None:
        """Remove an entry whose run is in the ledger."""
        self._remove(entry.number)

    def keep_numbers(self, ledger: Ledger) -> None:
        """Give no number again that a run of a restored ledger has."""
        given = [row.environment.get(FACT) for row in ledger.runs.all()]
        last = max([self._last(), *(int(facts["number"]) for facts in given if facts)])
        if last:
            make_private(self._folder)
            write_atomic(self._folder / LAST, str(last).encode())

    def tidy(self, ledger: Ledger) -> None:
        """Remove the entries of runs that began just before a kill."""
        entries = self.entries()
        begun = begun_entries(ledger) if entries else set()
        for entry in entries:
            if entry.id in begun:
                self.begun(entry)

    def has_results(self, run: RunId) -> bool:
        """Return True if a complete run's results were written."""
        return run_directory.is_complete(self._folder.parent / "runs" / run)

    def _last(self) -> int:
        """Return the highest number that was given, also of runs that have begun; 0: unknown."""
        try:
            return int((self._folder / LAST).read_bytes()[:12])
        except (OSError, ValueError):
            return 0

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06}.json"

    def _write(self, entry: QueuedRun) -> None:
        text = json.dumps({"format": FORMAT, **asdict(entry)}, ensure_ascii=False)
        write_atomic(self._path(entry.number), text.encode())

    def _remove(self, number: int) -> None:
        path = self._path(number)
        with storage_errors("remove", path):
            path.unlink(missing_ok=True)
            sync_directory(path.parent)  # a power cut brings no cancelled run back


def submit(directory: Path, config: Config, fields: Mapping[str, Any], actor: str) -> QueuedRun:
    """Append a run to a federation's queue, as an operator's command has it.

    Args:
        directory: the federation's; the caller has its lock.
        config: its configuration.
        fields: ``title``, ``settings`` and the fields of a ``partition``, unchecked.
        actor: the operator.

    Raises:
        ConfigError, UsageError, DiskFull, StorageError: nothing was submitted.
    """
    check_submitted(config, fields)
    return append(directory, fields, actor)


def check_submitted(
    config: Config, fields: Mapping[str, Any], abandoned: Callable[[], bool] = lambda: False
) -> None:
    """Check the fields of `submit`, which may take long; needs no lock.

    Raises:
        ConfigError, UsageError: they are wrong.
    """
    settings = fields.get("settings")
    if not isinstance(settings, dict):
        raise UsageError("a submitted run has settings, an object of sections.")
    given = fields.get("partition")
    plan = None if given is None else PartitionPlan.of(given)
    check_whole(settings, config, plan, abandoned)


def append(directory: Path, fields: Mapping[str, Any], actor: str) -> QueuedRun:
    """Append a run whose fields `check_submitted` has passed.

    Raises:
        UsageError, DiskFull, StorageError: nothing was submitted.
    """
    title = str(fields.get("title") or "")
    return RunQueue(directory).append(title, fields["settings"], actor)


def cancel(directory: Path, fields: Mapping[str, Any]) -> QueuedRun:
    """Remove the run ``number`` from a federation's queue, as an operator's command has it.

    Raises:
        UsageError: no such run waits. StorageError: it is still there.
    """
    number = fields.get("number")
    if not isinstance(number, int):
        raise UsageError("the run to cancel is given by its number.")
    return RunQueue(directory).cancel(number)


def describe_submitted(directory: Path, entry: QueuedRun) -> dict[str, Any]:
    """Return an entry's number, its title, and how many runs wait before it."""
    before = sum(other.number < entry.number for other in RunQueue(directory).waiting())
    return {"number": entry.number, "title": entry.title, "before": before}


def describe_waiting(directory: Path) -> list[dict[str, Any]]:
    """Return the queue as plain data, without the settings' values."""
    return [
        {
            "number": entry.number,
            "title": entry.title,
            "method": entry.settings.get("method", {}).get("name"),
            "submitted_at": entry.at or None,
            "by": entry.by,
            "refused": entry.refused or None,
        }
        for entry in RunQueue(directory).entries()
    ]


def _read(name: str, text: bytes) -> QueuedRun:
    number = int(_NAME.findall(name)[0])
    try:
        return QueuedRun.parse(text, number)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return QueuedRun(number, "", "", 0.0, "", {}, refused=f"{name} is damaged ({error})")


def check(settings: Settings, base: Config) -> Config:
    """Return the configuration of a run with these settings.

    Raises:
        ConfigError: one message; the settings are wrong, or not a run's.
    """
    foreign = [name for name in settings if name not in SECTIONS]
    if foreign:
        raise ConfigError(
            f"[{foreign[0]}] is no section of a single run.",
            action=f"A submitted run has {', '.join(f'[{name}]' for name in SECTIONS)}; everything "
            "else belongs to the server, in its federation.toml.",
        )
    _check_plain(settings)
    flat = [name for name, keys in settings.items() if not isinstance(keys, dict)]
    if flat:
        raise ConfigError(f"{flat[0]} is a section, expected keys in it: [{flat[0]}].")
    if "window_mb" in settings.get("wire", {}):
        raise ConfigError(
            "wire.window_mb belongs to the server's link.", action="Set it in federation.toml."
        )
    config = with_settings(base, settings)
    check_method({"name": config.method.name, **config.method.options})
    return config


def check_whole(
    settings: Settings,
    base: Config,
    plan: PartitionPlan | None,
    abandoned: Callable[[], bool] = lambda: False,
) -> None:
    """Check a run as far as it can be before it begins.

    Raises:
        ConfigError: the settings are wrong, or do not fit the partition.
    """
    config = check(settings, base)
    method = registry.load_method(config.method.name)
    with blaming(method):
        hparams = registry.make_hparams(method, config.method.options)
        check_places(config.run, method, hparams, abandoned)
    if plan is not None:
        check_fits(plan, config)


def _check_plain(value: object, depth: int = 0) -> None:
    """Refuse what no file of settings can hold.

    Raises:
        ConfigError: some text is not Unicode or holds a NUL, or the tables are too deep.
    """
    if depth > MOST_DEPTH:
        raise ConfigError(
            f"the settings have more than {MOST_DEPTH} levels of tables and lists.",
            action="Give sections with keys, as in federation.toml.",
        )
    if isinstance(value, str) and ("\0" in value or not _is_unicode(value)):
        raise ConfigError(
            f"the settings hold text that cannot be stored: {ascii(value)[:60]}.",
            action="Give text in UTF-8 without NUL.",
        )
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_plain(key, depth + 1)
            _check_plain(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check_plain(inner, depth + 1)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def with_settings(base: Config, settings: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return a federation's configuration with the settings of one run.

    ``[method]`` and ``[tasks]`` replace the federation's; of other sections, each key does.

    Raises:
        ConfigError: the result is no configuration.
    """
    fields = base.model_dump(exclude_unset=True)
    for section, keys in settings.items():
        kept = {} if section in WHOLE else fields.get(section, {})
        fields[section] = {**kept, **keys}
    return validate(fields)


def next_run(
    queue: RunQueue, ledger: Ledger, *, new: bool
) -> tuple[RunRow | None, QueuedRun | None]:
    """Decide which run a server opens: the run that it resumes, or the entry of a new one.

    Both are None for a new run with the federation's own configuration, which ``new`` asks for. A
    complete run without its results is resumed: they are written first.

    Raises:
        StorageError: the queue cannot be read or tidied.
    """
    queue.tidy(ledger)
    if new:
        return None, None
    row = ledger.runs.newest()
    if row is not None and row.status not in (RunStatus.DONE, RunStatus.STOPPED):
        return row, None
    stopped = row is not None and row.status is RunStatus.STOPPED
    if row is not None and not stopped and not queue.has_results(row.run_id):
        return row, None
    entry = queue.next()
    if entry is not None or stopped:
        return None, entry
    return row, None


def config_for(
    row: RunRow | None, entry: QueuedRun | None, config: Config, overrides: Sequence[str] = ()
) -> Config:
    """Return the federation's configuration with the settings that a run was submitted with.

    Args:
        row: the run that is resumed.
        entry: the one that begins.
        config: the federation's configuration.
        overrides: of this start; of a run that is resumed, they win for the keys that it may change
            (`frozen_config.FREE_KEYS`), such as a new place of the weights.

    Raises:
        ConfigError: the entry's settings are wrong by now.
    """
    if entry is not None:
        return check(entry.settings, config)
    submitted = None if row is None else row.environment.get(FACT)
    if not submitted:
        return config
    settings: Settings = copy.deepcopy(submitted["settings"])
    for override in overrides:
        section, _, key = override.partition("=")[0].strip().partition(".")
        if key in FREE_KEYS.get(section, ()):
            apply_override(settings, override)
    return with_settings(config, settings)


def begun_entries(ledger: Ledger) -> set[str]:
    """Return the ids of the entries whose runs are in the ledger."""
    submitted = (row.environment.get(FACT) for row in ledger.runs.all())
    return {str(facts["id"]) for facts in submitted if facts}
