"""PILoRA's server half: averages, class means, opening tasks, and what a broadcast holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from adapters.kit import DIM, Federation, client_id, make_tasks, now, toy_images
from fcil_adapters.contract import State, Update
from fcil_adapters.numerics.update_list import UpdateList
from fcil_adapters.toolkit.prototypes.options import ReweightOptions
from fcil_adapters.toolkit.prototypes.reweighting import reweight
from fcil_protocol.errors import ConfigError
from fcil_protocol.payloads.payload import Payload, pack

TASKS = make_tasks([0, 1, 2], [5, 4])
CLIENTS = [toy_images({0: 6, 1: 2}, 1), toy_images({0: 1, 5: 3}, 2), toy_images({1: 4, 4: 2}, 3)]
FAST = {"rank": 2, "epochs": 1, "lr_prototype": 1e-2, "lr_lora": 1e-2}


def federation(clients=CLIENTS, task=TASKS[0], **kw) -> Federation:
    fed = Federation.of("pilora", clients, **{**FAST, **kw})
    fed.open(task)
    return fed


def uploads(fed: Federation, kind: str = "train") -> UpdateList:
    return UpdateList.of(
        [Update(client_id(k), fed.upload(kind, k)) for k in range(len(fed.clients))]
    )


def sent_mean(payload: Payload, c: int):
    owned = payload.tensors["owned"].tolist()
    return payload.tensors["mean"][owned.index(c)] if c in owned else np.zeros(DIM, np.float32)


def of_task(state: State, task: int) -> dict[str, np.ndarray]:
    prefix = f"task.{task}."
    return {n.removeprefix(prefix): a for n, a in state.tensors.items() if n.startswith(prefix)}


class TestOpening:
    def test_draws_a_kaiming_uniform_b_zero_and_small_prototypes(self):
        fed = federation(rank=8, task=make_tasks(range(200))[0])
        drawn = of_task(fed.state, 0)
        A = np.concatenate([drawn["lora.0.q.A"], drawn["lora.0.v.A"]])
        bound = 1 / np.sqrt(DIM)
        assert np.abs(A).max() <= bound
        assert A.std() == pytest.approx(bound / np.sqrt(3), rel=0.1)
        assert not drawn["lora.0.q.B"].any()
        assert drawn["proto"].std() == pytest.approx(0.1, rel=0.05)
        assert drawn["seen"].tolist() == [0] * 200

    def test_or_a_gaussian_of_variance_1_over_d(self):
        A = of_task(federation(rank=64, init_a="gaussian").state, 0)["lora.0.q.A"]
        assert A.std() == pytest.approx(1 / np.sqrt(DIM), rel=0.05)
        assert np.abs(A).max() > 2 / np.sqrt(DIM)  # beyond any uniform of this width

    def test_draws_depend_on_seed_and_task_alone(self):
        one, same, other = federation(), federation(), federation(seed=1)
        assert pack(one.state) == pack(same.state)
        assert pack(one.state) != pack(other.state)
        one.open(TASKS[1])
        first, second = of_task(one.state, 0), of_task(one.state, 1)
        assert not np.array_equal(first["lora.0.q.A"], second["lora.0.q.A"])

    def test_tasks_cannot_open_out_of_order(self):
        with pytest.raises(AssertionError, match="one after the other"):
            federation(task=TASKS[1])

    def test_candidates_all_start_as_the_negatives_they_were(self):
        fed = federation(candidates="all", total_classes=6, init="random")
        future = fed.parts()["current"].tensors["future"]
        assert future.shape == (3, DIM)
        fed.open(TASKS[1])
        current = now(fed.parts())
        np.testing.assert_array_equal(current["proto"], future[:2])
        np.testing.assert_array_equal(current["future"], future[2:])

    def test_more_classes_than_announced_is_a_configuration_error(self):
        fed = federation(candidates="all", total_classes=4)
        with pytest.raises(ConfigError, match="total_classes = 4, but task 1 makes 5 classes"):
            fed.open(TASKS[1])


class TestPrepare:
    def test_prototypes_are_the_means_over_all_images_of_all_clients(self):
        fed = federation()
        updates = uploads(fed, "prepare")
        before = of_task(fed.state, 0)["proto"]
        after = of_task(fed.aggregate("prepare", updates), 0)
        for row, c in enumerate((0, 1)):
            counts = np.array([u.payload.tensors["count"][row] for u in updates], dtype=np.float64)
            means = np.stack([sent_mean(u.payload, c) for u in updates]).astype(np.float64)
            np.testing.assert_allclose(
                after["proto"][row], counts @ means / counts.sum(), atol=1e-6
            )
        np.testing.assert_array_equal(after["proto"][2], before[2])
        assert after["seen"].tolist() == [1, 1, 0]

    def test_a_capped_client_cannot_set_a_mean_alone(self):
        big = [toy_images({0: 50}, 1), toy_images({0: 1}, 2), toy_images({0: 1}, 3)]
        fed = federation(big, max_weight_share=0.5)
        updates = uploads(fed, "prepare")
        means = [sent_mean(u.payload, 0) for u in updates]
        after = of_task(fed.aggregate("prepare", updates), 0)["proto"][0]
        np.testing.assert_allclose(after, 0.5 * means[0] + 0.25 * (means[1] + means[2]), atol=1e-6)

    def test_without_class_means_there_is_no_such_exchange(self):
        kinds = {
            i: [e.kind for e in federation(init=i).exchanges] for i in ("random", "class_means")
        }
        assert kinds == {"random": ["train"], "class_means": ["prepare", "train"]}


class TestTrain:
    def test_lora_is_the_sample_weighted_mean(self):
        fed = federation()
        updates = uploads(fed)
        after = of_task(fed.aggregate("train", updates), 0)
        n = np.array(updates.samples, dtype=np.float64)
        for name in ("lora.0.q.A", "lora.0.q.B", "lora.0.v.A", "lora.0.v.B"):
            stack = np.stack([u.payload.tensors[name].astype(np.float64) for u in updates])
            np.testing.assert_allclose(after[name], np.tensordot(n / n.sum(), stack, 1), atol=1e-7)

    def test_the_weight_cap_holds_for_lora(self):
        fed = federation(max_weight_share=0.4)
        updates = uploads(fed)  # 8, 1 and 4 images: 0.62 is capped, the rest shared 1 to 4
        after = of_task(fed.aggregate("train", updates), 0)["lora.0.q.A"]
        stack = np.stack([u.payload.tensors["lora.0.q.A"] for u in updates])
        np.testing.assert_allclose(after, np.tensordot([0.4, 0.2, 0.4], stack, 1), atol=1e-6)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"temperature": "mul", "distance": "squared"},
            {"enabled": False},
            {"owners_only": True},
        ],
    )
    def test_prototypes_are_re_weighted_by_their_owners_means(self, options):
        fed = federation(reweight=options)
        updates = uploads(fed)
        before = of_task(fed.state, 0)["proto"]
        n = torch.tensor(updates.samples, dtype=torch.float64)
        expected, _ = reweight(
            torch.tensor(np.stack([u.payload.tensors["proto"] for u in updates])),
            torch.tensor(np.stack([[sent_mean(u.payload, c) for c in (0, 1, 2)] for u in updates])),
            torch.tensor(np.stack([u.payload.tensors["count"] for u in updates])),
            torch.tensor(before),
            n / n.sum(),
            options=ReweightOptions(**options),
        )
        after = of_task(fed.aggregate("train", updates), 0)
        np.testing.assert_allclose(after["proto"], expected.numpy(), atol=1e-6)
        np.testing.assert_array_equal(after["proto"][2], before[2])
        assert after["seen"].tolist() == [1, 1, 0]

    def test_the_order_in_which_clients_are_numbered_does_not_matter(self):
        fed = federation()
        sent = [u.payload for u in uploads(fed)]
        states = [
            fed.aggregate(
                "train", UpdateList.of(Update(client_id(i), sent[j]) for i, j in enumerate(order))
            )
            for order in ((0, 1, 2), (2, 0, 1))
        ]
        for name, array in states[0].tensors.items():
            np.testing.assert_allclose(states[1].tensors[name], array, atol=1e-6)

    def test_one_client_is_the_identity(self):
        fed = federation(CLIENTS[:1])
        sent = fed.upload("train", 0)
        after = of_task(fed.aggregate("train", UpdateList.of([Update(client_id(0), sent)])), 0)
        for name in ("lora.0.q.A", "lora.0.v.B"):
            np.testing.assert_array_equal(after[name], sent.tensors[name])
        np.testing.assert_array_equal(after["proto"][:2], sent.tensors["proto"][:2])


class TestSeen:
    def test_a_class_once_seen_stays_seen(self):
        fed = federation(init="random")
        fed.round()
        fed.clients = [CLIENTS[0].of([1]), CLIENTS[2].of([1])]
        fed.round()
        assert of_task(fed.state, 0)["seen"].tolist() == [1, 1, 0]

    def test_a_class_without_an_owner_of_enough_images_keeps_its_prototype_unseen(self):
        fed = federation(init="random", reweight={"min_count": 5})
        before = of_task(fed.state, 0)["proto"]
        fed.round()  # 6 and 1 images of class 0; 2 and 4 of class 1
        after = of_task(fed.state, 0)
        assert after["seen"].tolist() == [1, 0, 0]
        assert (after["proto"] != before).any(1).tolist() == [True, False, False]

    def test_a_class_whose_means_all_stay_at_home_is_not_seen(self):
        fed = federation(min_count_upload=5)
        before = of_task(fed.state, 0)["proto"]
        fed.round("prepare")
        fed.round("train")
        after = of_task(fed.state, 0)
        assert after["seen"].tolist() == [1, 0, 0]
        np.testing.assert_array_equal(after["proto"][1:], before[1:])


class TestBroadcast:
    def test_a_finished_task_never_changes_again(self):
        fed = federation()
        fed.round("prepare")
        fed.round("train")
        final = of_task(fed.state, 0)
        fed.open(TASKS[1])
        before = {
            p.name: pack(p.payload)
            for p in fed.aggregator.broadcast(fed.context("train"), fed.state)
        }
        fed.round("train")
        after = {
            p.name: pack(p.payload)
            for p in fed.aggregator.broadcast(fed.context("train"), fed.state)
        }
        assert [n for n in after if after[n] != before[n]] == ["task/1"]
        part = fed.parts()["task/0"]
        assert part.meta == {"task": 0}
        for name, array in part.tensors.items():
            np.testing.assert_array_equal(array, final[name])

    def test_before_the_first_task_there_is_nothing_to_send(self):
        fed = Federation.of("pilora", CLIENTS)
        assert fed.aggregator.broadcast(fed.context("train"), fed.state) == ()

    def test_upload_size_is_that_of_the_published_count(self):
        """ViT-B/16, 10 classes: 12,288 LoRA values + 7,680 prototypes + 7,680 means, 110,592 bytes."""
        fed = Federation.of("pilora", [])
        info = replace(fed.backbone.info, dim=768, depth=12)
        task = make_tasks(range(10))[0]
        train = fed.method.exchanges(fed.hparams, info)[-1]
        counts = (10 + 10 + 10 + 1) * 8
        assert train.upload.max_bytes(fed.method.dims(fed.hparams, info, task)) == 110_592 + counts
