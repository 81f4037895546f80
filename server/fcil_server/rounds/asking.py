"""RoundOpen for the clients of a round, with the parts that a client may need."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

import numpy as np

from fcil_adapters.contract import Part, TaskInfo
from fcil_protocol.messages.messages import PartRef, RoundOpen, Verdict
from fcil_protocol.payloads.builtin import EVALUATE, REGISTRY
from fcil_protocol.payloads.payload import Payload
from fcil_server.rounds.events import Available, Phase
from fcil_server.rounds.machine import Round
from fcil_server.rounds.position import Mode, RunContext, RunProgress, stamp
from fcil_server.rounds.schedule import Step
from fcil_server.sessions.peers import Peer


def available(
    kit: RunContext, at: RunProgress, peers: Iterable[Peer], now: float
) -> list[Available]:
    """Return, for each connected client, if it has data for the round under way."""
    keys: frozenset[str] = frozenset()
    evaluating = at.step is not None and at.step.kind == EVALUATE
    if at.task is not None and at.step is not None:
        keys = kit.classes.keys_of(at.task.seen if evaluating else at.task.classes)
    part = "test" if evaluating else "train"
    task = at.task.index if at.task is not None and not evaluating else -1
    return [
        Available(
            peer.client,
            peer.holds(keys, part) and (peer.client, task) not in kit.forgotten,
            now,
        )
        for peer in peers
    ]


async def ask(
    kit: RunContext, at: RunProgress, peer: Peer, *, remaining_s: float, verdict: Verdict | None
) -> bool:
    """Send RoundOpen for the round under way."""
    assert at.task is not None
    assert at.step is not None
    registry = await registry_part(kit, at, peer, at.task, at.step)
    return kit.send(
        peer,
        RoundOpen(
            run=kit.run,
            task=at.task.index,
            kind=at.step.kind,
            round=at.step.round,
            rounds=at.step.rounds,
            base=at.base,
            classes=list(at.task.classes),
            past=list(at.task.past),
            # The client's id makes its stream differ from the others' of the same round.
            seed=[kit.config.run.seed, int.from_bytes(peer.client.encode()[:6], "big")],
            remaining_s=remaining_s,
            min_count=kit.config.privacy.evaluate_min_count,
            parts=[*at.refs, registry],
            verdict=verdict,
        ),
    )


async def registry_part(
    kit: RunContext, at: RunProgress, peer: Peer, task: TaskInfo, step: Step
) -> PartRef:
    """Publish the names and ids of the classes that this client may know."""
    if kit.config.privacy.share_names:
        ids = {name: class_id for class_id, name in kit.classes.names().items()}
    else:
        ids = kit.classes.names_for(peer.names)
    seen = set(task.seen)
    names = sorted(name for name, class_id in ids.items() if class_id in seen)
    tasks = {c: t.task for t in kit.ledger.tasks.all(kit.run) for c in t.class_ids}
    payload = Payload(
        {
            "class": np.array([ids[n] for n in names], np.int64),
            "task": np.array([tasks[ids[n]] for n in names], np.int64),
        },
        {"names": names},
    )
    part = Part(REGISTRY, payload)
    return await kit.publisher.publish_for(peer.client, part, stamp(kit, at, task, step))


def describe_pause(at: RunProgress) -> str:
    """Return a phrase that names what ends the pause."""
    return "fcil-server resume" + (f" ({at.held_for})" if at.held_for else "")


def describe_wait(kit: RunContext, at: RunProgress) -> tuple[str, str]:
    """Return the phase of the round under way, and a phrase that names what it waits for."""
    assert at.round is not None
    assert at.task is not None
    assert at.step is not None
    if at.round.phase is Phase.OPEN:
        stuck = at.round.stuck_until is not None
        return "collecting", "clients that have declined to be able to take part" if stuck else ""
    if at.mode is Mode.PAUSED:
        return "paused", describe_pause(at)
    return "gathering", _describe_gathering(kit, at.round, at.task, at.step)


def _describe_gathering(kit: RunContext, machine: Round, task: TaskInfo, step: Step) -> str:
    here = len(kit.peers.announced())
    more = kit.config.round.min_clients - here
    if more > 0:
        return f"{more} more client{'s' if more > 1 else ''} ({here} here)"
    if machine.opens_at is not None:
        return "others that may come or have images in a moment (round.settle_s)"
    hidden = hidden_classes(kit, task, step)
    if hidden:
        return f"hidden classes to be shown: fcil-server classes show {hidden}"
    images = wanted_images(kit, task, step)
    if not machine.holders:
        return f"a client that holds {images}"
    lacking = machine.rules.min_updates - machine.holders
    who = f"{lacking} more client{'' if lacking == 1 else 's'} that hold{'s' * (lacking == 1)}"
    return f"{who} {images} ({machine.holders} here)"


def wanted_images(kit: RunContext, task: TaskInfo, step: Step) -> str:
    """Return a phrase that names the images that a round needs."""
    names = kit.classes.names()
    wanted = _wanted(task, step)
    more = f" and {len(wanted) - 8} more" if len(wanted) > 8 else ""
    listed = ", ".join(names[c] for c in wanted[:8])
    return f"{'test ' if step.kind == EVALUATE else ''}images of {listed}{more}"


def hidden_classes(kit: RunContext, task: TaskInfo, step: Step) -> str:
    """Return the arguments of `fcil-server classes show` if all classes of a round are hidden.

    Empty if a class of the round is not hidden: then no connected client has images of it.
    """
    wanted = _wanted(task, step)
    if not wanted or kit.classes.keys_of(wanted):
        return ""
    names = kit.classes.names()
    return shlex.join(names[c] for c in wanted)


def _wanted(task: TaskInfo, step: Step) -> tuple[int, ...]:
    return task.seen if step.kind == EVALUATE else task.classes
