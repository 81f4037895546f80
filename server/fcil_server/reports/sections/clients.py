"""The clients section: identity, state, contribution and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fcil_server.ledger.labels import GONE, progress_of, short_device
from fcil_server.reports.charts.history import History, MemberLine
from fcil_server.reports.sections.params import ROWS, Params, cut, matches

# Ratings of a client's states; the page's style gives each rating a sign.
_STATES = {
    "ready": "good",
    "preparing": "quiet",
    "resting": "warn",
    "refused": "bad",
    "away": "quiet",
    "expired": "bad",
    "left": "quiet",
    "revoked": "bad",
    "erased": "bad",
}
_MISSED = "took part in the last rounds"
_IN_REPORT = 500  # clients that a report lists
_HERE = frozenset({"ready", "preparing", "resting"})
_GONE = frozenset(GONE)


@dataclass(frozen=True)
class ClientLine:
    """One client.

    Attributes:
        state, look: a word, and its rating; empty if unknown.
        here: True if it is connected now.
        note: why it is in this state, or its current work.
        device: its hardware and software; ``short`` in two words, such as ``CPU, 2 threads``.
    """

    member: MemberLine
    state: str
    look: str
    here: bool
    note: str
    device: str

    @property
    def short(self) -> str:
        """Its device in two words."""
        words = short_device(self.device)
        return "CPU" + words[3:] if words[:4] in ("cpu", "cpu,") else words

    @property
    def may_be_revoked(self) -> bool:
        """True if it is still a member, even an expired one."""
        return self.member.standing not in _GONE


def view(history: History, live: Mapping[str, Any] | None, params: Params) -> dict[str, Any]:
    """Return the template's values."""
    known = [row_of(member, live) for member in history.members]
    found = [r for r in known if _is_meant(r, params.find)]
    found.sort(key=lambda r: (r.member.standing in _GONE, not r.here and r.look == "quiet"))
    gone = sum(r.member.standing in _GONE for r in known)
    return {
        "cut": cut(found, params.page, _IN_REPORT if history.frozen else ROWS),
        "here": sum(r.here for r in known),
        "gone": gone,
        "members": len(known) - gone,
        "missed": sum(r.state == "away" and r.member.recent for r in known),
        "told": live is not None,
    }


def _is_meant(row: ClientLine, find: str) -> bool:
    m = row.member
    return matches(find, m.name, m.client, row.state, row.device, m.via, m.refusal)


def row_of(member: MemberLine, live: Mapping[str, Any] | None) -> ClientLine:
    """Return a client's current row."""
    peer: Mapping[str, Any] = {}
    if live is not None:
        peer = live.get("peers", {}).get(member.client, {})
    state = "" if live is None else str(peer.get("state", "away"))
    if live is not None and member.client in live.get("relays", ()):
        state = "ready"
    if member.standing in {"expired", *_GONE}:
        state = member.standing
    missed = state == "away" and member.recent
    note = member.why or str(peer.get("why") or "") or _doing(peer)
    device = str(peer.get("device") or "") or member.device
    look = "warn" if missed else _STATES.get(state, "quiet")
    return ClientLine(member, state, look, state in _HERE, note or missed * _MISSED, device)


def _doing(peer: Mapping[str, Any]) -> str:
    progress = peer.get("progress")
    if peer.get("paused"):
        return "stalled"
    return progress_of(*progress) if progress else ""
