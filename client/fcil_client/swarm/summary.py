"""Summary of a swarm: all members in a few numbers and one line. No IO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fcil_client.session.events import Link, Work
from fcil_protocol.process.terminal import count_of

if TYPE_CHECKING:
    from fcil_client.swarm.members import SwarmMember


def summary(members: Sequence[SwarmMember]) -> dict[str, Any]:
    """Return the members' numbers, JSON-ready.

    ``connected`` have a session; ``fetching``, ``working`` and ``sending`` are in a round (one
    computes at a time, the others wait for their turn); ``counted`` are updates since the start;
    bytes are of messages, before the link encrypts them.
    """
    clients = [m.client for m in members if m.client is not None]
    alive = [m.client for m in members if m.client is not None and m.error is None]
    work = Counter(client.session.work for client in alive)
    keys = Counter(str(c.session.key) for c in alive if c.session.key is not None)
    runs = Counter(c.terms.run for c in alive if c.terms is not None)
    up, down = zip(*(c.application_bytes for c in clients), strict=True) if clients else ((), ())
    return {
        "members": len(members),
        "enrolled": sum(m.home is not None for m in members),
        "connected": sum(c.session.link is Link.READY for c in alive),
        "fetching": work[Work.FETCHING],
        "working": work[Work.WORKING],
        "sending": work[Work.SENDING],
        "counted": sum(c.counted for c in clients),
        "round": keys.most_common(1)[0][0] if keys else None,
        "run": runs.most_common(1)[0][0] if runs else None,
        "bytes_up": sum(up),
        "bytes_down": sum(down),
        "failed": {m.seat.name: str(m.error) for m in members if m.error is not None},
    }


def line(told: dict[str, Any]) -> str:
    """Return a summary in one line."""
    words = [f"{told['connected']} of {told['members']} connected"]
    if told["enrolled"] + len(told["failed"]) < told["members"]:
        words.append(f"{told['enrolled']} enrolled")
    at_work = [f"{told[w]} {w}" for w in ("fetching", "working", "sending") if told[w]]
    if told["round"]:
        words.append(f"{told['round']}: {', '.join(at_work)}")
    words.append(f"{count_of(told['counted'], 'update')} counted")
    words.append(f"{told['bytes_up'] / 1e6:.1f} MB up, {told['bytes_down'] / 1e6:.1f} MB down")
    if told["failed"]:
        words.append(f"{len(told['failed'])} failed")
    return "; ".join(words)
