"""``fcil-server forget``: recompute a run as if a client had never taken part.

If uploads depend only on each client's own images (`Method.forgets`) and counted updates are kept
(`[run] keep_updates`), the run is aggregated again from the other clients' updates. The result
becomes a fork (decisions 0017 and 0031); the states of the old run, which hold the client, are
removed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from fcil_adapters.contract import State
from fcil_adapters.contract.forgetting import classes_with_images
from fcil_adapters.contract.late_images import classes_of
from fcil_protocol.errors import CorruptFile, InternalError, UsageError
from fcil_protocol.ids import ClientId, Digest, RoundKey, RunId, is_run_id, sha256_of
from fcil_protocol.payloads.builtin import EVALUATE, LATE
from fcil_protocol.payloads.payload import pieces, unpack
from fcil_protocol.storage.atomic_files import storage_errors
from fcil_server.aggregation import start
from fcil_server.aggregation.kept_updates import KeptUpdates, kept_folder
from fcil_server.aggregation.store import StateStore, kept_states, new_id, states_folder
from fcil_server.ledger.enums import OPENING, UpdateStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import ClientRow, RunRow, StateRow, UpdateRow
from fcil_server.reports import run_directory
from fcil_server.rounds.position import RunContext
from fcil_server.runs.fork import share_kept, share_start
from fcil_server.runs.recovery import take_step
from fcil_server.runs.resources import RunSetup

TELL_S = 2.0  # between two lines about the progress of a long computation
_EMPTIED = ("states", "parts", "spool", "incoming", "kept")


@dataclass(frozen=True)
class Forgotten:
    """Result of forgetting.

    Attributes:
        member: the client goes on as one.
        run: the fork that continues.
        parent, state: the origin of the fork.
        updates, images: of the client, no longer in any state; ``tasks``: theirs.
        vanished: names of classes of which no other client had an image.
        left_out: excluded updates of others, too far from the remaining ones, with the reason.
        emptied: runs whose states and stored updates are removed.
        elsewhere: other runs, with the number of the client's updates that are still in them.
        overtaken: the run that a server would have resumed, if it was another one, and its newest
            state.
    """

    client: ClientId
    name: str
    member: bool
    run: RunId
    parent: RunId
    state: int
    updates: int
    images: int
    tasks: tuple[int, ...]
    vanished: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    emptied: tuple[RunId, ...]
    elsewhere: dict[RunId, int]
    overtaken: tuple[RunId, int] | None


@dataclass(frozen=True)
class ForgetPlan:
    """A client's part in a run, and the state from which to compute again.

    Attributes:
        run: the run.
        client: the client to forget.
        mine: its counted updates, in the order of the rounds.
        first: the number of the first state that contains it.
    """

    ledger: Ledger
    run: RunRow
    client: ClientRow
    mine: tuple[UpdateRow, ...]
    first: int

    @cached_property
    def rounds(self) -> dict[RoundKey, list[UpdateRow]]:
        """The counted updates of each round that made a state."""
        found = {}
        for row in self.ledger.states.all(self.run.run_id):
            if row.kind != OPENING:
                rows = self.ledger.updates.of_round(row.key)
                found[row.key] = [
                    u for u in rows if u.status is UpdateStatus.COUNTED and u.samples > 0
                ]
        return found

    def updates_of_others(self, row: StateRow) -> list[UpdateRow]:
        """Return the updates that a state was made of, except the client's."""
        return [u for u in self.rounds[row.key] if u.client != self.client.client_id]


def plan(
    ledger: Ledger,
    directory: Path,
    run: RunRow,
    client: ClientRow,
    why_not: str,
    trains: Collection[str] = (),
) -> ForgetPlan:
    """Return what forgetting a client takes.

    Args:
        ledger: the federation's.
        directory: the federation's.
        run: the run that forgets.
        client: the client to forget.
        why_not: why the run cannot forget exactly; empty: it can.
        trains: kinds of rounds whose updates leave traces in all later ones (`Exchange.trains`).

    Raises:
        UsageError: there is nothing to forget, or not exactly; the message names alternatives.
    """
    counted = [
        u
        for u in ledger.updates.of_client(run.run_id, client.client_id)
        if u.status is UpdateStatus.COUNTED and u.samples > 0 and u.kind != EVALUATE
    ]
    if run.emptied_at is not None or not counted:
        others = [r for r in ledger.updates.counted_by_run(client.client_id) if r != run.run_id]
        listed = f" It is in {', '.join(others)}: name one with --run." if others else ""
        raise UsageError(
            f"no update of {client.name!r} is in the states of run {run.run_id}.{listed}",
            action="fcil-server rounds says who took part.",
        )
    keys = {RoundKey(u.run, u.task, u.kind, u.round) for u in counted}
    states = [row for row in ledger.states.all(run.run_id) if row.kind != OPENING]
    first = min((row.state for row in states if row.key in keys), default=None)
    if first is None:
        raise InternalError(f"no state of run {run.run_id} was made of its counted updates.")
    why_not = why_not or _trained(counted, trains)
    if why_not:
        raise UsageError(
            f"run {run.run_id} cannot forget {client.name!r} exactly: {why_not}.",
            action=_instead(ledger, directory, run, client, first),
        )
    return ForgetPlan(ledger, run, client, tuple(counted), first)


def _trained(counted: Sequence[UpdateRow], trains: Collection[str]) -> str:
    """Return why a client's updates of these kinds cannot be taken out; empty: it has none."""
    many = sum(u.kind in trains for u in counted)
    if not many:
        return ""
    updates = "update that trained is" if many == 1 else f"{many} updates that trained are"
    return f"its {updates} counted, and all later updates depend on what it taught"


def _instead(ledger: Ledger, directory: Path, run: RunRow, client: ClientRow, first: int) -> str:
    """Return the nearest alternative for a run that cannot forget exactly."""
    before = [row for row in kept_states(ledger, directory, run.run_id) if row.state < first]
    anew = f"learn again without it: fcil-server revoke {client.name}, then serve --new-run"
    if not before:
        return f"Every kept state includes it; {anew}."
    kept = before[-1].state
    return (
        f"Go back to before it took part: fcil-server run rollback {run.run_id} --to-state {kept} "
        f"(the newest kept state without it; all that came later is learned again); or {anew}."
    )


def why_not_exact(setup: RunSetup) -> str:
    """Return why a run cannot forget exactly; empty if it can."""
    reason = setup.method.forgets(setup.hparams)
    if reason:
        return f"with {setup.method.name}, {reason}"
    if not setup.keeps_updates:
        return "it keeps no counted updates ([run] keep_updates was false as it began)"
    return ""


def training_kinds(setup: RunSetup) -> frozenset[str]:
    """Return the kinds of rounds whose updates leave traces in all later ones."""
    declared = setup.method.exchanges(setup.hparams, setup.info)
    return frozenset(e.kind for e in declared if e.trains)


@dataclass
class Forgetting:
    """Computes a run again without a client, and makes the result a fork.

    Attributes:
        left_out: (round, client, reason) of updates that are now too far from the others'.
    """

    context: RunContext
    plan: ForgetPlan
    directory: Path
    left_out: list[tuple[RoundKey, ClientId, str]] = field(default_factory=list)

    async def run(self) -> tuple[RunId, list[tuple[int, Digest, Digest | None]]]:
        """Write the fork's states and kept updates; the ledger does not know them yet.

        Returns:
            The fork's id, and number, digest and parent's digest of each changed state.

        Raises:
            CorruptFile: a kept update is missing or damaged. UsageError: several are missing.
            DiskFull, StorageError.
        """
        context, ledger = self.context, self.plan.ledger
        self._refuse_gaps()
        fork = new_id(ledger)
        target = StateStore(states_folder(self.directory, fork))
        with storage_errors("create the run directory", target.directory):
            target.directory.parent.chmod(0o700)
        rows = ledger.states.all(context.run)
        whole = {row.state for row in kept_states(ledger, self.directory, context.run)}
        base = max((n for n in whole if n < self.plan.first), default=-1)
        for number in sorted(n for n in whole if n <= base):
            context.states.copy_to(target, number)
        share_start(self.directory, context.run, fork)
        share_kept(ledger, self.directory, context.run, fork, without=self.plan.client.client_id)
        return fork, await self._compute(rows, base, target, {*whole, rows[-1].state})

    async def _compute(
        self, rows: list[StateRow], base: int, target: StateStore, saved: set[int]
    ) -> list[tuple[int, Digest, Digest | None]]:
        """Recompute every state after ``base`` and return them; write those that are ``saved``."""
        context = self.context
        state: State | None = context.states.load(base) if base >= 0 else None
        digest: Digest | None = rows[base].digest if base >= 0 else None
        found, recent = [], dict[int, State]()  # older states, from which some updates start

        def load(number: int) -> State:
            return recent[number] if number in recent else context.states.load(number)

        left, told_at = rows[base + 1 :], time.monotonic()
        for done, row in enumerate(left):
            if time.monotonic() > told_at + TELL_S:
                told_at = time.monotonic()
                context.notify("info", "forget", f"{done} of {len(left)} states are computed again")
            state = await self._next(row, state, load)
            recent[row.state] = state
            recent.pop(row.state - context.config.round.max_staleness - 1, None)
            parent = digest
            if row.state in saved:
                digest = target.save(row.state, state, parent, row.task)
            else:
                digest = sha256_of(*pieces(state))
            found.append((row.state, digest, parent))
        return found

    async def _next(
        self, row: StateRow, before: State | None, load: Callable[[int], State]
    ) -> State:
        """Return a state without the client; with too few updates of others, the one before."""
        updates = self.plan.updates_of_others(row) if row.kind != OPENING else []
        if row.kind == OPENING:
            opened, _ = await take_step(self.context, row, before, [])
            assert opened is not None, "an opening needs no updates"
            return opened
        assert before is not None, "a round starts from a state"
        if self._too_few(row, updates):
            return before
        state, excluded = await take_step(self.context, row, before, updates, load)
        self.left_out += [(row.key, c, reason) for c, reason in sorted(excluded.items())]
        rest = [u for u in updates if u.client not in excluded]
        if state is None or self._too_few(row, rest):
            return before
        return state

    def _too_few(self, row: StateRow, updates: list[UpdateRow]) -> bool:
        """Exclude these updates and return True if they are too few to make a state.

        A number that was enough under an earlier `[round] min_updates` still is.
        """
        least = min(self.context.config.least_updates, len(self.plan.rounds[row.key]))
        if len(updates) >= max(least, 1):
            return False
        reason = f"without the client, the round has fewer than {least} updates (round.min_updates)"
        self.left_out += [(row.key, u.client, reason) for u in updates]
        return True

    def _refuse_gaps(self) -> None:
        kept = self.context.kept
        assert kept is not None, "the run keeps updates"
        names = set(kept.names())
        rows = [r for r in self.plan.ledger.states.all(self.context.run) if r.kind != OPENING]
        needed = [
            u for r in rows if r.state >= self.plan.first for u in self.plan.updates_of_others(r)
        ]
        lost = [u for u in needed if u.update_id not in names]
        if lost:
            who = ", ".join(sorted({self.context.name_of(u.client) for u in lost}))
            raise UsageError(
                f"{len(lost)} counted updates of other clients are not kept any more ({who}), so "
                "the run cannot be computed again without this one.",
                action=_instead(
                    self.plan.ledger, self.directory, self.plan.run, self.plan.client,
                    self.plan.first,
                ),
            )  # fmt: skip

    def vanished(self) -> tuple[str, ...]:
        """Return the names of the classes of which no other client had an image.

        Empty if an update of another client is damaged: it may have had images of any class.
        """
        mine, others = set[int](), set[int]()
        kept, registry = self.context.kept, self.context.classes
        assert kept is not None, "the run keeps updates"
        names = set(kept.names())
        for key, updates in self.plan.rounds.items():
            classes = classes_of(key.kind, registry.task_info(key.task))
            for update in updates:
                if update.update_id in names:
                    held = mine if update.client == self.plan.client.client_id else others
                    try:
                        held |= classes_with_images(unpack(kept.get(update.update_id)), classes)
                    except CorruptFile:
                        if held is others:
                            return ()
        known = registry.names()
        return tuple(known[c] for c in sorted(mine - others))

    def commit(
        self,
        fork: RunId,
        states: list[tuple[int, Digest, Digest | None]],
        actor: str,
        *,
        revoke: Callable[[], object] | None = None,
    ) -> Forgotten:
        """Make the fork the current run, in one transaction; then remove the old states.

        Args:
            fork: the new run.
            states: what `run` returned.
            actor: the caller, for the audit log.
            revoke: ends the client's membership, in the same transaction; None: it stays a member.
        """
        ledger, source, client = self.plan.ledger, self.plan.run, self.plan.client
        vanished, counts = self.vanished(), ledger.updates.counted_by_run(client.client_id)
        emptied = tuple(r for r in ledger.forks.lineage(source.run_id) if r in counts)
        newest = ledger.states.all(source.run_id)[-1].state
        overtaken = _overtaken(ledger, source)
        with ledger.transaction():
            if revoke is not None:
                revoke()
            ledger.forks.begin(source.run_id, newest, fork)
            ledger.forks.leave_out(fork, client.client_id, states)
            for key, other, reason in self.left_out:
                ledger.updates.exclude(key._replace(run=fork), other, reason)
            for run in emptied:
                ledger.runs.empty(run)
            ledger.audit.add(actor, "forget", f"{client.client_id} in {source.run_id}: {fork}")
            text = f"a client was forgotten in run {source.run_id}; run {fork} continues without it"
            ledger.events.add("warning", "forgotten", text, run=fork)
        finish_emptying(ledger, self.directory)
        return Forgotten(
            client=client.client_id,
            name=client.name,
            member=client.may_join(ledger.now) and revoke is None,
            run=fork,
            parent=source.run_id,
            state=newest,
            updates=len(self.plan.mine),
            images=_images(self.plan.mine),
            tasks=tuple(sorted({u.task for u in self.plan.mine})),
            vanished=vanished,
            left_out=tuple((self.context.name_of(c), why) for _, c, why in self.left_out),
            emptied=emptied,
            elsewhere={r: n for r, n in counts.items() if r not in emptied},
            overtaken=overtaken,
        )


def _images(updates: Iterable[UpdateRow]) -> int:
    """Return how many images some updates of one client were made from: rounds repeat them."""
    of_task: dict[tuple[int, str], int] = {}
    for update in updates:
        if update.kind == LATE:  # each image once
            of_task[update.task, LATE] = of_task.get((update.task, LATE), 0) + update.samples
        else:
            most = max(of_task.get((update.task, ""), 0), update.samples)
            of_task[update.task, ""] = most
    return sum(of_task.values())


def _overtaken(ledger: Ledger, source: RunRow) -> tuple[RunId, int] | None:
    """Return the run that is newer than the forked one, with its newest state."""
    last = ledger.runs.newest()
    state = ledger.states.newest(last.run_id) if last is not None else None
    if last is None or state is None or last.run_id == source.run_id:
        return None
    return last.run_id, state.state


def finish_emptying(ledger: Ledger, directory: Path) -> None:
    """Remove the states and stored updates of runs that a client was forgotten from.

    Including those that a kill left: the ledger lists the runs. Tables and plots stay. It also
    removes forks that a kill or an error left before the ledger knew them: they share states and
    kept updates, perhaps of a client that is forgotten or erased afterwards.

    Raises:
        StorageError: a file cannot be removed.
    """
    emptied = [path for run in ledger.runs.emptied() for path in leftovers(directory, run.run_id)]
    for path in (*emptied, *_unfinished_forks(ledger, directory)):
        with storage_errors("remove", path):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def remove_uncounted(ledger: Ledger, directory: Path, runs: Iterable[RunId]) -> None:
    """Remove kept updates that their run does not count, such as later ones of a fork's parent.

    Args:
        ledger: the federation's.
        directory: the federation's.
        runs: which no server has open.

    Raises:
        StorageError: a file cannot be removed.
    """
    for run in runs:
        kept = KeptUpdates(kept_folder(directory, run))
        if names := set(kept.names()):
            kept.remove(names - ledger.updates.counted_ids(run))


def _unfinished_forks(ledger: Ledger, directory: Path) -> list[Path]:
    """Return the folders of forks that the ledger does not know and no server has opened."""
    runs = directory / "runs"
    with storage_errors("list", runs):
        folders = sorted(p for p in runs.iterdir() if is_run_id(p.name)) if runs.is_dir() else []
        unknown = [p for p in folders if p.is_dir() and ledger.runs.get(RunId(p.name)) is None]
        own = ("states", "kept", start.NAME)
        # A file under way has a dot before its name.
        return [p for p in unknown if all(q.name.lstrip(".").startswith(own) for q in p.iterdir())]


def leftovers(directory: Path, run: RunId) -> list[Path]:
    """Return the files of an emptied run that should have been removed."""
    folder = directory / "runs" / run
    there = [p for name in (*_EMPTIED, run_directory.FINAL_MODEL) if (p := folder / name).exists()]
    return [p for p in there if p.is_file() or any(p.iterdir())]
