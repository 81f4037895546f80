"""A client that is killed at any write, cut off and asked anew: its state is what the server counted.

The session machine, the daemon's execution of its instructions, home and outbox are the real ones;
server, link and worker are a script. Kills come before or after a chosen operation on the disk.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client.round_kit import FED, KEYS, SERVER
from fcil_client.daemon import client as daemon
from fcil_client.rounds.round_work import ClientOptions, RoundWork
from fcil_client.session import events
from fcil_client.session.events import Link, Work
from fcil_client.session.machine import ClientSession
from fcil_client.state import home as homes
from fcil_client.state import outbox
from fcil_client.state.home import Enrolment, Home
from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes.envelope import Core, seal, wrap_key
from fcil_protocol.errors import StorageError
from fcil_protocol.ids import ClientId
from fcil_protocol.messages.messages import RoundOpen, Verdict
from fcil_protocol.payloads.payload import Payload, pack

RUN = "r20260102-030405-0a0b"
EXAMPLES = int(os.environ.get("FCIL_FUZZ_EXAMPLES", "60"))


class Killed(BaseException):
    """The process ended here."""


class Disk:
    """Counts operations that change the disk, and ends the process at one of them."""

    def __init__(self):
        self.left = None

    def step(self):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Killed

    def around(self, real):
        def operation(*args, **options):
            self.step()
            result = real(*args, **options)
            self.step()
            return result

        return operation


class Server:
    """What the server keeps: it forgets nothing, and repeats its last verdict."""

    def __init__(self):
        self.round, self.base = 0, 0
        self.accepted = ""  # in the open round
        self.judged = []  # (digest, counted), in the order of rounds
        self.of = {}  # digest -> (round, serial)

    def order(self):
        return RoundOpen(
            run=RUN, task=0, kind="evaluate" if self.round % 3 == 2 else "train", round=self.round,
            rounds=9, base=self.base, classes=[0], past=[], seed=[1], remaining_s=60.0, parts=[],
            verdict=self.verdict,
        )  # fmt: skip

    @property
    def verdict(self):
        if not self.judged:
            return None
        digest, counted = self.judged[-1]
        return Verdict(update=digest, counted=counted, reason="" if counted else "an outlier")

    def answer(self, digest):
        """Return None for an Ack, or the code of a Nack."""
        if digest == self.accepted or digest in dict(self.judged):
            return None
        if self.of[digest][0] != self.round:
            return "round_closed"
        if self.accepted:
            return "already_have"
        self.accepted = digest
        return None

    def close(self, counted):
        """Close the round; return the RoundOver that a connected client hears."""
        key = self.order().key
        if self.accepted:
            self.judged.append((self.accepted, counted))
        self.round, self.base, self.accepted = self.round + 1, self.base + 1, ""
        return events.RoundOver(key, self.verdict)

    @property
    def counted(self):
        serials = [(self.of[d], c) for d, c in self.judged]
        return [serial for (number, serial), c in serials if c and number % 3 != 2]


class Device(daemon.Client):
    """One life of the daemon: from its start to its kill."""

    def __init__(self, directory, server, serials):
        self.home = Home(directory)
        self.home.make()
        self.notes = daemon.Notes(lambda _: None)
        self.counted, self._judged, self._timers = 0, "", {}
        self._reports = SimpleNamespace(now=None)
        self._host = SimpleNamespace(client_changed=lambda: None)
        self.server, self.serials, self._tracing = server, serials, None
        enrolment = Enrolment(ClientId("a" * 26), "c", FED, "", ("a:1",), "data")
        self._work = RoundWork(self.home, enrolment, KEYS, ClientOptions(directory))
        self._work.check_able = lambda kind, terms: None  # every client here can train
        self._outbox = self._work.outbox
        self._session = ClientSession.resume(*self._outbox.waiting())
        self.todo = []
        later = lambda name: lambda *args: self.todo.append((name, *args))  # noqa: E731
        self._jobs = SimpleNamespace(
            load=later("load"), scan=later("scan"), train=later("train"), inventory=None,
            cancel_round=lambda: self._drop("train"),
        )  # fmt: skip
        self._transfers = SimpleNamespace(
            announce=later("announce"), fetch=later("fetch"), offer=later("offer"),
            stop=lambda: self._drop("fetch"),
        )  # fmt: skip
        self._line = SimpleNamespace(server=None, send=lambda *_: None)
        self._talk = SimpleNamespace(greet=later("greet"), known_terms=None, terms=None)
        self._later = later("later")
        self._enter = self.home.enter_run

    def _drop(self, name):
        self.todo = [t for t in self.todo if t[0] != name]

    def connect(self):
        self._feed(events.LinkUp())

    def cut(self):
        self.todo = [t for t in self.todo if t[0] in ("train", "scan", "load")]
        self._feed(events.LinkDown())

    def heard(self, event):
        if self._session.link is Link.READY:
            self._feed(event)

    def step(self):
        """Carry out what waits longest."""
        if not self.todo:
            return
        name, *args = self.todo.pop(0)
        match name:
            case "greet":
                self._feed(events.Welcomed(RUN, ready=True, verdict=self.server.verdict))
            case "load":
                self._feed(events.BackboneReady(RUN))
            case "scan":
                self._feed(events.Scanned())
            case "announce":
                self._feed(events.Announced())
                if not self.server.accepted:
                    self._feed(events.RoundOpened(self.server.order()))
            case "fetch":
                self._feed(events.PartsReady(args[0].key))
            case "train":
                self._feed(events.WorkDone(args[0].key, self._learn(args[0])))
            case "offer":
                code = self.server.answer(args[0])
                event = events.Acked(args[0]) if code is None else events.Nacked(args[0], code)
                self._feed(event)

    def _learn(self, order):
        serial = next(self.serials)
        before = self.home.state().tensors.get("seen", np.zeros(0, np.int64))
        state = Payload({"seen": np.append(before, serial)}) if order.kind == "train" else None
        core = Core(
            protocol=PROTOCOL_VERSION, federation=FED, run=RUN, direction="update",
            sender="a" * 26, sender_key=KEYS.public.fingerprint, recipient="server", method="m",
            schema="", task=0, round=order.round, kind=order.kind, base=order.base,
        )  # fmt: skip
        plain = pack(Payload({"serial": np.array([serial])}))
        sealed, key = seal(plain, core, KEYS, chunk_bytes=16384)
        digest = str(sealed.parsed.update_id)
        self.server.of[digest] = (order.round, serial)
        stored = sealed.stored(wrap_key(key, sealed.header, SERVER.public))
        self._work._keeping._write(digest, stored, state)
        return digest


class World:
    """A client over its lives, and its server."""

    def __init__(self, directory):
        self.directory, self.disk, self.server = directory, Disk(), Server()
        self.serials = itertools.count(1)
        self.device = Device(directory, self.server, self.serials)
        self.deaths = 0

    def do(self, action):
        try:
            action()
        except Killed:
            self.deaths += 1
            self.disk.left = None
            self.device = Device(self.directory, self.server, self.serials)

    def act(self, what, number):
        device = self.device
        match what:
            case "step":
                self.do(device.step)
            case "up":
                if device._session.link is Link.OFFLINE:
                    self.do(device.connect)
            case "cut":
                self.do(device.cut)
            case "kill":
                self.disk.left = number
            case "close":
                over = self.server.close(counted=number % 3 > 0)
                self.do(lambda: device.heard(over))
                self.ask()

    def ask(self):
        self.do(lambda: self.device.heard(events.RoundOpened(self.server.order())))

    def finish(self):
        """Let a client that is killed no more and a good link come to rest."""
        self.disk.left = None
        for _ in range(3):
            self.do(self.device.cut)
            self.do(self.device.connect)
            for _ in range(20):
                self.do(self.device.step)
            self.act("close", 1)

    def state(self):
        return self.device.home.state().tensors.get("seen", np.zeros(0, np.int64)).tolist()


@contextlib.contextmanager
def world(directory):
    with pytest.MonkeyPatch.context() as patch:
        made = World(directory)
        disk = made.disk
        for where, name in (
            (homes, "write_atomic"),
            (homes, "_remove"),
            (outbox, "write_envelope"),
        ):
            patch.setattr(where, name, disk.around(getattr(where, name)))
        patch.setattr(Home, "settle_provisional", disk.around(Home.settle_provisional))
        yield made


acts = st.tuples(
    st.sampled_from(["step"] * 6 + ["up"] * 3 + ["cut", "kill", "kill", "close"]),
    st.integers(0, 12),
)


@settings(max_examples=EXAMPLES)
@given(st.lists(acts, max_size=60))
def test_whatever_is_cut_killed_or_closed_the_state_holds_exactly_what_was_counted(
    tmp_path_factory, script
):
    with world(tmp_path_factory.mktemp("c")) as made:
        for what, number in script:
            made.act(what, number)
        made.finish()
        assert made.state() == made.server.counted
        assert len(made.server.judged) >= 2, "it took part again"
        assert made.device.home.outbox() == []


def test_a_kill_at_every_single_operation_of_three_rounds_changes_nothing(tmp_path_factory):
    """One life, ended at the n-th operation on the disk, for every n that there is."""
    walked = 0
    for n in itertools.count():
        with world(tmp_path_factory.mktemp("n")) as made:
            made.act("up", 0)
            made.act("kill", n)
            for _ in range(3):
                for _ in range(8):
                    made.act("step", 0)
                    made.act("up", 0)
                made.act("close", 1)
            made.finish()
            assert made.state() == made.server.counted, f"killed at operation {n}"
            assert len(made.server.judged) >= 5
            walked += made.deaths
            if not made.deaths:
                break
    assert walked >= 30


def test_a_verdict_that_cannot_be_kept_stops_the_next_round_and_not_the_client(
    tmp_path_factory, monkeypatch
):
    """The disk fails while the state is settled: nothing is learned from the older state."""
    with world(tmp_path_factory.mktemp("v")) as made:
        made.act("up", 0)
        for _ in range(8):
            made.act("step", 0)
        assert made.server.accepted
        real = Home.settle_provisional

        def fail(*_args, **_options):
            raise StorageError("the disk is gone.")

        monkeypatch.setattr(Home, "settle_provisional", fail)
        made.act("close", 1)
        assert made.device._session.work is Work.IDLE
        assert made.device.todo == []
        monkeypatch.setattr(Home, "settle_provisional", real)
        made.ask()
        made.finish()
        assert made.state() == made.server.counted
