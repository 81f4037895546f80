"""The server's side of its intake processes: together they are one `ServerLink`.

The processes listen on one port, among which the kernel divides the connections. If one ends, its
clients connect again, to whichever process; the server starts it again. What a client sent and got
no answer for, it sends again, as after any lost connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fcil_protocol.errors import FcilError, from_code
from fcil_protocol.ids import RoundKey
from fcil_protocol.link.interface import Incoming, SharedFrame
from fcil_protocol.link.listeners import open_listeners
from fcil_protocol.link.tcp_info import TcpCounts
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.process.children import ChildProcess, module_command
from fcil_protocol.trust.keys import PublicKeys
from fcil_server.federation.allow_list import AllowList
from fcil_server.sessions.intake_pool.pipe import ProcessPipe, Record, SharedFrames
from fcil_server.sessions.intake_pool.process import MOST_PROCESSES
from fcil_server.sessions.intake_pool.transfers import Flow, SmallPart

MODULE = "fcil_server.sessions.intake_pool.process"
QUEUE, QUEUE_BYTES = 256, 16 << 20  # messages read ahead from the processes
MOST_WAITING = 256 << 20  # bytes that a process has not taken; then it takes no more
BACK_OFF_S = (0.0, 0.2, 1.0, 5.0)  # before the first, second, third ... start in a row
STEADY_S = 60.0  # after this long, an end counts as the first again
SILENT_S = 60.0  # a process that does not answer for this long is killed
ASK_S = 5.0  # between two questions if it answers
END_S = 2.0  # for the processes to end with the server


@dataclass
class _Process:
    """One intake process, through all its starts.

    Attributes:
        child, pipe: None while it is not running.
        conns: its connections, with the CURVE key of each.
        asked, answered: number of the last request for counts, and of the last one answered.
        heard_at: when it last answered, or was first asked since.
    """

    index: int
    listener: socket.socket
    child: ChildProcess | None = None
    pipe: ProcessPipe | None = None
    conns: dict[int, bytes] = field(default_factory=dict)
    frames: SharedFrames = field(default_factory=SharedFrames)
    ends: int = 0
    began_at: float = 0.0
    asked: int = 0
    answered: int = 0
    heard_at: float = 0.0


class IntakePool:
    """A `ServerLink` over several intake processes.

    Args:
        count: how many, at most `MOST_PROCESSES`.
        curve_secret, curve_public: the server's 32-byte CURVE keys.
        allow_list: of the gates; the processes repeat each change to it.
        heartbeat_s, allow, flooded: as `fcil_protocol.link.zmq_link.Router` has them.
        credit: the largest window of a member, in bytes.
        notify: takes a note for the operator: level, text.
    """

    def __init__(
        self,
        count: int,
        *,
        curve_secret: bytes,
        curve_public: bytes,
        allow_list: AllowList,
        heartbeat_s: float,
        credit: int,
        allow: Callable[[bytes], int],
        flooded: Callable[[bytes, str], None],
        notify: Callable[[str, str], None],
    ) -> None:
        assert 0 < count <= MOST_PROCESSES
        self._count = count
        self._terms = (curve_secret, curve_public, heartbeat_s, credit)
        self._allow_list = allow_list
        self._allow = allow
        self._flooded = flooded
        self._notify = notify
        self._loop = asyncio.get_running_loop()
        self._processes: list[_Process] = []
        self._queue: deque[Incoming] = deque()
        self._queue_bytes = 0
        self._came = asyncio.Event()
        self._paused = False
        self._counts: list[dict[int, TcpCounts]] = []
        self._flows: list[Flow] = []
        self._round: tuple[Any, ...] | None = None
        self._answered = asyncio.Event()
        self._numbers = itertools.count()
        self._closing: set[asyncio.Future[None]] = set()
        self._watch: asyncio.TimerHandle | None = None
        self._closed = False

    # --- life -------------------------------------------------------------------------------

    def bind(self, host: str, port: int) -> int:
        """Listen on a port with all processes; 0 picks a free one. Return the port.

        Raises:
            PortInUse, LinkError: see `open_listeners`; or a process cannot be started.
        """
        listeners = open_listeners(host, port, self._count)
        self._processes = [_Process(i, sock) for i, sock in enumerate(listeners)]
        self._allow_list.watch(self._tell_lists)
        for process in self._processes:
            self._start(process)
        self._watch = self._loop.call_later(ASK_S, self._look)
        return int(listeners[0].getsockname()[1])

    def _start(self, process: _Process) -> None:
        """Start a process, now that its connections are gone."""
        if self._closed:
            return
        own, other = socket.socketpair()
        fds = (process.listener.fileno(), other.fileno())
        try:
            process.child = ChildProcess(module_command(MODULE, *map(str, fds)), fds=fds)
        except OSError as error:
            own.close()
            self._restart(process, f"cannot be started: {error.strerror}")
            return
        finally:
            other.close()
        process.began_at = process.heard_at = self._loop.time()
        process.asked = process.answered = next(self._numbers)
        process.frames = SharedFrames()
        process.pipe = ProcessPipe(own, partial(self._take, process), partial(self._over, process))
        process.pipe.send("begin", process.index, *self._terms, self._allow_list.lists())
        if self._round is not None:
            process.pipe.send("round", *self._round)
        if self._paused:
            process.pipe.pause()

    def _over(self, process: _Process) -> None:
        """Take the end of a process: its connections are gone."""
        conns, process.conns = process.conns, {}
        for conn, key in conns.items():
            self._put(Incoming(b"", conn, key))
        assert process.child is not None, "its pipe was open"
        self._reap(process.child)
        process.child = process.pipe = None
        self._restart(process, "ended")

    def _reap(self, child: ChildProcess) -> None:
        child.kill()
        ending = asyncio.ensure_future(asyncio.to_thread(child.stop, END_S))
        self._closing.add(ending)
        ending.add_done_callback(self._closing.discard)

    def _restart(self, process: _Process, why: str) -> None:
        steady = self._loop.time() - process.began_at > STEADY_S
        process.ends = 1 if steady else process.ends + 1
        pause = BACK_OFF_S[min(process.ends, len(BACK_OFF_S)) - 1]
        self._notify("warning", f"intake process {process.index + 1} {why}; it is started again")
        self._loop.call_later(pause, self._start, process)

    def _look(self) -> None:
        """Ask all processes for counts, and kill those that have not answered for long."""
        now = self._loop.time()
        self._watch = self._loop.call_later(ASK_S, self._look)
        for process in self._processes:
            if process.answered == process.asked or self._paused:
                process.heard_at = now
                self._ask(process)
            elif now - process.heard_at > SILENT_S and process.child is not None:
                self._notify("warning", f"intake process {process.index + 1} does not answer")
                process.child.kill()

    def close(self) -> None:
        """Stop listening, and end the processes."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        self._allow_list.watch(None)
        running = [p.child for p in self._processes if p.child is not None]
        for process in self._processes:
            if process.pipe is not None:
                process.pipe.close()
            process.listener.close()
        for child in running:
            child.ask()
        for child in running:
            child.stop(END_S)

    def describe(self) -> list[dict[str, int | None]]:
        """Return process id and number of connections of each, for the status."""
        return [
            {"pid": p.child.pid if p.child else None, "connections": len(p.conns)}
            for p in self._processes
        ]

    # --- in ---------------------------------------------------------------------------------

    def _take(self, process: _Process, record: Record) -> None:
        """Take a record of a process."""
        kind, *words = record
        match kind:
            case "message":
                conn, frames = words
                self._put(Incoming(_route(conn), conn, process.conns[conn], tuple(frames)))
            case "update":
                conn, digest, frames = words
                key = process.conns[conn]
                self._put(Incoming(_route(conn), conn, key, tuple(frames), update=digest))
            case "fault":
                conn, digest, *error = words
                fault = from_code(*error)
                key = process.conns[conn]
                self._put(Incoming(_route(conn), conn, key, (b"",), update=digest, fault=fault))
            case "new":
                conn, key = words
                process.conns[conn] = key
                self._tell_allowance(process, conn, key)
            case "gone":
                self._put(Incoming(b"", words[0], process.conns.pop(words[0])))
            case "counts":
                process.answered, process.heard_at = words[0], self._loop.time()
                self._counts.append({conn: TcpCounts(*counts) for conn, *counts in words[1]})
                self._flows += words[2]
                self._answered.set()
            case "flooded":
                self._flooded(*words)

    def _tell_allowance(self, process: _Process, conn: int, key: bytes) -> None:
        """Tell a process how much of a connection may be unread, where lists do not say it."""
        allowed = self._allow_list.allow(key)
        with contextlib.suppress(FcilError):  # a ledger that cannot be read
            allowed = self._allow(key)
        if allowed != self._allow_list.allow(key) and process.pipe is not None:
            process.pipe.send("allow", conn, allowed)

    def _put(self, incoming: Incoming) -> None:
        self._queue.append(incoming)
        self._queue_bytes += sum(map(len, incoming.frames))
        self._came.set()
        if not self._paused and (len(self._queue) > QUEUE or self._queue_bytes > QUEUE_BYTES):
            self._paused = True
            for process in self._processes:
                if process.pipe is not None:
                    process.pipe.pause()

    async def recv(self) -> Incoming:
        """Wait for the next message, or for the departure of a peer that had sent one."""
        while not self._queue:
            self._came.clear()
            await self._came.wait()
        incoming = self._queue.popleft()
        self._queue_bytes -= sum(map(len, incoming.frames))
        if (
            self._paused
            and len(self._queue) <= QUEUE // 2
            and self._queue_bytes <= QUEUE_BYTES // 2
        ):
            self._paused = False
            for process in self._processes:
                if process.pipe is not None:
                    process.pipe.go_on()
        return incoming

    # --- out --------------------------------------------------------------------------------

    def send(self, route: bytes, frames: Sequence[bytes]) -> bool:
        """Queue a message without waiting; False if the peer is gone, or its process is stuck."""
        conn = int.from_bytes(route, "big")
        process = self._process_of(conn)
        pipe = process.pipe
        if pipe is None or conn not in process.conns or pipe.waiting_bytes > MOST_WAITING:
            return False
        pipe.send("send", conn, [self._shared(process, pipe, frame) for frame in frames])
        return True

    def _shared(self, process: _Process, pipe: ProcessPipe, frame: bytes) -> bytes | int:
        """Return a frame, or the number of one that a process has, or gets now."""
        if not isinstance(frame, SharedFrame):
            return frame
        if not isinstance(frame.held, int):
            frame.held = next(self._numbers)
        if process.frames.use(frame.held) is None:
            process.frames.keep(frame.held, frame)
            pipe.send("frame", frame.held, frame)
        return frame.held

    def cut(self, conn: int) -> None:
        """Shut down the TCP connection of one peer at once."""
        pipe = self._process_of(conn).pipe
        if pipe is not None:
            pipe.send("cut", conn)

    def _process_of(self, conn: int) -> _Process:
        return self._processes[conn % MOST_PROCESSES]

    def _tell_lists(self, *change: Any) -> None:
        for process in self._processes:
            if process.pipe is not None:
                process.pipe.send("list", *change)

    # --- transfers --------------------------------------------------------------------------

    def hand_over(self, conn: int, channel: Channel, keys: PublicKeys) -> None:
        """Let the process of a connection do the transfers in its client's session."""
        process = self._process_of(conn)
        if process.pipe is not None and conn in process.conns:
            handed = channel.hand_over()
            fields = [handed.mine, handed.theirs, handed.sent, handed.heard, handed.raw_digests]
            process.pipe.send("session", conn, fields, [keys.curve, keys.signing, keys.sealing])

    def open_round(self, key: RoundKey, parts: Iterable[SmallPart]) -> None:
        """Let the processes receive updates of a round, and give clients parts of its broadcast."""
        found = [(p.header_bytes, p.signature, p.key.value, p.body) for p in parts]
        self._round = (tuple(key), found)
        for process in self._processes:
            if process.pipe is not None:
                process.pipe.send("round", *self._round)

    # --- counts -----------------------------------------------------------------------------

    def _ask(self, process: _Process) -> None:
        if process.pipe is not None:
            process.asked = next(self._numbers)
            process.pipe.send("count", process.asked)

    async def settle_counts(self) -> None:
        """Wait until `take_counts` has all bytes up to now, as far as the processes answer."""
        asked: list[tuple[_Process, ProcessPipe, int]] = []
        for process in self._processes:
            self._ask(process)
            if process.pipe is not None:
                asked.append((process, process.pipe, process.asked))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                while any(p.pipe is pipe and p.answered < number for p, pipe, number in asked):
                    self._answered.clear()
                    await self._answered.wait()

    def take_counts(self) -> Iterator[Mapping[int, TcpCounts]]:
        """Yield the kernel's counts that the processes have reported since the last call."""
        counts, self._counts = self._counts, []
        yield from counts

    def take_flows(self) -> list[Flow]:
        """Return what the processes have sent and received by themselves since the last call."""
        flows, self._flows = self._flows, []
        return flows


def _route(conn: int) -> bytes:
    return conn.to_bytes(8, "big")
