"""Updates that start from older states: moved by definition, through the worker, or left out."""

import asyncio
import math
from types import SimpleNamespace

import numpy as np
import pytest

from adapters.kit import Federation, client_id, make_tasks, toy_images
from adapters.worker_kit import Direct
from fcil_adapters.contract import State, Update
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.payloads.payload import Payload, pack
from fcil_server.aggregation import worker as worker_module
from fcil_server.aggregation.aggregation import Aggregation
from fcil_server.aggregation.staleness import (
    OlderStates,
    Rebase,
    damping,
    load_older,
    unmoved,
)
from fcil_server.aggregation.store import StateStore
from fcil_server.aggregation.worker import ServerWorker
from fcil_server.federation.config import load
from server.update_rows import update_row

FAST = {"rank": 2, "blocks": [0, 1], "epochs": 1, "lr_head": 0.1, "augment": "none"}


@pytest.mark.parametrize(("staleness", "factor"), [(0, 1), (1, 0.70710678), (3, 0.5), (8, 1 / 3)])
def test_a_change_counts_less_the_older_its_start_is(staleness, factor):
    assert damping(staleness) == pytest.approx(factor, abs=1e-8)


def test_a_change_is_added_to_the_current_state_and_other_tensors_stay():
    rng = np.random.default_rng(3)
    now, then, trained = (rng.standard_normal((4, 3)).astype(np.float32) for _ in range(3))
    count = np.array([7], np.int64)
    payload = Payload({"w": trained, "n": count}, {"version": 2})
    moved = Rebase({"w": now}, {3: {"w": then}}, [0, 3])(1, payload)
    exact = now.astype(np.float64) + 0.5 * (trained.astype(np.float64) - then)
    np.testing.assert_array_equal(moved.tensors["w"], exact.astype(np.float32))
    assert moved.tensors["n"] is count
    assert moved.meta == {"version": 2}
    assert moved.tensors["w"].dtype == np.float32


def test_an_update_of_the_current_state_stays_as_it_is():
    payload = Payload({"w": np.ones(2, np.float32)})
    assert Rebase({"w": np.zeros(2)}, {3: {"w": np.zeros(2)}}, [0, 3])(0, payload) is payload
    assert unmoved(0, payload) is payload


def test_states_are_loaded_once_and_one_that_is_damaged_is_named(tmp_path):
    store = StateStore(tmp_path)
    for number in range(4):
        store.save(number, State({"w": np.full(2, number, np.float32)}), None, 0)
    store.path(1).write_bytes(b"damaged")
    rows = [SimpleNamespace(base_state=b) for b in (None, 0, 0, 1, 3)]
    older, unreadable = load_older(store.load, 3, rows)
    assert list(older.states) == [0]
    assert list(unreadable) == [1]
    assert [older.staleness(r.base_state) for r in rows] == [0, 3, 3, 2, 0]


class Host:
    """A worker that writes down what it is given."""

    async def call(self, op, fields, payloads=(), *, on_request=None, on_progress=None):
        if op == "broadcast":
            return {"parts": []}, []
        self.staleness, self.states = fields["staleness"], payloads
        return {"excluded": {}, "far_apart": []}, [pack(payloads[0])]


def test_the_worker_gets_each_older_state_once_and_the_age_of_every_update(tmp_path):
    """State 0 is an older state like any other; an update without a base is of the current one."""
    fed = Federation.of("fedavg_lora", [toy_images({0: 4, 1: 3})], **FAST)
    made = Aggregation(fed.method, fed.hparams, load(None, ()), log=tmp_path / "worker.log")
    made._host = host = Host()
    made.use(fed.backbone.info, None, None, trials=tmp_path / "trials.json")
    states = [State({"w": np.full(1, k, np.float32)}) for k in range(4)]
    rows = [update_row(client_id(k), base_state=base) for k, base in enumerate((0, None, 2, 0))]
    older = OlderStates(3, {0: states[0], 2: states[2]})
    asyncio.run(made.aggregate(fed.context("train"), states[3], rows, older))
    assert host.staleness == [3, 0, 1, 3]
    assert [float(s.f32("w")[0]) for s in host.states] == [3, 2, 0]


def test_a_round_with_updates_of_three_states_equals_fedbuff(monkeypatch):
    """The state equals the current one plus the weighted, damped changes, in float64."""
    fed = Federation.of("fedavg_lora", [toy_images({0: 4, 1: 3}, k) for k in range(3)], **FAST)
    fed.open(make_tasks([0, 1])[0])
    states, sent = [], []
    for k in range(3):  # client k starts from state k
        states.append(fed.state)
        sent.append(fed.upload("train", k))
        fed.round()
    ctx = fed.context("train")
    monkeypatch.setattr(worker_module.LoadedModels, "prepare", lambda *_: (fed.method, ctx))
    fields = {
        "clients": [client_id(k) for k in range(3)],
        "samples": [int(u.i64("n")[0]) for u in sent],
        "staleness": [2, 1, 0],
        "outliers": {"factor": 0, "min_clients": 5},
    }
    answers = [({"reply": {}}, [pack(u)]) for u in sent]
    payloads = [states[2], states[1], states[0]]
    _, (made,) = Direct(ServerWorker())("aggregate", fields, payloads, answers)

    begun = [fed.aggregator.start(ctx, state) for state in states]
    total = sum(fields["samples"])
    after = fed.aggregator.start(ctx, made)
    for name, now in begun[2].items():
        exact = now.astype(np.float64)
        for k, tau in enumerate((2, 1, 0)):
            change = sent[k].tensors[name].astype(np.float64) - begun[k][name]
            exact = exact + fields["samples"][k] / total / math.sqrt(1 + tau) * change
        np.testing.assert_allclose(after[name], exact, rtol=0, atol=1e-6)
    plain = fed.aggregate(
        "train", UpdateList.of(Update(client_id(k), u) for k, u in enumerate(sent))
    )
    assert not np.allclose(
        after["head.weight"], fed.aggregator.start(ctx, plain)["head.weight"], atol=1e-4
    )
