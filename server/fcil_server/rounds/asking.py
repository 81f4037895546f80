"""RoundOpen for the clients of a round, with the parts that a client may need."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable
from functools import partial

import numpy as np

from fcil_adapters.contract import Part, TaskInfo
from fcil_adapters.masks.exchanges import AFTER_KEYS
from fcil_adapters.masks.record import MaskRecord, context_of, is_for, members_of, names_part
from fcil_protocol.errors import MethodMismatch
from fcil_protocol.ids import ClientId, seed_word
from fcil_protocol.messages.messages import RoundOpen, Verdict
from fcil_protocol.payloads.builtin import EVALUATE, LATE, REGISTRY
from fcil_protocol.payloads.payload import Payload
from fcil_server.rounds.events import Available, Phase
from fcil_server.rounds.machine import Round
from fcil_server.rounds.position import Mode, RunContext, RunProgress, header_stamp
from fcil_server.rounds.schedule import Step
from fcil_server.sessions.offers import MOST_ARRIVING
from fcil_server.sessions.peers import Peer


def list_available(
    context: RunContext,
    progress: RunProgress,
    peers: Iterable[Peer],
    now: float,
    late: Collection[ClientId] = (),
) -> list[Available]:
    """Return, for each connected client, if it has data for the round under way.

    Args:
        context: the fixed parts of the run.
        progress: the run's progress.
        peers: the connected clients.
        now: seconds of the server's uptime.
        late: clients that may have late images.
    """
    if progress.step is not None and progress.step.kind == LATE:
        return [Available(peer.client, peer.client in late, now) for peer in peers]
    members = _members(context, progress)
    if progress.step is not None and progress.step.kind in AFTER_KEYS and members is not None:
        return [Available(peer.client, peer.client in members, now) for peer in peers]
    keys: frozenset[str] = frozenset()
    unlabelled, skipped = _is_of_unlabelled(context, progress.step), frozenset[ClientId]()
    if unlabelled and progress.step is not None:
        # A client forgets what it counted as a fork begins, and the fork's state still has it.
        skipped = context.ledger.updates.inherited_from(context.run, progress.step.kind)
    if progress.step is not None and progress.step.prepares:
        skipped = clients_unable(context, progress)
    evaluating = progress.step is not None and progress.step.kind == EVALUATE
    if progress.task is not None and progress.step is not None:
        keys = context.classes.keys_of(progress.task.seen if evaluating else progress.task.classes)
    part = "test" if evaluating else "train"
    task = progress.task.index if progress.task is not None and not evaluating else -1
    return [
        Available(
            peer.client,
            # Whether a client has unlabelled images, only the client knows.
            peer.client not in skipped
            and (unlabelled or peer.holds(keys, part))
            and (peer.client, task) not in context.forgotten
            and (members is None or peer.client in members),
            now,
        )
        for peer in peers
    ]


async def ask(
    context: RunContext,
    progress: RunProgress,
    peer: Peer,
    *,
    remaining_s: float,
    verdict: Verdict | None,
) -> bool:
    """Send RoundOpen for the round under way, unless the client's update came before it."""
    assert progress.task is not None
    assert progress.step is not None
    stamp = header_stamp(context, progress.base, progress.task, progress.step)
    registry = await context.publisher.publish_for(
        peer.client, class_registry(context, peer, progress.task), stamp
    )
    key = progress.key(context.run)
    assert key is not None
    if context.is_asynchronous(key.kind) and context.ledger.updates.get(key, peer.client):
        return True
    return context.send(
        peer,
        RoundOpen(
            run=context.run,
            task=progress.task.index,
            kind=progress.step.kind,
            round=progress.step.round,
            rounds=progress.step.rounds,
            base=progress.base,
            oldest_base=progress.oldest_base,
            classes=list(progress.task.classes),
            past=list(progress.task.past),
            seed=[context.config.run.seed, seed_word(peer.client)],
            remaining_s=remaining_s,
            min_count=context.config.privacy.evaluate_min_count,
            ask_first=progress.round is not None and len(progress.round.answers) > MOST_ARRIVING,
            parts=[*(r for r in progress.refs if is_for(r.name, peer.client)), registry],
            verdict=verdict,
        ),
    )


def mask_names(context: RunContext, progress: RunProgress, task: TaskInfo) -> tuple[Part, ...]:
    """Return the part with the digests of a task's names, for a masked round after its list."""
    step, record = progress.step, MaskRecord.read(progress.state)
    if record is None or step is None or step.kind not in context.masked_kinds:
        return ()
    digest = record.members.digest(context.run, task.index)
    return (names_part(digest, context.classes.keyed(task.classes), task.classes),)


def sums_are_about(context: RunContext, progress: RunProgress, task: TaskInfo) -> bytes:
    """Return the digest that the masked sums of the round under way must name; empty: none."""
    step = progress.step
    if step is None or step.kind not in context.masked_kinds:
        return b""
    parts = {p.name: p.payload for p in (*progress.parts, *progress.names)}
    return context_of(
        step.kind,
        step.round,
        step.rounds,
        context.config.run.seed,
        context.schema_digest,
        task.classes,
        task.past,
        parts,
    )


def clients_unable(context: RunContext, progress: RunProgress) -> frozenset[ClientId]:
    """Return the clients that declined a round that these keys prepare: they cannot compute it."""
    assert progress.task is not None
    assert progress.step is not None
    return context.ledger.answers.declined_for(
        context.run, progress.task.index, progress.step.prepares, MethodMismatch.code
    )


def _members(context: RunContext, progress: RunProgress) -> frozenset[ClientId] | None:
    """Return the clients of the masked round under way; None: any client can take part."""
    step = progress.step
    if step is None or step.kind not in {*AFTER_KEYS, *context.masked_kinds}:
        return None
    return members_of(progress.state, step.kind)


def oldest_base(context: RunContext, progress: RunProgress) -> int:
    """Return the oldest state on disk that an update of the round under way may start from.

    -1: the round is not asynchronous, and its own state is the only one.
    """
    if progress.step is None or not context.is_asynchronous(progress.step.kind):
        return -1
    held, oldest = set(context.states.numbers()), progress.base
    bound = progress.base - context.config.round.max_staleness
    while oldest > bound and oldest - 1 in held:  # fewer are kept where it was lower before
        oldest -= 1
    return oldest


def class_registry(context: RunContext, peer: Peer, task: TaskInfo) -> Part:
    """Return the part with the names and ids of the classes that this client may know.

    The same part for all clients with the same classes, while these do not change.
    """
    return context.ledger.remember(
        ("registry", context.run, tuple(peer.names), task.index),
        ("classes", "class_aliases", "tasks"),
        partial(_class_registry, context, peer, task),
    )


def _class_registry(context: RunContext, peer: Peer, task: TaskInfo) -> Part:
    ids = context.classes.names_for(peer.names)
    if context.config.privacy.share_names:
        own = set(ids.values())
        ids |= {name: c for c, name in context.classes.shown_names().items() if c not in own}
    seen = set(task.seen)
    names = sorted(name for name, class_id in ids.items() if class_id in seen)
    tasks = {c: t.task for t in context.ledger.tasks.all(context.run) for c in t.class_ids}
    payload = Payload(
        {
            "class": np.array([ids[n] for n in names], np.int64),
            "task": np.array([tasks[ids[n]] for n in names], np.int64),
        },
        {"names": names},
    )
    return Part(REGISTRY, payload)


def describe_pause(progress: RunProgress) -> str:
    """Return a phrase that names what ends the pause."""
    return "fcil-server resume" + (f" ({progress.held_for})" if progress.held_for else "")


def describe_phase(progress: RunProgress) -> str:
    """Return the phase of the round under way, in a word."""
    assert progress.round is not None
    if progress.round.phase is not Phase.GATHERING:  # once closed, the last updates are stored
        return "collecting"
    return "paused" if progress.mode is Mode.PAUSED else "gathering"


def describe_wait(context: RunContext, progress: RunProgress) -> str:
    """Return a phrase that names what the round under way waits for."""
    assert progress.round is not None
    assert progress.task is not None
    assert progress.step is not None
    if progress.round.phase is not Phase.GATHERING:
        stuck = progress.round.stuck_until is not None
        return "clients that have declined to be able to take part" if stuck else ""
    if progress.mode is Mode.PAUSED:
        return describe_pause(progress)
    return _describe_gathering(context, progress.round, progress.task, progress.step)


def _describe_gathering(context: RunContext, machine: Round, task: TaskInfo, step: Step) -> str:
    here = len(context.peers.announced())
    more = context.config.round.min_clients - here
    if more > 0:
        return f"{more} more client{'s' if more > 1 else ''} ({here} ready)"
    if machine.opens_at is not None:
        return "others that may connect or bring images shortly (round.settle_s)"
    hidden = describe_hidden(context, task, step)
    if hidden:
        return f"hidden classes to be shown: fcil-server classes show {hidden}"
    images = describe_images(context, task, step)
    if not machine.holders:
        return f"a client that holds {images}"
    lacking = machine.rules.min_updates - machine.holders
    who = f"{lacking} more client{'' if lacking == 1 else 's'} that hold{'s' * (lacking == 1)}"
    return f"{who} {images} ({machine.holders} connected)"


def describe_images(context: RunContext, task: TaskInfo, step: Step) -> str:
    """Return a phrase that names the images that a round needs."""
    if _is_of_unlabelled(context, step):
        return "unlabelled images"
    if step.kind in AFTER_KEYS:
        return "a place in this masked round"
    if step.kind == LATE:
        return "images of learned classes that are not counted yet"
    names = context.classes.names()
    wanted = _wanted(task, step)
    more = f" and {len(wanted) - 8} more" if len(wanted) > 8 else ""
    listed = ", ".join(names[c] for c in wanted[:8])
    return f"{'test ' if step.kind == EVALUATE else ''}images of {listed}{more}"


def describe_hidden(context: RunContext, task: TaskInfo, step: Step) -> str:
    """Return the arguments of `fcil-server classes show` if all classes of a round are hidden.

    Empty if a class of the round is not hidden: then no connected client has images of it.
    """
    any_class = _is_of_unlabelled(context, step) or step.kind == LATE
    wanted = () if any_class else _wanted(task, step)
    if not wanted or context.classes.keys_of(wanted):
        return ""
    names = context.classes.names()
    return shlex.join(names[c] for c in wanted)


def _is_of_unlabelled(context: RunContext, step: Step | None) -> bool:
    exchange = None if step is None else context.exchange(step.kind)
    return exchange is not None and exchange.unlabelled > 0


def _wanted(task: TaskInfo, step: Step) -> tuple[int, ...]:
    return task.seen if step.kind == EVALUATE else task.classes
