"""Parts from an object store: which addresses are used, what is kept, and what is left to the link."""

import asyncio
import contextlib
import hashlib
import threading

import pytest

from fcil_client.link import url_fetch
from fcil_client.link.object_downloads import PAUSE_S, ObjectDownloads, is_local
from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes.assembly import Assembly
from fcil_protocol.envelopes.envelope import Core, seal
from fcil_protocol.envelopes.transfer import OBJECT_BYTES
from fcil_protocol.errors import DiskFull, LinkError, WireError
from fcil_protocol.ids import FederationId
from fcil_protocol.trust.keys import PrivateKeys
from web_folder import flipped, half_of_it, refused, sent_elsewhere, web_server

KEYS = PrivateKeys(curve=b"\x01" * 32, signing=b"\x02" * 32, sealing=b"\x03" * 32)
CORE = Core(
    protocol=PROTOCOL_VERSION, federation=FederationId("0123456789abcdef" * 2),
    run="r20260102-030405-0a0b", direction="broadcast", sender="server",
    sender_key=KEYS.public.fingerprint, recipient="client", method="pilora", schema="", task=0,
    round=0, kind="train", base=0, part="current",
)  # fmt: skip
CHUNK = 64 << 10
SEALED = seal(hashlib.shake_256(b"part").digest(40 * CHUNK), CORE, KEYS, chunk_bytes=CHUNK)[0]
HEADER = SEALED.parsed
BODY = bytes(SEALED.stored(b"").body)


class Client:
    """What uses `ObjectDownloads`, with one part under way."""

    def __init__(self, base, **given):
        self.steps, self.came, self.now = 0, [], 0.0
        self.ended = None
        self.over, self.counted = asyncio.Event(), asyncio.Event()
        self.objects = ObjectDownloads(
            base, plain_http=given.pop("plain_http", True), arrived=self._arrived,
            ended=self._ended, came=self._came,
            spawn=asyncio.create_task, clock=lambda: self.now,
        )  # fmt: skip

    def _arrived(self):
        self.steps += 1

    def _came(self, _digest, size):
        self.came.append(size)
        self.counted.set()

    def _ended(self, end):
        self.ended = end
        self.over.set()


async def fetch(folder, assembly, **web):
    (folder / "part").write_bytes(BODY)
    with web_server(folder, **web) as server:
        base = f"http://127.0.0.1:{server.server_port}/"
        client = Client(base)
        assert client.objects.usable(f"{base}part?signature=1")
        client.objects.begin(f"{base}part?signature=1", (b"", b"", b""), assembly)
        assert client.objects.under_way == {HEADER.update_id: assembly}
        await client.over.wait()
        assert not client.objects.under_way
        client.asked = server.asked
    return client


def new_assembly(tmp_path):
    return Assembly(HEADER, path=tmp_path / "incoming")


def body_of(assembly, tmp_path):
    assembly.finish(tmp_path / "done")
    return (tmp_path / "done").read_bytes()


def test_a_part_arrives_whole_in_steps_and_is_counted(tmp_path):
    assembly = new_assembly(tmp_path)
    client = asyncio.run(fetch(tmp_path, assembly))
    assert client.ended.error is None
    assert body_of(assembly, tmp_path) == BODY
    assert client.steps == 3
    assert client.came == [len(BODY)]
    assert client.asked == ["/part?signature=1"]


def test_only_missing_chunks_are_read(tmp_path):
    assembly = new_assembly(tmp_path)
    for index in (0, 1, 20):
        assembly.put(index, BODY[HEADER.extent(range(index, index + 1))])
    client = asyncio.run(fetch(tmp_path, assembly))
    assert body_of(assembly, tmp_path) == BODY
    assert client.came == [len(BODY) - 3 * CHUNK]
    assert len(client.asked) == 2  # one request for each run of chunks


def test_a_store_without_ranges_gives_a_part_that_has_no_chunk_yet(tmp_path):
    assembly = new_assembly(tmp_path)
    client = asyncio.run(fetch(tmp_path, assembly, ranges=False))
    assert client.ended.error is None
    assert body_of(assembly, tmp_path) == BODY


def test_and_is_not_asked_for_the_rest_of_one(tmp_path):
    assembly = new_assembly(tmp_path)
    assembly.put(0, BODY[:CHUNK])
    client = asyncio.run(fetch(tmp_path, assembly, ranges=False))
    assert isinstance(client.ended.error, LinkError)
    assert client.came == []


@pytest.mark.parametrize(
    ("answer", "kept"),
    [(half_of_it, 20), (flipped, 40), (refused, 0), (sent_elsewhere, 0)],
)
def test_what_came_right_is_kept_and_the_store_left_alone_for_a_while(tmp_path, answer, kept):
    assembly = new_assembly(tmp_path)
    client = asyncio.run(fetch(tmp_path, assembly, answer=answer))
    assert isinstance(client.ended.error, WireError if answer is flipped else LinkError)
    assert assembly.received_bytes == kept * CHUNK
    assert sum(client.came) == (len(BODY) if answer is flipped else kept * CHUNK)
    objects = client.objects
    assert not objects.usable(f"{objects.base}part")
    assert not objects.may_hold(OBJECT_BYTES)
    client.now += PAUSE_S
    assert objects.usable(f"{objects.base}part")
    assert objects.may_hold(OBJECT_BYTES)


def missing(request, _status, _data):
    request.send_error(404)
    return 0


def test_a_part_that_is_not_there_any_more_is_no_fault_of_the_store(tmp_path):
    client = asyncio.run(fetch(tmp_path, new_assembly(tmp_path), answer=missing))
    assert isinstance(client.ended.error, LinkError)
    assert client.objects.may_hold(OBJECT_BYTES)


@pytest.mark.parametrize("in_headers", [False, True])
def test_a_store_that_drips_is_silent(tmp_path, monkeypatch, in_headers):
    monkeypatch.setattr(url_fetch, "SILENCE_S", 0.1)
    over = threading.Event()

    def drip(request, status, data):
        """Send a byte now and then, for as long as it is read."""
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        if not in_headers:
            request.end_headers()
        request.wfile.flush()
        with contextlib.suppress(OSError):
            while not over.wait(0.01):
                request.wfile.write(b"a")
        return 0

    async def given_up():
        assembly = new_assembly(tmp_path)
        (tmp_path / "part").write_bytes(BODY)
        with web_server(tmp_path, answer=drip) as server:
            base = f"http://127.0.0.1:{server.server_port}/"
            client = Client(base)
            client.objects.begin(f"{base}part", (b"", b"", b""), assembly)
            await client.over.wait()
            over.set()
        return client

    client = asyncio.run(given_up())
    assert isinstance(client.ended.error, LinkError)
    assert not client.objects.may_hold(OBJECT_BYTES)


def test_no_address_is_in_an_error(tmp_path):
    """It may be signed, and is as good as a key then."""
    client = Client("http://127.0.0.1:1/")

    async def run(url):
        client.objects.begin(url, (b"", b"", b""), new_assembly(tmp_path))
        await client.over.wait()

    asyncio.run(run("http://127.0.0.1:1/a?sig=SECRET"))
    assert client.ended.error.message == "Connection refused."
    client.over = asyncio.Event()
    asyncio.run(run("http://127.0.0.1:x/a b?sig=SECRET"))
    assert "SECRET" not in str(client.ended.error)


def test_a_full_disk_is_no_fault_of_the_store(tmp_path, monkeypatch):
    assembly = new_assembly(tmp_path)

    def full(*_):
        raise DiskFull("no space")

    monkeypatch.setattr(assembly, "put", full)
    client = asyncio.run(fetch(tmp_path, assembly))
    assert isinstance(client.ended.error, DiskFull)
    assert client.objects.may_hold(OBJECT_BYTES)


def test_a_part_that_is_not_needed_any_more_is_not_read_on(tmp_path):
    (tmp_path / "part").write_bytes(BODY)

    def slow(request, status, data):
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data[: len(data) // 2])
        request.wfile.flush()
        request.rfile.read(1)  # until the client goes
        return 0

    async def leave():
        with web_server(tmp_path, answer=slow) as server:
            base = f"http://127.0.0.1:{server.server_port}/"
            client = Client(base)
            arrived = asyncio.Event()
            client.objects._arrived = arrived.set
            assembly = new_assembly(tmp_path)
            client.objects.begin(f"{base}part", (b"", b"", b""), assembly)
            await arrived.wait()
            client.objects.keep_only({HEADER.update_id})
            assert client.objects.under_way
            client.objects.keep_only(())
            assert not client.objects.under_way
            await client.counted.wait()
            return client, assembly

    client, assembly = asyncio.run(leave())
    assert client.ended is None
    assert client.came == [assembly.received_bytes] == [16 * CHUNK]


def test_only_addresses_below_the_told_one_are_used():
    client = Client("https://store.example/bucket/")
    usable = client.objects.usable
    assert usable("https://store.example/bucket/a?X-Amz-Signature=1")
    assert not usable("https://store.example/other/a")
    assert not usable("https://store.example.org/bucket/a")
    assert not usable("file:///etc/passwd")
    assert not usable("")


@pytest.mark.parametrize("base", ["", "file:///etc/", "ftp://store.example/"])
def test_nothing_else_than_http_is_a_store(base):
    assert not Client(base).objects.usable(f"{base}a")


def test_plain_http_is_for_this_machine():
    assert Client("http://127.0.0.1/").objects.usable("http://127.0.0.1/a")
    assert not Client("http://127.0.0.1/", plain_http=False).objects.usable("http://127.0.0.1/a")
    assert is_local("127.0.0.1:7710")
    assert is_local("[::1]:7710")
    assert is_local("localhost:7710")
    assert not is_local("192.168.1.2:7710")
    assert not is_local("server.example:7710")


def test_small_parts_are_not_looked_for():
    client = Client("https://store.example/")
    assert client.objects.may_hold(OBJECT_BYTES)
    assert not client.objects.may_hold(OBJECT_BYTES - 1)
