"""Updates are pulled in time, opened once while they fit, and leave nothing behind."""

import mmap
import weakref
from collections import Counter, deque

import numpy as np
import pytest

from fcil_adapters.worker.loop import Call
from fcil_protocol.errors import CorruptFile, WireError
from fcil_protocol.payloads.payload import Payload, pack
from fcil_server.aggregation import pulled_updates as module
from fcil_server.aggregation.pulled_updates import PulledUpdates

K = 12
CLIENTS = [f"{k:026d}" for k in range(K)]


def payload(k):
    rng = np.random.default_rng(k)
    return Payload({"w": rng.random(40_000, np.float32), "count": np.array([k + 1])}, {"k": k})


SIZE = len(pack(payload(0)))


class Daemon:
    """Stands where the worker's pipe does: answers in order, out of memory that can be watched."""

    def __init__(self, together=1):
        self.together = together  # updates in an answer
        self.opened = []
        self.waiting = deque()
        self.live = weakref.WeakSet()
        self.failing = {}  # number -> what is told instead

    def send(self, message):
        if "request" in message:
            self.waiting.append(message["request"]["updates"])

    def recv(self):
        numbers = self.waiting.popleft()[: self.together]
        self.opened.extend(numbers)
        if numbers[0] in self.failing:
            return self.failing[numbers[0]], []
        return {"reply": {}}, [self.memory(pack(payload(number))) for number in numbers]

    def memory(self, data):
        memory = mmap.mmap(-1, len(data))
        memory.write(data)
        self.live.add(memory)
        return memoryview(memory)


def pulled(daemon):
    call = Call({}, [], daemon)
    return call, PulledUpdates(call, tuple(CLIENTS), (1,) * K, tuple(range(K)))


def numbers_of(updates):
    return [u.payload.meta["k"] for u in updates]


def test_every_update_is_opened_once_however_often_it_is_visited():
    daemon = Daemon()
    _, updates = pulled(daemon)
    passes = [[pack(u.payload) for u in updates] for _ in range(3)]
    assert passes == [[pack(payload(k)) for k in range(K)]] * 3
    assert daemon.opened == list(range(K))
    assert [u.client for u in updates] == CLIENTS
    assert numbers_of(updates.without({CLIENTS[3]})) == [0, 1, 2, *range(4, K)]
    assert len(daemon.opened) == K


def test_training_metrics_do_not_reach_the_aggregator(monkeypatch):
    plain = payload(0)
    told = Payload(plain.tensors, {"k": 0, "train_loss": 0.5, "train_accuracy": 1.0})
    monkeypatch.setitem(globals(), "payload", lambda _k: told)
    _, updates = pulled(Daemon())
    assert [dict(u.payload.meta) for u in updates] == [{"k": 0}] * K


def test_what_does_not_fit_is_opened_again_and_never_more_than_two_beyond_the_bound(monkeypatch):
    monkeypatch.setattr(module, "KEPT_BYTES", 5 * SIZE)
    daemon = Daemon()
    _, updates = pulled(daemon)
    most = 0
    for _ in range(3):
        for k, update in enumerate(updates):
            most = max(most, len(daemon.live))
            assert update.payload.f32("w").tobytes() == payload(k).f32("w").tobytes()
            del update
    assert Counter(daemon.opened) == {k: 1 if k < 5 else 3 for k in range(K)}
    assert updates.kept.size == 5 * SIZE
    assert most == 5 + 1  # the one in use; the one on its way is the daemon's until it is received


def test_who_keeps_a_small_tensor_does_not_keep_the_update(monkeypatch):
    monkeypatch.setattr(module, "KEPT_BYTES", 0)
    daemon = Daemon()
    _, updates = pulled(daemon)
    counts = [u.payload.i64("count") for u in updates]
    assert len(daemon.live) == 0
    assert [int(n[0]) for n in counts] == list(range(1, K + 1))


def test_the_next_update_is_asked_for_before_the_one_at_hand_is_used():
    daemon = Daemon()
    _, updates = pulled(daemon)
    for k, _ in enumerate(updates):
        assert daemon.opened == list(range(k + 1))
        assert [asked[0] for asked in daemon.waiting] == ([k + 1] if k + 1 < K else [])


def test_a_pass_that_ends_early_leaves_no_answer_in_the_pipe():
    daemon = Daemon()
    call, updates = pulled(daemon)
    assert next(iter(updates)).client == CLIENTS[0]
    assert [asked[0] for asked in daemon.waiting] == [1]
    call.finish()
    assert not daemon.waiting
    assert numbers_of(updates) == list(range(K))


@pytest.mark.parametrize("bound", [0, 3 * SIZE, 1 << 30])
def test_two_passes_at_once_see_the_same_updates(monkeypatch, bound):
    monkeypatch.setattr(module, "KEPT_BYTES", bound)
    _, updates = pulled(Daemon())
    pairs = [
        (a.payload.meta["k"], b.payload.meta["k"]) for a, b in zip(updates, updates, strict=True)
    ]
    assert pairs == [(k, k) for k in range(K)]
    assert updates.kept.size <= bound


def test_a_failure_comes_at_the_turn_of_the_update_that_it_is_about():
    daemon = Daemon()
    daemon.failing[4] = {"error": CorruptFile.code, "message": "update 4.", "action": ""}
    call, updates = pulled(daemon)
    visit = iter(updates)
    assert [next(visit).client for _ in range(4)] == CLIENTS[:4]
    with pytest.raises(CorruptFile, match="update 4"):
        next(visit)
    call.finish()
    daemon.failing.clear()
    assert numbers_of(updates) == list(range(K))


def test_an_answer_without_a_payload_is_refused():
    daemon = Daemon()
    daemon.failing[0] = {"reply": {}}
    with pytest.raises(WireError, match="1 to 12 updates were expected, got 0"):
        list(pulled(daemon)[1])


def test_more_than_was_asked_for_is_refused(monkeypatch):
    monkeypatch.setattr(module, "MOST_ASKED", 2)
    daemon = Daemon()
    daemon.recv = lambda: ({"reply": {}}, [b""] * 3)
    with pytest.raises(WireError, match="1 to 2 updates were expected, got 3"):
        list(pulled(daemon)[1])


@pytest.mark.parametrize("together", [2, 5, K, 100])
@pytest.mark.parametrize("bound", [0, 3 * SIZE, 1 << 30])
def test_updates_that_come_together_are_the_same_and_in_order(monkeypatch, together, bound):
    monkeypatch.setattr(module, "KEPT_BYTES", bound)
    monkeypatch.setattr(module, "MOST_ASKED", 7)
    daemon = Daemon(together)
    call, updates = pulled(daemon)
    for _ in range(2):
        for k, update in enumerate(updates):
            assert pack(update.payload) == pack(payload(k))
    call.finish()
    kept = min(K, bound // SIZE)
    assert Counter(daemon.opened) == {k: 1 if k < kept else 2 for k in range(K)}
    assert numbers_of(updates.without({CLIENTS[0], CLIENTS[5]})) == [1, 2, 3, 4, *range(6, K)]
