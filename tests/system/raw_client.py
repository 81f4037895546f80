"""A client made of the protocol's own pieces, that can say what no honest client says."""

import asyncio
import copy
import time
from collections import deque

import numpy as np

import fcil_protocol
from fcil_protocol.envelopes.envelope import Core, parse_header, seal, wrap_key
from fcil_protocol.link.zmq_link import Dealer, LinkNews
from fcil_protocol.messages.frames import parse
from fcil_protocol.messages.messages import Ack, Chunk, Hello, Nack, RoundOpen, Update, Welcome
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.payloads.builtin import INVENTORY
from fcil_protocol.payloads.payload import Payload, pack
from fcil_protocol.process import control_socket
from fcil_protocol.trust.certificate import Certificate
from fcil_protocol.trust.keys import PrivateKeys

WAIT_S = 60


class RawClient:
    """Enrols through the control socket and speaks message by message.

    `heard` holds the newest messages from the server as they came, frame by frame.
    """

    def __init__(self, federation, name="raw"):
        keys = PrivateKeys.generate()
        public = {k: v.hex() for k, v in keys.public.to_fields().items()}
        reply = control_socket.ask(federation.federation, "enrol_local", name=name, keys=public)
        certificate = bytes.fromhex(reply["certificate"])
        self._be(keys, reply["client_id"], certificate, reply["addresses"][0])

    @classmethod
    def of(cls, keys, client, certificate, address):
        """Return a client that is enrolled already: keys, id, the server's certificate, HOST:PORT."""
        made = cls.__new__(cls)
        made._be(keys, client, certificate, address)
        return made

    def _be(self, keys, client, certificate, address):
        self.keys = keys
        self.client = client
        self.certificate = Certificate.from_bytes(certificate)
        self.server = self.certificate.verify(self.certificate.federation, time.time())
        self.address = address
        self.link = None
        self.channel = None
        self.welcome = None
        self.heard = deque(maxlen=100)

    def twin(self):
        """Return this client once more, as whoever copied its files would start it."""
        other = copy.copy(self)
        other.heard = deque(maxlen=100)
        return other

    async def connect(self):
        host, _, port = self.address.rpartition(":")
        self.link = Dealer(
            curve_secret=self.keys.curve_secret,
            curve_public=self.keys.public.curve,
            server_key=self.server.curve,
        )
        self.link.connect(host, int(port))
        while True:
            news = await asyncio.wait_for(self.link.recv(), WAIT_S)
            if isinstance(news, LinkNews) and news.state == "up":
                return

    async def hear(self, *types):
        """Return the next message of one of the types; others are let pass."""
        while True:
            frames = await asyncio.wait_for(self.link.recv(), WAIT_S)
            if isinstance(frames, LinkNews):
                continue
            self.heard.append(frames)
            received = parse(frames)
            if isinstance(received.message, Welcome):
                self.channel.peer_nonce = received.message.server_nonce
            message = self.channel.check(received)
            if isinstance(message, Welcome) and message.session_key:
                self.channel.agree_as_client(message.session_key)
            if isinstance(message, types):
                return message

    def frames(self, message, *blobs):
        """Return a message as it would be sent now, for sending it later, twice or elsewhere."""
        return self.channel.frames(message, *blobs)

    def say(self, message, *blobs):
        frames = self.frames(message, *blobs)
        while not self.link.send(frames):
            assert self.link._up  # else only its queue is full, which a thread empties

    async def greet(self, **changes):
        """Say Hello twice, as a client of a method without a backbone does."""
        digest = run = ""
        for _ in range(2):
            self.channel = Channel(self.keys, self.server)
            fields = {
                "nonce": self.channel.nonce,
                "session_key": self.channel.session_key,
                "protocol": fcil_protocol.PROTOCOL_VERSION,
                "oldest": fcil_protocol.OLDEST_PROTOCOL_VERSION,
                "package": "0",
                "federation": self.certificate.federation,
                "client": self.client,
                "methods": ["running_mean==1", "pilora==1"],
                "run": run,
                "schema_digest": digest,
                "takes_compact": True,
            } | changes
            self.say(Hello(**fields))
            answer = await self.hear(Welcome, Nack)
            if isinstance(answer, Nack) or answer.ready:
                self.welcome = answer
                return answer
            digest, run = answer.schema_digest, answer.run
        raise AssertionError("not ready after two Hellos")

    def core(self, kind, *, task=-1, round_=0, base=0, **changes):
        fields = {
            "protocol": fcil_protocol.PROTOCOL_VERSION,
            "federation": self.certificate.federation,
            "run": self.welcome.run,
            "direction": "update",
            "sender": self.client,
            "sender_key": self.keys.public.fingerprint,
            "recipient": "server",
            "method": self.welcome.method,
            "schema": self.welcome.schema_digest,
            "task": task,
            "round": round_,
            "kind": kind,
            "base": base,
        } | changes
        return Core(**fields)

    def sealed(self, payload, core):
        plain = payload if isinstance(payload, bytes) else pack(payload)
        sealed, key = seal(plain, core, self.keys, chunk_bytes=65536)
        return sealed, wrap_key(key, sealed.header, self.server)

    async def upload(self, sealed, wrap, digest=None, body=None):
        """Send an envelope whole; return the server's Ack or Nack about it."""
        header = parse_header(sealed.header, max_plain_bytes=1 << 30)
        digest = digest or header.update_id
        update = Update(digest=digest, unasked=len(header.hashes))
        self.say(update, sealed.header, sealed.signature, wrap)
        body = sealed.body if body is None else body
        for index in range(len(header.hashes)):
            start = index * header.chunk_bytes
            chunk = body[start : start + header.chunk_bytes]
            self.say(Chunk(digest=digest, index=index), chunk)
        return await self.hear(Ack, Nack)

    async def announce(self, train):
        names = sorted(train)
        payload = Payload(
            {
                "train": np.array([train[n] for n in names], np.int64),
                "test": np.zeros(len(names), np.int64),
            },
            {"names": names},
        )
        return await self.upload(*self.sealed(payload, self.core(INVENTORY)))

    async def asked(self):
        return await self.hear(RoundOpen)

    def update_core(self, order, **changes):
        fields = {"task": order.task, "round_": order.round, "base": order.base} | changes
        return self.core(order.kind, **fields)

    def close(self):
        self.link.close()


def good_update(order, dim=64):
    """Return what an honest client of running_mean with one sample per class would send."""
    count = len(order.classes)
    return {
        "classes": np.array(order.classes, np.int64),
        "count": np.ones(count, np.int64),
        "n": np.array([count], np.int64),
        "mean": np.full((count, dim), 0.5, np.float32),
    }


def events(federation):
    """Return the server's notes so far."""
    return control_socket.ask(federation.federation, "status")["notes"]
