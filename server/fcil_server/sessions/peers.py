"""Connected clients: one `Peer` per live session, found by route, connection or client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fcil_protocol.envelopes.transfer import Receiver
from fcil_protocol.envelopes.window import MIN_WINDOW_BYTES
from fcil_protocol.ids import ClientId
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.trust.keys import PublicKeys

FIRST_LANE = 1 << 62  # numbers of connections that are lanes of relays: others stay far below
GOODBYE_S = 1.0  # for the reason to arrive before a connection is cut


@dataclass
class Peer:
    """One client's live session.

    Attributes:
        ready: its Hello was complete and accepted; it may announce and be asked.
        train, test: class key -> number of images, as announced; None before.
        names: the class names as the client spells them.
        receiver: of envelopes on their way in.
        progress: its last report of its work in the current round.
        paused: its work is suspended, by its last report.
        resting: it may not work now; when it may again, it announces its classes again.
        untrained: names of classes that it brings and that were learned before.
        agreement: relative distance of its features of the probe images from the server's.
        takes_models: it knows the message `UseModel`.
        promoted: the promoted state that its Welcome named; -1: none.
        sums: it is a relay that sends sums of its clients' updates.
        fetched: digest of a part -> bytes of it that it says it has fetched elsewhere.
    """

    client: ClientId
    name: str
    keys: PublicKeys = field(repr=False)
    route: bytes
    conn: int
    channel: Channel = field(repr=False)
    ready: bool = False
    device: str = ""
    package: str = ""
    train: dict[str, int] | None = None
    test: dict[str, int] | None = None
    names: tuple[str, ...] = ()
    receiver: Receiver = field(default_factory=lambda: Receiver(MIN_WINDOW_BYTES), repr=False)
    progress: tuple[str, int, int] | None = None
    paused: bool = False
    resting: bool = False
    untrained: tuple[str, ...] = ()
    agreement: float | None = None
    takes_models: bool = False
    promoted: int = -1
    sums: bool = False
    fetched: dict[str, int] = field(default_factory=dict, repr=False)

    @property
    def relayed(self) -> bool:
        """True if a relay carries its messages."""
        return self.conn >= FIRST_LANE

    @property
    def announced(self) -> bool:
        """True if the server knows which classes it holds."""
        return self.ready and self.train is not None

    @property
    def state(self) -> str:
        """Its state in a word: ``resting``, ``ready`` or ``preparing``."""
        return "resting" if self.resting else "ready" if self.announced else "preparing"

    def holds(self, names: frozenset[str], part: str) -> bool:
        """Return True if it has an image of one of the classes (by class key)."""
        counts = self.train if part == "train" else self.test
        return any(counts.get(name, 0) > 0 for name in names) if counts else False


class Peers:
    """All live sessions; a client has at most one, the newest.

    Attributes:
        refused: clients that cannot take part as they are, with the reason in a sentence.
    """

    def __init__(self) -> None:
        self.refused: dict[ClientId, str] = {}
        self._by_client: dict[ClientId, Peer] = {}
        self._by_conn: dict[int, Peer] = {}
        self._in_order: tuple[Peer, ...] | None = None  # by client; None: to be sorted again

    def add(self, peer: Peer) -> Peer | None:
        """Add a session; returns the client's older one on another connection, if any."""
        old = self._by_client.get(peer.client)
        if old is not None:
            self._by_conn.pop(old.conn, None)
        self.refused.pop(peer.client, None)
        self._by_client[peer.client] = peer
        self._by_conn[peer.conn] = peer
        self._in_order = None
        return old if old is not None and old.conn != peer.conn else None

    def is_left_behind(self, peer: Peer) -> bool:
        """Return True if a client has spoken on a connection made later than this one.

        A network may deliver messages of an old connection after those of a new one. Connection
        numbers grow, those of lanes behind relays separately.
        """
        newest = self._by_client.get(peer.client)
        if newest is None or (newest.conn < FIRST_LANE) != (peer.conn < FIRST_LANE):
            return False
        return peer.conn < newest.conn

    def remove(self, conn: int) -> Peer | None:
        """Drop the session of a connection that ended; None if a newer one replaced it."""
        peer = self._by_conn.pop(conn, None)
        if peer is not None and self._by_client.get(peer.client) is peer:
            del self._by_client[peer.client]
            self._in_order = None
        return peer

    def by_conn(self, conn: int) -> Peer | None:
        """Return the session of a connection."""
        return self._by_conn.get(conn)

    def by_client(self, client: ClientId) -> Peer | None:
        """Return a client's session."""
        return self._by_client.get(client)

    def __iter__(self) -> Iterator[Peer]:
        if self._in_order is None:
            self._in_order = tuple(sorted(self._by_client.values(), key=lambda p: p.client))
        return iter(self._in_order)

    def __len__(self) -> int:
        return len(self._by_client)

    def announced(self) -> list[Peer]:
        """Return the sessions that may be asked, in ClientId order."""
        return [p for p in self if p.announced and not p.resting]
