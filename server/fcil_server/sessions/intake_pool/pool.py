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
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

from fcil_protocol.errors import FcilError, from_code
from fcil_protocol.ids import RoundKey
from fcil_protocol.link.interface import Incoming, SharedFrame, SharedFrames
from fcil_protocol.link.listeners import open_listeners
from fcil_protocol.link.tcp_info import TcpCounts
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.process.children import ChildProcess, module_command
from fcil_protocol.trust.keys import PublicKeys
from fcil_server.federation.addresses import MOST_INTAKE
from fcil_server.federation.allow_list import AllowList
from fcil_server.sessions.intake_pool.pipe import FRAMES_BYTES, ProcessPipe, Record
from fcil_server.sessions.intake_pool.process import process_of
from fcil_server.sessions.intake_pool.transfers import Flow, SmallPart

MODULE = "fcil_server.sessions.intake_pool.process"
MOST_QUEUED, QUEUED_BYTES = 256, 16 << 20  # messages read ahead from the processes
DOWN_BYTES = 256 << 20  # on their way to a process; then it takes no more
BACK_OFF_S = (0.0, 0.2, 1.0, 5.0)  # before the first, second, third ... start in a row
STEADY_S = 60.0  # after this long, an end counts as the first again
ASK_S = 5.0  # between two questions to each process
MOST_UNANSWERED = 12  # looks in a row without an answer; then a process is killed
COUNTS_S = 2.0  # longest wait for the counts of all processes
END_S = 2.0  # for the processes to end with the server


@dataclass(frozen=True)
class PassedOn(Incoming):
    """A message or an update that an intake process passes on to the server.

    Attributes:
        heard: number of the newest message of this session that the process has taken itself.
        update: digest of an update that the process has received and verified; the frames are its
            header, signature, wrap and chunks.
        chunks: numbers of those chunks, if the process has given it up before the others came.
        goes_on: its connection goes on, and the others are requested here.
        fault: the error of such an update; with an empty digest, of a chunk, requested again.
    """

    heard: int = 0
    update: str | None = None
    chunks: tuple[int, ...] | None = None
    goes_on: bool = False
    fault: FcilError | None = None


def _no_frames() -> SharedFrames[int]:
    return SharedFrames(FRAMES_BYTES)


@dataclass
class _Process:
    """One intake process, through all its starts.

    Attributes:
        child, pipe: None while it is not running.
        conns: its connections, with the CURVE key of each.
        frames: that it remembers. parts: digests of the parts that it has.
        updates: that it has received.
        asked, answered: number of the last request for counts, and of the last one answered.
        unanswered: looks in a row at which it owed an answer.
    """

    index: int
    listener: socket.socket
    child: ChildProcess | None = None
    pipe: ProcessPipe | None = None
    conns: dict[int, bytes] = field(default_factory=dict)
    frames: SharedFrames[int] = field(default_factory=_no_frames)
    ends: int = 0
    began_at: float = 0.0
    parts: set[str] = field(default_factory=set)
    updates: int = 0
    asked: int = 0
    answered: int = 0
    unanswered: int = 0

    @property
    def number(self) -> int:
        """Its number in notes, from 1."""
        return self.index + 1


class IntakePool:
    """A `ServerLink` over several intake processes.

    Args:
        count: how many, at most `MOST_INTAKE`.
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
        assert 0 < count <= MOST_INTAKE
        self._count = count
        self._terms = (count, curve_secret, curve_public, heartbeat_s, credit)
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
        self._begun: dict[bytes, str] = {}  # CURVE key -> update that a process began to receive
        self._round: tuple[RoundKey | None, int, list[SmallPart]] | None = None
        self._answered = asyncio.Event()
        self._numbers = itertools.count()
        self._closing: set[asyncio.Future[None]] = set()
        self._claim: socket.socket | None = None  # of the port, for this server alone
        self._watch: asyncio.TimerHandle | None = None
        self._closed = False

    # --- life -------------------------------------------------------------------------------

    def bind(self, host: str, port: int) -> int:
        """Listen on a port with all processes; 0 picks a free one. Return the port.

        Raises:
            PortInUse, LinkError: see `open_listeners`.
        """
        listeners, self._claim = open_listeners(host, port, self._count)
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
        process.began_at = self._loop.time()
        try:
            process.child, own = _start_child(process.listener)
        except OSError as error:
            number, why = process.number, error.strerror
            text = f"intake process {number} cannot be started: {why}; it is tried again"
            self._notify("warning", text)
            self._restart(process)
            return
        process.asked = process.answered = next(self._numbers)
        process.unanswered = 0
        process.frames, process.parts = _no_frames(), set()
        process.pipe = ProcessPipe(own, partial(self._take, process), partial(self._over, process))
        process.pipe.send("begin", process.index, *self._terms, self._allow_list.lists())
        self._tell_round(process)
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
        self._notify("warning", f"intake process {process.number} ended; it is started again")
        self._restart(process)

    def _reap(self, child: ChildProcess) -> None:
        child.kill()
        ending = asyncio.ensure_future(asyncio.to_thread(child.stop, END_S))
        self._closing.add(ending)
        ending.add_done_callback(self._closing.discard)

    def _restart(self, process: _Process) -> None:
        steady = self._loop.time() - process.began_at > STEADY_S
        process.ends = 1 if steady else process.ends + 1
        pause = BACK_OFF_S[min(process.ends, len(BACK_OFF_S)) - 1]
        self._loop.call_later(pause, self._start, process)

    def _look(self) -> None:
        """Ask all processes for counts, and kill those that have not answered for long."""
        self._watch = self._loop.call_later(ASK_S, self._look)
        for process in self._processes:
            if process.answered == process.asked or self._paused:
                process.unanswered = 0
                self._ask(process)
                continue
            process.unanswered += 1
            if process.unanswered > MOST_UNANSWERED and process.child is not None:
                self._notify("warning", f"intake process {process.number} does not answer")
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
        if self._claim is not None:
            self._claim.close()
        for child in running:
            child.ask()
        ends = time.monotonic() + END_S
        for child in running:
            child.stop(max(0.0, ends - time.monotonic()))

    def describe(self) -> list[dict[str, int | None]]:
        """Return each one's process id, connections, and updates received, for the status."""
        return [
            {
                "pid": p.child.pid if p.child else None,
                "connections": len(p.conns),
                "updates": p.updates,
            }
            for p in self._processes
        ]

    # --- in ---------------------------------------------------------------------------------

    def _take(self, process: _Process, record: Record) -> None:
        """Take a record of a process."""
        kind, *words = record
        match kind:
            case "message":
                conn, frames, heard = words
                self._put(_passed(process, conn, frames, heard=heard))
            case "begun":
                conn, digest = words
                self._begun[process.conns[conn]] = digest
            case "update":
                conn, digest, frames, flows = words
                self._flows += (Flow(*flow) for flow in flows)
                self._begun.pop(process.conns[conn], None)
                process.updates += 1
                self._put(_passed(process, conn, frames, update=digest))
            case "lost":
                conn, digest, frames, chunks, goes_on = words
                came = tuple(chunks)
                self._put(
                    _passed(process, conn, frames, update=digest, chunks=came, goes_on=goes_on)
                )
            case "fault":
                conn, digest, *error = words
                fault = from_code(*error)
                self._put(_passed(process, conn, [b""], update=digest, fault=fault))
            case "new":
                conn, key = words
                process.conns[conn] = key
                self._tell_allowance(process, conn, key)
            case "gone":
                self._put(Incoming(b"", words[0], process.conns.pop(words[0])))
            case "counts":
                process.answered = max(process.answered, words[0])
                process.unanswered = 0
                self._counts.append({conn: TcpCounts(*counts) for conn, *counts in words[1]})
                self._flows += (Flow(*flow) for flow in words[2])
                self._answered.set()
            case "flooded":
                self._flooded(*words)

    def _tell_allowance(self, process: _Process, conn: int, key: bytes) -> None:
        """Tell a process of a relay's connection, of which more may be unread and wait."""
        allowed = self._allow_list.allow(key)
        with contextlib.suppress(Exception):  # a ledger that cannot be read
            allowed = self._allow(key)
        if allowed > self._allow_list.allow(key) and process.pipe is not None:
            process.pipe.send("relay", conn, allowed)

    def _put(self, incoming: Incoming) -> None:
        self._queue.append(incoming)
        self._queue_bytes += sum(map(len, incoming.frames))
        self._came.set()
        if not self._paused and self._is_full(1):
            self._paused = True
            for process in self._processes:
                if process.pipe is not None:
                    process.pipe.pause()

    def _is_full(self, part: int) -> bool:
        """Return True if the queue is full, or its n-th part: to pause and resume takes time."""
        return len(self._queue) > MOST_QUEUED // part or self._queue_bytes > QUEUED_BYTES // part

    async def recv(self) -> Incoming:
        """Wait for the next message, or for the departure of a peer that had sent one."""
        while not self._queue:
            self._came.clear()
            await self._came.wait()
        incoming = self._queue.popleft()
        self._queue_bytes -= sum(map(len, incoming.frames))
        if self._paused and not self._is_full(2):
            self._paused = False
            for process in self._processes:
                if process.pipe is not None:
                    process.pipe.resume()
        return incoming

    # --- out --------------------------------------------------------------------------------

    def send(self, route: bytes, frames: Sequence[bytes]) -> bool:
        """Queue a message without waiting; False if the peer is gone, or its process is stuck."""
        conn = int.from_bytes(route, "big")
        process = self._process_of(conn)
        pipe = process.pipe
        if pipe is None or conn not in process.conns or pipe.waiting_bytes > DOWN_BYTES:
            return False
        pipe.send("send", conn, [self._shared(process, pipe, frame) for frame in frames])
        return True

    def _shared(self, process: _Process, pipe: ProcessPipe, frame: bytes) -> bytes | int:
        """Return a frame, or the number of one that a process has, or gets now.

        A message has at most one such frame, so both ends use them in the same order.
        """
        if not isinstance(frame, SharedFrame):
            return frame
        frame.number = frame.number or next(self._numbers)
        if process.frames.use(frame.number) is None:
            process.frames.keep(frame.number, frame)
            pipe.send("frame", frame.number, frame)
        return frame.number

    def cut(self, conn: int) -> None:
        """Shut down the TCP connection of one peer at once."""
        pipe = self._process_of(conn).pipe
        if pipe is not None:
            pipe.send("cut", conn)

    def _process_of(self, conn: int) -> _Process:
        return self._processes[process_of(conn)]

    def _tell_lists(self, *change: Any) -> None:
        for process in self._processes:
            if process.pipe is not None:
                process.pipe.send("list", *change)

    # --- transfers --------------------------------------------------------------------------

    def hand_over(self, conn: int, channel: Channel, keys: PublicKeys) -> None:
        """Let the process of a connection do the transfers in its client's session.

        But for an update that a process has begun to receive and lost with an earlier connection:
        the server receives it, and resumes it where the next connection ends.
        """
        process = self._process_of(conn)
        if process.pipe is not None and conn in process.conns:
            handed = channel.hand_over()
            fields = astuple(handed)
            left = self._begun.get(process.conns[conn], "")
            public = [keys.curve, keys.signing, keys.sealing]
            process.pipe.send("session", conn, fields, public, left)

    def open_round(self, key: RoundKey | None, base: int, parts: Iterable[SmallPart]) -> None:
        """Let the processes receive updates of a round, and give clients parts of its broadcast.

        Updates that do not start from the state ``base`` pass.

        No key: they receive none, since a later round may take this one's.
        """
        self._round = (key, base, list(parts))
        for process in self._processes:
            self._tell_round(process)

    def _tell_round(self, process: _Process) -> None:
        """Tell a process of the round, and send it the parts that it lacks."""
        if self._round is None or process.pipe is None:
            return
        key, base, parts = self._round
        digests = {str(part.header.update_id): part for part in parts}
        for digest in digests.keys() - process.parts:
            part = digests[digest]
            head = (part.header_bytes, part.signature)
            process.pipe.send("part", *head, part.key.value, part.body)
        process.parts = set(digests)
        process.pipe.send("round", None if key is None else tuple(key), base, list(digests))

    # --- counts -----------------------------------------------------------------------------

    def _ask(self, process: _Process) -> None:
        if process.pipe is not None:
            process.asked = next(self._numbers)
            process.pipe.send("count", process.asked)

    async def settle_counts(self) -> None:
        """Wait until `take_counts` has all bytes up to now, as far as the processes answer."""
        asked: list[tuple[_Process, ProcessPipe, int]] = []
        for process in self._processes:
            if process.pipe is not None and not process.unanswered:
                self._ask(process)
                asked.append((process, process.pipe, process.asked))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COUNTS_S):
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


def _start_child(listener: socket.socket) -> tuple[ChildProcess, socket.socket]:
    """Start an intake process; return it, and this end of its pipe.

    Raises:
        OSError: it cannot be started.
    """
    own, other = socket.socketpair()
    with other:
        fds = (listener.fileno(), other.fileno())
        try:
            return ChildProcess(module_command(MODULE, *map(str, fds)), fds=fds), own
        except BaseException:
            own.close()
            raise


def _passed(process: _Process, conn: int, frames: Iterable[bytes], **more: Any) -> PassedOn:
    return PassedOn(conn.to_bytes(8, "big"), conn, process.conns[conn], tuple(frames), **more)
