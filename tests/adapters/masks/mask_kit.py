"""A masked round in one process: the toy federation's clients with their own secrets."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from adapters.kit import Federation, client_id
from fcil_adapters.contract import Exchange, State, Update
from fcil_adapters.contract.registry import load_half
from fcil_adapters.masks.aggregator import MaskedAggregator
from fcil_adapters.masks.checks import upload_faults
from fcil_adapters.masks.exchanges import (
    KEYS,
    LIST,
    SETS,
    SHARES,
    UNMASK,
    VOTE,
    VOTES,
    with_masks,
)
from fcil_adapters.masks.member import Bounds, Member, keys_upload
from fcil_adapters.masks.record import Letters, MaskList, MaskRecord, letters_part
from fcil_adapters.masks.shares import RoundSecrets
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.ids import ClientId, RoundKey
from fcil_protocol.messages.messages import PrivacyTerms
from fcil_protocol.payloads.payload import Payload, pack, unpack
from fcil_protocol.trust.keys import PrivateKeys

RUN = "r20261127-120000-0000"

USUAL = Bounds(PrivacyTerms(secure="masks"))
ABOUT = b"the same round, model and classes"[:32]


@dataclass
class MaskedRounds:
    """The masked rounds of a toy federation, step by step.

    Attributes:
        toy: the federation, whose aggregator is replaced.
        cycle: number of masked rounds before this one.
        trained: number of the training round that clients are in.
        sent: kind -> client -> what it sent, as a server's spool has it.
    """

    toy: Federation
    cycle: int = 0
    trained: int = 0
    sent: dict[str, dict[ClientId, Payload]] = field(default_factory=dict)
    secrets: dict[int, RoundSecrets] = field(default_factory=dict)
    keys: dict[int, PrivateKeys] = field(default_factory=dict)
    _read: tuple[State, dict[str, Payload]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        toy = self.toy
        plain = toy.method.exchanges(toy.hparams, toy.backbone.info)
        self.plain: dict[str, Exchange] = {e.kind: e for e in plain}
        inner = load_half(toy.method.aggregator)
        self.masked = with_masks(toy.method)
        self.server = MaskedAggregator(inner, self.plain, RUN)

    def close(self, kind: str, sent: dict[int, Payload]) -> State:
        """Close a round with these uploads: through bytes, schemas and the server's checks."""
        toy, exchange = self.toy, None
        exchanges = self.masked.exchanges(toy.hparams, toy.backbone.info)
        exchange = next(e for e in exchanges if e.kind == kind)
        dims = self.masked.dims(toy.hparams, toy.backbone.info, toy.task)
        updates = []
        for k, payload in sent.items():
            received = unpack(pack(payload))
            assert exchange.upload.check_upload(received, dims) == []
            assert self.faults(kind, k, received) == []
            updates.append(Update(client_id(k), received))
        self.sent[kind] = {u.client: u.payload for u in updates}
        ctx = toy.context(kind, self.cycle)
        many = UpdateList.of(updates)
        toy.state = unpack(pack(self.server.aggregate(ctx, toy.state, many)))
        return toy.state

    def faults(self, kind: str, k: int, payload: Payload) -> list[str]:
        """Return the server's objections to an upload of client k."""
        key = RoundKey(RUN, self.toy.task.index, kind, self.cycle)
        record, signing = MaskRecord.read(self.toy.state), self.keys[k].public.signing
        return upload_faults(record, key, client_id(k), signing, payload, ABOUT)

    def parts(self) -> dict[str, Payload]:
        """Return the broadcast, checked by its schemas: read once for each state."""
        toy = self.toy
        if self._read is not None and self._read[0] is toy.state:
            return self._read[1]
        schemas = self.masked.broadcast(toy.hparams, toy.backbone.info)
        dims = self.masked.dims(toy.hparams, toy.backbone.info, toy.task)
        found = {}
        for part in self.server.broadcast(toy.context("train"), toy.state):
            payload = unpack(pack(part.payload))
            assert schemas[part.kind].check(payload, dims) == []
            found[part.name] = payload
        self._read = (toy.state, found)
        return found

    def member(self, k: int, bounds: Bounds = USUAL) -> Member:
        """Return client k as it has checked the list."""
        members = MaskList.read(self.parts()[LIST])
        task = self.toy.task.index
        return Member.of(self.secrets[k], members, RUN, task, client_id(k), bounds)

    def sets(self) -> tuple[Any, Any]:
        """Return the flags of the clients that have delivered, and of the survivors."""
        sets = self.parts()[SETS]
        return sets.i64("delivered"), sets.i64("survivors")

    def hidden(self) -> Any:
        """Return the survivors' signatures of the clients that they hide among."""
        return self.parts()[SETS].tensors["hidden"]

    def letters(self, k: int) -> Letters:
        """Return what the others have written to client k."""
        return Letters.read(self.parts()[letters_part(client_id(k))])

    def give_keys(self, who: Collection[int]) -> None:
        """Run the first round."""
        sent = {}
        for k in who:
            self.secrets[k] = RoundSecrets.draw()
            self.keys.setdefault(k, PrivateKeys.generate())
            sent[k] = keys_upload(
                self.secrets[k], self.keys[k], RUN, self.toy.task.index, self.cycle, client_id(k)
            )
        self.close(KEYS, sent)

    def give_shares(self, who: Collection[int]) -> None:
        """Run the second round."""
        self.close(SHARES, {k: self.member(k).shares_upload(self.keys[k]) for k in who})

    def masked_upload(self, k: int, upload: Payload, kind: str) -> Payload:
        """Return client k's masked sums."""
        toy = self.toy
        additive = self.plain[kind].additive
        assert additive is not None
        dims = self.masked.dims(toy.hparams, toy.backbone.info, toy.task)
        shapes = {
            s.name: tuple(n if isinstance(n, int) else dims[n] for n in s.shape)
            for s in additive.sums
        }
        delivered, _ = self.sets()
        sums = additive.read(upload)
        return self.member(k).masked(
            sums, additive.sums, shapes, delivered, self.letters(k), self.keys[k], ABOUT
        )

    def give_sums(self, who: Collection[int], kind: str = "train") -> None:
        """Run the third round; the plain uploads come from the federation's own learner."""
        plain = {k: replace(self, toy=self.toy)._plain(k, kind) for k in who}
        self.close(kind, {k: self.masked_upload(k, plain[k], kind) for k in who})

    def _plain(self, k: int, kind: str) -> Payload:
        return self.toy.upload(kind, k, self.trained, self.trained + 1)

    def vote_upload(self, k: int) -> Payload:
        """Return client k's signature of the survivors that the server has published."""
        member, sets = self.member(k), self.sets()
        member.check_survivors(*sets, self.hidden(), ABOUT)
        return member.vote_upload(self.keys[k], *sets)

    def unmask_upload(self, k: int) -> Payload:
        """Return client k's shares for the survivors that the server has published."""
        member, sets, votes = self.member(k), self.sets(), self.parts()[VOTES]
        member.check_votes(*sets, votes.i64("voted"), votes.tensors["signatures"])
        return member.unmask_upload(*sets, self.letters(k))

    def give_votes(self, who: Collection[int]) -> None:
        """Run the fourth round."""
        self.close(VOTE, {k: self.vote_upload(k) for k in who})

    def give_unmasked(self, who: Collection[int]) -> State:
        """Run the fifth round."""
        return self.close(UNMASK, {k: self.unmask_upload(k) for k in who})

    def all(self, kind: str, listed, shared=None, summed=None, last=None) -> State:
        """Run a masked round: clients that give keys, shares, sums, and votes and shares.

        Those that are not given are as before.
        """
        shared = listed if shared is None else shared
        summed = shared if summed is None else summed
        last = summed if last is None else last
        self.give_keys(listed)
        self.give_shares(shared)
        self.give_sums(summed, kind)
        self.give_votes(last)
        after = self.give_unmasked(last)
        self.cycle += 1
        return after


def close_to(one: State, other: State, but: Collection[str] = (), atol: float = 1e-6) -> bool:
    """Return True if two states differ by no more than rounding.

    Args:
        one: a state.
        other: another one.
        but: tensors that are not compared; their other halves, ``.low``, never are.
        atol: of numbers near zero.
    """
    assert one.tensors.keys() == other.tensors.keys(), set(one.tensors) ^ set(other.tensors)
    names = [n for n in one.tensors if n not in but and not n.endswith(".low")]
    return all(np.allclose(one.tensors[n], other.tensors[n], rtol=1e-5, atol=atol) for n in names)
