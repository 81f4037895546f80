"""HGP's drawing, store, mixture and rebalancing against definitions, and its edge cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from adapters.hgp_reference import cross_entropy
from adapters.kit import DIM, client_id
from fcil_adapters.contract import State
from fcil_adapters.contract.registry import make_hparams
from fcil_adapters.methods.hgp import METHOD
from fcil_adapters.toolkit.gaussians.gaussian import describe
from fcil_adapters.toolkit.gaussians.mixture import make_mixture
from fcil_adapters.toolkit.gaussians.rebalance import head_loss, rebalance
from fcil_adapters.toolkit.gaussians.store import (
    ClassEntry,
    entry_tensors,
    merge_entries,
    read_entries,
)
from fcil_adapters.toolkit.prompts.initial import draw_pool, orthonormal_rows


def rng(seed=0):
    return np.random.default_rng(seed)


def stream(seed=0):
    return torch.Generator().manual_seed(seed)


def entry(task, label, k, n, form="lowrank", seed=0):
    x = rng([task, label, k, n, seed]).normal(size=(n, DIM)) + label
    return ClassEntry(task, label, client_id(k), describe(x, form, 3))


class TestDrawing:
    def test_rows_are_orthonormal_and_orthogonal_to_trained_ones(self):
        past = [rng(1).normal(size=(3, 4, DIM)), rng(2).normal(size=(3, 4, DIM))]
        new = draw_pool(rng(), (5, 4, DIM), past).reshape(5, -1)
        np.testing.assert_allclose(new @ new.T, np.eye(5), atol=1e-6)
        assert np.abs(new @ np.concatenate(past).reshape(6, -1).T).max() < 1e-5

    @pytest.mark.parametrize(("before", "new"), [(0, 20), (12, 10), (16, 4), (30, 3), (15, 40)])
    def test_without_room_new_sets_begin(self, before, new):
        past = [rng(1).normal(size=(before, DIM))]
        rows = orthonormal_rows(rng().normal(size=(new, DIM)), past)
        assert rows.shape == (new, DIM)
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-9)
        room = max(DIM - before, 0)
        if room and before:
            assert np.abs(rows[:room] @ past[0].T).max() < 1e-9
        second = rows[room : room + DIM]
        np.testing.assert_allclose(second @ second.T, np.eye(len(second)), atol=1e-9)

    def test_repeated_past_rows_take_one_direction(self):
        past = [np.repeat(rng(1).normal(size=(1, DIM)), 20, 0), np.zeros((3, DIM))]
        rows = orthonormal_rows(rng().normal(size=(DIM - 1, DIM)), past)
        assert np.abs(rows @ past[0].T).max() < 1e-9


class TestStore:
    def test_new_entries_replace_those_of_the_same_client_and_class_alone(self):
        old = [entry(0, 4, 0, 3), entry(0, 4, 1, 3), entry(0, 2, 1, 3)]
        new = [entry(0, 4, 1, 5), entry(0, 2, 0, 5)]
        merged = merge_entries(old, new, (4, 2), drop_stale=False)
        assert [(e.label, e.client[0], e.gaussian.count) for e in merged] == [
            (4, "a", 3), (4, "b", 5), (2, "a", 5), (2, "b", 3),
        ]  # fmt: skip
        assert merge_entries(old, new, (4, 2), drop_stale=True) == [new[0], new[1]]

    def test_a_class_that_nobody_has_now_is_not_stale(self):
        old = [entry(0, 4, 0, 3), entry(0, 2, 1, 3)]
        new = [entry(0, 4, 1, 5)]
        assert merge_entries(old, new, (4, 2), drop_stale=True) == [new[0], old[1]]
        assert merge_entries(old, [], (4, 2), drop_stale=True) == old

    def test_order_of_arrival_does_not_matter(self):
        many = [entry(0, c, k, 3) for c in (1, 0) for k in (2, 0, 1)]
        one = merge_entries([], many, (0, 1), drop_stale=False)
        assert one == merge_entries([], many[::-1], (0, 1), drop_stale=False)

    def test_survives_the_state(self):
        entries = [entry(1, 4, 0, 1), entry(1, 4, 1, 7), entry(1, 2, 1, 30)]
        state = State({**entry_tensors(entries, 1, DIM), **entry_tensors([], 2, DIM)})
        got = read_entries(state, [1, 2])
        assert [(e.task, e.label, e.client) for e in got] == [
            (e.task, e.label, e.client) for e in entries
        ]
        for one, other in zip(entries, got, strict=True):
            np.testing.assert_allclose(
                other.gaussian.covariance(), one.gaussian.covariance(), atol=1e-5
            )


class TestMixture:
    ENTRIES = (entry(0, 5, 0, 6), entry(0, 5, 1, 2), entry(0, 7, 1, 8), entry(1, 3, 0, 4))

    def test_weights_are_shares_of_the_images(self):
        mixture = make_mixture(self.ENTRIES, (5, 7, 3), "counts")
        assert mixture.classes == (5, 7, 3)
        np.testing.assert_allclose(mixture.omega, [8 / 20, 8 / 20, 4 / 20])
        np.testing.assert_allclose(mixture.pi[0], [6 / 8, 2 / 8])
        np.testing.assert_allclose(mixture.pi[1], [1])
        means = [e.gaussian.mean for e in self.ENTRIES]
        np.testing.assert_allclose(mixture.mean(5), (6 * means[0] + 2 * means[1]) / 8)

    def test_uniform_classes(self):
        mixture = make_mixture(self.ENTRIES, (5, 7, 3), "uniform")
        np.testing.assert_allclose(mixture.omega, [1 / 3] * 3)
        np.testing.assert_allclose(mixture.pi[0], [6 / 8, 2 / 8])

    def test_classes_without_entry_or_not_asked_for_are_left_out(self):
        assert make_mixture(self.ENTRIES, (9, 5), "counts").classes == (5,)
        assert make_mixture([], (9, 5), "counts").classes == ()

    @pytest.mark.parametrize("form", ["full", "lowrank", "diag"])
    def test_samples_have_the_moments_of_both_tiers(self, form):
        entries = [entry(0, 5, 0, 60, form), entry(0, 5, 1, 20, form), entry(0, 7, 1, 20, form)]
        s = 3.0
        mixture = make_mixture(entries, (7, 5), "counts")
        x, columns = (t.numpy() for t in mixture.draw(200_000, s, rng(), stream()))
        np.testing.assert_allclose(np.bincount(columns) / 200_000, [0.2, 0.8], atol=0.005)
        g = [e.gaussian for e in entries[:2]]
        E = 0.75 * g[0].mean + 0.25 * g[1].mean
        second = sum(
            p * (s * v.covariance() + np.outer(v.mean, v.mean))
            for p, v in zip((0.75, 0.25), g, strict=True)
        )
        own = x[columns == 1].astype(np.float64)
        np.testing.assert_allclose(own.mean(0), E, atol=0.03)
        np.testing.assert_allclose(np.cov(own, rowvar=False), second - np.outer(E, E), atol=0.1)

    def test_draws_depend_on_the_generator_alone(self):
        mixture = make_mixture(self.ENTRIES, (5, 7, 3), "counts")
        seeds = ((1, 1), (1, 1), (1, 2))
        one, same, other = (mixture.draw(50, 1.0, rng(a), stream(b))[0] for a, b in seeds)
        assert torch.equal(one, same)
        assert not torch.equal(one, other)

    def test_a_capped_client_neither_rules_a_class_nor_the_choice_of_classes(self):
        big = replace(self.ENTRIES[0].gaussian, count=10**9)
        entries = [replace(self.ENTRIES[0], gaussian=big), *self.ENTRIES[1:]]
        free = make_mixture(entries, (5, 7, 3), "counts")
        assert free.omega[0] > 0.999
        capped = make_mixture(entries, (5, 7, 3), "counts", 0.5)
        np.testing.assert_allclose(capped.pi[0], [0.5, 0.5], atol=1e-6)
        # Of task 0, client a has as many as client b, whose 10 are 2 of class 5 and 8 of class
        # 7; task 1 keeps its share.
        totals = np.array([10 + 2, 8, 4])
        np.testing.assert_allclose(capped.omega, totals / totals.sum(), rtol=1e-6)


class TestSingleImages:
    """The order of the substitutes of a missing covariance."""

    def borrowed(self, *others):
        lonely = entry(0, 5, 0, 1)
        mixture = make_mixture([lonely, *others], (5, 6, 7, 9), "counts")
        g = mixture.gaussians[0][0]
        np.testing.assert_array_equal(g.mean, lonely.gaussian.mean)
        assert g.count == 1
        return g.covariance()

    def average(self, *entries):
        return sum(e.gaussian.count * e.gaussian.covariance() for e in entries) / sum(
            e.gaussian.count for e in entries
        )

    def test_first_the_same_class_on_other_clients(self):
        same = [entry(0, 5, 1, 4), entry(0, 5, 2, 9)]
        got = self.borrowed(*same, entry(0, 6, 0, 8), entry(0, 5, 3, 1))
        np.testing.assert_allclose(got, self.average(*same), atol=1e-9)

    def test_then_other_classes_of_the_client(self):
        own = [entry(0, 6, 0, 8), entry(0, 7, 0, 2)]
        got = self.borrowed(*own, entry(0, 6, 1, 5), entry(1, 9, 0, 5))
        np.testing.assert_allclose(got, self.average(*own), atol=1e-9)

    def test_then_the_task(self):
        others = [entry(0, 6, 1, 8), entry(0, 7, 2, 2)]
        got = self.borrowed(*others, entry(1, 9, 0, 5))
        np.testing.assert_allclose(got, self.average(*others), atol=1e-9)

    def test_at_last_a_small_sphere(self):
        got = self.borrowed(entry(0, 6, 1, 1), entry(1, 9, 0, 5))
        np.testing.assert_allclose(got, 1e-4 * np.eye(DIM))


class TestRebalance:
    def start(self, C=3):
        generator = torch.Generator().manual_seed(0)
        return torch.randn(C, DIM, generator=generator), torch.randn(C, generator=generator)

    def run(self, draw=None, **kw):
        h = make_hparams(METHOD, {"server_batch": 8, "server_epochs": 3, **kw})
        x, y = rng().normal(size=(20, DIM)).astype(np.float32), np.arange(20) % 3
        return rebalance(
            h,
            *self.start(),
            draw or (lambda _: (torch.tensor(x), torch.tensor(y))),
            torch.Generator().manual_seed(1),
            lambda *_: None,
        )

    @pytest.mark.parametrize("loss", ["ce", "ce_logit_norm"])
    def test_is_sgd_with_momentum_and_a_cosine_over_the_epochs(self, loss):
        x, y = rng().normal(size=(20, DIM)).astype(np.float32), np.arange(20) % 3
        W, b = (t.double().numpy() for t in self.start())
        vW, vb = np.zeros_like(W), np.zeros_like(b)
        order = torch.Generator().manual_seed(1)
        for epoch in range(3):
            lr = 0.01 * (1 + np.cos(np.pi * epoch / 3)) / 2
            for i in torch.split(torch.randperm(20, generator=order), 8):
                xi, yi = x[i].astype(np.float64), y[i]
                dW, db = numeric_gradient(W, b, xi, yi, loss)
                vW, vb = 0.9 * vW + dW, 0.9 * vb + db
                W, b = W - lr * vW, b - lr * vb
        weight, bias = self.run(lambda _: (torch.tensor(x), torch.tensor(y)), head_loss=loss)
        np.testing.assert_allclose(weight, W, atol=1e-4)
        np.testing.assert_allclose(bias, b, atol=1e-4)

    def test_samples_are_renewed_each_epoch_or_once(self):
        for resample, expected in (("epoch", [0, 1, 2]), ("round", [0])):
            asked = []

            def draw(epoch, asked=asked):
                asked.append(epoch)
                return torch.randn(6, DIM), torch.arange(6) % 3

            self.run(draw, resample=resample)
            assert asked == expected

    def test_the_start_is_not_modified(self):
        weight, bias = self.start()
        h = make_hparams(METHOD, {})
        samples = torch.ones(6, DIM), torch.arange(6) % 3
        rebalance(h, weight, bias, lambda _: samples, torch.Generator(), lambda *_: None)
        assert torch.equal(weight, self.start()[0])
        assert torch.equal(bias, self.start()[1])

    def test_logits_of_zero_give_no_nan(self):
        h = make_hparams(METHOD, {"head_loss": "ce_logit_norm"})
        logits = torch.zeros(2, 3, requires_grad=True)
        head_loss(h, logits, torch.tensor([0, 1])).backward()
        assert torch.isfinite(logits.grad).all()


def numeric_gradient(W, b, x, y, loss):
    def value(W, b):
        scores = x @ W.T + b
        if loss == "ce_logit_norm":
            scores = scores / (0.1 * np.linalg.norm(scores, axis=1, keepdims=True))
        return cross_entropy(scores, y)

    step, gradients = 1e-6, []
    for array, at in ((W, lambda v: value(v, b)), (b, lambda v: value(W, v))):
        gradient = np.zeros_like(array)
        for i in np.ndindex(array.shape):
            up, down = array.copy(), array.copy()
            up[i] += step
            down[i] -= step
            gradient[i] = (at(up) - at(down)) / (2 * step)
        gradients.append(gradient)
    return gradients
