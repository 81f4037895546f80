"""FedAvg-LoRA, FFA-LoRA and the room that LoRA methods share, against float64 definitions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from adapters.kit import Federation, client_id, make_tasks, toy_backbone, toy_images
from adapters.lora_reference import cross_entropy, parameters, plain
from fcil_adapters.contract import State, Update
from fcil_adapters.numerics.update_list import UpdateList
from fcil_adapters.toolkit.lora.client import LoraSetup, Teacher, train
from fcil_adapters.toolkit.lora.manifest import lora_method, read_parts
from fcil_adapters.toolkit.lora.options import CrossEntropyHparams
from fcil_protocol.errors import SchemaMismatch
from fcil_protocol.payloads.payload import pack

TASKS = make_tasks([0, 1, 2], [5, 4])
CLIENTS = [toy_images({0: 6, 1: 2, 5: 2}, 1), toy_images({0: 1, 5: 3}, 2),
           toy_images({1: 4, 4: 2}, 3)]  # fmt: skip
FAST = {"rank": 2, "blocks": [0, 1], "epochs": 1, "lr_head": 0.1, "lr_lora": 0.05,
        "augment": "none"}  # fmt: skip


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


def federation(name, backbone, clients=CLIENTS, **kw) -> Federation:
    return Federation.of(name, clients, backbone, **{**FAST, **kw})


def uploads(fed) -> UpdateList:
    sent = [Update(client_id(k), fed.upload("train", k)) for k in range(len(fed.clients))]
    return UpdateList.of(sent)


@pytest.mark.parametrize("name", ["fedavg_lora", "ffa_lora"])
def test_a_step_is_sgd_on_the_cross_entropy_over_the_tasks_columns(name, backbone):
    """All images in one batch: start minus step size times the gradient of the definition."""
    fed = federation(name, backbone, batch_size=64, epochs=3)
    fed.run(TASKS[0])  # B is no longer zero, so that A has a gradient too
    fed.hparams = fed.hparams.model_copy(update={"epochs": 1})
    fed.open(TASKS[1])
    values = parameters(fed.parts())
    loss = cross_entropy(backbone, values, CLIENTS[1].of((5, 4)), (5, 4))
    gradients = dict(zip(values, torch.autograd.grad(loss, tuple(values.values())), strict=True))
    sent = fed.upload("train", 1).tensors
    moved = {n for n in values if n in sent}
    assert {n[-1] for n in moved if n.startswith("lora")} == (
        {"A", "B"} if name == "fedavg_lora" else {"B"}
    )
    for n in moved:
        lr = FAST["lr_lora" if n.startswith("lora") else "lr_head"]
        step = (-lr * gradients[n]).detach().numpy()
        start = values[n].detach().numpy()
        assert np.abs(step).max() > 0
        np.testing.assert_allclose(sent[n] - start, step, atol=2e-3 * np.abs(step).max() + 1e-8)


def test_fed_talora_without_its_residual_is_fedavg_lora_to_the_byte(backbone):
    both = [federation(n, backbone, **kw)
            for n, kw in (("fedavg_lora", {}), ("fed_talora", {"residual": "off"}))]  # fmt: skip
    for task in TASKS:
        for fed in both:
            fed.run(task, rounds=2)
        one, other = (pack(State(fed.state.tensors)) for fed in both)
        assert one == other


def products(payloads, weights, place) -> tuple[np.ndarray, np.ndarray]:
    """The weighted mean of B_k A_k, and the product of the means."""
    A, B = (plain(payloads, f"lora.{place}.{m}") for m in "AB")
    return (np.einsum("k,kor,kri->oi", weights, B, A),
            np.tensordot(weights, B, 1) @ np.tensordot(weights, A, 1))  # fmt: skip


def test_averages_of_b_alone_are_exact_and_those_of_both_factors_are_not(backbone):
    errors = {}
    for name in ("fedavg_lora", "ffa_lora"):
        fed = federation(name, backbone, epochs=2, lr_lora=0.5)
        fed.run(TASKS[0])
        fed.open(TASKS[1])
        before = fed.state.tensors
        updates = uploads(fed)
        weights = np.array(updates.samples) / sum(updates.samples)
        full = [
            State({**{n: a for n, a in before.items() if n.startswith("lora.")},
                   **u.payload.tensors}) for u in updates
        ]  # fmt: skip
        after = fed.aggregate("train", updates)
        worst = 0.0
        for place in ("0.q", "1.v", "0.fc1", "1.fc2"):
            exact, of_means = products(full, weights, place)
            got = after.f32(f"lora.{place}.B").astype(float) @ after.f32(f"lora.{place}.A")
            np.testing.assert_allclose(got, of_means, atol=1e-6)
            worst = max(worst, float(np.abs(got - exact).max() / np.abs(exact).max()))
        errors[name] = worst
    assert errors["ffa_lora"] < 1e-6
    assert errors["fedavg_lora"] > 1e-4


def test_frozen_factors_are_sent_once_and_never_back(backbone):
    fed, both = federation("ffa_lora", backbone), federation("fedavg_lora", backbone)
    for task in TASKS:
        for f in (fed, both):
            f.run(task)
    fixed = fed.parts()["fixed"]
    assert {n[-1] for n in fixed.tensors} == {"A"}
    drawn = federation("ffa_lora", backbone)
    drawn.open(TASKS[0])
    assert pack(drawn.parts()["fixed"]) == pack(fixed)
    lora = [sum(a.nbytes for n, a in f.upload("train", 0).tensors.items() if n[:4] == "lora")
            for f in (fed, both)]  # fmt: skip
    assert 2 * lora[0] == lora[1]


def test_old_classes_are_lost_to_the_loss_over_all_columns(backbone):
    """The plain FedAvg of the tables; with frozen past rows old and new stay comparable."""
    images = toy_images(dict.fromkeys((0, 1, 2, 5, 4), 8), 7)
    old = images.of((0, 1, 2))

    def right(loss) -> float:
        fed = federation("fedavg_lora", backbone, [images], head_loss=loss, epochs=8, lr_lora=0.0)
        for task in TASKS:
            fed.run(task, rounds=3)
        predictor = fed.predictor()
        best = np.array(predictor.classes)[predictor.logits(old.pictures).argmax(1)]
        return float((best == old.labels).mean())

    assert right("current") > right("all")


class TestTeacher:
    """The last task's model as clients see it, whatever becomes of past rows."""

    def method(self, rows):
        class WithTeacher(CrossEntropyHparams):
            @property
            def past_rows(self):
                return rows

            @property
            def keeps_teacher(self):
                return True

        return lora_method("with_teacher", "t", "c", WithTeacher), WithTeacher(**FAST)

    @pytest.mark.parametrize("rows", ["frozen", "together", "none"])
    def test_scores_past_classes_as_the_last_tasks_end_did(self, rows, backbone):
        fed = Federation(*self.method(rows), backbone, CLIENTS)
        fed.run(TASKS[0], rounds=2)
        then = fed.predictor()
        assert then.classes == (0, 1)  # nobody had class 2
        expected = then.logits(CLIENTS[0].pictures)
        fed.open(TASKS[1])
        fed.round()
        parts = fed.parts()
        ctx = fed.context("train")
        teacher = Teacher.of(ctx, read_parts(fed.hparams, parts))
        assert teacher.classes == (0, 1)
        scores = teacher.logits(torch.tensor(CLIENTS[0].pictures))
        np.testing.assert_allclose(scores.numpy(), expected, atol=1e-5)
        fed.round()
        assert pack(fed.parts()["teacher"]) == pack(parts["teacher"])

    def test_is_none_at_first_and_required_later(self, backbone):
        fed = Federation(*self.method("frozen"), backbone, CLIENTS)
        fed.open(TASKS[0])
        assert Teacher.of(fed.context("train"), read_parts(fed.hparams, fed.parts())) is None
        fed.open(TASKS[1])
        parts = fed.parts()
        del parts["teacher"]
        with pytest.raises(SchemaMismatch, match="'teacher'"):
            read_parts(fed.hparams, parts)


@pytest.mark.parametrize("micro", [None, 1])
def test_a_penalty_counts_once_a_step_and_a_loss_once_an_image(micro, backbone):
    """However many pieces a step's images come in."""
    fed = federation("fedavg_lora", backbone, batch_size=64, momentum=0.0, micro_batch=micro)
    fed.open(TASKS[0])
    ctx, data = fed.context("train"), CLIENTS[0].of((0, 1, 2))
    bench = LoraSetup.of(ctx, read_parts(fed.hparams, fed.parts()))
    seen = []

    def loss(one):
        seen.append((len(one.piece.rows), one.images))
        return one.logits[:, 0].sum()  # the mean's gradient to the first bias is 1

    train(ctx, bench, data, loss=loss, penalty=lambda b: 0.5 * (b.bias - 3).square().sum())
    assert seen == ([(8, 8)] if micro is None else [(1, 8)] * 8)
    expected = np.array([-0.1 * (1 - 3), 0.1 * 3, 0.1 * 3])
    np.testing.assert_allclose(bench.bias.detach().numpy(), expected, atol=1e-6)


def test_rows_as_long_as_a_schema_allows_do_not_keep_a_lone_class_from_being_broadcast(backbone):
    """A federation of few clients judges no outliers; its next round must close all the same."""
    fed = federation("fedavg_lora", backbone, max_weight_share=0.5)
    fed.open(TASKS[0])

    def longest(sent):
        rows = np.full_like(sent.f32("head.weight"), 1e4)
        return replace(sent, tensors={**sent.tensors, "head.weight": rows})

    fed.round(alter=longest)
    fed.open(make_tasks([0, 1, 2], [5])[1])
    fed.round()
    row = fed.parts()["current"].f32("head.weight")  # within its schema
    assert np.abs(row).max() == 1e4
