"""The fault list, and a whole federation in one process over a link in memory.

Server and clients are the real daemons with their real workers; only the sockets are not real.

Where each fault of the list is shown (rows: docs/architecture.md, "The life of an update"):

| fault | where |
|---|---|
| drop, duplicate, reorder, truncate, flipped bits | `Fault` here, rows 7, 8, 13, 14 |
| stale round, wrong method version, unknown client, another's id | tests/system/test_hostile_updates.py, test_attacks.py, test_third_party.py |
| disk full, read-only, forbidden, faulty | test_disks.py (every writer), test_real_disks.py (real ones); the spool here, in pairs |
| kill -9 after receive, fsync, Ack, commit | test_crash_walk.py (every point, these by name in `NAMED_KILLS`) |
| clock jump | tests/system/test_sleepers.py |
| learner hangs, runs out of memory | tests/system/test_sleepers.py, tests/adapters/worker/test_retry.py |
| learner crashes, gives NaN or a wrong shape | `Fault` here, rows 3 and 4 |
| one client only, all identical | test_matrix.py |
| zero clients | tests/system/test_bad_input.py: a task that nobody has data for waits |
| aggregator raises, once or always | `Fault` here, row 11 |

In a masked round each fault of `MASKED` strikes once in each of the five rounds that can meet it
(`behind_masks`).
"""

import asyncio
import errno
import itertools
import threading
from dataclasses import dataclass, field, replace
from enum import Enum

import msgpack
import numpy as np

from fcil_adapters.masks.exchanges import KEYS, SHARES, UNMASK, VOTE
from fcil_client.daemon.client import Client
from fcil_client.rounds.round_work import ClientOptions, RoundWork
from fcil_client.state.home import Home
from fcil_protocol.errors import DiskFull, InternalError, WorkerDied
from fcil_protocol.link.interface import LinkNews
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.storage import spool as spool_module
from fcil_protocol.storage.atomic_files import sync_data
from fcil_protocol.storage.spool import Spool
from fcil_protocol.testing import FaultScript, MemoryRouter
from fcil_server.aggregation.aggregation import Aggregation
from fcil_server.daemon.journal import Journal
from fcil_server.daemon.server import Server
from fcil_server.federation.directory import Federation

LIMIT_S = 240
SUMS = "train"  # the method's own round, which masks hide


@dataclass(frozen=True)
class Plan:
    """What is done to whom, and whether an update may be missing afterwards, openly."""

    where: str  # up, down: a link; learner, aggregator, spool
    what: str
    message: str = ""
    nth: int = 2  # 1 is often the inventory's
    openly: bool = False
    # A message that a TCP connection under CURVE cannot lose or exchange: nobody asks again, and
    # the round closes short, openly: by the operator, once all others have answered.
    closes_short: bool = False
    rounds: tuple[str, ...] = ()  # it strikes once in a round of each of these kinds, not at nth


class Fault(Enum):
    """Each is met once, by client a; the rest of the federation is in order."""

    HELLO_CUT = Plan("up", "cut", "hello", 1)
    HELLO_TWICE = Plan("up", "twice", "hello", 1)
    HELLO_FLIPPED = Plan("up", "flip_body", "hello", 1)
    WELCOME_CUT = Plan("down", "cut", "welcome", 1)
    WELCOME_TWICE = Plan("down", "twice", "welcome", 1)
    ORDER_CUT = Plan("down", "cut", "round_open", 1)
    ORDER_TWICE = Plan("down", "twice", "round_open", 1)
    ORDER_LATE = Plan("down", "late", "round_open", 1, closes_short=True)
    UPDATE_CUT = Plan("up", "cut", "update")
    UPDATE_TWICE = Plan("up", "twice", "update")
    UPDATE_LATE = Plan("up", "late", "update", closes_short=True)
    UPDATE_TRUNCATED = Plan("up", "truncate", "update")
    HEADER_FLIPPED = Plan("up", "flip_header", "update")
    SIGNATURE_FLIPPED = Plan("up", "flip_signature", "update", closes_short=True)
    WRAP_FLIPPED = Plan("up", "flip_wrap", "update")
    CHUNK_CUT = Plan("up", "cut", "chunk")
    CHUNK_TWICE = Plan("up", "twice", "chunk")
    CHUNK_TRUNCATED = Plan("up", "truncate", "chunk")
    TENSOR_FLIPPED = Plan("up", "flip_tensor", "chunk")
    TAG_FLIPPED = Plan("up", "flip_tag", "chunk")
    ACK_CUT = Plan("down", "cut", "ack")
    ACK_TWICE = Plan("down", "twice", "ack")
    PART_CUT = Plan("down", "cut", "parts", 1)
    PART_TWICE = Plan("down", "twice", "parts", 1)
    PART_HEADER_FLIPPED = Plan("down", "flip_header", "parts", 1, openly=True)
    PART_CHUNK_CUT = Plan("down", "cut", "chunk", 1)
    PART_CHUNK_FLIPPED = Plan("down", "flip_tensor", "chunk", 1)
    WANT_CUT = Plan("up", "cut", "want", 1)
    VERDICT_CUT = Plan("down", "cut", "round_closed", 1)
    LEARNER_CRASHES = Plan("learner", "crash", openly=True)
    LEARNER_GIVES_NAN = Plan("learner", "nan", openly=True)
    LEARNER_GIVES_A_WRONG_SHAPE = Plan("learner", "shape", openly=True)
    AGGREGATOR_RAISES_ONCE = Plan("aggregator", "once")
    AGGREGATOR_RAISES_ON_ONE_UPDATE = Plan("aggregator", "always", openly=True)
    SPOOL_FULL = Plan("spool", "full", nth=1)
    SPOOL_SYNC_FAILS = Plan("spool", "sync", nth=1)


def behind_masks(fault) -> Plan:
    """Return a fault that strikes once in each round of a masked one that can meet it.

    A fault that loses an update for good strikes only keys and shares, which clients make again:
    the sums of a statistic, the votes on them and an unmasking would wait for client a without end.
    """
    plan = fault.value
    rounds = (KEYS, SHARES, SUMS, VOTE, UNMASK)
    if plan.closes_short or fault is Fault.AGGREGATOR_RAISES_ON_ONE_UPDATE:
        rounds = (KEYS, SHARES)
    if plan.where == "learner":
        rounds = (SUMS,)
    return replace(plan, rounds=rounds)


# A hello comes before any round.
MASKED = [f for f in Fault if f.value.message not in ("hello", "welcome")]


def type_of(frames) -> str:
    return str(msgpack.unpackb(frames[0])["t"])


def flip(frame: bytes, at: int) -> bytes:
    changed = bytearray(frame)
    changed[at] ^= 0x10
    return bytes(changed)


def damaged(frames, what):
    """Return a message with one frame changed."""
    index, change = {
        "flip_body": (0, lambda f: flip(f, -2)),
        "flip_signature": (1, lambda f: flip(f, len(f) // 2)),
        "flip_header": (2, lambda f: flip(f, len(f) // 2)),
        "flip_wrap": (4, lambda f: flip(f, len(f) // 2)),
        "flip_tensor": (2, lambda f: flip(f, len(f) // 2)),
        "flip_tag": (-1, lambda f: flip(f, -1)),
        "truncate": (-1, lambda f: f[: len(f) // 2]),
    }[what]
    index %= len(frames)
    return (*frames[:index], change(frames[index]), *frames[index + 1 :])


class TypedScript(FaultScript):
    """Faults of one direction by the type of the message that they meet.

    Args:
        plans: the faults.
        strikes: called with a fault and the number of its message; True: it strikes.
        heard: called with each message first.
    """

    def __init__(self, plans, strikes, heard=lambda _: None):
        super().__init__()
        self.plans, self.strikes, self.heard, self.counts = plans, strikes, heard, {}

    def judge(self, frames):
        name = type_of(frames)
        self.counts[name] = self.counts.get(name, 0) + 1
        self._letters, self.seen = "", 0
        self.heard(frames)
        for plan in self.plans:
            if plan.message == name and self.strikes(plan, self.counts[name]):
                self._letters = {"cut": "x", "twice": "2", "late": "r"}.get(plan.what, ".")
                if self._letters == ".":
                    frames = damaged(frames, plan.what)
        return super().judge(frames)


class Line:
    """A client's link in memory that connects again by itself, as the real one does."""

    def __init__(self, router, key, up, down):
        self.dealer = router.dealer(key)
        self.dealer.up, self.dealer.down = up, down
        self.dealer.connect()

    async def recv(self):
        news = await self.dealer.recv()
        if isinstance(news, LinkNews) and news.state == "down":
            asyncio.get_running_loop().call_soon(self.dealer.connect)
        return news

    def send(self, frames):
        return self.dealer.send(frames)

    def allow(self, requested):
        self.dealer.allow(requested)

    def close(self):
        self.dealer.close()


class MemoryServer(Server):
    """The real server behind a link in memory."""

    def _listen(self, _roster, _flooded):
        self.router = MemoryRouter()
        return self.router, 7710


@dataclass
class InMemory:
    """A copy of a scene, run to its end in this process with some faults.

    Attributes:
        met: the faults that have happened, each with the kind of the round.
        round: kind of the round that client a was asked for last.
    """

    federation: object  # LocalFederation, for its directories
    folders: dict
    arguments: list[str]
    plans: list[Plan]
    monkeypatch: object
    notes: list = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    met: list = field(default_factory=list)
    round: str = ""

    def run(self):
        """Run to the end; every fault must have happened."""
        self.monkeypatch.setenv("XDG_STATE_HOME", str(self.federation.directory / "state"))
        self._plant()
        asyncio.run(self._run())
        missing = [
            p for p in self.plans for kind in p.rounds or [None] if not self.has_met(p, kind)
        ]
        assert not missing, f"not every fault happened: {missing} {self.notes}"

    def has_met(self, plan, kind=None):
        return any(met is plan and kind in (None, at) for met, at in self.met)

    def strikes(self, plan, nth):
        """Return True if a fault strikes now, and note it.

        Args:
            plan: the fault.
            nth: of its kind of message or call.
        """
        if plan.rounds:
            due = self.round in plan.rounds and not self.has_met(plan, self.round)
        else:
            due = nth == plan.nth
        if due:
            self.met.append((plan, self.round))
            self.news.set()
        return due

    async def _run(self):
        pairs = itertools.pairwise(self.arguments)
        overrides = tuple(value for flag, value in pairs if flag == "-c")
        federation = Federation.open(self.federation.federation, None, overrides)
        listens = asyncio.Event()
        server = MemoryServer(
            federation,
            Journal(federation.ledger, self._say),
            until_done=True,
            listening=lambda _: listens.set(),
        )
        serving = asyncio.create_task(server.serve())
        starts = asyncio.create_task(listens.wait())
        closing = asyncio.create_task(self._close_for_the_lost(server))
        clients, running = [], []
        try:
            async with asyncio.timeout(LIMIT_S):
                await asyncio.wait({serving, starts}, return_when=asyncio.FIRST_COMPLETED)
                assert starts.done(), serving
                clients = [self._client(server, name) for name in self.folders]
                running = [asyncio.create_task(c.run()) for c in clients]
                await serving
        except TimeoutError:
            raise AssertionError(f"not done in {LIMIT_S} s: {self.notes}") from None
        finally:
            for client in clients:
                client._stopping.set()
            closing.cancel()
            await asyncio.gather(*running, closing, return_exceptions=True)
            federation.close()

    async def _close_for_the_lost(self, server):
        """Close each round that waits for nothing but a message that is lost for good.

        A masked round has no use for the others' updates: it waits for its deadline.
        """
        for plan in [p for p in self.plans if p.closes_short and not p.rounds]:
            while not (self.has_met(plan) and self._waits_for_one(server._coordinator.progress)):
                await self.news.wait()
                self.news.clear()
            server._coordinator.close_short()

    @staticmethod
    def _waits_for_one(progress):
        return progress.is_open and progress.round._outstanding == 1

    def _note_round(self, frames):
        if type_of(frames) == "round_open":
            self.round = msgpack.unpackb(frames[0])["kind"]

    def _say(self, note):
        self.notes.append(f"{note.level}: {note.text}")
        self.news.set()

    def _client(self, server, name):
        [home] = Home.known(self.folders[name])
        mine = self.plans if name == "a" else []
        up = TypedScript([p for p in mine if p.where == "up"], self.strikes)
        heard = self._note_round if name == "a" else lambda _: None
        down = TypedScript([p for p in mine if p.where == "down"], self.strikes, heard)

        def make(_address, keys, _peer):
            return Line(server.router, keys.public.curve, up, down)

        options = ClientOptions(self.folders[name])
        return Client(home, home.enrolment(), options, notify=self._say, make=make)

    # --- faults inside ----------------------------------------------------------------------

    def _plant(self):
        for plan in self.plans:
            if plan.where == "learner":
                self._plant_learner(plan)
            elif plan.where == "aggregator":
                self._plant_aggregator(plan)
            elif plan.where == "spool":
                self._plant_spool(plan)

    def _plant_learner(self, plan):
        compute = RoundWork._compute

        async def faulty(work, ctx, *args):
            state, payload = await compute(work, ctx, *args)
            own = work.data == self.folders["a"] and ctx.kind != "evaluate"
            if not own or self.has_met(plan):
                return state, payload
            self.met.append((plan, ctx.kind))
            if plan.what == "crash":
                raise WorkerDied("the client worker was killed (signal 9).")
            mean = payload.tensors["mean"]
            bad = np.full_like(mean, np.nan) if plan.what == "nan" else mean[:, :-1].copy()
            return state, Payload({**payload.tensors, "mean": bad}, payload.meta)

        self.monkeypatch.setattr(RoundWork, "_compute", faulty)

    def _plant_aggregator(self, plan):
        combine, culprits = Aggregation._combine, []

        async def faulty(work, ctx, state, updates, older):
            if plan.rounds:
                due = ctx.kind in plan.rounds and not self.has_met(plan, ctx.kind)
            else:
                due = not self.has_met(plan)
            if due:
                self.met.append((plan, ctx.kind))
                culprits.append(updates[0].update_id)
            always = plan.what == "always" and any(u.update_id in culprits for u in updates)
            if due or always:
                raise InternalError("planted: it cannot be combined.")
            return await combine(work, ctx, state, updates, older)

        self.monkeypatch.setattr(Aggregation, "_combine", faulty)

    def _plant_spool(self, plan):
        name = "append" if plan.what == "full" else "sync"
        original, times, fails = getattr(Spool, name), [], threading.local()

        def faulty(spool, *args):
            if name == "sync" and not spool._unsynced:
                return original(spool, *args)
            times.append(1)
            fails.here = self.strikes(plan, len(times))
            if fails.here and name == "append":
                raise DiskFull("planted: the disk is full.")
            try:
                return original(spool, *args)
            finally:
                fails.here = False

        def fails_here(fd):
            # Within the spool's own sync: it drops what another thread appends meanwhile, too.
            if getattr(fails, "here", False):
                raise OSError(errno.ENOSPC, "planted")
            sync_data(fd)

        self.monkeypatch.setattr(Spool, name, faulty)
        self.monkeypatch.setattr(spool_module, "sync_data", fails_here)
