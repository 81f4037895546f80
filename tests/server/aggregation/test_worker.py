"""The server's worker opens tasks, combines pulled updates, publishes parts and evaluates."""

import asyncio
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest

from adapters.worker_kit import Direct, context, fields_of, fill
from fcil_adapters.contract import Update
from fcil_adapters.contract.registry import load_half, load_method
from fcil_adapters.numerics.update_list import UpdateList
from fcil_adapters.worker.host import WorkerHost
from fcil_protocol.errors import DataError, StorageError, WireError, WorkerDied
from fcil_protocol.payloads.payload import Payload, pack, unpack
from fcil_server.aggregation.aggregation import Aggregation
from fcil_server.aggregation.worker import ServerWorker

MEAN = "running_mean"
SIDE = 8
CLIENTS = [letter * 26 for letter in "abcdef"]
OFF = {"factor": 0, "min_clients": 5}


def update(seed, counts=(3, 2)):
    mean = np.random.default_rng(seed).random((len(counts), SIDE**2), np.float32)
    count = np.array(counts, np.int64)
    return Payload({"mean": mean, "count": count, "n": count.sum().reshape(1)})


def opened(worker, classes=(0, 1), state=None, past=()):
    fields = fields_of(MEAN, context(MEAN, classes=classes, past=past))
    if state is None:
        _, (state,) = worker("init", fields)
    _, (state,) = worker("open_task", fields, [state])
    return fields, state


def aggregation(fields, updates, outliers=OFF):
    return {
        **fields,
        "outliers": outliers,
        "clients": CLIENTS[: len(updates)],
        "samples": [int(u.i64("n")[0]) for u in updates],
        "staleness": [0] * len(updates),
    }


def test_updates_are_pulled_one_by_one_and_combined_as_if_they_lay_in_memory():
    worker = Direct(ServerWorker())
    fields, state = opened(worker)
    updates = [update(seed) for seed in range(3)]
    answers = [({"reply": {}}, [pack(u)]) for u in updates]
    _, (new,) = worker("aggregate", aggregation(fields, updates), [state], answers)
    listed = UpdateList.of(Update(c, u) for c, u in zip(CLIENTS, updates, strict=False))
    expected = load_half(load_method(MEAN).aggregator).aggregate(context(MEAN), state, listed)
    assert pack(new) == pack(expected)
    assert worker.sent == [{"request": {"updates": list(range(i, 3))}} for i in range(3)]


def pulled(worker, fields, state, updates, outliers, again):
    """Aggregate; ``again``: what the worker asks for after the pass over all updates."""
    order = [*range(len(updates)), *again]
    answers = [({"reply": {}}, [pack(updates[i])]) for i in order]
    worker.sent.clear()
    reply, (new,) = worker("aggregate", aggregation(fields, updates, outliers), [state], answers)
    assert [sent["request"]["updates"][0] for sent in worker.sent] == order
    return reply["excluded"], new


def test_an_update_far_from_the_others_is_left_out_and_never_pulled_again(monkeypatch):
    worker = Direct(ServerWorker())
    fields, state = opened(worker)
    updates = [update(seed) for seed in range(6)]
    large = updates[2].f32("mean") * 100
    updates[2] = Payload({**updates[2].tensors, "mean": large})
    rule = {"factor": 6, "min_clients": 5}
    excluded, new = pulled(worker, fields, state, updates, rule, [])
    assert list(excluded) == [CLIENTS[2]]
    monkeypatch.setattr("fcil_server.aggregation.pulled_updates.KEPT_BYTES", 0)
    assert pulled(worker, fields, state, updates, rule, [0, 1, 3, 4, 5])[0] == excluded
    for word in ("prototype", "median", "limit"):
        assert word in excluded[CLIENTS[2]]
    honest = UpdateList.of(
        Update(c, u) for c, u in zip(CLIENTS, updates, strict=True) if c != CLIENTS[2]
    )
    expected = load_half(load_method(MEAN).aggregator).aggregate(context(MEAN), state, honest)
    assert pack(new) == pack(expected)


@pytest.mark.parametrize("rule", [OFF, {"factor": 6, "min_clients": 7}])
def test_without_a_rule_or_enough_clients_nothing_is_looked_at_or_left_out(rule):
    worker = Direct(ServerWorker())
    fields, state = opened(worker)
    updates = [update(seed) for seed in range(6)]
    updates[2] = Payload({**updates[2].tensors, "mean": updates[2].f32("mean") * 100})
    excluded, _ = pulled(worker, fields, state, updates, rule, [])
    assert excluded == {}


def test_a_broadcast_names_its_parts_and_depends_on_the_state_alone():
    worker = Direct(ServerWorker())
    fields, state = opened(worker)
    fields, state = opened(worker, (2, 3), state, (0, 1))
    reply, parts = worker("broadcast", fields, [state])
    assert sorted(reply["parts"]) == ["current", "task/0"]
    again = Direct(ServerWorker())("broadcast", fields, [state])
    assert (again[0], [pack(p) for p in again[1]]) == (reply, [pack(p) for p in parts])


@pytest.mark.parametrize(
    ("clients", "samples"),
    [([], []), (CLIENTS[:2], [1]), (CLIENTS[1::-1], [1, 1]), ([CLIENTS[0]] * 2, [1, 1])],
)
def test_an_aggregation_of_unsorted_or_missing_clients_is_refused(clients, samples):
    worker = Direct(ServerWorker())
    fields, state = opened(worker)
    with pytest.raises(WireError, match="sorted clients"):
        worker("aggregate", {**fields, "clients": clients, "samples": samples}, [state])


def test_wrong_numbers_of_payloads_are_refused():
    worker = Direct(ServerWorker())
    fields, state = opened(worker)
    with pytest.raises(WireError, match="takes one state, got 2"):
        worker("broadcast", fields, [state, state])
    with pytest.raises(WireError, match="1 to 1 updates were expected, got 0"):
        worker("aggregate", aggregation(fields, [update(0)]), [state], [({"reply": {}}, [])])


def test_a_central_folder_is_evaluated_with_its_test_side_only(tmp_path):
    fill(tmp_path, "train", "light", range(5), 200)
    fill(tmp_path, "test", "light", range(10, 14), 200)
    fill(tmp_path, "test", "Dark", range(20, 22), 40)
    fill(tmp_path, "test", "dunkel", range(22, 23), 40)  # another name of the class
    fill(tmp_path, "test", "future", range(30, 32), 90)
    mean = np.repeat(np.float32([[200], [40]]) / 255, SIDE**2, axis=1)
    part = Payload({"mean": mean, "count": np.ones(2, np.int64), "classes": np.arange(2)})
    fields = fields_of(MEAN, context(MEAN, "evaluate"))
    fields |= {
        "data": str(tmp_path),
        "classes": {"light": 0, "dark": 1, "dunkel": 1},
        "parts": ["current"],
    }
    worker = Direct(ServerWorker())
    reply, (counts,) = worker("evaluate", fields, [part])
    assert counts.i64("classes").tolist() == [0, 1]
    assert counts.i64("correct").tolist() == counts.i64("total").tolist() == [4, 3]
    assert reply == {"images": 7, "faults": []}
    (tmp_path / "test/light/10.png").write_bytes(b"broken")
    fill(tmp_path, "test", "light", [15], 200)
    reply, (counts,) = worker("evaluate", fields, [part])
    assert counts.i64("total").tolist() == [4, 3]
    assert len(reply["faults"]) == 1


def test_images_to_train_on_are_never_tested_on(tmp_path):
    fill(tmp_path, "train", "light", range(5), 200)
    part = Payload({
        "mean": np.full((1, SIDE**2), 200 / 255, np.float32), "count": np.ones(1, np.int64),
        "classes": np.arange(1),
    })  # fmt: skip
    fields = fields_of(MEAN, context(MEAN, "evaluate"))
    fields |= {"data": str(tmp_path), "classes": {"light": 0}, "parts": ["current"]}
    reply, _ = Direct(ServerWorker())("evaluate", fields, [part])
    assert reply["images"] == 0
    assert reply["faults"] == [f"{tmp_path} has images in train/ and none in test/ to test on."]


def test_a_missing_central_folder_is_named(tmp_path):
    fields = fields_of(MEAN, context(MEAN, "evaluate"))
    fields |= {"data": str(tmp_path / "no"), "classes": {}, "parts": []}
    with pytest.raises(DataError, match="no folder or file"):
        Direct(ServerWorker())("evaluate", fields, [])


def test_a_real_process_survives_a_failing_pull_and_a_kill_in_the_middle(tmp_path):
    """Through `python -m fcil_server.aggregation.worker`: what fails leaves the daemon's state untouched."""
    fields, state = opened(Direct(ServerWorker()))
    updates = [update(seed) for seed in range(3)]
    fields = aggregation(fields, updates)

    def give(request):
        return {}, [pack(updates[number]) for number in request["updates"]]

    async def go():
        host = WorkerHost(
            "fcil_server.aggregation.worker", name="server", log=tmp_path / "worker.log"
        )

        def vanish(request):
            raise StorageError(f"update {request['updates'][0]} cannot be read.")

        def strike(request):
            os.kill(host.pid, signal.SIGKILL)
            return give(request)

        try:
            _, (first,) = await host.call("aggregate", fields, [state], on_request=give)
            pid = host.pid
            with pytest.raises(StorageError, match="update 0 cannot be read"):
                await host.call("aggregate", fields, [state], on_request=vanish)
            assert host.pid == pid
            with pytest.raises(WorkerDied, match="signal 9"):
                await host.call("aggregate", fields, [state], on_request=strike)
            _, (second,) = await host.call("aggregate", fields, [state], on_request=give)
        finally:
            await host.stop()
        return first, second

    first, second = asyncio.run(go())
    assert first == second
    assert unpack(first).i64("task.0.count").tolist() == [9, 6]


def test_faults_of_the_servers_own_test_images_are_told_once():
    told = []
    kit = SimpleNamespace(_told_faults=set(), _notify=told.append)
    Aggregation._tell_faults(kit, "tests", [])
    for _ in range(3):  # it is evaluated after every task
        Aggregation._tell_faults(kit, "tests", ["a.png is damaged.", "b.png is damaged."])
    Aggregation._tell_faults(kit, "tests", ["a.png is damaged.", "c.png is damaged."])
    assert told == [
        "the test images in tests: a.png is damaged, and 1 more",
        "the test images in tests: c.png is damaged",
    ]
