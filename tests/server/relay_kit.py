"""A relay between two links in memory: the real `RelayedLink` above it, real `Downloads` below.

What stands in for the server's daemon answers a Hello with a session and a Want with parts,
and counts what it gave out.
"""

import asyncio
import contextlib
from collections import Counter
from types import SimpleNamespace

import numpy as np

from fcil_client.link.downloads import Downloads
from fcil_client.state.home import Enrolment, Home
from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes.envelope import Core, seal, unwrap_key, wrap_key
from fcil_protocol.envelopes.transfer import Sender
from fcil_protocol.errors import FcilError
from fcil_protocol.link.enrol_with_ticket import EnrolmentRecord
from fcil_protocol.link.interface import LinkNews
from fcil_protocol.messages.frames import parse
from fcil_protocol.messages.messages import Chunk, Hello, PartRef, Parts, Want, Welcome
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.payloads.payload import Payload, pack
from fcil_protocol.testing import MemoryRouter
from fcil_protocol.trust.certificate import RootKey
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.federation.allow_list import AllowList
from fcil_server.federation.roster import Roster
from fcil_server.ledger.enums import Role
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.sessions.byte_meter import ByteMeter
from fcil_server.sessions.relay.cache import Cache
from fcil_server.sessions.relay.relay import Relay
from fcil_server.sessions.relayed import RelayedLink

RUN = "r20260102-030405-0a0b"
CHUNK = 16_384
CREDIT = 4 * CHUNK
ADDRESS = "127.0.0.1:7720"


class Federation:
    """As much of a federation as roster and lanes need."""

    def __init__(self, ledger):
        self.ledger = ledger
        self.root, self.keys = RootKey.generate(), PrivateKeys.generate()
        self.id = self.root.federation
        self.certificate = self.root.certify(self.keys.public)


class Center:
    """The server: a socket in memory, `RelayedLink`, and a daemon of a few lines."""

    def __init__(self, ledger):
        self.federation = Federation(ledger)
        self.ledger = ledger
        self.roster = Roster(self.federation, AllowList(), self._changed)
        self.router = MemoryRouter(self.roster.allow_list)
        self.notes, self.parts = [], {}
        self.accounts = ByteMeter(ledger, RUN)
        self.lanes = RelayedLink(
            self.router,
            self.roster,
            credit=CREDIT,
            byte_meter=lambda: self.accounts,
            serve=self.serve,
            notify=lambda *note: self.notes.append(note),
        )
        self.given = Counter()  # (digest, chunk) -> times that it was sent
        self.by = Counter()  # client -> chunks that were sent to it
        self.heard, self.left, self.tasks, self.strays = [], [], [], []
        self.channels = {}  # conn -> (incoming, channel)
        self.reading = asyncio.Event()
        self.reading.set()
        self.giving = asyncio.Event()
        self.giving.set()
        self.refuse = False
        self.spoil = bytes  # what becomes of a chunk

    def _changed(self, relay):
        self.lanes.send_lists(relay)

    def member(self, name, *, via=None, role=Role.CLIENT):
        """Enrol somebody with a ticket; return keys and id."""
        keys = PrivateKeys.generate()
        ticket = self.roster.issue(name, 3600, (ADDRESS,), "test", via=via, role=role)
        row = self.ledger.tickets.get(ticket.guest_keys().public.curve)
        return keys, self.roster.redeem(row, keys.public, "test")

    def publish(self, name="dense", size=9 * CHUNK - 1000):
        """Seal a part of about ``size`` bytes; return its reference."""
        values = np.random.default_rng(len(self.parts)).integers(0, 256, size, dtype=np.uint8)
        core = Core(
            protocol=PROTOCOL_VERSION, federation=self.federation.id, run=RUN,
            direction="broadcast", sender="server",
            sender_key=self.federation.keys.public.fingerprint, recipient="client", method="m",
            schema="0" * 64, task=0, round=0, kind="train", base=0, part=name,
        )  # fmt: skip
        plain = pack(Payload({"x": values}))
        sealed, key = seal(plain, core, self.federation.keys, chunk_bytes=CHUNK)
        digest = sealed.parsed.update_id
        self.parts[digest] = (sealed, key)
        return PartRef(name=name, digest=digest, sealed_bytes=len(sealed.body))

    def serve(self, peer, want):
        """Answer a Want as the publisher does."""
        if self.refuse:
            raise FcilError("no part for this client has that digest.")
        work = self._give(peer.client, peer.route, peer.channel, peer.keys, want)
        self.tasks.append(asyncio.create_task(work))

    async def _give(self, client, route, channel, keys, want):
        if want.chunks:
            await self.giving.wait()
        sealed, key = self.parts[want.digest]
        if want.header:
            wrap = wrap_key(key, sealed.header, keys)
            frames = channel.frames(
                Parts(digest=want.digest), sealed.header, sealed.signature, wrap
            )
            assert self.lanes.send(route, frames)
        sender = Sender(sealed.parsed, sealed.stored(b"").read)
        for message, data in sender.messages(want.chunks, want.span):
            count = -(-len(data) // sealed.parsed.chunk_bytes)
            self.given.update((want.digest, message.index + n) for n in range(count))
            self.by[client] += count
            self.lanes.send(route, channel.frames(message, self.spoil(data)))

    async def run(self):
        while True:
            await self.reading.wait()
            incoming = await self.lanes.recv()
            if not incoming.frames:
                self.left.append(incoming.key)
                self.channels.pop(incoming.conn, None)
                continue
            try:
                await self._take(incoming)
            except FcilError as error:
                self.heard.append(error)

    async def _take(self, incoming):
        received = parse(incoming.frames)
        message = received.message
        if isinstance(message, Hello):
            row = self.ledger.clients.by_curve(incoming.key)
            channel = Channel(self.federation.keys, row.public_keys)
            channel.peer_nonce = message.nonce
            channel.check(received)
            self.channels[incoming.conn] = (incoming, channel, row)
            welcome = Welcome(
                protocol=1, server_nonce=channel.nonce, certificate=b"", run="r", method="m",
                method_version="1", hparams="{}", schema_digest="0" * 64, backbone="{}",
                needs_backbone=False, ready=True, max_payload_bytes=1, credit=1,
            )  # fmt: skip
            self.lanes.send(incoming.route, channel.frames(welcome))
            return
        if incoming.conn not in self.channels:  # the server answers that a session begins otherwise
            self.strays.append(message)
            return
        _, channel, row = self.channels[incoming.conn]
        message = channel.check(received)
        self.heard.append(message)
        if isinstance(message, Want):
            await self._give(row.client_id, incoming.route, channel, row.public_keys, message)

    def say(self, key, message, *blobs):
        """Send a message to the client with a CURVE key."""
        for incoming, channel, row in self.channels.values():
            if row.curve == key:
                assert self.lanes.send(incoming.route, channel.frames(message, *blobs))


class LyingDoor:
    """A listening socket of a relay that does not pass on what it should.

    ``lie(frames)`` returns the messages that the client gets in the place of one.
    """

    def __init__(self, router, lie):
        self._router, self._lie = router, lie

    async def recv(self):
        return await self._router.recv()

    async def settle_counts(self):
        await self._router.settle_counts()

    def take_counts(self):
        return self._router.take_counts()

    def send(self, route, frames):
        sent = [self._router.send(route, told) for told in self._lie(tuple(frames))]
        return all(sent)

    def cut(self, conn):
        self._router.cut(conn)

    def close(self):
        self._router.close()


class Site:
    """A relay and what it listens on."""

    def __init__(
        self,
        center,
        directory,
        name="site",
        *,
        lie=lambda frames: [frames],
        limit=1 << 30,
        via=None,
    ):
        self.center, self.name, self._lie, self.via = center, name, lie, via
        outer = None if via is None else via.name
        self.keys, self.id = center.member(name, role=Role.RELAY, via=outer)
        self.directory, self.limit = directory / name, limit
        self.doors, self.notes, self.records = [], [], []
        self.router = self.dealer = None
        self.relay = self.make()

    def make(self, certificate=None):
        federation = self.center.federation
        known = certificate or federation.certificate
        record = EnrolmentRecord(
            self.id, self.name, federation.id, known.to_bytes().hex(), ("127.0.0.1:7710",), ""
        )
        cache = Cache(self.directory, self.limit)
        return Relay(
            record, self.keys, address=ADDRESS, cache=cache, open_link=self._door,
            notify=lambda *note: self.notes.append(note), keep=self.records.append, make=self._dial,
        )  # fmt: skip

    def _dial(self, _address, keys, _server):
        listens = self.center if self.via is None else self.via
        self.dealer = listens.router.dealer(keys.public.curve)
        self.dealer.connect()
        return self.dealer

    def _door(self, admit):
        self.router = MemoryRouter(admit)
        return LyingDoor(self.router, self._lie)

    async def up(self):
        """Wait until it listens."""
        await until(lambda: self.relay.status()["up"])

    def client(self, tmp_path, name):
        keys, client = self.center.member(name, via=self.name)
        return Member(self, keys, client, tmp_path / name)


class Member:
    """A client behind a relay: its session, and the real downloads."""

    def __init__(self, site, keys, client, directory):
        self.site, self.keys, self.id = site, keys, client
        federation = site.center.federation
        self.server = federation.keys.public
        home = Home(directory)
        home.make()
        enrolment = Enrolment(
            client, "c", federation.id, federation.certificate.to_bytes().hex(), (ADDRESS,), ".",
            link_key="7e" * 32,  # it knows that it is behind a relay
        )  # fmt: skip
        self.home = home
        self.downloads = Downloads(home, enrolment, keys, self.say)
        self.terms = SimpleNamespace(run=RUN, max_payload_bytes=1 << 30, credit=CREDIT)
        self.wraps, self.errors, self.heard, self.news = [], [], [], []
        self.complete = False

    def say(self, message, *blobs):
        self.link.send(self.channel.frames(message, *blobs))

    async def connect(self):
        key = self.keys.public.curve
        await until(lambda: self.site.relay._session._allow_list.is_member(key))
        self.link = self.site.router.dealer(key)
        self.link.connect()
        assert await self.link.recv() == LinkNews("up")

    async def greet(self, *, connected=False):
        """Connect and begin a session."""
        if not connected:
            await self.connect()
        self.channel = Channel(self.keys, self.server)
        federation = self.site.center.federation
        self.say(
            Hello(
                nonce=self.channel.nonce, protocol=1, oldest=1, package="0",
                federation=federation.id, client=self.id, takes_compact=True,
            )
        )  # fmt: skip
        received = parse(await self.link.recv())
        welcome = self.channel.check(received)
        self.channel.peer_nonce = welcome.server_nonce
        self.task = asyncio.create_task(self._listen())

    async def _listen(self):
        while True:
            frames = await self.link.recv()
            if isinstance(frames, LinkNews):
                self.news.append(frames)
                continue
            try:
                self._take(parse(frames))
            except FcilError as error:
                self.errors.append(error)

    def _take(self, received):
        message = self.channel.check(received)
        self.heard.append(message)
        if isinstance(message, Parts):
            self.wraps.append((received.blobs[0], received.blobs[2]))
            self.complete |= self.downloads.header(received, message, self.terms, self.server)
        elif isinstance(message, Chunk):
            self.complete |= self.downloads.chunk(received, message)

    async def fetch(self, *refs):
        """Fetch parts until all are on disk."""
        self.complete = self.downloads.start(refs)
        await until(lambda: self.complete)


async def until(true):
    """Let other tasks go on until something holds."""
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


def play(tmp_path, story, **options):
    """Run ``async story(center, site)`` with a relay that is up."""

    async def main():
        with Ledger(tmp_path / LEDGER_NAME) as ledger:
            center = Center(ledger)
            site = Site(center, tmp_path, **options)
            tasks = [asyncio.create_task(center.run()), asyncio.create_task(site.relay.run())]
            try:
                await site.up()
                await story(center, site)
                assert not tasks[0].done()
            finally:
                site.relay.stop()
                for task in tasks:
                    task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.gather(*tasks)

    asyncio.run(main())


def opens(keys, header, wrap):
    """Say whether somebody's keys open a wrapped content key."""
    with contextlib.suppress(FcilError):
        unwrap_key(wrap, header, keys)
        return True
    return False
