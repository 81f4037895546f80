"""Who can be asked, and the asking: RoundOpen with the parts that a client may need."""

from __future__ import annotations

import numpy as np

from fcil_adapters.contract import Part, TaskInfo
from fcil_protocol.messages import PartRef, RoundOpen, Verdict
from fcil_protocol.payload import Payload
from fcil_protocol.schema import class_key
from fcil_protocol.wellknown import EVALUATE, REGISTRY
from fcil_server.peers import Peer
from fcil_server.plan import Step
from fcil_server.position import Kit, Position, stamp
from fcil_server.round import Available, Phase


def available(kit: Kit, at: Position, peer: Peer, now: float) -> Available:
    """Say that a client is here, and whether it has data for the round under way."""
    holds = False
    if at.task is not None and at.step is not None:
        evaluating = at.step.kind == EVALUATE
        names = kit.classes.names()
        wanted = at.task.seen if evaluating else at.task.classes
        keys = frozenset(class_key(names[c]) for c in wanted)
        holds = peer.holds(keys, "test" if evaluating else "train")
    return Available(peer.client, holds, now)


async def ask(
    kit: Kit, at: Position, peer: Peer, *, remaining_s: float, verdict: Verdict | None
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
            # The client's word makes its stream differ from the others' of the same round.
            seed=[kit.config.run.seed, int.from_bytes(peer.client.encode()[:6], "big")],
            remaining_s=remaining_s,
            min_count=kit.config.privacy.evaluate_min_count,
            parts=[*at.refs, registry],
            verdict=verdict,
        ),
    )


async def registry_part(kit: Kit, at: Position, peer: Peer, task: TaskInfo, step: Step) -> PartRef:
    """Publish the names and ids of the classes that this client may know."""
    if kit.config.privacy.share_names:
        ids = {name: class_id for class_id, name in kit.classes.names().items()}
    else:
        ids = kit.classes.names_for(peer.names)
    seen = set(task.seen)
    names = sorted(name for name, class_id in ids.items() if class_id in seen)
    tasks = {c: t.task for t in kit.ledger.tasks(kit.run) for c in t.class_ids}
    payload = Payload(
        {
            "class": np.array([ids[n] for n in names], np.int64),
            "task": np.array([tasks[ids[n]] for n in names], np.int64),
        },
        {"names": names},
    )
    part = Part(REGISTRY, payload)
    return await kit.publisher.publish_for(peer.client, part, stamp(kit, at, task, step))


def describe_wait(kit: Kit, at: Position) -> None:
    """Say in a phrase what the round under way waits for."""
    assert at.round is not None
    assert at.task is not None
    assert at.step is not None
    if at.round.phase is Phase.OPEN:
        at.phase, at.waiting_for = "collecting", ""
        return
    at.phase = "gathering"
    here = len(kit.peers.announced())
    more = kit.config.round.min_clients - here
    if more > 0:
        at.waiting_for = f"{more} more client{'s' if more > 1 else ''} ({here} here)"
        return
    evaluating = at.step.kind == EVALUATE
    names = kit.classes.names()
    wanted = at.task.seen if evaluating else at.task.classes
    listed = ", ".join(names[c] for c in wanted[:8])
    at.waiting_for = f"a client that holds {'test ' if evaluating else ''}images of {listed}"
