"""An API for tests: a real ledger behind a real socket, and a server that says what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

from fcil_protocol.errors import Unreachable
from fcil_server.federation.api_tokens import TokenRole, make_token
from fcil_server.web.api.problems import refusal
from fcil_server.web.api.server import LIMITS, Api
from server.web_kit import ask, door


class Server:
    """A server that says what a test wants, op by op; of others it knows nothing."""

    def __init__(self, **says) -> None:
        self.says = says
        self.asked: list[dict] = []

    def __call__(self, op: str, _wait_s: float = 5.0, **fields):
        self.asked.append({"op": op, **fields})
        found = self.says.get(op, Unreachable("no daemon runs at federation."))
        found = found() if callable(found) else found
        if isinstance(found, Exception):
            raise found
        return json.loads(json.dumps(found))


class ApiDoor:
    """A federation's API, and a token for each role."""

    def __init__(self, directory: Path, server: Server | None = None) -> None:
        self.directory = directory
        self.server = server or Server()
        self.api = Api(directory, self.server)
        self.tokens = {}
        for role in TokenRole:
            made = make_token(directory, role.value, role.value, lasts_s=None, now=time.time())
            self.tokens[role.value] = made[0]
        self.port = 0

    async def ask(self, path, *, method="GET", role="read", body=None, host="127.0.0.1", **headers):
        """Return status, headers and JSON of an answer."""
        text = "" if body is None else body if isinstance(body, str) else json.dumps(body)
        given = {"Host": host, "Connection": "close"}
        if role is not None:
            given["Authorization"] = f"Bearer {self.tokens.get(role, role)}"
        if body is not None:
            given |= {"Content-Type": "application/json", "Content-Length": str(len(text))}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        answer = await ask(self.port, f"{method} {path} HTTP/1.1\r\n{lines}\r\n{text}")
        return parsed(answer)

    @contextlib.asynccontextmanager
    async def served(self, **limits) -> AsyncIterator[ApiDoor]:
        """Serve it."""
        given = {"body_bytes": LIMITS.body_bytes, **limits}
        async with door(self.api.app, refusal=refusal, **given) as self.port:
            working = asyncio.create_task(self.api.work())
            try:
                yield self
            finally:
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)
                self.api.end()


def parsed(answer: str) -> tuple[int, dict[str, str], dict]:
    """Return status, headers but for the time of day, and content: the same for the same answer."""
    head, _, body = answer.partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    headers.pop("date", None)
    content = json.loads(body) if "json" in headers.get("content-type", "") else {"text": body}
    return int(first.split(" ")[1]), headers, content


def visited(directory: Path, work, server: Server | None = None, **limits):
    """Let a test use an API; return what it returns."""

    async def served():
        api = ApiDoor(directory, server)
        async with api.served(**limits):
            return await asyncio.wait_for(work(api), 60)

    return asyncio.run(served())
