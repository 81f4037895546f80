"""A round's work without a worker process: keys, terms, an order, a host that says what it is told."""

import asyncio

import numpy as np

from client.daemon_kit import DIGEST, HPARAMS, LIMIT, RUN, order
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.methods.running_mean import METHOD
from fcil_client.link.handshake import Terms
from fcil_client.rounds import round_work
from fcil_client.rounds.round_work import ClientOptions, RoundWork
from fcil_protocol.ids import FederationId
from fcil_protocol.messages.messages import PartRef
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.trust.keys import PrivateKeys

FED = FederationId("0123456789abcdef" * 2)
KEYS, SERVER = (
    PrivateKeys(curve=bytes([n]) * 32, signing=bytes([n]) * 32, sealing=bytes([n]) * 32)
    for n in (1, 2)
)
TERMS = Terms(RUN, METHOD, HPARAMS, NO_BACKBONE, DIGEST, LIMIT, 64)


def registry_part(names=("cat", "dog"), ids=(0, 1), **changes):
    tensors = {"class": np.array(ids, np.int64), "task": np.zeros(len(ids), np.int64)}
    return Payload({**tensors, **changes}, {"names": list(names)})


class Host:
    """In the place of the worker process: calls end when the test says so."""

    def __init__(self):
        self.calls, self.kills = [], 0
        self.gate = asyncio.Event()
        self.answer = ({}, [])

    async def call(self, op, *_args, **_options):
        self.calls.append(op)
        try:
            await self.gate.wait()
        except BaseException:
            self.kill()
            raise
        return self.answer

    def kill(self):
        self.kills += 1

    async def stop(self):
        pass


def make(home, enrolment, data):
    work = RoundWork(home, enrolment, KEYS, ClientOptions(data))
    work._host = Host()
    return work


def fit(monkeypatch):
    """Let rounds have the registry alone."""
    monkeypatch.setattr(
        round_work, "open_part", lambda _home, ref, *_: {"registry": registry_part()}[ref.name]
    )


def unguard(monkeypatch):
    """Let any upload pass the guard."""
    monkeypatch.setattr(RoundWork, "_guard", lambda *_: None)


ORDER = order(parts=[PartRef(name="registry", digest="1" * 64, sealed_bytes=1)])
