"""Classes of a run, with their ids and tasks.

The rules over the ledger's rows: names are matched by `class_key` (NFC, trimmed, case-folded), ids
are given in order and never change, a client may bring a limited number of names, and it learns ids
only of names that it holds itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from fcil_adapters.contract import TaskInfo
from fcil_adapters.masks.exchanges import SHARES
from fcil_protocol.errors import ConfigError, InternalError, UsageError
from fcil_protocol.ids import ClientId, RunId
from fcil_protocol.payloads.schema import class_key, class_name_fault, normalise_class_name
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import ClassRow

_NAMED = 3  # refused names that a note lists
DEFAULT_QUOTA = 1000  # names that one client may bring into a run


@dataclass(frozen=True)
class Announcement:
    """Result of a client's announcement of class names.

    Attributes:
        accepted: the client's spellings of the names that the run now knows.
        new: those of them that the run had never seen.
        refused: (name, reason), for the client.
    """

    accepted: tuple[str, ...]
    new: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]


class ClassRegistry:
    """Class names of one run; this class holds the rules, the ledger all data."""

    def __init__(
        self, ledger: Ledger, run: RunId, *, quota: int = DEFAULT_QUOTA, confirm: bool = False
    ) -> None:
        self._ledger = ledger
        self._run = run
        self._quota = quota
        self._confirm = confirm

    def register_listed(self, tasks: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
        """Give ids in listed order, at the start of a run; a repetition changes nothing.

        Returns:
            The ids of each task's classes.

        Raises:
            ConfigError: a name is malformed or listed twice, a task is empty, or the run was
                started with other names.
        """
        _check_listed(tasks)
        held = self._ledger.classes.all(self._run)
        wanted = [
            (class_key(name), task, i)
            for i, (task, name) in enumerate(
                (task, name) for task, names in enumerate(tasks) for name in names
            )
        ]
        if held:
            if [(c.key, c.planned_task, c.class_id) for c in held] != wanted:
                raise ConfigError(
                    "[tasks] classes differ from those that the run was started with.",
                    action="Start a new run: fcil-server serve --new-run",
                )
        else:
            names = [normalise_class_name(name) for listed in tasks for name in listed]
            with self._ledger.transaction():
                for (key, task, class_id), name in zip(wanted, names, strict=True):
                    self._ledger.classes.add(
                        self._run, key, name, class_id=class_id, planned_task=task
                    )
        return [
            tuple(i for _, planned, i in wanted if planned == task) for task in range(len(tasks))
        ]

    def announce(self, client: ClientId, names: Iterable[str]) -> Announcement:
        """Add the class names that a client holds images of.

        New names wait for their task; a run with listed classes refuses them. A client's quota
        counts the names that it was the first to bring.
        """
        rows = {c.key: c for c in self._ledger.classes.all(self._run)}
        aliases = self._ledger.classes.aliases(self._run)
        listed = any(c.planned_task is not None for c in rows.values())
        brought = sum(c.first_seen_by == client for c in rows.values())
        accepted: list[str] = []
        new: dict[str, str] = {}  # key -> the client's spelling
        refused: list[tuple[str, str]] = []
        for name in names:
            clean = normalise_class_name(name)
            key = class_key(name)
            if aliases.get(key, key) in rows or key in new:
                accepted.append(name)
                continue
            reason = class_name_fault(clean)
            if reason is None and listed:
                reason = "the run's listed tasks do not name this class"
            if reason is None and brought + len(new) >= self._quota:
                reason = f"a client may bring at most {self._quota} class names"
            if reason is None:
                new[key] = name
                accepted.append(name)
            else:
                refused.append((name, reason))
        if new:
            # Not on disk at once: until a task has opened with a name, its clients announce it.
            with self._ledger.transaction(waits=False):
                for key, name in new.items():
                    clean = normalise_class_name(name)
                    self._ledger.classes.add(
                        self._run, key, clean, first_seen_by=client, admitted=not self._confirm
                    )
        return Announcement(tuple(accepted), tuple(new.values()), tuple(refused))

    def pending(self) -> list[ClassRow]:
        """Return the names that the next task would take, in the order of their future ids.

        Each one's ``seen_at`` is the time since when it waits. Empty in a run with listed classes.
        """
        rows = self._ledger.classes.all(self._run)
        waiting = [c for c in rows if c.class_id is None and not c.hidden and c.admitted]
        return sorted(waiting, key=lambda c: c.key)

    def awaiting_admission(self) -> list[ClassRow]:
        """Return the names that wait for the operator to admit them, oldest first."""
        rows = [c for c in self._ledger.classes.all(self._run) if not (c.admitted or c.hidden)]
        return sorted(rows, key=lambda c: (c.seen_at, c.key))

    def canonical(self, keys: Iterable[str]) -> frozenset[str]:
        """Return the keys of the classes that these keys name."""
        aliases = self._ledger.classes.aliases(self._run)
        return frozenset(aliases.get(key, key) for key in keys)

    def keys_of(self, class_ids: Collection[int]) -> frozenset[str]:
        """Return all keys by which clients may call these classes; hidden ones have none."""
        return frozenset(self.keyed(class_ids))

    def keyed(self, class_ids: Collection[int]) -> dict[str, int]:
        """Return the keys of `keys_of`, each with the id of its class."""
        wanted = set(class_ids)
        rows = self._ledger.classes.all(self._run)
        own = {
            c.key: c.class_id
            for c in rows
            if c.class_id is not None and c.class_id in wanted and not c.hidden
        }
        others = self._ledger.classes.aliases(self._run).items()
        return own | {key: own[target] for key, target in others if target in own}

    def listed_tasks(self) -> int:
        """Return the number of listed tasks, 0 if classes are discovered."""
        planned = [c.planned_task for c in self._ledger.classes.all(self._run)]
        return 1 + max((p for p in planned if p is not None), default=-1)

    def open_task(self, task: int, *, only: Collection[str] | None = None) -> TaskInfo:
        """Open a task in the ledger with its listed classes, or with the pending names.

        ``only`` restricts pending names to these keys; the others keep waiting.

        Pending names are sorted before they get the next ids, so that ids do not depend on the
        order of connecting.

        Raises:
            InternalError: the task would have no class, or is not the next one.
        """
        rows = self._ledger.classes.all(self._run)
        if self.listed_tasks():
            chosen = [(c.key, c.class_id) for c in rows if c.planned_task == task]
        else:
            first = 1 + max((c.class_id for c in rows if c.class_id is not None), default=-1)
            waiting = [c for c in self.pending() if only is None or c.key in only]
            chosen = [(c.key, first + i) for i, c in enumerate(waiting)]
        if not chosen:
            raise InternalError(f"task {task} would open without a class.")
        ids = [class_id for _, class_id in chosen if class_id is not None]
        with self._ledger.transaction():
            for (key, _), class_id in zip(chosen, ids, strict=True):
                self._ledger.classes.place(self._run, key, class_id=class_id, task=task)
            self._ledger.tasks.open(self._run, task, ids)
        return self.task_info(task)

    def task_info(self, task: int) -> TaskInfo:
        """Return an opened task as methods see it."""
        opened = self._ledger.tasks.all(self._run)
        past = tuple(i for t in opened[:task] for i in t.class_ids)
        return TaskInfo(index=task, classes=opened[task].class_ids, past=past)

    def names_for(self, names: Iterable[str]) -> dict[str, int]:
        """Return the client's own spellings with their ids, for tasks that have opened.

        A client learns nothing about names that it does not hold. Hidden classes are excluded.
        """
        by_key = {
            c.key: c.class_id
            for c in self._ledger.classes.all(self._run)
            if c.task is not None and c.class_id is not None and not c.hidden
        }
        aliases = self._ledger.classes.aliases(self._run)
        found: dict[str, int] = {}
        for name in names:
            key = class_key(name)
            class_id = by_key.get(aliases.get(key, key))
            if class_id is not None:
                found[name] = class_id
        return found

    def names(self) -> dict[int, str]:
        """Return id -> name of every class that has an id."""
        rows = self._ledger.classes.all(self._run)
        return {c.class_id: c.name for c in rows if c.class_id is not None}

    def shown_names(self) -> dict[int, str]:
        """Return id -> name of every class that has an id and is not hidden."""
        rows = self._ledger.classes.all(self._run)
        return {c.class_id: c.name for c in rows if c.class_id is not None and not c.hidden}

    def are_signed(self) -> bool:
        """Return True while clients sign the names of a task's classes, in a round of masked sums.

        It follows the round of shares at once.
        """
        opened = self._ledger.tasks.all(self._run)
        closed = self._ledger.rounds.closed_of(self._run, opened[-1].task) if opened else []
        last = closed[-1] if closed else None
        return last is not None and last.kind == SHARES and last.new_state is not None

    # Changes by the operator.

    def rename(self, name: str, new_name: str) -> None:
        """Rename a class; its id stays, and the old name becomes an alias.

        Raises:
            UsageError: there is none of the name, or the new name is of another class.
        """
        row = self._find(name)
        clean = _clean_name(new_name)
        key = class_key(clean)
        with self._ledger.transaction():
            if self._ledger.classes.aliases(self._run).get(key) == row.key:  # of this very class
                self._ledger.classes.remove_alias(self._run, key)
            if key != row.key:
                self._refuse_taken(clean)
            self._ledger.classes.rename(self._run, row.key, key, clean)
            if key != row.key:
                self._ledger.classes.add_alias(self._run, row.key, row.name, key)

    def alias(self, name: str, target: str) -> None:
        """Make ``name`` an alias of the class ``target``, merging a waiting name into it.

        Raises:
            UsageError: ``target`` is unknown, or ``name`` is a class with its own id.
        """
        to = self._find(target)
        clean = _clean_name(name)
        key = class_key(clean)
        rows = {c.key: c for c in self._ledger.classes.all(self._run)}
        if key == to.key or (key in rows and rows[key].class_id is not None):
            raise UsageError(
                f"{clean!r} is a class of its own and cannot become another name of {to.name!r}.",
                action="Hide it instead.",
            )
        with self._ledger.transaction():
            self._ledger.classes.move_aliases(self._run, key, to.key)
            self._ledger.classes.remove(self._run, key)
            self._refuse_taken(clean)
            self._ledger.classes.add_alias(self._run, key, clean, to.key)

    def admit(self, name: str) -> None:
        """Allow tasks to take a name that waits for the operator."""
        self._ledger.classes.admit(self._run, self._find(name).key)

    def hide(self, name: str, *, hidden: bool = True) -> None:
        """Keep a name out of coming tasks and away from clients, or show it again."""
        self._ledger.classes.hide(self._run, self._find(name).key, hidden=hidden)

    def _find(self, name: str) -> ClassRow:
        key = class_key(name)
        key = self._ledger.classes.aliases(self._run).get(key, key)
        rows = {c.key: c for c in self._ledger.classes.all(self._run)}
        if key not in rows:
            known = ", ".join(repr(c.name) for c in list(rows.values())[:20]) or "none yet"
            raise UsageError(
                f"the run has no class {name!r}; it knows {known}.",
                action="fcil-server classes ls lists all of them.",
            )
        return rows[key]

    def _refuse_taken(self, name: str) -> None:
        key = class_key(name)
        taken = {c.key for c in self._ledger.classes.all(self._run)}
        if key in taken or key in self._ledger.classes.aliases(self._run):
            raise UsageError(f"{name!r} names a class already.", action="Choose another name.")


def refused_names(refused: Iterable[tuple[str, str]]) -> list[str]:
    """Return one sentence for each reason, no matter how many names it refused.

    Args:
        refused: (name, reason), as in `Announcement.refused`.
    """
    names: dict[str, list[str]] = {}
    for name, reason in refused:
        names.setdefault(reason, []).append(name)
    return [f"{_counted(found)}: {reason}" for reason, found in names.items()]


def _counted(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NAMED])
    if len(names) == 1:
        return f"class {shown}"
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return f"{len(names):,} classes: {shown}{more}"


def _clean_name(name: str) -> str:
    clean = normalise_class_name(name)
    fault = class_name_fault(clean)
    if fault is not None:
        raise UsageError(f"{name[:80]!r}: {fault}.", action="Choose another name.")
    return clean


def _check_listed(tasks: Sequence[Sequence[str]]) -> None:
    faults: list[str] = []
    seen: dict[str, int] = {}
    for task, names in enumerate(tasks):
        if not names:
            faults.append(f"task {task} lists no class")
        for name in names:
            fault = class_name_fault(normalise_class_name(name))
            if fault is not None:
                faults.append(f"task {task}, {name[:80]!r}: {fault}")
            earlier = seen.setdefault(class_key(name), task)
            if earlier != task or sum(class_key(n) == class_key(name) for n in names) > 1:
                faults.append(f"{name[:80]!r} is listed in task {earlier} and again in {task}")
    if faults or not tasks:
        raise ConfigError(
            f"[tasks] classes: {'; '.join(dict.fromkeys(faults)) or 'no task is listed'}.",
            action="List every class once, as one list of names per task.",
        )
