"""Driver of one run, task by task and round by round.

Pure code (`schedule`, `machine`) decides the next step; this module carries it out, with `asking`,
`reception` and `closing`. The ledger commits every step before any client or operator hears of it,
so a restart resumes the same round: `Coordinator.drive` begins wherever the ledger says the run
stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fcil_adapters.contract import TaskInfo
from fcil_adapters.masks.exchanges import AFTER_KEYS, UNMASK, VOTE, is_summed_once
from fcil_adapters.masks.record import MaskRecord
from fcil_protocol.errors import MethodMismatch, NotNow, StorageError, UsageError
from fcil_protocol.ids import ClientId, RoundKey
from fcil_protocol.messages.messages import Verdict
from fcil_protocol.payloads.builtin import EVALUATE, LATE
from fcil_server.event_loop import Yielder
from fcil_server.federation.roster import WITHDRAWN
from fcil_server.ledger.enums import OPENING, SPLIT_SUM, Answer
from fcil_server.ledger.rows import RoundRow
from fcil_server.rounds import events as machine
from fcil_server.rounds import notes
from fcil_server.rounds.asking import (
    ask,
    describe_pause,
    describe_phase,
    describe_wait,
    list_available,
    mask_names,
    oldest_base,
    sums_are_about,
)
from fcil_server.rounds.closing import Closing, needed_updates, save
from fcil_server.rounds.discovery import Discovery, OldClasses
from fcil_server.rounds.events import Phase
from fcil_server.rounds.late_images import LateImages
from fcil_server.rounds.position import Mode, RunContext, RunProgress, header_stamp, method_context
from fcil_server.rounds.reception import Reception
from fcil_server.rounds.restore import machine_of, omission
from fcil_server.rounds.schedule import (
    Past,
    Step,
    late_step,
    next_masked_step,
    next_step,
    task_steps,
)
from fcil_server.sessions.peers import Peer
from fcil_server.sessions.run_ports import RunPorts

# Between two rounds of late images while the run waits for classes and nothing is new: longer than
# new classes settle.
MIN_BETWEEN_S = 30.0
JOINED_S = 0.5  # between two writes of the list of asked clients while others join a round


@dataclass
class Coordinator:
    """Driver of one run of the federation.

    Attributes:
        ports: the daemon's side of the run.
        task_closed: called when a task is learned and evaluated.
    """

    context: RunContext
    ports: RunPorts
    task_closed: Callable[[], None]
    progress: RunProgress = field(default_factory=RunProgress)
    _events: asyncio.Queue[machine.Event] = field(default_factory=asyncio.Queue)
    _mode_changed: asyncio.Event = field(default_factory=asyncio.Event)
    _timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.closing = Closing(self.context, self.progress, self.progress.adopt)
        self.reception = Reception(self.context, self.progress, self._updated, self._empty)
        self.discovery = Discovery(self.context, self._wait_for_classes, self._between_tasks)
        self.old_classes = OldClasses(self.context)
        self.late_images = LateImages(self.context)
        self._late_timer: asyncio.TimerHandle | None = None
        self._unheld_noted = -1  # the task for which the note about missing data was written
        # Clients asked by now, to be written: in an asynchronous round of thousands each one that
        # joins makes the list longer.
        self._joined: tuple[ClientId, ...] = ()
        self._joining: asyncio.TimerHandle | None = None

    # --- calls from the daemon ------------------------------------------------------------------

    def on_client_ready(self, peer: Peer) -> None:
        """Handle a client that is ready and has announced its classes (again)."""
        self.old_classes.notice(peer)
        self.late_images.on_ready(peer.client)
        self._look_at([peer])

    def _look_at(self, peers: list[Peer]) -> None:
        self.discovery.news.set()
        for event in self._list_available(peers):
            self._tell_round(event)

    def _tell_round(self, event: machine.Event) -> None:
        """Pass an event on to the round under way; without one it is forgotten.

        A round begins with all clients that are there, so it needs nothing of what came before.
        """
        if self.progress.round is not None:
            self._events.put_nowait(event)

    def _list_available(self, peers: list[Peer]) -> list[machine.Available]:
        progress, late = self.progress, frozenset[ClientId]()
        if progress.task is not None and progress.step is not None and progress.step.kind == LATE:
            late = self.late_images.clients(progress.task, peers, self._now())
        return list_available(self.context, progress, peers, self._now(), late)

    def on_client_left(self, client: ClientId) -> None:
        """Handle the end of a client's session."""
        self.discovery.news.set()  # the waiting phrase counts connected clients
        self._tell_round(machine.Left(client, self._now()))

    def on_client_declined(self, client: ClientId, key: RoundKey, reason: str) -> bool:
        """Handle a client that cannot take part; return True if the round waited for its answer."""
        progress = self.progress
        if progress.round is None or not progress.is_open or key != progress.key(self.context.run):
            return False
        waited = progress.round.answers.get(client) is Answer.NONE
        if waited:
            # The loop waits for no disk: one that a power cut takes is asked again.
            self.context.ledger.answers.set(key, client, Answer.DECLINED, reason, durable=False)
        resting, final = reason == NotNow.code, reason == MethodMismatch.code
        self._events.put_nowait(
            machine.Declined(client, reason, self._now(), final=final, resting=resting)
        )
        return waited

    def on_client_revoked(self, client: ClientId) -> None:
        """Handle a client's revocation; unless its update was kept, it declines the round."""
        key = self.progress.key(self.context.run)
        if key is None or not self.progress.is_open:
            return
        row = self.context.ledger.updates.get(key, client)
        if row is not None and row.reason != WITHDRAWN:
            return
        self._events.put_nowait(machine.Withdrawn(client, WITHDRAWN, self._now()))
        for other in self.context.ledger.updates.of_round(key) if row is not None else ():
            if other.sum_id is not None and other.reason == SPLIT_SUM:
                self._events.put_nowait(machine.Withdrawn(other.client, SPLIT_SUM, self._now()))

    def on_classes_changed(self) -> None:
        """Match clients with classes again after the operator changed names."""
        self._look_at(self.context.peers.announced())

    def close_short(self, *, rest_of_task: bool = False) -> None:
        """End the round under way with the updates received so far.

        Args:
            rest_of_task: also skip the further rounds of its task, except the evaluation.

        Raises:
            UsageError: no round is under way.
        """
        progress = self.progress
        if progress.round is None or progress.round.phase is Phase.CLOSED or progress.task is None:
            raise UsageError(
                "no round is under way.",
                action="fcil-server status shows what the server is doing.",
            )
        why = machine.Why.REST if rest_of_task else machine.Why.OPERATOR
        self._events.put_nowait(machine.Stop(self._now(), why))

    def set_mode(self, mode: Mode) -> None:
        """Hold the run between rounds, end the server there, or resume, as the operator wants."""
        progress = self.progress
        progress.mode, progress.held_for = mode, ""
        event = machine.Resume if mode is Mode.RUNNING else machine.Hold
        self._tell_round(event(self._now()))
        self._mode_changed.set()
        self.discovery.news.set()
        if mode is Mode.DRAINING and progress.phase == "done":
            self.ports.drained()

    def _wait_for_classes(self, what: str) -> None:
        self.progress.show("waiting", what)

    async def _may_go_on(self) -> None:
        """Wait between rounds while the operator holds the run; a drained server ends here."""
        progress = self.progress
        while progress.mode is not Mode.RUNNING:
            if progress.mode is Mode.DRAINING:
                progress.show("drained")
                self.ports.drained()
            else:
                progress.show("paused", describe_pause(progress))
            self._mode_changed.clear()
            await self._mode_changed.wait()

    def _empty(self, client: ClientId, reason: str) -> None:
        self._events.put_nowait(machine.Declined(client, reason, self._now(), final=True))

    def _updated(self, client: ClientId) -> None:
        self._events.put_nowait(machine.Updated(client, self._now()))

    def verdict(self, client: ClientId) -> Verdict | None:
        """Return the verdict on a client's last update whose round is closed."""
        return self.closing.verdict(client)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the open round's deadline."""
        if not self.progress.is_open or self.progress.round is None:
            return None
        return max(0.0, self.progress.round.deadline - self._now())

    # --- the run ----------------------------------------------------------------------------

    async def drive(self) -> None:
        """Drive the run from where the ledger says it stands to its listed end.

        A discovered schedule has no end: it waits for new classes until the server stops.
        """
        context, progress = self.context, self.progress
        await self._load_state()
        self._tidy_spool()
        await self._resume_late()
        while (task := await self._next_task()) is not None:
            progress.task = task
            await self._open_task(task)
            steps = task_steps(
                context.exchanges,
                context.config.round.rounds_per_task,
                task=task.index,
                evaluate=context.config.run.evaluate,
            )
            while True:
                step = self._next_step(steps, task.index)
                ends = step is None and not context.config.run.evaluate
                if ends or (step is not None and (step.kind, step.round) == (EVALUATE, 0)):
                    await self._count_late(task)  # the evaluation is of all that has come
                if step is None:
                    break
                await self._may_go_on()
                progress.step = step
                await self._one_round(task, step)
            progress.step = None
            if context.config.run.central_test:
                progress.show("evaluating")
                await self.closing.central_evaluation(task)
            context.ledger.tasks.close(context.run, task.index)
            level, text = notes.describe_task_end(context, task)
            context.notify(level, "task_done", text)
            self.task_closed()
        self.end()

    def end(self) -> None:
        """End a run that has learned all its tasks."""
        if self._late_timer is not None:
            self._late_timer.cancel()
        self.progress.show("done")

    def _next_step(self, steps: Sequence[Step], task: int) -> Step | None:
        context, rounds = self.context, self.context.ledger.rounds
        if context.method.plain is None:
            return next_step(steps, rounds.count_closed(context.run, task))
        past = [Past.of(row) for row in rounds.closed_of(context.run, task)]
        attempts = 1 + context.config.round.max_reopens
        once = {e.kind for e in context.exchanges if is_summed_once(context.method, e)}
        plain = context.method.plain.exchanges(context.hparams, context.info)
        gives_up = {e.kind: e.gives_up for e in plain}
        masked = context.masked_kinds
        step = next_masked_step(steps, past, masked, attempts, once, gives_up)
        after_list = step is not None and step.kind in {*AFTER_KEYS, *masked}
        record = MaskRecord.read(self.progress.state)
        if past and after_list and (record is None or record.run != context.run):
            # The list is of the run that this one was forked from: no client has its secrets here.
            past[-1] = replace(past[-1], worked=False)
            attempts += 1
            return next_masked_step(steps, past, masked, attempts, once, gives_up)
        return step

    async def _load_state(self) -> None:
        newest = self.context.ledger.states.newest(self.context.run)
        # A state file that the ledger does not know was never committed: its round resumes.
        self.context.states.discard_after(newest.state if newest else -1)
        if newest is not None:
            state = await asyncio.to_thread(self.context.states.load, newest.state)
            self.progress.adopt(state, newest.state, newest.digest)

    def _tidy_spool(self) -> None:
        """Remove updates of older rounds and unrecorded ones, which their senders still have."""
        row = self.context.ledger.rounds.current(self.context.run)
        updates = self.context.ledger.updates.accepted(row.key) if row else []
        held = set(self.context.spool.keys())
        for update in updates:
            if row is not None and update.record not in held:
                self.context.ledger.updates.exclude(row.key, update.client, "damaged in the spool")
                name = self.context.name_of(update.client)
                text = f"the update of {name} is damaged in the spool and cannot be counted"
                self.context.notify("error", "corrupt_file", text)
        needed = needed_updates(self.context.ledger, self.context.run)
        self.context.spool.remove([k for k in sorted(self.context.spool.keys()) if k not in needed])

    async def _next_task(self) -> TaskInfo | None:
        context = self.context
        opened = context.ledger.tasks.all(context.run)
        if opened and opened[-1].closed_at is None:
            return context.classes.task_info(opened[-1].task)
        listed = context.classes.listed_tasks()
        if listed and len(opened) >= listed:
            return None
        await self._may_go_on()
        if listed:
            return context.classes.open_task(len(opened))
        await self.discovery.wait()
        # Only classes that a connected client can teach: names of clients that left keep waiting.
        return context.classes.open_task(len(opened), only=self.discovery.held_class_keys())

    async def _between_tasks(self) -> None:
        """Let the wait for new classes go on; late images are counted first if it is their time."""
        await self._may_go_on()
        opened = self.context.ledger.tasks.all(self.context.run)
        if not self.context.counts_late or not opened:
            return
        wait_s = self.late_images.wait_s(self._now())
        if not wait_s:
            if await self._count_late(self.context.classes.task_info(opened[-1].task)):
                # Others may have come meanwhile.
                wait_s = max(self.late_images.wait_s(self._now()), MIN_BETWEEN_S)
            else:
                wait_s = self.late_images.left_alone_s(self._now())
        if wait_s:
            if self._late_timer is not None:
                self._late_timer.cancel()
            loop = asyncio.get_running_loop()
            self._late_timer = loop.call_later(wait_s, self.discovery.news.set)

    async def _resume_late(self) -> None:
        """Resume a round of late images that was open when the server stopped.

        It may be of a task that is over: no other round could open before it closes.
        """
        row = self.context.ledger.rounds.current(self.context.run)
        if row is not None and row.kind == LATE:
            await self._late_round(self.context.classes.task_info(row.task), late_step(row.round))

    async def _count_late(self, task: TaskInfo) -> bool:
        """Run a round for late images if clients may have some; return True if it took place.

        Args:
            task: the newest one; the round is recorded under it.
        """
        context = self.context
        if not context.counts_late or context.ledger.rounds.current(context.run) is not None:
            return False
        await self._may_go_on()
        if not self.late_images.suffice(task, self._now()):
            return False
        number = context.ledger.rounds.count_late(context.run, task.index)
        await self._late_round(task, late_step(number))
        return True

    async def _late_round(self, task: TaskInfo, step: Step) -> None:
        progress = self.progress
        waited_since = progress.unheld_since  # of the task's rounds
        progress.task, progress.step = task, step
        await self._one_round(task, step)
        progress.step, progress.unheld_since = None, waited_since

    async def _open_task(self, task: TaskInfo) -> None:
        context, progress = self.context, self.progress
        if any(row.task == task.index for row in context.ledger.states.all(context.run)):
            return  # opened before a restart
        progress.show("opening")
        ctx = method_context(context, task, Step(OPENING, 0, 1))
        state = progress.state if progress.number >= 0 else await context.aggregation.init(ctx)
        state = await context.aggregation.open_task(ctx, state)
        parts = await context.aggregation.broadcast(ctx, state)  # if it fails, no state is kept
        number, digest = await save(context, progress, state, task)
        key = RoundKey(context.run, task.index, OPENING, 0)
        context.ledger.states.add(key, number, digest, progress.digest)
        progress.adopt(state, number, digest, parts)
        names = context.classes.names()
        listed = ", ".join(names[c] for c in task.classes)
        context.notify("info", "task_opened", f"task {task.index} opens: {listed}")

    # --- one round --------------------------------------------------------------------------

    async def _one_round(self, task: TaskInfo, step: Step) -> None:
        context, progress = self.context, self.progress
        progress.show("publishing")
        if not progress.parts:
            progress.parts = await context.aggregation.broadcast(
                method_context(context, task, step), progress.state
            )
        before = {r.digest for r in progress.refs}
        progress.names = mask_names(context, progress, task)
        progress.about = await asyncio.to_thread(sums_are_about, context, progress, task)
        progress.refs = await context.publisher.publish(
            (*progress.parts, *progress.names), header_stamp(context, progress.base, task, step)
        )
        progress.oldest_base = oldest_base(context, progress)
        key = RoundKey(context.run, task.index, step.kind, step.round)
        await self.ports.round_opens(key, {r.digest for r in progress.refs} - before)
        began = self._now() - self._open_s(key)
        close = await self._collect(key)
        progress.show("aggregating")
        await self.closing.close(task, step, close, self._now() - began)
        self._note_counted(key)
        nobody = progress.round is not None and close.why is machine.Why.NO_HOLDER
        progress.unheld_since = (
            progress.round.unheld_since if nobody and progress.round is not None else None
        )
        progress.round = None
        await self.ports.round_closed(key)
        if void := self.closing.check_void(key):
            progress.hold(void)

    def _open_s(self, key: RoundKey) -> float:
        """Return the seconds for which a round is open already: it resumes after a restart."""
        row = self.context.ledger.rounds.current(self.context.run)
        # The clock may have been set back since.
        return max(0.0, self.context.ledger.now - row.opened_at) if row and row.key == key else 0.0

    def _note_counted(self, key: RoundKey) -> None:
        """Note which clients have sent the images that they were asked for, if these count once."""
        exchange = self.context.exchange(key.kind)
        if exchange is None or not exchange.counts_once:
            return
        images = self.late_images.close(key, self._now())
        if images and exchange.late:
            text = notes.describe_late_counted(self.context, images)
            self.context.notify("info", "late_counted", text)

    async def _collect(self, key: RoundKey) -> machine.Close:
        """Run the round's machine until it closes."""
        progress = self.progress
        row = self.context.ledger.rounds.current(self.context.run)
        row = row if row and row.key == key else None
        progress.opened_at = row.opened_at if row else None
        progress.round = machine_of(self.context, progress, key, row, self._now())
        if row is not None:
            self._list_restored(row, tuple(progress.round.answers))
        assert progress.task is not None
        self.late_images.begin(progress.task, key.kind)
        self._events = asyncio.Queue()
        now = self._now()
        ends = key.kind not in (EVALUATE, LATE, VOTE, UNMASK)  # a sum that has come counts
        if ends and self._no_more_of(key.task):
            self._events.put_nowait(machine.Stop(now, machine.Why.REST))
        elif row is None and (why := omission(self.context, progress, key)):
            self._events.put_nowait(machine.Stop(now, why))
        here = self._list_available(self.context.peers.announced())
        # One snapshot: all connected clients are candidates, in whatever order they connected.
        pairs = tuple((e.client, e.holds) for e in here)
        self._events.put_nowait(machine.Present(pairs, now))
        if progress.round.phase is Phase.OPEN:  # restored: it may be complete already
            self._set_timer(progress.round.deadline)
            self._set_timer(self._now() + progress.round.rules.grace_s)
            self._events.put_nowait(machine.Tick(self._now()))
        yielder = Yielder()
        try:
            while True:
                # Nobody is at work: the round goes on after the next start.
                if progress.mode is Mode.DRAINING and progress.round.is_idle:
                    await self._may_go_on()
                progress.show_live(
                    partial(describe_phase, progress),
                    partial(describe_wait, self.context, progress),
                )
                for instruction in progress.round.handle(await self._events.get()):
                    if isinstance(instruction, machine.Close):
                        await self.ports.drain()
                        self._write_joined(key)
                        self._ensure_row(key)
                        return instruction
                    await self._execute(instruction, key)
                    await yielder.yield_if_long()
        finally:
            self._write_joined(key)
            self._forget_joined()  # a list that cannot be written is no other round's
            for timer in self._timers:
                timer.cancel()
            self._timers.clear()

    def _no_more_of(self, task: int) -> bool:
        """Return True if the operator wanted no more rounds of a task; the ledger remembers."""
        rounds = self.context.ledger.rounds
        return rounds.was_closed_by(self.context.run, task, machine.Why.REST.value)

    def _ensure_row(self, key: RoundKey) -> None:
        """Record a round that closed before it asked any client."""
        if self.context.ledger.rounds.current(self.context.run) is None:
            self.context.ledger.rounds.open(key, asked=(), base_state=self.progress.number)

    def _set_timer(self, at: float) -> None:
        loop = asyncio.get_running_loop()
        tick = machine.Tick(at)
        self._timers = [timer for timer in self._timers if timer.when() > loop.time()]
        self._timers.append(loop.call_at(at, lambda: self._events.put_nowait(tick)))

    async def _execute(self, instruction: machine.Instruction, key: RoundKey) -> None:
        context, progress = self.context, self.progress
        match instruction:
            case machine.Unheld(until):
                self._note_unheld(None if until is None else until - self._now())
            case machine.Unable(until):
                left = None if until is None else until - self._now()
                text = notes.describe_unable(context, self.progress, left)
                context.notify("warning", "all_declined", text)
            case machine.Opened(asked):
                self._unheld_noted = -1
                remaining = context.config.round.deadline_s
                with context.ledger.transaction(waits=False):
                    row = context.ledger.rounds.open(
                        key, asked=asked, base_state=self.progress.number, remaining_s=remaining
                    )
                self.progress.opened_at = row.opened_at
                await asyncio.to_thread(context.ledger.sync)
                context.notify("info", "round_opened", notes.describe_opened(progress, asked))
            case machine.Widened(asked, declined=False):
                self._joined = asked
                if self._joining is None:
                    later = asyncio.get_running_loop().call_later
                    self._joining = later(JOINED_S, self._write_joined, key)
            case machine.Widened(asked):
                self._forget_joined()  # they are in this list too
                context.ledger.rounds.set_asked(key, asked)
                context.ledger.rounds.set_remaining(key, context.config.round.deadline_s)
                context.notify("info", "round_widened", notes.describe_widened(progress, asked))
            case machine.Ask(client):
                peer = context.peers.by_client(client)
                # In a session whose list of classes is still to come it is asked with that.
                if peer is not None and peer.announced:
                    self.late_images.ask(peer)
                    left, verdict = self.remaining_s or 0.0, self.verdict(client)
                    await ask(context, progress, peer, remaining_s=left, verdict=verdict)
            case machine.SetTimer(at):
                self._set_timer(at)
            case machine.Reopened():
                await self._reopened(instruction, key)
            case machine.Close():
                raise AssertionError("the caller takes Close")

    def _list_restored(self, row: RoundRow, asked: tuple[ClientId, ...]) -> None:
        """List who had joined a round and answered before a kill, and was not written yet."""
        if set(asked) - set(row.asked):
            self._joined = asked
            self._write_joined(row.key)

    def _write_joined(self, key: RoundKey) -> None:
        """Write the list of asked clients if some have joined since; a kill forgets them.

        If that fails, it is tried again when the next one joins, or the round closes.
        """
        asked = self._joined
        self._forget_joined()
        if asked:
            try:
                self.context.ledger.rounds.set_asked(key, asked, durable=False)
            except StorageError:
                self._joined = asked

    def _forget_joined(self) -> None:
        if self._joining is not None:
            self._joining.cancel()
        self._joined, self._joining = (), None

    async def _reopened(self, what: machine.Reopened, key: RoundKey) -> None:
        assert self.progress.round is not None
        self._forget_joined()
        asked = tuple(self.progress.round.answers)
        self.context.ledger.rounds.reopen(key, asked=asked, remaining_s=what.at - self._now())
        self.context.notify(
            "warning", "reopened", notes.describe_reopened(self.context, self.progress, what)
        )
        if self.progress.mode is Mode.DRAINING:  # it resumes when the server is started again
            await self._may_go_on()

    def _note_unheld(self, until_s: float | None) -> None:
        assert self.progress.task is not None
        if self._unheld_noted != self.progress.task.index:
            self._unheld_noted = self.progress.task.index
            self.context.notify(
                "warning", "no_holder", notes.describe_unheld(self.context, self.progress, until_s)
            )
