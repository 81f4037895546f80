"""An intake process: it accepts connections for a server, and carries their messages.

Started by the server as ``python -m fcil_server.sessions.intake_pool.process LISTENER PIPE``, two
descriptors. It decides who passes the gate, by the lists that the server sends, and does the
transfers of a round (`transfers`). It has the link key of the server and the keys of sessions, not
the server's identity: it can neither sign for the server nor open an update. It ends with the
server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from functools import partial
from typing import Any

from fcil_protocol.envelopes.envelope import ContentKey, parse_header
from fcil_protocol.errors import FcilError
from fcil_protocol.ids import RoundKey, RunId
from fcil_protocol.link.descriptors import allow_many_files
from fcil_protocol.link.interface import Incoming, SharedFrame, SharedFrames
from fcil_protocol.link.send_queue import MAX_QUEUED_BYTES, SendQueue
from fcil_protocol.link.zmq_link import Router
from fcil_protocol.messages.signed_session import HandedSession
from fcil_protocol.process.child import GONE, die_with_parent, end_with_parent, parent_pipe
from fcil_protocol.trust.keys import PublicKeys
from fcil_server.event_loop import Yielder
from fcil_server.federation.addresses import MOST_INTAKE
from fcil_server.federation.allow_list import AllowList
from fcil_server.sessions.intake_pool.pipe import FRAMES_BYTES, ProcessPipe, Record
from fcil_server.sessions.intake_pool.transfers import (
    REVIVE_S,
    Frames,
    RoundTransfers,
    SmallPart,
)

UP_BYTES = 8 << 20  # on their way to the server; then clients' messages wait unread
CLIENT_BYTES = 1 << 20  # that wait for a client's socket; then it is cut


def number_of(at_us: int, process: int) -> int:
    """Return the number of a connection of a process, from the time of its handshake."""
    return at_us * MOST_INTAKE + process


def process_of(conn: int) -> int:
    """Return the number of the process that has a connection."""
    return conn % MOST_INTAKE


class Numbers:
    """Numbers of connections that grow with the time of the handshake, over all processes.

    So the server sees which of a client's connections is the newest. Linux has one monotonic clock
    for all processes.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self._last_us = 0

    def __call__(self) -> int:
        """Return the next number."""
        self._last_us = max(self._last_us + 1, time.monotonic_ns() // 1000)
        return number_of(self._last_us, self._process)


class IntakeProcess:
    """The connections of one process.

    Args:
        listener: accepts them.
        pipe: a socket whose other end the server has.
    """

    def __init__(self, listener: socket.socket, pipe: socket.socket) -> None:
        self._listener = listener
        self._began = asyncio.Event()
        self._router: Router
        self._allow_list: AllowList
        self._queues: dict[int, SendQueue] = {}  # connection -> what its socket does not take yet
        self._frames = SharedFrames[int](FRAMES_BYTES)
        self._transfers: RoundTransfers
        self._counting: set[asyncio.Task[None]] = set()  # a task that is not held may vanish
        self._parts: dict[str, SmallPart] = {}
        self._pipe = ProcessPipe(pipe, self._take, lambda: os._exit(GONE))

    async def run(self) -> None:
        """Carry messages until the server ends."""
        await self._began.wait()
        self._revive()
        while True:
            self._up(await self._router.recv())
            # Meanwhile clients' messages wait in libzmq, within the bytes that may be unread.
            if self._pipe.waiting_bytes > UP_BYTES:
                await self._pipe.emptied()

    # --- up ---------------------------------------------------------------------------------

    def _up(self, incoming: Incoming) -> None:
        conn = incoming.conn
        if not incoming.frames:
            self._forget(conn)
            self._pipe.send("gone", conn)
            return
        if conn not in self._queues:
            send = partial(self._router.send, incoming.route)
            self._queues[conn] = SendQueue(send, CLIENT_BYTES)
            self._pipe.send("new", conn, incoming.key)
        if not self._transfers.take(conn, incoming.frames):
            self._pipe.send("message", conn, incoming.frames, self._transfers.heard(conn))

    def _arrived(self, conn: int, digest: str, blobs: Frames, chunks: Frames) -> None:
        # With the bytes that it took: a process that is killed then has lost none of a counted one.
        flows = self._transfers.take_flows(conn)
        self._pipe.send("update", conn, digest, [*blobs, *chunks], flows)

    def _lost(
        self, conn: int, digest: str, blobs: Frames, chunks: dict[int, bytes], goes_on: bool
    ) -> None:
        frames = [*blobs, *chunks.values()]
        self._pipe.send("lost", conn, digest, frames, list(chunks), goes_on)

    def _faulty(self, conn: int, digest: str, error: FcilError) -> None:
        self._pipe.send("fault", conn, digest, error.code, error.message, error.action)

    def _revive(self) -> None:
        asyncio.get_running_loop().call_later(REVIVE_S, self._revive)
        self._transfers.revive()

    def _forget(self, conn: int) -> None:
        self._transfers.end(conn)
        queue = self._queues.pop(conn, None)
        if queue is not None:
            queue.clear()

    def _flooded(self, key: bytes, why: str) -> None:
        self._pipe.send("flooded", key, why)

    # --- down -------------------------------------------------------------------------------

    def _take(self, record: Record) -> None:
        """Do what the server says."""
        kind, *words = record
        match kind:
            case "send":
                self._send_whole(*words)
            case "session":
                conn, session, keys, left = words
                if conn in self._queues:
                    handed = HandedSession(*session)
                    self._transfers.begin(conn, handed, PublicKeys(*keys), left)
            case "round":
                self._open_round(*words)
            case "frame":
                self._frames.keep(words[0], SharedFrame(words[1]))
            case "cut":
                self._router.cut(words[0])
            case "list":
                self._allow_list.repeat(*words)
            case "relay":
                self._router.allow_unread(*words)
                if (queue := self._queues.get(words[0])) is not None:
                    queue.most_bytes = MAX_QUEUED_BYTES
            case "count":
                task = asyncio.get_running_loop().create_task(self._count(words[0]))
                self._counting.add(task)
                task.add_done_callback(self._counting.discard)
            case "part":
                self._part(*words)
            case "begin":
                self._begin(*words)

    def _begin(
        self,
        process: int,
        processes: int,
        curve_secret: bytes,
        curve_public: bytes,
        heartbeat_s: float,
        credit: int,
        lists: list[Any],
    ) -> None:
        self._allow_list = AllowList(credit=credit)
        self._allow_list.replace(*lists)
        self._router = Router(
            curve_secret=curve_secret,
            curve_public=curve_public,
            admit=self._allow_list,
            heartbeat_s=heartbeat_s,
            allow=self._allow_list.allow,
            flooded=self._flooded,
            numbers=Numbers(process),
        )
        self._transfers = RoundTransfers(
            credit=credit,
            processes=processes,
            send=self._send_now,
            begun=partial(self._pipe.send, "begun"),
            arrived=self._arrived,
            lost=self._lost,
            faulty=self._faulty,
        )
        self._router.listen(self._listener)
        self._began.set()

    def _part(self, header: bytes, signature: bytes, key: bytes, body: bytes) -> None:
        """Keep a part of the broadcast, for as long as rounds name it."""
        parsed = parse_header(header, max_plain_bytes=len(body))
        part = SmallPart(parsed, header, signature, ContentKey(key), body)
        self._parts[parsed.update_id] = part

    def _open_round(self, key: list[Any] | None, base: int, digests: list[str]) -> None:
        """Note the round under way, and the parts that clients may fetch for it."""
        self._parts = {digest: self._parts[digest] for digest in digests}
        whole = None if key is None else RoundKey(RunId(key[0]), *key[1:])
        self._transfers.open_round(whole, self._parts, base)

    def _send_whole(self, conn: int, frames: list[bytes | int]) -> None:
        """Send a message of the server, some of whose frames are known here by their numbers."""
        whole: list[bytes] = []
        for frame in frames:
            shared = self._frames.use(frame) if isinstance(frame, int) else frame
            assert shared is not None, "both ends forget the same frames"
            whole.append(shared)
        stamped = self._transfers.stamp(conn, whole)
        queue = self._queues.get(conn)
        if stamped is not None and queue is not None and not queue.put(stamped):
            self._router.cut(conn)  # it does not read

    def _send_now(self, conn: int, frames: Frames) -> bool:
        return self._queues[conn].send_now(frames)

    async def _count(self, request: int) -> None:
        """Report the kernel's counts of the connections."""
        turns, found = Yielder(), []
        for some in self._router.take_counts():
            found += [
                (c, n.received, n.acked, n.retransmitted, n.link_up, n.link_down)
                for c, n in some.items()
            ]
            await turns.yield_if_long()
        self._pipe.send("counts", request, found, self._transfers.take_flows())


async def _main(listener: int, pipe: int) -> None:
    await IntakeProcess(socket.socket(fileno=listener), socket.socket(fileno=pipe)).run()


def main() -> None:
    """Run until the server ends."""
    die_with_parent()  # also one that is stopped: it would keep the port
    end_with_parent(parent_pipe())
    allow_many_files()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2])))


if __name__ == "__main__":
    main()
