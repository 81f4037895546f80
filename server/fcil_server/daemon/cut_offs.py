"""Temporary exclusion of members that continue after hundreds of refusals.

A member that is cut off is a guest for the length of the pause: the gate admits it occasionally,
and it gets the reason. Its key, its updates and its place in the federation stay as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from fcil_protocol.errors import CutOff, FcilError
from fcil_protocol.ids import ClientId
from fcil_protocol.messages.messages import Message, nack_of
from fcil_server.federation.roster import Roster
from fcil_server.sessions.conduct import MOST, WINDOW_S, Conduct
from fcil_server.sessions.peers import GOODBYE_S, Peer, Peers

# Weights in needless messages: of a connection cut for a flood, and of a change of keys, which
# waits for the disk and leaves a row for good.
A_FLOOD = 100
A_ROTATION = 60


class Speaker(Protocol):
    """Sends to a connected client, and ends its connection."""

    def send(self, peer: Peer, message: Message, *blobs: bytes) -> bool:
        """Send one message; False if the client is gone."""
        ...

    def cut(self, peer: Peer) -> None:
        """End a client's connection."""
        ...


class CutOffs:
    """Cuts members off for too many refused messages.

    Args:
        roster: the roster of the members.
        peers: the connected members.
        notify: writes a note for the operator: level, code, text, client.
        speaker: returns the object that sends to connected members; called when there is one.
        dismiss: ignores a connection from now on.
        silence: ignores a relay's connections, and cuts them.
        conduct: counts.
    """

    def __init__(
        self,
        roster: Roster,
        peers: Peers,
        *,
        notify: Callable[[str, str, str, ClientId], None],
        speaker: Callable[[], Speaker],
        dismiss: Callable[[int], None],
        silence: Callable[[ClientId], None],
        conduct: Conduct | None = None,
    ) -> None:
        self._roster = roster
        self._ledger = roster.federation.ledger
        self._peers = peers
        self._notify = notify
        self._speaker = speaker
        self._hear_no_more = dismiss
        self._silence = silence
        self._conduct = conduct or Conduct()

    def count_needless(self, client: ClientId, count: float = 1.0) -> None:
        """Count a member's needless messages; cut it off after too many."""
        pause_s = self._conduct.count_needless(client, count)
        if pause_s:
            self._begin(client, pause_s)

    def flooded(self, key: bytes) -> None:
        """Count a member's connection that was cut because it sent too much."""
        row = self._ledger.clients.by_curve(key) if key else None
        if row is not None:
            self.count_needless(row.client_id, A_FLOOD)

    def refuse(self, client: ClientId) -> None:
        """Refuse a member that comes back before its pause is over.

        Raises:
            CutOff: with the time left.
        """
        left = self._conduct.remaining_s(client)
        if left:
            raise CutOff(f"{_why()}; the server listens to it again in {left:.0f} s.")

    def _begin(self, client: ClientId, pause_s: float) -> None:
        row = self._ledger.clients.get(client)
        if row is None:
            return
        text = f"{row.name} is cut off for {pause_s:.0f} s: {_why()}"
        self._notify("warning", CutOff.code, text, client)
        with contextlib.suppress(FcilError):  # a full disk must not prevent the cut
            self._ledger.audit.add("server", CutOff.code, text)
        self._peers.refused[client] = f"cut off for {pause_s:.0f} s: {_why()}"
        self._roster.suspend(row)
        peer = self._peers.by_client(client)
        if peer is not None:
            self._dismiss(peer)
        self._silence(client)
        asyncio.get_running_loop().call_later(pause_s, self._end, client)

    def _dismiss(self, peer: Peer) -> None:
        """Ignore a session, and cut it once the reason had time to arrive."""
        speaker = self._speaker()
        speaker.send(peer, nack_of(CutOff(f"{_why()}.")))
        self._hear_no_more(peer.conn)
        asyncio.get_running_loop().call_later(GOODBYE_S, speaker.cut, peer)

    def _end(self, client: ClientId) -> None:
        if self._peers.refused.get(client, "").startswith("cut off"):
            del self._peers.refused[client]  # another reason stays
        row = self._ledger.clients.get(client)
        if row is not None:
            self._roster.readmit(row)


def _why() -> str:
    return (
        "too many of its messages were refused or unnecessary "
        f"({MOST} at once, then {MOST / WINDOW_S:.0f} a second)"
    )
