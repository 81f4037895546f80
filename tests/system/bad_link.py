"""A TCP proxy that is a bad link: slow, far away, cut, stalling, late with what is over."""

import asyncio
import contextlib
import random
import socket
import threading
from dataclasses import dataclass, field

UP, DOWN = "up", "down"  # client to server, server to client


@dataclass(frozen=True)
class Link:
    """What a link is like; the default is a perfect one.

    Attributes:
        rate: bytes per second in each direction, all connections together; 0: without limit.
        delay_s: from one end to the other.
        jitter_s: added to that at random; the order stays.
        cut_bytes: a connection is cut when so many have passed, both directions together.
        cut_s: a connection is cut when it is so old.
        stall_bytes: after so many of a connection nothing passes for a while.
        stall_s: for how long.
        late: the server hears the rest of a cut connection, and its end, only when the next
            connection has carried something.
    """

    rate: float = 0
    delay_s: float = 0
    jitter_s: float = 0
    cut_bytes: int = 0
    cut_s: float = 0
    stall_bytes: int = 0
    stall_s: float = 0
    late: bool = False


PERFECT = Link()
SLACK_S = 0.05  # what this machine may be late and still keep the rate
LATE_BYTES = 2000  # what the next connection has carried: its handshake and a Hello
HANDSHAKE_BYTES = 20_000  # more than a handshake and a Hello take


@dataclass(eq=False)
class _Pair:
    """One connection through the proxy.

    Attributes:
        carried: bytes that entered, both directions together.
        over: set when it was cut, or ended by itself.
        successor: set when the next connection has carried `LATE_BYTES` to the server.
    """

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    carried: int = 0
    to_server: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)
    successor: asyncio.Event = field(default_factory=asyncio.Event)


class BadLink:
    """The proxy: listens on ``port``, leads to ``target``.

    Attributes:
        carried: bytes that have entered it, by direction.
        cuts: connections that it has cut.
        connections: those that carried more than a handshake: on a busy machine one may be tried
            twice.
        heard: every byte by direction, if it taps the wire; else None.
    """

    def __init__(self, target, link=PERFECT, *, host="127.0.0.1", seed=0, tap=False):
        self.target, self.link, self.host = target, link, host
        self.carried = {UP: 0, DOWN: 0}
        self.heard = {UP: bytearray(), DOWN: bytearray()} if tap else None
        self._more = threading.Condition()
        self.cuts = self.connections = 0
        self._free_at = {UP: 0.0, DOWN: 0.0}
        self._random = random.Random(seed)
        self._last = None
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    def _run(self):
        asyncio.set_event_loop(self._loop)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # A router holds little: what it cannot send waits with the sender.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
        sock.bind((self.host, 0))
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._accept, sock=sock, limit=4096)
        )
        self.port = sock.getsockname()[1]
        self._ready.set()
        self._loop.run_forever()

    async def _accept(self, reader, client):
        try:
            far, server = await asyncio.open_connection("127.0.0.1", self.target, limit=4096)
        except OSError:
            client.transport.abort()
            return
        except asyncio.CancelledError:  # the proxy is closed
            client.transport.abort()
            raise
        pair = _Pair(client, server)
        before, self._last = self._last, pair
        up = asyncio.create_task(self._carry(pair, reader, server, UP, before))
        down = asyncio.create_task(self._carry(pair, far, client, DOWN, None))
        age = asyncio.create_task(self._age(pair))
        with contextlib.suppress(asyncio.CancelledError):  # the proxy is closed
            await pair.over.wait()
            down.cancel()
            client.transport.abort()
            if self.link.late:
                await pair.successor.wait()
                await up
        client.transport.abort()
        server.close()
        for task in (up, down, age):
            task.cancel()
        await asyncio.gather(up, down, age, return_exceptions=True)
        server.transport.abort()

    async def _age(self, pair):
        if self.link.cut_s:
            await asyncio.sleep(self.link.cut_s)
            self._cut(pair)

    def _cut(self, pair):
        if not pair.over.is_set():
            self.cuts += 1
            pair.over.set()

    async def _carry(self, pair, reader, writer, direction, before):
        """Read at the link's rate; what was read arrives after its delay, in order."""
        queue = asyncio.Queue()
        sender = asyncio.create_task(self._arrive(pair, queue, writer, direction))
        try:
            while data := await reader.read(self._piece()):
                with self._more:
                    self.carried[direction] += len(data)
                    self._more.notify_all()
                if self.heard is not None:
                    self.heard[direction] += data
                before_it, pair.carried = pair.carried, pair.carried + len(data)
                self.connections += before_it <= HANDSHAKE_BYTES < pair.carried
                if direction == UP:
                    pair.to_server += len(data)
                    if before is not None and pair.to_server >= LATE_BYTES:
                        before.successor.set()
                due = await self._wait_for_turn(len(data), direction)
                queue.put_nowait((due, data))
                await self._maybe_stall(pair, len(data))
                if self.link.cut_bytes and pair.carried >= self.link.cut_bytes:
                    self._cut(pair)
                if pair.over.is_set():
                    break
            queue.put_nowait((0, b""))
            await sender
        except OSError:
            pass
        finally:
            sender.cancel()
            pair.over.set()

    def _piece(self):
        return 4096 if not self.link.rate else max(512, min(4096, int(self.link.rate / 20)))

    async def _wait_for_turn(self, size, direction):
        now = self._loop.time()
        if self.link.rate:
            begin = max(now - SLACK_S, self._free_at[direction])
            self._free_at[direction] = begin + size / self.link.rate
            await asyncio.sleep(max(0, self._free_at[direction] - now))
        return self._loop.time() + self.link.delay_s + self._random.uniform(0, self.link.jitter_s)

    async def _maybe_stall(self, pair, size):
        every = self.link.stall_bytes
        if every and pair.carried // every != (pair.carried - size) // every:
            await asyncio.sleep(self.link.stall_s)

    async def _arrive(self, pair, queue, writer, direction):
        with contextlib.suppress(OSError):
            while True:
                due, data = await queue.get()
                await asyncio.sleep(due - self._loop.time())
                if pair.over.is_set() and self.link.late and direction == UP:
                    await pair.successor.wait()
                if not data:
                    return
                writer.write(data)
                await writer.drain()

    def wait_for(self, direction, size):
        """Wait until so many bytes have entered it in a direction."""
        with self._more:
            assert self._more.wait_for(lambda: self.carried[direction] >= size, 60)

    def close(self):
        async def end():
            self._server.close()
            await asyncio.sleep(0)  # what was accepted begins: it then ends what it holds
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await asyncio.sleep(0)  # for transports that were ended to close their sockets

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
