"""HePCo's tasks of a single class, and what its broadcast holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from adapters.hepco_reference import CLIENTS, POOLS, SMALL, TASKS, federation, uploads
from adapters.kit import Federation, make_tasks, now, toy_images
from fcil_protocol.payloads.payload import pack


class TestSingleClass:
    def test_the_row_is_the_federated_class_mean_of_unit_length_at_first(self):
        clients = [toy_images({3: 5}, 1), toy_images({3: 2}, 2)]
        fed = federation(clients, make_tasks([3])[0])
        start = dict(fed.state.tensors)
        updates = uploads(fed)
        after = fed.aggregate("train", updates).tensors
        mean = sum(
            n * u.payload.tensors["head.weight"][0].astype(np.float64)
            for n, u in zip((5, 2), updates, strict=True)
        ) / 7  # fmt: skip
        np.testing.assert_allclose(after["head.weight"][0], mean / np.linalg.norm(mean), atol=1e-6)
        assert after["head.bias"].tolist() == [0]
        for name in POOLS:
            np.testing.assert_array_equal(after[name], start[name])

    def test_later_it_has_the_mean_length_of_the_known_past_rows(self):
        clients = [toy_images({0: 4, 1: 4, 3: 5}, 1), toy_images({0: 3, 1: 3, 3: 2}, 2)]
        tasks = make_tasks([0, 1, 2], [3])
        fed = federation(clients, tasks[0], distill="none")
        fed.round()
        rows = fed.state.tensors["head.weight"][:2]  # nobody has class 2
        fed.open(tasks[1])
        fed.round()
        norm = np.linalg.norm(fed.state.tensors["head.weight"][3])
        assert norm == pytest.approx(np.linalg.norm(rows, axis=1).mean(), rel=1e-5)

    def test_distillation_then_runs_over_all_seen_classes(self):
        clients = [toy_images({0: 4, 1: 4, 3: 5}, 1)]
        tasks = make_tasks([0, 1], [3])
        rows = {}
        for distill in ("none", "both"):
            fed = federation(clients, tasks[0], distill=distill)
            fed.round()
            fed.open(tasks[1])
            pools = {n: fed.state.tensors[n] for n in POOLS}
            before = fed.state.tensors["head.weight"][0]
            fed.round()
            rows[distill] = np.array_equal(fed.state.tensors["head.weight"][0], before)
            for name, array in pools.items():
                np.testing.assert_array_equal(fed.state.tensors[name], array)
        assert rows == {"none": True, "both": False}


class TestBroadcast:
    def test_finished_tasks_stay_and_the_model_changes(self):
        fed = federation()
        fed.round()
        fed.open(TASKS[1])

        def sent():
            parts = fed.aggregator.broadcast(fed.context("train"), fed.state)
            return {p.name: pack(p.payload) for p in parts}

        before = sent()
        fed.round()
        after = sent()
        assert before["task/0"] == after["task/0"]
        assert all(before[name] != after[name] for name in ("current", "pools"))
        assert fed.parts()["task/0"].tensors["classes"].tolist() == [0, 1, 2]
        assert fed.parts()["task/0"].tensors["seen"].tolist() == [1, 1, 0]

    def test_a_task_opens_with_the_pools_that_clients_have(self):
        fed = federation()
        fed.round()
        before = fed.parts()
        fed.open(TASKS[1])
        after = fed.parts()
        assert pack(after["pools"]) == pack(before["pools"])
        assert after["current"].tensors["head.bias"].shape == (5,)

    def test_holds_nothing_of_the_previous_server_or_of_counts(self):
        fed = Federation.of("hepco", CLIENTS, **SMALL)
        fed.run(TASKS[0])
        fed.run(TASKS[1])
        names = set(now(fed.parts()))
        assert names == {*POOLS, "head.weight", "head.bias", "classes", "seen"}

    def test_before_the_first_task_there_is_nothing_to_send(self):
        fed = Federation.of("hepco", CLIENTS, **SMALL)
        assert fed.aggregator.broadcast(fed.context("train"), fed.state) == ()

    def test_upload_size_is_the_published_count_less_the_past_rows(self):
        """ViT-B/16, 100 prompts, 5 blocks, 10 classes: 8,071,690 values (32,286,760 bytes)."""
        fed = Federation.of("hepco", [])
        info = replace(fed.backbone.info, dim=768, depth=12)
        task = make_tasks(range(90), range(90, 100))[1]
        (train,) = fed.method.exchanges(fed.hparams, info)
        dims = fed.method.dims(fed.hparams, info, task)
        assert train.upload.max_bytes(dims) == 32_286_760 + 21 * 8
        down = fed.method.broadcast(fed.hparams, info)
        sent = sum(down[name].max_bytes(dims) for name in ("current", "pools"))
        assert sent == 8_140_900 * 4 + 20 * 8
