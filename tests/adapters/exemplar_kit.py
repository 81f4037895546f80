"""A federation in one process whose clients keep their states, and so their exemplars."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np

from adapters.kit import Federation, Images
from fcil_adapters.contract import State
from fcil_adapters.contract.exemplars import Exemplars, check_state, exemplar_digests
from fcil_adapters.contract.local_images import as_digests
from fcil_protocol.payloads.payload import Payload, pack, unpack


def digests(images: Images) -> list[str]:
    return [hashlib.sha256(picture.tobytes()).hexdigest() for picture in images.pictures]


def chosen(images: Images, wanted: list[str], past: tuple[int, ...]) -> Images:
    """What the door to exemplars shows: images of past classes with these contents, in order."""
    found = {d: i for i, d in enumerate(digests(images)) if images.labels[i] in past}
    index = np.array([found[d] for d in wanted if d in found], dtype=np.int64)
    return Images(images.pictures[index], images.labels[index])


@dataclass
class KeepingFederation(Federation):
    """Every upload counts, so every state is kept."""

    states: dict[int, State] = field(default_factory=dict)

    def upload(self, kind: str, k: int, round_: int = 0, rounds: int = 1) -> Payload:
        exchange = next(e for e in self.exchanges if e.kind == kind)
        if exchange.unlabelled:
            return super().upload(kind, k, round_, rounds)
        own = self.clients[k].of(self.task.classes)
        ctx = replace(self.context(kind, round_, rounds), seed=(self.seed, k))
        state = self.states.get(k, State())
        most = self.method.exemplars(self.hparams)
        if most:
            again = chosen(self.clients[k], exemplar_digests(state), self.task.past)
            shown = Exemplars(again, *(as_digests(digests(one)) for one in (again, own)))
            ctx = replace(ctx, exemplars=shown)
        after, sent = self.learner.run(ctx, state, self.parts(), own)
        check_state(after, most)
        if exchange.keeps_state:
            self.states[k] = unpack(pack(after))
        payload = unpack(pack(self.forms.narrow(sent, exchange.upload)))
        assert exchange.upload.check(payload, self.dims) == []
        assert exchange.check(payload, self.task) == []
        return self.forms.widen(payload)
