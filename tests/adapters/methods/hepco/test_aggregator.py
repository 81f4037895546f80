"""HePCo's server half: averages, what a state remembers, edge cases, and what a broadcast holds."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from adapters.hepco_reference import CLIENTS, POOLS, SMALL, TASKS, federation, prompt_gap, uploads
from adapters.kit import DIM, Federation, client_id, make_tasks, toy_images
from fcil_adapters.contract import Update
from fcil_adapters.methods.hepco import consolidation
from fcil_adapters.methods.hepco.consolidation import Source
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.errors import ConfigError
from fcil_protocol.payloads.payload import Payload, pack


def sources_of(fed: Federation, updates: UpdateList, monkeypatch) -> list[Source]:
    """The teachers that a round would distil from."""
    caught: list[Source] = []

    def catch(_ctx, _provisional, _known, sources):
        caught.extend(sources)
        return {}

    monkeypatch.setattr("fcil_adapters.methods.hepco.aggregator.consolidate", catch)
    fed.aggregate("train", updates)
    monkeypatch.undo()
    return caught


class TestOpening:
    def test_draws_pools_from_the_unit_interval_and_rows_as_a_linear(self):
        fed = federation(pool_size=50)
        for name in POOLS:
            values = fed.state.tensors[name]
            assert 0 <= values.min() < 0.05
            assert 0.95 < values.max() < 1
        assert fed.state.tensors["prompt.0"].shape == (50, 4, DIM)
        assert np.abs(fed.state.tensors["head.weight"]).max() <= 1 / np.sqrt(DIM)
        assert not np.array_equal(fed.state.tensors["prompt.0"], fed.state.tensors["prompt.1"])

    def test_draws_depend_on_the_seed(self):
        assert pack(federation().state) == pack(federation().state)
        assert pack(federation().state) != pack(federation(seed=1).state)

    def test_a_new_task_keeps_pools_and_rows_and_remembers_the_server(self):
        fed = federation()
        fed.round()
        before = dict(fed.state.tensors)
        fed.open(TASKS[1])
        after = fed.state.tensors
        for name in POOLS:
            np.testing.assert_array_equal(after[name], before[name])
            np.testing.assert_array_equal(after[f"prev.{name}"], before[name])
        np.testing.assert_array_equal(after["head.weight"][:3], before["head.weight"])
        np.testing.assert_array_equal(after["prev.head.weight"], after["head.weight"])
        assert after["classes"].tolist() == [0, 1, 2, 5, 4]
        assert after["counted"].tolist() == [7, 6, 0, 0, 0]

    def test_the_previous_server_stays_while_the_task_runs(self):
        fed = federation()
        fed.round()
        fed.open(TASKS[1])
        before = dict(fed.state.tensors)
        fed.round()
        fed.round(round_=1)
        for name in (*POOLS, "head.weight", "head.bias"):
            np.testing.assert_array_equal(fed.state.tensors[f"prev.{name}"], before[f"prev.{name}"])
        assert fed.state.tensors["counted"].tolist() == [7, 6, 0, 12, 6]

    def test_without_replay_nothing_previous_is_stored(self):
        fed = federation(replay_ratio=0)
        fed.round()
        fed.open(TASKS[1])
        assert not any(name.startswith("prev.") for name in fed.state.tensors)
        fed.round()

    def test_tasks_cannot_open_out_of_order(self):
        with pytest.raises(AssertionError, match="one after the other"):
            federation(task=TASKS[1])

    def test_more_classes_than_announced_is_a_configuration_error(self):
        fed = federation(total_classes=4)
        with pytest.raises(ConfigError, match="total_classes = 4, but the run now has 5 classes"):
            fed.open(TASKS[1])


class TestAverage:
    @pytest.mark.parametrize(
        ("options", "share", "weights"),
        [
            ({}, 1.0, [1 / 3, 1 / 3, 1 / 3]),
            ({"average": "samples"}, 1.0, [8 / 13, 1 / 13, 4 / 13]),
            ({"average": "samples"}, 0.4, [0.4, 0.2, 0.4]),  # 0.62 and then 0.48 are capped
        ],
    )
    def test_without_distillation_pools_and_rows_are_means(self, options, share, weights):
        clients = [toy_images({0: 6, 1: 2}, 1), toy_images({0: 1}, 2), toy_images({1: 4}, 3)]
        fed = federation(clients, distill="none", max_weight_share=share, **options)
        updates = uploads(fed)
        after = fed.aggregate("train", updates).tensors
        for name in (*POOLS, "head.weight", "head.bias"):
            stack = np.stack([u.payload.tensors[name].astype(np.float64) for u in updates])
            np.testing.assert_allclose(after[name], np.tensordot(weights, stack, 1), atol=1e-6)

    def test_past_rows_change_by_distillation_alone(self):
        for distill, changes in (("none", False), ("prompts", False), ("head", True)):
            fed = federation(distill=distill)
            fed.round()
            fed.open(TASKS[1])
            before = fed.state.tensors["head.weight"][:3]
            fed.round()
            assert (not np.array_equal(fed.state.tensors["head.weight"][:2], before[:2])) == changes


class TestDistillation:
    def test_repairs_what_it_is_asked_to(self):
        states = {}
        for distill in ("none", "prompts", "head", "both"):
            fed = federation(distill=distill)
            states[distill] = fed.aggregate("train", uploads(fed)).tensors
        same = {
            (d, n): np.array_equal(states[d][n], states["none"][n])
            for d in ("prompts", "head", "both")
            for n in ("prompt.0", "key.1", "head.weight", "head.bias")
        }
        for (distill, name), equal in same.items():
            part = "head" if name.startswith("head") else "prompts"
            assert equal == (distill not in ("both", part)), (distill, name)

    def test_brings_the_server_nearer_to_what_its_teachers_say(self):
        """The prompt loss falls over the steps in every block, and so does the head's."""
        fed = federation(distillation_steps=60, lr_distillation=3e-3, generator_steps=20)
        fed.round()
        fed.open(TASKS[1])
        fed.progress.clear()
        fed.aggregate("train", uploads(fed))
        losses = [p.loss for p in fed.progress][-180:]
        for part in (losses[:60], losses[60:120], losses[120:]):
            assert np.mean(part[-15:]) < np.mean(part[:15])

    def test_the_previous_server_holds_the_prompts(self):
        """The paper's main ablation, on the server: without replay the prompts drift further."""
        strong = {"distillation_steps": 60, "lr_distillation": 1e-2, "generator_steps": 10}
        fed = federation(**strong)
        fed.round()
        fed.open(TASKS[1])
        previous = {n: fed.state.tensors[f"prev.{n}"] for n in POOLS}
        updates = uploads(fed)
        z = np.random.default_rng(0).normal(size=(20, DIM))
        gaps = {}
        for ratio in (4.0, 0.0):
            fed.hparams = fed.hparams.model_copy(update={"replay_ratio": ratio})
            after = fed.aggregate("train", updates).tensors
            gaps[ratio] = sum(prompt_gap(after, [previous], z, np.ones((20, 1)), b) for b in (0, 1))
        assert gaps[4.0] < 0.7 * gaps[0.0]

    def test_one_client_alone_keeps_its_prompts(self):
        fed = federation(CLIENTS[:1])
        sent = fed.upload("train", 0)
        after = fed.aggregate("train", UpdateList.of([Update(client_id(0), sent)])).tensors
        for name in POOLS:
            np.testing.assert_array_equal(after[name], sent.tensors[name])

    def test_order_of_clients_changes_nothing(self):
        fed = federation(distillation_steps=10, generator_steps=10)
        sent = [u.payload for u in uploads(fed)]
        states = [
            fed.aggregate(
                "train", UpdateList.of(Update(client_id(i), sent[j]) for i, j in enumerate(order))
            )
            for order in ((0, 1, 2), (2, 0, 1))
        ]
        for name, array in states[0].tensors.items():
            np.testing.assert_allclose(states[1].tensors[name], array, atol=1e-7)

    def test_the_round_draws_its_own_latents(self):
        fed = federation()
        updates = uploads(fed)
        one, same, other = (fed.aggregate("train", updates, r).tensors for r in (0, 0, 1))
        np.testing.assert_array_equal(one["head.weight"], same["head.weight"])
        assert not np.array_equal(one["head.weight"], other["head.weight"])

    def test_counts_its_steps(self):
        fed = Federation.of("hepco", CLIENTS, **SMALL)
        fed.run(TASKS[0])
        fed.run(TASKS[1])
        fed.open(make_tasks([0, 1, 2], [5, 4], [7, 8])[2])
        fed.clients = [toy_images({7: 2, 8: 2})]
        updates = uploads(fed)
        for steps, old in (("growing", 4 + 100), ("fixed", 4)):
            fed.hparams = fed.hparams.model_copy(update={"old_steps": steps})
            fed.progress.clear()
            fed.aggregate("train", updates)
            total = 4 + old + 3 * (2 + 1)
            assert [p.done for p in fed.progress] == list(range(1, total + 1))
            assert {p.total for p in fed.progress} == {total}

    @pytest.mark.parametrize("options", [{"distill": "none"}, {"replay_ratio": 0.0}])
    def test_without_replay_no_previous_server_is_kept(self, options):
        fed = Federation.of("hepco", CLIENTS, **{**SMALL, **options})
        for task in TASKS:
            fed.run(task)
        assert not [name for name in fed.state.tensors if name.startswith("prev.")]
        assert fed.predictor().classes


class TestTeachers:
    def test_clients_teach_their_classes_with_their_own_rows(self, monkeypatch):
        fed = federation()
        updates = uploads(fed)
        (new,) = sources_of(fed, updates, monkeypatch)
        t = new.teachers
        np.testing.assert_allclose(t.shares, [[6 / 7, 1 / 3], [1 / 7, 0], [0, 2 / 3]])
        np.testing.assert_allclose(t.labels, [7 / 13, 6 / 13])
        for k, update in enumerate(updates):
            np.testing.assert_array_equal(
                t.heads.weight[k].numpy(), update.payload.tensors["head.weight"][:2]
            )
        assert [pack(Payload(m)) for m in new.models()] == [pack(u.payload) for u in updates]

    def test_the_previous_server_teaches_past_classes_by_all_their_images(self, monkeypatch):
        fed = federation()
        fed.round()
        fed.round(round_=1)
        final = fed.state.tensors["head.weight"]
        fed.open(TASKS[1])
        updates = uploads(fed)
        new, old = sources_of(fed, updates, monkeypatch)
        assert old.batch == 4
        np.testing.assert_allclose(old.teachers.labels, [7 / 13, 6 / 13, 0, 0])
        np.testing.assert_allclose(new.teachers.labels, [0, 0, 6 / 9, 3 / 9])
        np.testing.assert_array_equal(old.teachers.heads.weight[0, :2].numpy(), final[:2])
        assert old.teachers.shares.tolist() == [[1, 1, 1, 1]]
        # a client's past rows are those that the round began with
        np.testing.assert_array_equal(new.teachers.heads.weight[1, :2].numpy(), final[:2])

    def test_a_class_that_nobody_has_now_is_taught_by_the_rounds_start(self, monkeypatch):
        fed = federation()
        fed.round()
        start = fed.state.tensors
        fed.clients = [CLIENTS[0].of([0, 5])]
        updates = uploads(fed)
        (new,) = sources_of(fed, updates, monkeypatch)
        np.testing.assert_allclose(new.teachers.shares, [[1, 0], [0, 1]])
        np.testing.assert_allclose(new.teachers.labels, [6 / 12, 6 / 12])
        np.testing.assert_array_equal(
            new.teachers.heads.weight[1].numpy(), start["head.weight"][:2]
        )
        assert np.array_equal(list(new.models())[1]["key.0"], start["key.0"])
        after = fed.aggregate("train", updates)
        assert after.tensors["recent"].tolist() == [6, 6, 0]
        assert after.tensors["counted"].tolist() == [13, 6, 0]

    def test_the_row_of_a_class_nobody_ever_had_is_only_averaged(self):
        rows = []
        for distill in ("none", "both"):
            fed = federation(distill=distill)
            rows.append(fed.aggregate("train", uploads(fed)).tensors["head.weight"][2])
        np.testing.assert_array_equal(rows[0], rows[1])

    def test_withheld_counts_are_taken_as_spread_evenly(self, monkeypatch):
        """The client with 8 images has 8/3 of each class of the task, the others 1/3 and 4/3."""
        fed = federation(send_counts=False)
        updates = uploads(fed)
        assert not any("count" in u.payload.tensors for u in updates)
        (new,) = sources_of(fed, updates, monkeypatch)
        np.testing.assert_allclose(new.teachers.shares, [[8 / 13] * 3, [1 / 13] * 3, [4 / 13] * 3])
        np.testing.assert_allclose(new.teachers.labels, [1 / 3] * 3)
        fed.state = fed.aggregate("train", updates)
        assert fed.state.tensors["counted"].tolist() == [4, 4, 4]
        assert fed.predictor().classes == (0, 1, 2)

    def test_some_may_withhold_their_counts(self, monkeypatch):
        fed = federation()
        *told, last = uploads(fed)
        rest = {n: a for n, a in last.payload.tensors.items() if n != "count"}
        mixed = UpdateList.of([*told, Update(last.client, Payload(rest))])
        (new,) = sources_of(fed, mixed, monkeypatch)
        counts = np.array([[6, 2, 0], [1, 0, 0], [4 / 3] * 3])
        np.testing.assert_allclose(new.teachers.shares, counts / counts.sum(0))

    def test_no_client_fills_the_latents_by_inflated_counts(self, monkeypatch):
        clients = [toy_images({0: 40}, 1), toy_images({1: 2}, 2), toy_images({1: 2}, 3)]
        fed = federation(clients, max_weight_share=0.5)
        (new,) = sources_of(fed, uploads(fed), monkeypatch)
        np.testing.assert_allclose(new.teachers.labels, [0.5, 0.5])

    @pytest.mark.parametrize("labels", ["counts", "uniform"])
    def test_past_classes_without_any_image_are_never_replayed(self, labels, monkeypatch):
        fed = federation(labels=labels)
        fed.round()
        fed.open(TASKS[1])
        _, old = sources_of(fed, uploads(fed), monkeypatch)
        assert old.teachers.labels[2:].tolist() == [0, 0]
        fed = federation(clients=[CLIENTS[0].of([5])], labels=labels)
        fed.round()  # nobody has anything of the first task
        fed.open(TASKS[1])
        assert len(sources_of(fed, uploads(fed), monkeypatch)) == 1

    def test_more_teachers_are_opened_block_by_block(self, monkeypatch):
        """No more than one block of all clients' pools is stacked at a time."""
        opened, alive = [], []
        original = consolidation._block

        def block_of(models, block, *rest):
            if block not in opened:
                assert [ref() for ref in alive if ref() is not None] == []
            opened.append(block)
            pools = original(models, block, *rest)
            alive.append(weakref.ref(pools.prompts))
            return pools

        monkeypatch.setattr(consolidation, "_block", block_of)
        fed = federation()
        fed.aggregate("train", uploads(fed))
        assert opened == [0, 0, 1, 1]  # the server's and the teachers', per block


def test_the_state_it_was_given_stays_as_it_was():
    fed = federation()
    fed.round()
    fed.open(TASKS[1])
    updates = uploads(fed)
    before = [pack(fed.state), *(pack(u.payload) for u in updates)]
    fed.aggregate("train", updates)
    assert [pack(fed.state), *(pack(u.payload) for u in updates)] == before
