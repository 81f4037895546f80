"""Bytes as they pass: summed in memory, written to the ledger at intervals and round ends.

Wire bytes are the exact ZMTP + CURVE prediction (`transport.frame_wire_bytes`) and marked so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from fcil_protocol.ids import ClientId, RunId
from fcil_protocol.messages import Chunk, Message, Parts, Update
from fcil_protocol.transport import HANDSHAKE_DOWN_BYTES, HANDSHAKE_UP_BYTES, wire_bytes
from fcil_server.ledger import Ledger
from fcil_server.ledger_rows import Cause, Direction, RoundKey

_Flow = tuple[RoundKey | None, ClientId | None, Direction, Cause]


class Accounts:
    """Counts every message of every client.

    Attributes:
        round_key: the round that bytes belong to now; None between runs.
        new_parts: digests of the parts that the current round introduced; fetching others
            is catching up.
    """

    def __init__(self, ledger: Ledger, run: RunId) -> None:
        self._ledger = ledger
        self._run = run
        self._flows: dict[_Flow, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        self.round_key: RoundKey | None = None
        self.new_parts: set[str] = set()

    def connected(self, client: ClientId) -> None:
        """Count the CURVE handshake of a new connection."""
        for direction, size in (
            (Direction.UP, HANDSHAKE_UP_BYTES),
            (Direction.DOWN, HANDSHAKE_DOWN_BYTES),
        ):
            self._flows[(self.round_key, client, direction, Cause.HANDSHAKE)][3] += size

    def received(self, client: ClientId, message: Message, frames: Sequence[bytes]) -> None:
        """Count one message from a client."""
        up = isinstance(message, Update | Chunk)
        cause = Cause.UPDATE if up else Cause.CONTROL
        sealed = len(frames[2]) if isinstance(message, Chunk) else 0
        self._add(client, Direction.UP, cause, frames, sealed=sealed)

    def sent(
        self, client: ClientId, message: Message, frames: Sequence[bytes], *, tensor: int = 0
    ) -> None:
        """Count one message to a client; ``tensor`` bytes come with a part's header."""
        cause, sealed = Cause.CONTROL, 0
        if isinstance(message, Parts | Chunk):
            new = message.digest in self.new_parts
            cause = Cause.BROADCAST if new else Cause.CATCH_UP
            sealed = len(frames[2]) if isinstance(message, Chunk) else 0
        self._add(client, Direction.DOWN, cause, frames, sealed=sealed, tensor=tensor)

    def head(self, relay: ClientId, direction: Direction, frame: bytes) -> None:
        """Count the frame that names a lane; the client's own message is counted as its own."""
        self._add(relay, direction, Cause.CONTROL, (frame,))

    def tensors_up(self, client: ClientId, size: int) -> None:
        """Count the tensor bytes of an update once it has been opened."""
        self._flows[(self.round_key, client, Direction.UP, Cause.UPDATE)][0] += size

    def _add(
        self,
        client: ClientId,
        direction: Direction,
        cause: Cause,
        frames: Sequence[bytes],
        *,
        sealed: int = 0,
        tensor: int = 0,
    ) -> None:
        flow = self._flows[(self.round_key, client, direction, cause)]
        flow[0] += tensor
        flow[1] += sealed
        flow[2] += sum(len(f) for f in frames)
        flow[3] += wire_bytes(frames)

    def flush(self) -> None:
        """Write what has been counted to the ledger; what fails is written the next time."""
        with self._ledger.transaction(durable=False):
            for (key, client, direction, cause), counts in self._flows.items():
                tensor, sealed, application, wire = counts
                self._ledger.add_bytes(
                    direction,
                    cause,
                    run=self._run,
                    round_key=key,
                    client=client,
                    tensor=tensor,
                    sealed=sealed,
                    application=application,
                    wire=wire,
                )
        self._flows.clear()
