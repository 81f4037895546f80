"""PLoRA's server half: averages, class means, the teacher, and what a broadcast holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from adapters.kit import DIM, Federation, client_id, make_tasks, toy_images
from fcil_adapters.contract import State, Update
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.errors import ConfigError
from fcil_protocol.payloads.payload import Payload, pack

TASKS = make_tasks([0, 1, 2], [5, 4], [6])
CLIENTS = [toy_images({0: 6, 1: 2}, 1), toy_images({0: 1, 5: 3}, 2), toy_images({1: 4, 4: 2}, 3)]
FAST = {"rank": 2, "blocks": [0, 1], "epochs": 1, "lr_prototype": 1e-2, "lr_lora": 1e-2}
LORA = [f"lora.{b}.{p}.{m}" for b in (0, 1) for p in ("q", "v") for m in ("A", "B")]


def federation(clients=CLIENTS, **kw) -> Federation:
    fed = Federation.of("plora", clients, **{**FAST, **kw})
    fed.open(TASKS[0])
    return fed


def uploads(fed: Federation, kind: str = "train") -> UpdateList:
    return UpdateList.of(
        [Update(client_id(k), fed.upload(kind, k)) for k in range(len(fed.clients))]
    )


def of_task(state: State, task: int) -> dict[str, np.ndarray]:
    prefix = f"task.{task}."
    return {n.removeprefix(prefix): a for n, a in state.tensors.items() if n.startswith(prefix)}


def sent_means(payload: Payload, classes) -> np.ndarray:
    """(c, d) in float64, zero where the client sent none."""
    owned = payload.tensors["owned"].tolist()
    return np.stack([
        payload.tensors["mean"][owned.index(c)].astype(np.float64) if c in owned else np.zeros(DIM)
        for c in classes
    ])  # fmt: skip


def reweighted(updates, previous, classes, *, eta=0.2, squared=False, multiply=False):
    """Equations 7 to 10 by loops: the new prototypes, (c, d)."""
    K = len(updates)
    protos = [u.payload.tensors["proto"].astype(np.float64) for u in updates]
    means = [sent_means(u.payload, classes) for u in updates]
    counts = [u.payload.tensors["count"] for u in updates]
    result = []
    for c in range(len(classes)):
        owners = [i for i in range(K) if counts[i][c] > 0]
        if not owners:
            result.append(previous[c])
            continue
        p = []
        for k in range(K):
            norms = [np.linalg.norm(protos[k][c] - means[i][c]) for i in owners]
            p.append(1 / max(sum(x * x if squared else x for x in norms), 1e-12))
        low, high = min(p), max(p)
        a = np.array([(x - low) / (high - low) if high > low else 0.0 for x in p])
        e = np.exp(eta * a if multiply else a / eta)
        result.append(sum(w * proto[c] for w, proto in zip(e / e.sum(), protos, strict=True)))
    return np.stack(result)


class TestOpening:
    def test_draws_a_kaiming_uniform_b_zero_and_small_prototypes(self):
        fed = Federation.of("plora", [], **{**FAST, "rank": 8})
        fed.open(make_tasks(range(200))[0])
        A = np.concatenate([fed.state.tensors[n] for n in LORA if n.endswith("A")])
        bound = 1 / np.sqrt(DIM)
        assert np.abs(A).max() <= bound
        assert A.std() == pytest.approx(bound / np.sqrt(3), rel=0.1)
        assert not any(fed.state.tensors[n].any() for n in LORA if n.endswith("B"))
        assert of_task(fed.state, 0)["proto"].std() == pytest.approx(0.1, rel=0.05)

    def test_draws_depend_on_the_seed_alone(self):
        one, same, other = federation(), federation(), federation(seed=1)
        assert pack(one.state) == pack(same.state)
        assert pack(one.state) != pack(other.state)

    def test_the_lora_goes_on_and_its_last_value_becomes_the_teacher(self):
        fed = federation()
        fed.round()
        final = {n: fed.state.tensors[n] for n in LORA}
        fed.open(TASKS[1])
        for name in LORA:
            np.testing.assert_array_equal(fed.state.tensors[name], final[name])
            np.testing.assert_array_equal(fed.state.tensors[f"teacher.{name}"], final[name])

    def test_a_may_be_gaussian_of_variance_1_over_d(self):
        fed = federation(rank=64, init_a="gaussian")
        A = np.concatenate([fed.state.tensors[n] for n in LORA if n.endswith("A")])
        assert A.std() == pytest.approx(1 / np.sqrt(DIM), rel=0.05)

    def test_tasks_cannot_open_out_of_order(self):
        fed = Federation.of("plora", CLIENTS, **FAST)
        with pytest.raises(AssertionError, match="one after the other"):
            fed.open(TASKS[1])

    def test_a_block_that_the_backbone_lacks_is_named(self):
        fed = Federation.of("plora", CLIENTS, rank=2)  # blocks 0 to 4 of a backbone with two
        with pytest.raises(ConfigError, match="block 2 does not exist"):
            _ = fed.exchanges
        with pytest.raises(ConfigError, match="blocks 0 to 1"):
            fed.parts()


class TestAggregate:
    def test_prepare_gives_the_means_over_all_images_of_all_clients(self):
        fed = federation()
        updates = uploads(fed, "prepare")
        before, after = of_task(fed.state, 0), of_task(fed.aggregate("prepare", updates), 0)
        counts = np.stack([u.payload.tensors["count"] for u in updates]).astype(np.float64)
        means = np.stack([sent_means(u.payload, (0, 1, 2)) for u in updates])
        for row in (0, 1):
            expected = counts[:, row] @ means[:, row] / counts[:, row].sum()
            np.testing.assert_allclose(after["proto"][row], expected, atol=1e-6)
        np.testing.assert_array_equal(after["proto"][2], before["proto"][2])
        assert after["seen"].tolist() == [1, 1, 0]

    def test_lora_is_the_sample_weighted_mean(self):
        fed = federation()
        updates = uploads(fed)
        after = fed.aggregate("train", updates).tensors
        n = np.array(updates.samples, dtype=np.float64)
        for name in LORA:
            stack = np.stack([u.payload.tensors[name].astype(np.float64) for u in updates])
            np.testing.assert_allclose(after[name], np.tensordot(n / n.sum(), stack, 1), atol=1e-7)

    def test_the_weight_cap_holds_for_lora(self):
        fed = federation(max_weight_share=0.4)
        updates = uploads(fed)  # 8, 1 and 4 images: 0.62 is capped, the rest shared 1 to 4
        after = fed.aggregate("train", updates).tensors["lora.1.v.A"]
        stack = np.stack([u.payload.tensors["lora.1.v.A"] for u in updates])
        np.testing.assert_allclose(after, np.tensordot([0.4, 0.2, 0.4], stack, 1), atol=1e-6)

    @pytest.mark.parametrize(
        ("options", "terms"),
        [
            ({}, {}),
            (
                {"temperature": "mul", "distance": "squared"},
                {"squared": True, "multiply": True},
            ),
        ],
    )
    def test_prototypes_are_re_weighted_by_the_definition(self, options, terms):
        fed = federation(reweight=options)
        updates = uploads(fed)
        before, after = of_task(fed.state, 0), of_task(fed.aggregate("train", updates), 0)
        expected = reweighted(updates, before["proto"], (0, 1, 2), **terms)
        np.testing.assert_allclose(after["proto"], expected, atol=1e-5)
        assert after["seen"].tolist() == [1, 1, 0]

    def test_a_sole_owner_gets_e5_over_e5_plus_the_others(self):
        """One client has the class, two were pushed away: weight e^5 / (e^5 + sum e^(5 a_k))."""
        fed = federation()
        updates = uploads(fed)
        far = [
            replace(u, payload=Payload({**u.payload.tensors, "proto": u.payload.tensors["proto"]
                    + (0 if k == 0 else 1000.0)}, u.payload.meta))
            for k, u in enumerate(updates)
        ]  # fmt: skip
        sole = [
            u if k != 1 else replace(u, payload=without_class(u.payload, 0))
            for k, u in enumerate(far)
        ]
        after = of_task(fed.aggregate("train", UpdateList.of(sole)), 0)["proto"][0]
        own = far[0].payload.tensors["proto"][0]
        weight = np.exp(5) / (np.exp(5) + 2)
        np.testing.assert_allclose(after - own, (1 - weight) * 1000, rtol=1e-2)

    def test_one_client_is_the_identity(self):
        fed = federation(CLIENTS[:1])
        sent = fed.upload("train", 0)
        after = fed.aggregate("train", UpdateList.of([Update(client_id(0), sent)]))
        for name in LORA:
            np.testing.assert_array_equal(after.tensors[name], sent.tensors[name])
        np.testing.assert_array_equal(of_task(after, 0)["proto"][:2], sent.tensors["proto"][:2])

    def test_the_numbering_of_clients_does_not_matter(self):
        fed = federation()
        sent = [u.payload for u in uploads(fed)]
        one, two = (
            fed.aggregate(
                "train", UpdateList.of(Update(client_id(i), sent[j]) for i, j in enumerate(order))
            )
            for order in ((0, 1, 2), (2, 0, 1))
        )
        for name, array in one.tensors.items():
            np.testing.assert_allclose(two.tensors[name], array, atol=1e-6)


def without_class(payload: Payload, c: int) -> Payload:
    """The same upload by a client that has no image of class c (0 is the first row)."""
    owned = payload.tensors["owned"]
    count = payload.tensors["count"].copy()
    count[c] = 0
    kept = {"owned": owned[owned != c], "mean": payload.tensors["mean"][owned != c]}
    n = np.array([max(int(count.sum()), 1)])
    return Payload({**payload.tensors, **kept, "count": count, "n": n}, payload.meta)


class TestBroadcast:
    def test_finished_tasks_and_the_teacher_do_not_change_within_a_task(self):
        fed = federation()
        fed.round()
        fed.open(TASKS[1])

        def packed():
            parts = fed.aggregator.broadcast(fed.context("train"), fed.state)
            return {p.name: pack(p.payload) for p in parts}

        before = packed()
        fed.round()
        after = packed()
        assert sorted(before) == ["current", "lora/0", "task/0", "task/1"]
        assert sorted(n for n in after if after[n] != before.get(n)) == ["lora/1", "task/1"]
        assert sorted(fed.parts()["task/0"].tensors) == ["classes", "proto", "seen"]

    def test_a_client_that_joins_late_distils_from_the_same_teacher(self):
        """It has nothing but the parts; its upload is that of a client that was always there."""
        fed = federation(gamma_kd=50.0)
        fed.round()
        fed.open(TASKS[1])
        fed.round()  # the LoRA has left the teacher
        late = federation(gamma_kd=50.0)
        late.state, late.task = fed.state, fed.task
        assert pack(late.upload("train", 2)) == pack(fed.upload("train", 2))
        blind = federation(gamma_kd=0.0)
        blind.state = State({n: a for n, a in fed.state.tensors.items() if "teacher" not in n},
                            fed.state.meta)  # fmt: skip
        blind.task = fed.task
        assert pack(blind.upload("train", 2)) != pack(fed.upload("train", 2))

    def test_only_the_last_teacher_is_sent(self):
        fed = federation()
        for task in TASKS[1:]:
            fed.round()
            fed.open(task)
        tasks = ["task/0", "task/1", "task/2"]
        assert sorted(fed.parts()) == ["current", "lora/1", *tasks]

    def test_without_distillation_there_is_no_teacher(self):
        fed = federation(gamma_kd=0.0)
        fed.round()
        fed.open(TASKS[1])
        fed.round()
        assert sorted(fed.parts()) == ["current", "lora/1", "task/0", "task/1"]

    def test_a_task_that_nobody_trains_leaves_the_lora_and_its_name(self):
        """The next teacher is what the last training left, also if that was long ago."""
        fed = federation()
        fed.round()
        trained = pack(fed.parts()["lora/0"])
        for task in make_tasks([0, 1, 2], [6], [5, 4])[1:]:
            fed.open(task)
        assert [n for n in fed.parts() if n.startswith("lora/")] == ["lora/0"]
        assert pack(fed.parts()["lora/0"]) == trained
        fed.round()
        assert sorted(n for n in fed.parts() if n.startswith("lora/")) == ["lora/0", "lora/2"]
        assert pack(fed.parts()["lora/0"]) == trained

    def test_before_the_first_task_there_is_nothing_to_send(self):
        assert Federation.of("plora", CLIENTS, **FAST).parts() == {}

    def test_upload_size_is_that_of_the_published_count(self):
        """ViT-B/16, 10 classes, blocks 0 to 4: 76,800 values, 307,200 bytes per client."""
        fed = Federation.of("plora", [])
        info = replace(fed.backbone.info, dim=768, depth=12)
        train = fed.method.exchanges(fed.hparams, info)[-1]
        dims = fed.method.dims(fed.hparams, info, make_tasks(range(10))[0])
        assert train.upload.max_bytes(dims) == 307_200 + (10 + 10 + 10 + 1) * 8
