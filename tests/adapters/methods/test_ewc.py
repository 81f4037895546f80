"""EWC: Fisher information and penalty by their definitions, and what they hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from adapters.kit import Federation, client_id, make_tasks, toy_images
from fcil_adapters.contract import Update
from fcil_adapters.methods.ewc import learner
from fcil_adapters.methods.ewc.fisher import squared_gradients
from fcil_adapters.methods.ewc.learner import Held
from fcil_adapters.methods.ewc.parts import IMPORTANCE, LARGEST
from fcil_adapters.numerics.torch_numpy import to_torch
from fcil_adapters.numerics.update_list import UpdateList
from fcil_adapters.toolkit.lora.client import LoraSetup
from fcil_adapters.toolkit.lora.manifest import read_parts
from fcil_protocol.payloads.payload import Payload, pack

SMALL = {"rank": 2, "blocks": [0, 1], "epochs": 2, "batch_size": 4, "augment": "none"}
TASKS = make_tasks([3, 1], [5, 4], [2])
CLIENTS = [toy_images({3: 4, 1: 2, 5: 3, 4: 3, 2: 2}, 1), toy_images({1: 2, 5: 1}, 2)]


def federation(**options):
    fed = Federation.of("ewc", CLIENTS, **{**SMALL, "lr_lora": 0.05, "lr_head": 0.1, **options})
    fed.open(TASKS[0])
    return fed


def trained(**options):
    fed = federation(**options)
    fed.round("train")
    return fed


def bench_of(fed, task):
    return LoraSetup.of(fed.context("finish"), read_parts(fed.hparams, fed.parts()))


@pytest.mark.parametrize("fisher", ["B", "AB"])
def test_the_fisher_information_is_a_sum_over_images_of_their_own_gradients(fisher):
    """One backward pass for each image, in float64, against one pass for all."""
    fed = trained(fisher=fisher, scale=1.5)
    bench = bench_of(fed, TASKS[0])
    images = CLIENTS[0].of(TASKS[0].classes)
    rows = np.array([TASKS[0].classes.index(c) for c in images.labels])
    pixels = to_torch(images.pictures).float()
    found = squared_gradients(bench, pixels, to_torch(rows))
    expected = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in bench.lora.items()}
    for x, row in zip(pixels, rows, strict=True):
        log_p = functional.log_softmax(bench.logits(bench.features(x[None])), 1)[0, row]
        grads = torch.autograd.grad(log_p, list(bench.lora.values()))
        for name, grad in zip(bench.lora, grads, strict=True):
            expected[name] += log_p.exp().detach().double() * grad.double().square()
    assert set(found) == set(expected)
    assert {n.rpartition(".")[2] for n in found} == set(fisher)
    for name, value in expected.items():
        assert value.max() > 0
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-12)


def test_gradients_agree_with_finite_differences():
    bench = bench_of(trained(), TASKS[0])
    images = CLIENTS[0].of([3])
    pixels = to_torch(images.pictures[:1]).float()
    row = torch.zeros(1, dtype=torch.int64)  # class 3
    found = squared_gradients(bench, pixels, row)["1.fc2.B"]
    place = np.unravel_index(int(found.argmax()), found.shape)

    def log_p():
        with torch.no_grad():
            return functional.log_softmax(bench.logits(bench.features(pixels)), 1)[0, 0].double()

    parameter, here = bench.lora["1.fc2.B"], log_p()
    ends = []
    for step in (1e-2, -2e-2):
        parameter.data[place] += step
        ends.append(log_p())
    slope = (ends[0] - ends[1]) / 2e-2
    assert float(found[place]) == pytest.approx(float(here.exp() * slope**2), rel=2e-2)


def test_a_client_sends_the_mean_over_its_images_whatever_the_micro_batch():
    fed = trained()
    whole, small = fed.upload("finish", 0), None
    fed.micro_batch = 2
    small = fed.upload("finish", 0)
    assert whole.i64("n").tolist() == [6]
    for name, array in whole.tensors.items():
        np.testing.assert_allclose(small.tensors[name], array, rtol=1e-4, atol=1e-12)


def test_the_servers_sum_is_that_over_all_images_and_earlier_tasks_fade():
    """F <- gamma F + (1 / N) sum_k F_k."""
    fed = trained(gamma=0.5)
    name = "fisher.0.v.B"
    fresh = []
    for task in TASKS[:2]:
        if task.index:
            fed.open(task)
            fed.round("train")
        sent = [fed.upload("finish", k) for k in range(2)]
        n = np.array([s.i64("n")[0] for s in sent], dtype=np.float64)
        fresh.append(
            sum(k * s.f32(name).astype(np.float64) for k, s in zip(n, sent, strict=True)) / n.sum()
        )
        fed.round("finish")
    fed.open(TASKS[2])
    part = fed.parts()[IMPORTANCE]
    np.testing.assert_allclose(part.f32(name), 0.5 * fresh[0] + fresh[1], rtol=1e-5)


def test_a_task_that_nobody_measured_takes_nothing_from_earlier_ones():
    fed = trained()
    fed.round("finish")
    fed.open(TASKS[1])
    before = fed.parts()[IMPORTANCE].f32("fisher.0.q.B")
    fed.open(TASKS[2])
    assert np.array_equal(fed.parts()[IMPORTANCE].f32("fisher.0.q.B"), before)


def test_a_task_of_one_class_has_no_gradient_and_changes_no_importance():
    fed = trained()
    fed.round("finish")
    fed.open(make_tasks([3, 1], [5])[1])
    before = pack(fed.parts()[IMPORTANCE])
    fed.round("train")
    assert not any(a.any() for n, a in fed.upload("finish", 0).tensors.items() if "fisher" in n)
    fed.round("finish")
    fed.open(make_tasks([3, 1], [5], [2, 4])[2])
    assert pack(fed.parts()[IMPORTANCE]) == before


def test_the_penalty_is_lambda_f_times_the_squared_way_from_the_last_task():
    fed = trained(ewc_lambda=3.0)
    fed.round("finish")
    fed.open(TASKS[1])
    parts, ctx = fed.parts(), fed.context("train")
    received = read_parts(fed.hparams, parts)
    bench = LoraSetup.of(ctx, received)
    held = Held.of(ctx, bench, received, parts)
    assert float(held(bench).detach()) == 0
    expected = 0.0
    generator = torch.Generator().manual_seed(0)
    for name, p in bench.lora.items():
        step = torch.randn(p.shape, generator=generator)
        p.data += step
        fisher = parts[IMPORTANCE].f32(f"fisher.{name}").astype(np.float64)
        expected += float(3 * (fisher * step.numpy().astype(np.float64) ** 2).sum())
    assert float(held(bench).detach()) == pytest.approx(expected, rel=1e-5)


def test_a_large_lambda_holds_what_mattered_and_lets_the_rest_move():
    """Without it everything moves; with it, what earlier tasks are most sensitive to does not."""
    ways = {}
    for weight in (0.0, 1e6):
        fed = trained(ewc_lambda=weight)
        fed.round("finish")
        fed.open(TASKS[1])
        start, fisher = fed.state, fed.parts()[IMPORTANCE]
        fed.round("train")
        moved, matters = [], []
        for name in (n for n in fisher.tensors if n.endswith(".B")):
            lora = name.replace("fisher", "lora")
            moved.append(np.abs(fed.state.f32(lora) - start.f32(lora)).ravel())
            matters.append(fisher.f32(name).ravel())
        moved, matters = np.concatenate(moved), np.concatenate(matters)
        top = matters >= np.quantile(matters, 0.9)
        ways[weight] = moved[top].mean(), moved[~top].mean()
        assert np.isfinite(moved).all()
    assert ways[1e6][0] < 0.2 * ways[0.0][0]
    assert ways[1e6][0] < ways[1e6][1]


def test_a_late_client_is_held_by_the_same_anchor_from_the_parts_alone():
    fed = trained()
    fed.round("finish")
    fed.open(TASKS[1])
    fed.round("train")
    received = read_parts(fed.hparams, fed.parts())
    assert received.teacher is not None
    assert not np.array_equal(received.teacher[0]["lora.0.q.B"], received.lora["lora.0.q.B"])


def test_importance_is_never_negative_on_the_wire():
    fed = trained()
    sent = fed.upload("finish", 0)
    bad = {**sent.tensors, "fisher.0.q.B": -np.ones_like(sent.f32("fisher.0.q.B"))}
    faults = fed.exchanges[1].check(Payload(bad), TASKS[0])
    assert faults == ["'fisher.0.q.B' holds a negative number"]


def test_a_client_sends_no_importance_above_the_bound_of_its_schema(monkeypatch):
    def huge(bench, *_):
        return {n: torch.full(p.shape, 1e9, dtype=torch.float64) for n, p in bench.lora.items()}

    monkeypatch.setattr(learner, "squared_gradients", huge)
    sent = trained().upload("finish", 0)
    largest = max(float(np.max(sent.f32(n))) for n in sent.tensors if n.startswith("fisher"))
    assert largest == LARGEST


def test_the_largest_importance_in_every_task_can_still_be_broadcast():
    """A federation of few clients judges no outliers; its next task must open all the same."""
    fed = Federation.of("ewc", CLIENTS, **SMALL, modules=["q"])
    for task in make_tasks([3, 1], [5, 4], [2, 0], [6, 7]):
        fed.open(task)
        parts = fed.parts()  # within its schema
        fed.round("finish", alter=lambda sent: replace(sent, tensors={
            n: np.full_like(a, 1e4) if n.startswith("fisher") else a
            for n, a in sent.tensors.items()
        }))  # fmt: skip
    assert parts[IMPORTANCE].f32("fisher.0.q.B").max() == 1e4


def test_one_client_of_two_that_measured_is_enough():
    fed = trained()
    only = UpdateList.of([Update(client_id(0), fed.upload("finish", 0))])
    state = fed.aggregate("finish", only)
    sent = fed.upload("finish", 0).f32("fisher.1.fc1.B")
    np.testing.assert_allclose(state.f32("new.fisher.1.fc1.B"), sent, rtol=1e-6)
