"""A page for tests: a real ledger behind a real socket, and a server that says what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

from fcil_protocol.errors import Unreachable
from fcil_protocol.storage.atomic_files import write_atomic
from fcil_server.federation.page_key import KEY_NAME
from fcil_server.ledger.ledger import LEDGER_NAME
from fcil_server.web.errors import Faults
from fcil_server.web.page.access.sessions import KeyedSessions
from fcil_server.web.page.app import Pages, PageSite, make_app
from fcil_server.web.page.board import Boards
from fcil_server.web.page.event_stream import Hub
from fcil_server.web.page.server import LIMITS
from fcil_server.web.page.watch import PageWatch
from server.web_kit import ask, door, get

KEY = bytes(range(32))


class Server:
    """A server that says what a test wants; without words it does not answer."""

    def __init__(self, live=None) -> None:
        self.live = live
        self.asked: list[dict] = []

    def __call__(self, op: str, **fields):
        self.asked.append({"op": op, **fields})
        if self.live is None:
            raise Unreachable("no daemon runs at federation.")
        return json.loads(json.dumps(self.live))


class Page:
    """A federation's page, and a browser that is let in."""

    def __init__(self, directory: Path, server=None, *, read_only=False, most=100) -> None:
        self.directory = directory
        self.server = server or Server()
        self.faults = Faults()
        self.hub = Hub(most)
        self.boards = Boards(directory, self.faults, acts=not read_only)
        greeting = {"read_only": read_only, "version": "1"}
        self.watch = PageWatch(self.boards, self.server, self.hub, greeting, self.faults)
        write_atomic(directory / KEY_NAME, KEY)
        self.keyed = KeyedSessions(directory)
        self.pages = Pages(
            PageSite(directory, read_only=read_only), self.watch, self.hub, self.keyed
        )
        self.app = make_app(self.pages, (), (), self.faults)
        sessions = self.keyed.current()
        self.cookie = f"{sessions.cookie}={sessions.begin()}"
        self.port = 0

    @property
    def ledger(self) -> Path:
        return self.directory / LEDGER_NAME

    async def get(self, path: str, **headers: str) -> str:
        """Return the answer to a browser that is let in."""
        return await ask(self.port, get(path, Cookie=self.cookie, **headers))

    @contextlib.asynccontextmanager
    async def served(self, **limits) -> AsyncIterator[Page]:
        """Serve it."""
        given = {"connections": LIMITS.connections, "body_bytes": LIMITS.body_bytes, **limits}
        async with door(self.app, **given) as self.port:
            watching = asyncio.create_task(self.watch.run())
            try:
                yield self
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                self.hub.end()
        await self.watch.close()


class Browser:
    """One open stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.head = ""
        self._rest = b""

    async def next(self) -> tuple[str, dict]:
        """Wait for the next event."""
        lines = (await self._event()).decode().split("\n")
        fields = dict(line.split(": ", 1) for line in lines)
        return fields["event"], json.loads(fields["data"])

    async def until(self, event: str, /, **said) -> dict:
        """Wait for an event of this name which says this, and drop others."""
        while True:
            found, data = await self.next()
            if found == event and data.items() >= said.items():
                return data

    async def _event(self) -> bytes:
        while b"\n\n" not in self._rest:
            size = int(await asyncio.wait_for(self.reader.readline(), 60), 16)
            if not size:
                raise EOFError
            self._rest += (await asyncio.wait_for(self.reader.readexactly(size + 2), 60))[:-2]
        found, self._rest = self._rest.split(b"\n\n", 1)
        return found


@contextlib.asynccontextmanager
async def browsing(page: Page, path: str = "/stream", **headers: str):
    """Open a stream; yields the `Browser`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", page.port, limit=1 << 22)
    request = get(path, Cookie=page.cookie, **headers).replace("Connection: close\r\n", "")
    writer.write(request.encode())
    browser = Browser(reader, writer)
    browser.head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).decode()
    try:
        yield browser
    finally:
        writer.close()
