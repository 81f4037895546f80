"""An HTTP door for tests, over real sockets, and browsers that say just what a test wants."""

from __future__ import annotations

import asyncio
import contextlib

from fcil_server.federation.addresses import TlsFiles
from fcil_server.web.http_server import HttpLimits, make_server, open_listener, plain_refusal

NO_CERTIFICATE = TlsFiles()


@contextlib.asynccontextmanager
async def door(application, certificate=NO_CERTIFICATE, refusal=plain_refusal, **limits):
    """Serve an app; yields the port."""
    sock = open_listener("127.0.0.1:0")
    server = make_server(application, certificate, HttpLimits(**limits), refusal)
    server.capture_signals = contextlib.nullcontext  # they are pytest's
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 60)
        sock.close()


async def ask(port: int, request: str, *, tls=None) -> str:
    """Send bytes as they are; return everything until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    got = b""
    try:
        writer.write(request.encode("latin-1"))
        with contextlib.suppress(ConnectionError):  # cut: what came until then
            while more := await asyncio.wait_for(reader.read(1 << 16), 60):
                got += more
    finally:
        writer.close()
    return got.decode("utf-8", errors="replace")


def get(path: str = "/", host: str = "127.0.0.1", *, method: str = "GET", **headers: str) -> str:
    """Return a request; its connection is closed afterwards."""
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{more}Connection: close\r\n\r\n"
