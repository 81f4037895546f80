"""Bytes and CPU of a masked round beside a plain one, by the number of clients.

Every client and the server do their part in this process, with the code that a federation uses
(`masks.member`, `masks.checks`, `masks.aggregator`) and payloads through their bytes; sealing,
disks and sockets are the same for all rounds and left out. The update is that of LoRA with a head,
``--numbers`` float32 and ten classes. A tenth of the clients drops out after its shares, where the
threshold allows it. CPU is that of this process; the plain round is a bare average in float64.

    .venv/bin/python scripts/bench/masks.py --clients 3 10 30 100
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from fcil_adapters.contract import (
    Context,
    Exchange,
    Hparams,
    Part,
    PayloadSchema,
    State,
    TaskInfo,
    Update,
    Updates,
)
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.masks import graph
from fcil_adapters.masks.aggregator import MaskedAggregator
from fcil_adapters.masks.checks import upload_faults
from fcil_adapters.masks.exchanges import KEYS, LIST, SETS, SHARES, UNMASK, VOTE, VOTES
from fcil_adapters.masks.member import Bounds, Member, keys_upload
from fcil_adapters.masks.record import Letters, MaskList, MaskRecord, letters_part
from fcil_adapters.masks.shares import RoundSecrets
from fcil_adapters.numerics.class_reports import tally_specs
from fcil_adapters.numerics.update_list import UpdateList
from fcil_adapters.numerics.weighted_sums import weighted_sums
from fcil_protocol.ids import ClientId, RoundKey, RunId, named_client_id
from fcil_protocol.messages.messages import PrivacyTerms
from fcil_protocol.payloads.payload import Payload, pack, unpack
from fcil_protocol.payloads.schema import Kind, TensorSpec
from fcil_protocol.trust.keys import PrivateKeys

RUN = RunId("r20260101-000000-0000")
CLASSES = 10
ABOUT = bytes(32)
SPEC = TensorSpec("lora.0.q.A", Kind.LORA, ("r", "width"))
SUMS = weighted_sums([(SPEC, "images")])
TRAIN = Exchange("train", PayloadSchema((SPEC, *tally_specs())), additive=SUMS)

BOUNDS = Bounds(PrivacyTerms(secure="masks"))

T = TypeVar("T")


class Mean:
    """A server half that takes the average over, as the shared LoRA half does."""

    def init(self, ctx: Context) -> State:
        """Return an empty state."""
        del ctx
        return State()

    def open_task(self, ctx: Context, state: State) -> State:
        """Return the state."""
        del ctx
        return state

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Return the weighted mean."""
        del ctx, state
        total = sum(updates.samples)
        mean: Any = 0.0
        for n, update in zip(updates.samples, updates, strict=True):
            mean = mean + n / total * update.payload.tensors[SPEC.name].astype(np.float64)
        return State({SPEC.name: np.asarray(mean, np.float32)})

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the mean."""
        del ctx
        return (Part("current", state),) if state.tensors else ()


@dataclass
class Costs:
    """Bytes of one client and CPU seconds, of each round."""

    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)
    client_s: dict[str, float] = field(default_factory=dict)
    server_s: dict[str, float] = field(default_factory=dict)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return a result and the CPU seconds that it took."""
    began = time.process_time()
    return work(), time.process_time() - began


@dataclass
class Bench:
    """One masked round of n clients, and the plain one beside it."""

    clients: int
    numbers: int
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        self.names = sorted(named_client_id(str(k)) for k in range(self.clients))
        self.keys = {name: PrivateKeys.generate() for name in self.names}
        self.secrets: dict[ClientId, RoundSecrets] = {}
        self.server = MaskedAggregator(Mean(), {"train": TRAIN}, RUN)
        self.state, self.task = State(), TaskInfo(0, tuple(range(CLASSES)))
        rng = np.random.default_rng(0)
        self.plain = {name: self._upload(rng) for name in self.names}

    def _upload(self, rng: np.random.Generator) -> Payload:
        counts = rng.integers(1, 60, CLASSES)
        return Payload(
            {
                SPEC.name: rng.normal(0, 0.1, (4, self.numbers // 4)).astype(np.float32),
                "classes": np.arange(CLASSES),
                "count": counts,
                "n": counts.sum().reshape(1),
            }
        )

    def context(self, kind: str) -> Context:
        """Return the context of a round."""
        return Context(
            kind=kind, task=self.task, round=0, rounds=1, hparams=Hparams(),
            backbone_info=NO_BACKBONE, masked_run=RUN,
        )  # fmt: skip

    def parts(self) -> dict[str, Payload]:
        """Return the broadcast."""
        made = self.server.broadcast(self.context("train"), self.state)
        return {part.name: part.payload for part in made}

    def round(self, kind: str, who: list[ClientId], make: Callable[[ClientId], Payload]) -> None:
        """Run one round; the first client's bytes and the mean of the clients' CPU count."""
        parts, reader = self.parts(), who[0]
        mine = [p for n, p in parts.items() if "/" not in n or n == letters_part(reader)]
        sent, spent = {}, []
        for name in who:
            payload, seconds = timed(lambda name=name: make(name))  # type: ignore[misc]
            sent[name] = pack(payload)
            spent.append(seconds)
        costs, record = self.costs, MaskRecord.read(self.state)
        costs.up[kind] = len(sent[reader])
        costs.down[kind] = sum(len(pack(part)) for part in mine)
        costs.client_s[kind] = statistics.mean(spent)

        def close() -> State:
            updates = []
            for name, data in sent.items():
                payload = unpack(data)
                key, signing = RoundKey(RUN, 0, kind, 0), self.keys[name].public.signing
                assert upload_faults(record, key, name, signing, payload, ABOUT) == []
                updates.append(Update(name, payload))
            return self.server.aggregate(self.context(kind), self.state, UpdateList.of(updates))

        self.state, costs.server_s[kind] = timed(close)

    def member(self, name: ClientId, parts: dict[str, Payload]) -> Member:
        """Return a client with the list that it has checked."""
        members = MaskList.read(parts[LIST])
        return Member.of(self.secrets[name], members, RUN, 0, name, BOUNDS)

    def run(self) -> tuple[int, float]:
        """Run the five rounds; return how many clients dropped out, and the largest error."""

        def keys(name: ClientId) -> Payload:
            self.secrets[name] = RoundSecrets.draw()
            return keys_upload(self.secrets[name], self.keys[name], RUN, 0, 0, name)

        self.round(KEYS, self.names, keys)
        parts = self.parts()
        self.round(
            SHARES, self.names, lambda name: self.member(name, parts).shares_upload(self.keys[name])
        )
        parts = self.parts()
        record = MaskRecord.read(self.state)
        assert record is not None
        digest = record.members.digest(RUN, 0)
        gone, there = 0, list(self.names)
        while gone < self.clients // 10 and record.can_be_opened(digest, there[:-1]):
            gone, there = gone + 1, there[:-1]
        shapes: dict[str, tuple[int, ...]] = {
            SPEC.name: (4, self.numbers // 4), "count": (CLASSES,), "images": (1,),
        }  # fmt: skip

        def masked(name: ClientId) -> Payload:
            delivered, letters = parts[SETS].i64("delivered"), parts[letters_part(name)]
            sums, mail = SUMS.read(self.plain[name]), Letters.read(letters)
            return self.member(name, parts).masked(
                sums, SUMS.sums, shapes, delivered, mail, self.keys[name], ABOUT
            )

        self.round("train", there, masked)
        shown = self.parts()
        sets = shown[SETS].i64("delivered"), shown[SETS].i64("survivors")
        hidden = np.asarray(shown[SETS].tensors["hidden"], np.uint8)

        def vote(name: ClientId) -> Payload:
            member = self.member(name, shown)
            member.check_survivors(*sets, hidden, ABOUT)
            return member.vote_upload(self.keys[name], *sets)

        self.sets_bytes = len(pack(shown[SETS]))
        self.round(VOTE, there, vote)
        voted = self.parts()[VOTES]

        def unmask(name: ClientId) -> Payload:
            member = self.member(name, shown)
            signatures = np.asarray(voted.tensors["signatures"], np.uint8)
            member.check_votes(*sets, voted.i64("voted"), signatures)
            return member.unmask_upload(*sets, Letters.read(shown[letters_part(name)]))

        self.round(UNMASK, there, unmask)
        updates = UpdateList.of(Update(name, self.plain[name]) for name in there)
        plain, self.plain_s = timed(
            lambda: Mean().aggregate(self.context("train"), State(), updates)
        )
        difference = self.state.tensors[SPEC.name].astype(float) - plain.tensors[SPEC.name]
        return gone, float(np.abs(difference).max())


def table(rows: list[dict[str, Any]]) -> str:
    """Return the measurements as a table for a page."""
    heads = list(rows[0])
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(str(row[h]) for h in heads)} |" for row in rows]
    return "\n".join(lines)


def measure(clients: int, numbers: int) -> dict[str, Any]:
    """Return one row."""
    bench = Bench(clients, numbers)
    gone, error = bench.run()
    costs, plain = bench.costs, len(pack(next(iter(bench.plain.values()))))
    around = sum(size for kind, size in costs.up.items() if kind != "train")
    return {
        "clients": clients,
        "neighbours, t": f"{graph.degree(clients)}, {graph.threshold(graph.degree(clients))}",
        "dropped out": gone,
        "up, plain": f"{plain / 1e3:,.0f} kB",
        "up, masked sums": f"{costs.up['train'] / 1e3:,.0f} kB",
        "up, the other four": f"{around / 1e3:,.1f} kB",
        "down, beside the model": f"{_fetched(bench) / 1e3:,.1f} kB",
        "client CPU": f"{sum(costs.client_s.values()):.2f} s",
        "of which the own round": f"{costs.client_s['train']:.2f} s",
        "server CPU": f"{sum(costs.server_s.values()):.2f} s",
        "of which unmasking": f"{costs.server_s[UNMASK]:.2f} s",
        "server CPU, plain": f"{bench.plain_s:.2f} s",
        "largest error": f"{error:.0e}",
    }


def _fetched(bench: Bench) -> int:
    """Return the bytes of parts that a client fetches: those that changed, once each."""
    down = bench.costs.down
    return down["train"] + bench.sets_bytes + down[UNMASK] - down[VOTE]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[3, 10, 30, 100])
    parser.add_argument("--numbers", type=int, default=92_160, help="float32 of an update")
    given = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    rows = []
    for clients in given.clients:
        rows.append(measure(clients, given.numbers))
        print(rows[-1], file=sys.stderr)
    print(table(rows))


if __name__ == "__main__":
    main()
