"""Byte counts, summed in memory and written to the ledger at intervals and round ends.

Two counts run side by side. This module knows what every message means and predicts exactly what it
takes on the wire (`link.interface.frame_wire_bytes`); such counts name their cause. The kernel
counts what each connection really took (`tcp_info`). The difference is libzmq's own traffic:
heartbeats, and messages to strangers.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from fcil_protocol.ids import ClientId, RoundKey, RunId
from fcil_protocol.link.tcp_info import TcpCounts
from fcil_protocol.link.zmq_link import HANDSHAKE_DOWN_BYTES, HANDSHAKE_UP_BYTES, wire_bytes
from fcil_protocol.messages.messages import Chunk, Message, Parts, Update
from fcil_server.event_loop import Yielder
from fcil_server.ledger.enums import Cause, CountSource, Direction
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import ByteCount
from fcil_server.sessions.intake_pool.transfers import CONTROL, UPDATE, Flow

STEP = 64  # flows that are written in one go: 2 ms
_K = TypeVar("_K")

_Flow = tuple[RoundKey | None, ClientId | None, Direction, Cause]


async def _at_once() -> None:
    """Wait for nothing."""


class ByteMeter:
    """Counts every message of every client, and every connection.

    Args:
        kernel: returns the kernel's counts since the last call, by connection number, in pieces.
        settle: waits until those include every byte up to now, before they are asked for.
        elsewhere: returns what intake processes have sent and received by themselves since then.
        tensor_bytes: returns those of a part.

    Attributes:
        round_key: the round that bytes belong to now; None between runs.
        new_parts: digests of the parts that the current round introduced; fetching others is
            catching up.
    """

    def __init__(
        self,
        ledger: Ledger,
        run: RunId,
        *,
        kernel: Callable[[], Iterable[Mapping[int, TcpCounts]]] = tuple,
        settle: Callable[[], Awaitable[None]] = _at_once,
        elsewhere: Callable[[], Iterable[Flow]] = tuple,
        tensor_bytes: Callable[[str], int] = lambda _: 0,
    ) -> None:
        self._ledger = ledger
        self._run = run
        self._kernel = kernel
        self._settle = settle
        self._elsewhere = elsewhere
        self._tensor_bytes = tensor_bytes
        self._clients: dict[int, ClientId] = {}  # connection -> its client
        self._left: set[int] = set()  # connections that have ended since the last settlement
        self._ended: set[int] = set()  # and before: forgotten after their last count
        self._tcp: dict[tuple[RoundKey | None, ClientId | None], TcpCounts] = {}
        self._flows: dict[_Flow, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        self.round_key: RoundKey | None = None
        self.new_parts: set[str] = set()

    async def begin(self, key: RoundKey | None, new_parts: set[str]) -> None:
        """Charge bytes to this round from now on; other tasks have their turn meanwhile."""
        turns = Yielder()
        await self._settled()
        for _ in self._asked_kernel():
            await turns.yield_if_long()
        self.round_key, self.new_parts = key, new_parts

    def connected(self, client: ClientId, conn: int) -> None:
        """Count the CURVE handshake of a new connection, and remember its client."""
        self._clients[conn] = client
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

    def fetched(self, client: ClientId, size: int) -> None:
        """Count bytes that a client says it has fetched from the object store."""
        self._flows[(self.round_key, client, Direction.DOWN, Cause.OBJECT_STORE)][3] += size

    def departed(self, conn: int) -> None:
        """Note the end of a connection; its last bytes are still to be counted."""
        self._left.add(conn)

    def _asked_kernel(self) -> Iterator[None]:
        """Charge the bytes that connections carried since the last call to the current round.

        A few connections in each step. What a step finds belongs to the round of its moment.
        """
        ended, self._ended = self._ended, set()
        for few in batched(list(self._elsewhere()), STEP):
            for flow in few:
                self._add_flow(*flow)
            yield
        for some in self._kernel():
            for conn, counts in some.items():
                key = (self.round_key, self._clients.get(conn))
                known = self._tcp.get(key)
                self._tcp[key] = counts if known is None else known + counts
            yield
        for conn in ended:
            self._clients.pop(conn, None)

    async def _settled(self) -> None:
        """Wait until the counts include every byte up to now."""
        left, self._left = self._left, set()
        await self._settle()
        self._ended |= left

    def _add_flow(self, conn: int, about: str, sent: bool, parts: int, *sizes: int) -> None:
        """Count what an intake process has sent to a client, or received from it."""
        client = self._clients.get(conn)
        direction = Direction.DOWN if sent else Direction.UP
        if about in (CONTROL, UPDATE):
            cause, tensor = Cause(about), 0
        else:
            cause = Cause.BROADCAST if about in self.new_parts else Cause.CATCH_UP
            tensor = parts * self._tensor_bytes(about)
        flow = self._flows[(self.round_key, client, direction, cause)]
        for index, size in enumerate((tensor, *sizes)):
            flow[index] += size

    def head(self, relay: ClientId, direction: Direction, frame: bytes) -> None:
        """Count the frame that names a lane; the client's own message is counted separately."""
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

    async def flush_settled(self) -> None:
        """Write all counts up to now, those of other processes too."""
        await self._settled()
        self.flush()

    def flush(self) -> None:
        """Write all counts to the ledger; those that fail are written the next time."""
        left, self._left = self._left, set()
        self._ended |= left
        for _ in self._asked_kernel():
            pass
        for _ in self._written():
            pass

    async def flush_in_turns(self) -> float:
        """Do the same, but give other tasks a turn of the loop in between.

        Returns the seconds that the work itself took.
        """
        await self._settled()
        turns, busy_s, began = Yielder(), 0.0, time.perf_counter()
        for _ in chain(self._asked_kernel(), self._written()):
            busy_s += time.perf_counter() - began
            await turns.yield_if_long()
            began = time.perf_counter()
        return busy_s

    def _written(self) -> Iterator[None]:
        """Write the counts so far, a few clients in each step.

        Bytes counted between two steps for a flow that is not written yet are written with it.
        """
        for few in batched(list(self._tcp), STEP):
            self._ledger.bytes.add(
                count for k in few if k in self._tcp for count in self._of_kernel(k, self._tcp[k])
            )
            for whose in few:
                self._tcp.pop(whose, None)
            yield
        for some in batched(list(self._flows), STEP):
            self._ledger.bytes.add(
                self._of_flow(k, self._flows[k]) for k in some if k in self._flows
            )
            for flow in some:
                self._flows.pop(flow, None)
            yield

    def _of_flow(self, flow: _Flow, counts: Sequence[int]) -> ByteCount:
        key, client, direction, cause = flow
        reported = cause is Cause.OBJECT_STORE
        source = CountSource.REPORTED if reported else CountSource.PREDICTED
        return ByteCount(*self._place(key), client, direction, cause, source, *counts)

    def _place(self, key: RoundKey | None) -> tuple[RunId, int | None, str | None, int | None]:
        return key or (self._run, None, None, None)

    def _of_kernel(
        self, flow: tuple[RoundKey | None, ClientId | None], tcp: TcpCounts
    ) -> Iterator[ByteCount]:
        key, client = flow
        for direction, wire, again, link in (
            (Direction.UP, tcp.received, 0, tcp.link_up),
            (Direction.DOWN, tcp.acked, tcp.retransmitted, tcp.link_down),
        ):
            yield ByteCount(
                *self._place(key), client, direction, Cause.CONNECTION, CountSource.KERNEL,
                tensor=0, sealed=0, application=0, wire=wire, retransmitted=again, link=link,
            )  # fmt: skip


def batched(keys: Sequence[_K], most: int) -> Iterator[Sequence[_K]]:
    """Yield ``keys`` in order, at most ``most`` at a time."""
    for start in range(0, len(keys), most):
        yield keys[start : start + most]
