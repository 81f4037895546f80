"""A server made of the protocol's own pieces, a link in memory, and a worker that does as told."""

from __future__ import annotations

import asyncio
import contextlib
import json

from fcil_adapters.contract import registry
from fcil_adapters.contract.backbone_info import NO_BACKBONE, backbone_fields
from fcil_adapters.methods.running_mean import METHOD
from fcil_client.daemon import client as daemon
from fcil_client.data.inventory import Inventory
from fcil_client.policy.policy import ALWAYS, Facts
from fcil_client.rounds.round_work import ClientOptions, RoundWork
from fcil_client.state.home import Enrolment, Home
from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes.envelope import open_body, parse_header, unwrap_key
from fcil_protocol.errors import FcilError
from fcil_protocol.ids import new_client_id
from fcil_protocol.messages.frames import parse
from fcil_protocol.messages.messages import Ack, Chunk, Hello, RoundOpen, Update, Want, Welcome
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.payloads.payload import unpack
from fcil_protocol.testing import MemoryRouter
from fcil_protocol.trust.certificate import RootKey
from fcil_protocol.trust.keys import PrivateKeys

RUN, RUN2 = "r20260102-030405-0a0b", "r20260102-030405-0a0c"
HPARAMS = METHOD.hparams()
DIGEST = registry.schema_digest(METHOD, HPARAMS, NO_BACKBONE)
LIMIT = 10_000_000


def order(number=0, *, run=RUN, parts=()):
    return RoundOpen(
        run=run, task=0, kind="train", round=number, rounds=3, base=0, classes=[0, 1], past=[],
        seed=[1], remaining_s=60.0, parts=list(parts),
    )  # fmt: skip


class Work(RoundWork):
    """A worker's work as a script; sealing is the real one.

    Attributes:
        loads, scans, rounds: what comes of each call in turn, an exception or a value; an
            empty list means that all goes well.
        gate: rounds wait until it is set.
    """

    def __init__(self, home, enrolment, keys, options, place=None, **more):
        super().__init__(home, enrolment, keys, options, place, **more)
        self.loads, self.scans, self.rounds = [], [], []
        self.loaded, self.scanned, self.cancelled = [], 0, 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._order = None

    async def load(self, terms):
        self.loaded.append(terms.run)
        _next(self.loads)

    async def scan(self):
        self.scanned += 1
        return _next(self.scans) or Inventory({"cat": 3}, {"cat": 1})

    async def run(self, order, terms, server, progress):
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        _next(self.rounds)
        inventory = Inventory({"made": order.round + 1})
        self._order = order
        envelope, digest = self.seal_inventory(terms, server, inventory)
        self._order = None
        self.outbox.put(digest, envelope)
        return digest

    def _core(self, terms, key, *, base):
        """Say of an update that it is one, though an inventory is in it."""
        if self._order is not None:
            key, base = self._order.key, self._order.base
        return super()._core(terms, key, base=base)


def _next(script):
    outcome = script.pop(0) if script else None
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


class Server:
    """Says what a test tells it to, and opens what comes."""

    def __init__(self):
        self.root, self.keys = RootKey.generate(), PrivateKeys.generate()
        self.certificate = self.root.certify(self.keys.public).to_bytes()
        self.router = MemoryRouter()
        self.client = None  # PublicKeys
        self.channel = self.route = None

    def say(self, message, *blobs):
        assert self.router.send(self.route, self.channel.frames(message, *blobs))

    async def receive(self):
        """Return the next message and its blobs, of whatever kind; departures are let pass."""
        while True:
            incoming = await self.router.recv()
            if not incoming.frames:
                continue
            received = parse(incoming.frames)
            if isinstance(received.message, Hello):
                self.route = incoming.route
                self.channel = Channel(self.keys, self.client)
                self.channel.peer_nonce = received.message.nonce
            self.channel.check(received)
            return received.message, received.blobs

    async def hear(self, kind):
        """Return the next message, which must be of this kind."""
        message, _ = await self.receive()
        assert isinstance(message, kind), message
        return message

    def welcome(self, *, run=RUN, ready=True, **changes):
        fields = {
            "protocol": PROTOCOL_VERSION, "server_nonce": self.channel.nonce,
            "certificate": self.certificate, "run": run, "method": METHOD.name,
            "method_version": METHOD.version, "hparams": HPARAMS.model_dump_json(),
            "schema_digest": DIGEST, "backbone": json.dumps(backbone_fields(NO_BACKBONE)),
            "needs_backbone": False, "ready": ready, "max_payload_bytes": LIMIT, "credit": 8,
        }  # fmt: skip
        self.say(Welcome(**fields | changes))

    async def greet(self, *, run=RUN):
        """Take a client in that has nothing loaded for this run yet; return its last Hello."""
        await self.hear(Hello)
        self.welcome(run=run, ready=False)
        hello = await self.hear(Hello)
        self.welcome(run=run, ready=True)
        return hello

    async def envelope(self):
        """Return digest and payload of the next envelope, which must come now."""
        message, (header, _, wrap) = await self.receive()
        assert isinstance(message, Update), message
        parsed = parse_header(header, max_plain_bytes=LIMIT)
        lacking = list(range(message.unasked, len(parsed.hashes)))
        if lacking:
            self.say(Want(digest=message.digest, chunks=lacking))
        body = []
        while sum(map(len, body)) < parsed.sealed_bytes:
            chunk, blobs = await self.receive()
            assert isinstance(chunk, Chunk)
            body.append(blobs[0])
        return message.digest, unpack(open_body(parsed, unwrap_key(wrap, header, self.keys), body))

    async def inventory(self, *, names):
        digest, payload = await self.envelope()
        assert payload.meta["names"] == names
        return digest

    async def take_in(self, **changes):
        """Greet a client and acknowledge its inventory."""
        await self.greet(**changes)
        self.say(Ack(digest=await self.inventory(names=["cat"])))


class FakeSensors:
    """Says what a test sets: what comes next, if there is any, and then the same for ever."""

    def __init__(self, facts):
        self.facts = facts
        self.next = []
        self.reads = 0

    def read(self):
        self.reads += 1
        if self.next:
            self.facts = self.next.pop(0)
        return self.facts


class Running:
    """One client that runs against a `Server`; ``async with`` starts and stops it."""

    def __init__(
        self, tmp_path, monkeypatch, server, *, addresses=("a:1",), manners=ALWAYS, facts=None
    ):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        monkeypatch.setattr(daemon, "RoundWork", Work)
        data = tmp_path / "images"
        data.mkdir(exist_ok=True)
        self.home = Home.of(server.root.federation, data)
        enrolment = Enrolment(
            new_client_id(), "c", server.root.federation, server.certificate.hex(), addresses,
            str(data),
        )  # fmt: skip
        self.server = server
        self.notes = []
        self.tried = []
        self.dealer = None
        self.sensors = FakeSensors(facts or Facts())
        self.client = daemon.Client(
            self.home, enrolment, ClientOptions(data, manners=manners), notify=self.notes.append,
            make=self._make, sensors=self.sensors,
        )  # fmt: skip
        self.work = self.client._work
        server.client = self.client._keys.public

    def _make(self, address, keys, _server):
        self.tried.append(address)
        self.dealer = self.server.router.dealer(keys.public.curve)
        self.dealer.connect()
        return self.dealer

    async def __aenter__(self):
        self.task = asyncio.create_task(self.client.run())
        return self

    async def __aexit__(self, *_):
        self.client._stopping.set()
        with contextlib.suppress(FcilError):
            await self.task

    async def end(self):
        """Wait until the client ends by itself; return the error that it ends with."""
        try:
            await self.task
        except FcilError as error:
            return error
        raise AssertionError("it ended without an error")

    def said(self, words):
        return [n for n in self.notes if words in n.text]

    async def until(self, true):
        """Let other tasks go on until something holds."""
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)
