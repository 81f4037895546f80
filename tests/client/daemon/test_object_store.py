"""A client between the server and its object store: stopped, cut off, refused."""

import asyncio
import hashlib
import threading

import pytest

from client.daemon_kit import DIGEST, RUN, Running, Server, order
from fcil_adapters.methods.running_mean import METHOD
from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes.envelope import Core, seal, wrap_key
from fcil_protocol.messages.messages import Ack, Fetched, Hello, PartRef, Parts, Want
from web_folder import web_server

CHUNK = 64 << 10


def sealed_part(server):
    core = Core(
        protocol=PROTOCOL_VERSION, federation=server.root.federation, run=RUN,
        direction="broadcast", sender="server", sender_key=server.keys.public.fingerprint,
        recipient="client", method=METHOD.name, schema=DIGEST, task=0, round=0, kind="train",
        base=0, part="current",
    )  # fmt: skip
    plain = hashlib.shake_256(b"part").digest(2 << 20)
    sealed, key = seal(plain, core, server.keys, chunk_bytes=CHUNK)
    header = sealed.parsed
    ref = PartRef(name="current", digest=header.update_id, sealed_bytes=header.sealed_bytes)
    return ref, sealed.stored(wrap_key(key, sealed.header, server.client))


async def first(server, kind):
    """Return the next message of a kind; a client reports its progress between them."""
    while not isinstance(heard := (await server.receive())[0], kind):
        pass
    return heard


class Scene:
    """A client that has begun to fetch a part, of which the store keeps back the second half."""

    def __init__(self, server, running, base, folder):
        self.server, self.running, self.base, self.folder = server, running, base, folder

    async def begin(self):
        server = self.server
        await server.hear(Hello)
        server.welcome(ready=False, object_store=self.base)
        await server.hear(Hello)
        server.welcome(ready=True, object_store=self.base)
        server.say(Ack(digest=await server.inventory(names=["cat"])))
        self.ref, stored = sealed_part(server)
        (self.folder / self.ref.digest).write_bytes(bytes(stored.body))
        server.say(order(parts=[self.ref]))
        want = await first(server, Want)
        assert (want.header, want.chunks) == (True, []), "the store may have the chunks"
        self.arrived = asyncio.Event()
        self.downloads = self.running.client._transfers._downloads
        objects = self.downloads.objects
        objects._arrived = self.arrived.set
        self.ended, ended = asyncio.Event(), objects._ended
        objects._ended = lambda end: (ended(end), self.ended.set())
        told = Parts(digest=self.ref.digest, url=self.base + self.ref.digest)
        server.say(told, stored.header, stored.signature, stored.wrap)
        await self.arrived.wait()


@pytest.fixture
def play(tmp_path, monkeypatch):
    gate = threading.Event()

    def half(request, status, data):
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data[: len(data) // 2 + 1])
        request.wfile.flush()
        gate.wait()
        request.close_connection = True
        return 0

    def run(story):
        async def main():
            (tmp_path / "store").mkdir()
            with web_server(tmp_path / "store", answer=half) as web:
                server = Server()
                running = Running(tmp_path, monkeypatch, server, addresses=("127.0.0.1:1",))
                base = f"http://127.0.0.1:{web.server_port}/"
                try:
                    scene = Scene(server, running, base, tmp_path / "store")
                    await asyncio.wait_for(story(scene, gate), 20)
                finally:
                    gate.set()

        asyncio.run(main())

    return run


def test_a_client_that_stops_fetches_no_more_and_reports_what_came(play):
    async def story(scene, _):
        async with scene.running:
            await scene.begin()
            tasks = list(scene.downloads.objects._tasks.values())
        assert all(task.done() for task in tasks)
        fetched = await first(scene.server, Fetched)
        assert (fetched.digest, fetched.size) == (scene.ref.digest, 1 << 20)

    play(story)


def test_a_store_that_fails_while_the_link_is_down_leaves_nothing_to_wait_for(play):
    async def story(scene, gate):
        server, running = scene.server, scene.running
        async with running:
            await scene.begin()
            running.dealer.disconnect()
            gate.set()
            await scene.ended.wait()
            assert not scene.downloads.objects.under_way
            running.dealer.connect()
            await first(server, Hello)
            server.welcome(ready=True, object_store=scene.base)
            server.say(order(parts=[scene.ref]))
            heard = await first(server, Want)
            assert heard.digest == scene.ref.digest
            assert heard.chunks[0] >= 16, "the first half came from the store"

    play(story)
