"""HePCo's server mathematics against the definitions: weights, generator, objective, distillation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adapters.hepco_reference import SMALL, cosine, generator_loss, log_softmax, prompt_gap
from fcil_adapters.contract.registry import make_hparams
from fcil_adapters.methods.hepco import METHOD, distillation
from fcil_adapters.methods.hepco.distillation import (
    Pools,
    distill_head,
    distill_pools,
    prompt_loss,
)
from fcil_adapters.methods.hepco.generation import Objective, PoolGap
from fcil_adapters.methods.hepco.generator import LatentGenerator, make_latents, train_generator
from fcil_adapters.methods.hepco.teachers import (
    Head,
    Teachers,
    capped_counts,
    label_shares,
    one_hot,
)

K, C, M, L, D, B = 3, 4, 3, 4, 6, 5


def hparams(**kw):
    return make_hparams(METHOD, {**SMALL, **kw})


def model(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "key.0": rng.normal(size=(M, D)),
        "prompt.0": rng.normal(size=(M, L, D)),
        "key.1": rng.normal(size=(M, D)),
        "prompt.1": rng.normal(size=(M, L, D)),
        "head.weight": rng.normal(size=(C, D)),
        "head.bias": rng.normal(size=C),
    }


def head(models) -> Head:
    return Head(
        torch.tensor(np.stack([m["head.weight"] for m in models])),
        torch.tensor(np.stack([m["head.bias"] for m in models])),
    )


def pools(models, block=0) -> Pools:
    return Pools(
        torch.tensor(np.stack([m[f"key.{block}"] for m in models])),
        torch.tensor(np.stack([m[f"prompt.{block}"].reshape(M, -1) for m in models])),
    )


def one(stack: Pools) -> Pools:
    return Pools(stack.keys[0], stack.prompts[0])


CLIENTS, SERVER = [model(k) for k in range(K)], model(9)
SHARES = np.array([[0.5, 0, 0.2, 1], [0.5, 0, 0.3, 0], [0, 1, 0.5, 0]])
LABELS = np.array([0, 3, 2, 1, 2])
Z = np.random.default_rng(5).normal(size=(B, D))


def teachers(shares=SHARES, models=CLIENTS, labels=(0.4, 0.3, 0.2, 0.1)) -> Teachers:
    return Teachers(head(models), torch.tensor(shares), torch.tensor(labels, dtype=torch.float64))


class TestShares:
    """Three clients, three classes; nobody has class 1 now, and 7 images of it were there before."""

    COUNTS = np.array([[6, 0, 0], [2, 0, 3], [0, 0, 1]], dtype=np.float64)
    RECENT = np.array([5, 7, 0], dtype=np.float64)

    def test_per_class_are_the_clients_parts_of_a_class(self):
        shares, labels = label_shares(self.COUNTS, self.RECENT, 5, hparams())
        expected = [[0.75, 0, 0], [0.25, 0, 0.75], [0, 0, 0.25], [0, 1, 0]]
        np.testing.assert_allclose(shares, expected)
        np.testing.assert_allclose(labels, np.array([8, 7, 4]) / 19)

    def test_repo_divides_by_one_total_in_which_absent_classes_count_one(self):
        shares, _ = label_shares(self.COUNTS, self.RECENT, 5, hparams(weights="repo"))
        total = 8 + 1 + 4 + 5
        np.testing.assert_allclose(shares[:3], self.COUNTS / total)
        np.testing.assert_allclose(shares[3], [0, 7 / total, 0])

    def test_none_lets_every_client_teach_every_class_that_is_there(self):
        shares, _ = label_shares(self.COUNTS, self.RECENT, 5, hparams(weights="none"))
        np.testing.assert_array_equal(shares, [[1, 0, 1]] * 3 + [[0, 1, 0]])

    def test_uniform_labels_leave_out_classes_without_a_teacher(self):
        h = hparams(labels="uniform")
        assert label_shares(self.COUNTS, self.RECENT, 5, h)[1] == pytest.approx([1 / 3] * 3)
        never = np.zeros(3)
        shares, labels = label_shares(self.COUNTS, never, 5, h)
        assert labels.tolist() == [0.5, 0, 0.5]
        assert not shares[:, 1].any()
        assert not shares[3].any()

    def test_one_client_cannot_take_more_than_its_share_of_a_label(self):
        shares, _ = label_shares(self.COUNTS, self.RECENT, 5, hparams(), 0.6)
        np.testing.assert_allclose(shares[:, 0], [0.6, 0.4, 0, 0])

    def test_capped_counts_bound_a_client_that_inflates_them(self):
        honest = np.array([[3, 1], [2, 2]])
        np.testing.assert_array_equal(capped_counts(honest, 1.0), honest)
        capped = capped_counts(np.array([[0, 996], [2, 0], [0, 2]]), 0.5)
        np.testing.assert_allclose(capped, [[0, 4], [2, 0], [0, 2]])


class TestGenerator:
    def make(self, seed=0, **kw):
        draws = torch.Generator().manual_seed(seed)
        return LatentGenerator(hparams(**kw), C, D, draws), draws

    def test_is_three_layers_over_noise_and_embedding(self):
        generator, _ = self.make(batch_norm=False)
        noise, own = torch.randn(B, 4).double(), one_hot(torch.tensor(LABELS), C)
        got = generator(noise, own).detach().numpy()
        first, second, last = (x for x in generator.layers if isinstance(x, torch.nn.Linear))
        for b in range(B):
            x = np.concatenate([noise[b].numpy(), generator.embedding[LABELS[b]].detach().numpy()])
            for layer in (first, second):
                x = np.maximum(layer.weight.detach().numpy() @ x + layer.bias.detach().numpy(), 0)
            x = last.weight.detach().numpy() @ x + last.bias.detach().numpy()
            np.testing.assert_allclose(got[b], x, atol=1e-12)

    def test_norms_use_the_batch_in_training_and_running_statistics_after(self):
        generator, _ = self.make()
        noise, own = torch.randn(B, 4).double(), one_hot(torch.tensor(LABELS), C)
        linear, norm = generator.layers[0], generator.layers[1]
        x = linear(torch.cat([noise, own @ generator.embedding], 1))
        generator.train()
        expected = (x - x.mean(0)) / (x.var(0, unbiased=False) + norm.eps).sqrt()
        torch.testing.assert_close(norm(x), expected)
        generator(noise, own)
        generator.eval()
        alone = generator(noise[:1], own[:1])
        torch.testing.assert_close(alone, generator(noise, own)[:1])

    def test_start_depends_on_its_draws_alone(self):
        torch.manual_seed(1)
        a, _ = self.make(3)
        torch.manual_seed(2)
        b, _ = self.make(3)
        c, _ = self.make(4)
        for x, y in zip(a.parameters(), b.parameters(), strict=True):
            assert torch.equal(x, y)
        assert not torch.equal(a.embedding, c.embedding)
        assert a.layers[0].weight.abs().max() <= 1 / np.sqrt(8)

    def test_latents_have_labels_with_a_teacher_only(self):
        generator, draws = self.make()
        some = teachers(labels=(0.5, 0.0, 0.5, 0.0))
        latents = make_latents(generator, some, 50, 6, draws)
        assert latents.z.shape == (50, 6, D)
        counts = latents.own.sum((0, 1))
        assert counts[[1, 3]].sum() == 0
        assert counts[0].item() == pytest.approx(150, abs=40)
        assert not latents.z.requires_grad

    def test_latents_come_from_running_statistics_whatever_their_number(self):
        """In training mode a batch of one would be refused, and others would change a latent."""
        generator, draws = self.make()
        assert torch.isfinite(make_latents(generator, teachers(), 1, 1, draws).z).all()

    def test_training_lowers_the_objective_and_fits_the_labels(self):
        generator, draws = self.make(hidden=[32, 32])
        seen = []
        h = hparams(lambda_kl=0.0, lr_generator=1e-2, server_batch_size=32)
        every = teachers(np.full((K, C), 1 / K), [CLIENTS[0]] * K, (0.25,) * 4)
        objective = Objective(h, every, Head(*_server_head()), (), 1)
        train_generator(generator, objective, every, 60, h, draws, seen.append)
        assert len(seen) == 60
        assert np.mean(seen[-5:]) < 0.3 * np.mean(seen[:5])
        latents = make_latents(generator, every, 1, 100, draws)
        right = every.heads.logits(latents.z[0])[0].argmax(1) == latents.own[0].argmax(1)
        assert right.double().mean() > 0.8


def _server_head():
    return torch.tensor(SERVER["head.weight"]), torch.tensor(SERVER["head.bias"])


class TestObjective:
    OPTIONS = (
        {},
        {"kl": "student_teacher", "lambda_kl": 0.4},
        {"detach_query": False, "mse_reduction": "mean", "lambda_mse": 0.7},
        {"detach_query": False, "mse_reduction": "mean", "lambda_kl": 0.0},
    )

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_equals_the_definition(self, options):
        h = hparams(**options)
        gaps = [
            PoolGap.of(
                *(getattr(one(pools([SERVER], b)), n) for n in ("keys", "prompts")),
                pools(CLIENTS, b).keys,
                pools(CLIENTS, b).prompts,
            )
            for b in (0, 1)
            if not h.detach_query
        ]
        objective = Objective(h, teachers(), Head(*_server_head()), gaps, L * D)
        got = objective(torch.tensor(Z), one_hot(torch.tensor(LABELS), C))
        expected = generator_loss(
            Z, LABELS, SHARES, CLIENTS, SERVER, CLIENTS, (0, 1), h.model_dump()
        )
        assert got.item() == pytest.approx(expected, rel=1e-10)

    def test_disagreement_is_zero_where_the_teachers_are_the_server(self):
        """K = 1 in a round: what remains is the cross-entropy."""
        same = teachers(np.ones((1, C)), [SERVER])
        gap = PoolGap.of(
            *(getattr(one(pools([SERVER])), n) for n in ("keys", "prompts")),
            pools([SERVER]).keys,
            pools([SERVER]).prompts,
        )
        h = hparams(detach_query=False, mse_reduction="mean", lambda_mse=5.0, lambda_kl=5.0)
        own = one_hot(torch.tensor(LABELS), C)
        got = Objective(h, same, Head(*_server_head()), [gap], L * D)(torch.tensor(Z), own)
        entropy = -sum(
            log_softmax(SERVER["head.weight"] @ z + SERVER["head.bias"])[y]
            for z, y in zip(Z, LABELS, strict=True)
        )
        assert got.item() == pytest.approx(entropy, rel=1e-10)

    def test_a_client_without_the_label_has_no_say(self):
        changed = [CLIENTS[0], model(77), model(78)]
        only_first = np.array([[1.0] * C, [0] * C, [0] * C])
        own = one_hot(torch.tensor(LABELS), C)
        values = [
            Objective(hparams(), teachers(only_first, m), Head(*_server_head()), (), 1)(
                torch.tensor(Z), own
            ).item()
            for m in (CLIENTS, changed)
        ]
        assert values[0] == pytest.approx(values[1], rel=1e-12)


class TestPrompts:
    WEIGHTS = SHARES[:, LABELS].T  # (B, K)

    def loss(self, server):
        tensors = [torch.tensor(a, requires_grad=True) for a in server]
        loss = prompt_loss(
            Pools(*tensors), pools(CLIENTS), torch.tensor(Z), torch.tensor(self.WEIGHTS)
        )
        return loss, tensors

    def test_loss_is_the_definition_up_to_a_constant(self):
        """Two servers: the difference of their losses is that of equation 6."""
        servers = [SERVER, model(10)]
        got = [self.loss((s["key.0"], s["prompt.0"].reshape(M, -1)))[0].item() for s in servers]
        expected = [prompt_gap(s, CLIENTS, Z, self.WEIGHTS, 0) for s in servers]
        assert got[0] - got[1] == pytest.approx(expected[0] - expected[1], rel=1e-9)

    @pytest.mark.parametrize("steps_at_once", [1, 2, 5, 100])
    def test_teachers_prompts_of_some_steps_at_once_change_nothing(
        self, monkeypatch, steps_at_once
    ):
        h = hparams(lr_distillation=0.01)
        z = torch.tensor(np.random.default_rng(5).normal(size=(5, *Z.shape)))
        shares = torch.tensor(self.WEIGHTS).expand(5, -1, -1)
        start = Pools(
            torch.tensor(SERVER["key.0"]), torch.tensor(SERVER["prompt.0"].reshape(M, -1))
        )
        width = start.prompts.shape[-1]
        monkeypatch.setattr(distillation, "_TARGET_BYTES", steps_at_once * len(Z) * width * 8)
        losses = []
        result = distill_pools(start, pools(CLIENTS), z, shares, h, losses.append)
        server = [torch.nn.Parameter(t.clone()) for t in (start.keys, start.prompts)]
        optimiser = torch.optim.Adam(server, lr=h.lr_distillation)
        for step in range(5):
            optimiser.zero_grad()
            loss = prompt_loss(Pools(*server), pools(CLIENTS), z[step], shares[step])
            loss.backward()
            optimiser.step()
            assert losses[step] == pytest.approx(loss.item(), rel=1e-9)
        assert np.allclose(result.keys, server[0].detach(), rtol=1e-9)
        assert np.allclose(result.prompts, server[1].detach(), rtol=1e-9)

    def test_gradient_is_that_of_the_definition(self):
        start = (SERVER["key.0"], SERVER["prompt.0"].reshape(M, -1))
        loss, tensors = self.loss(start)
        loss.backward()
        rng = np.random.default_rng(0)
        for which, name in enumerate(("key.0", "prompt.0")):
            direction = rng.normal(size=SERVER[name].shape)
            ends = [
                prompt_gap(
                    {**SERVER, name: SERVER[name] + e * direction}, CLIENTS, Z, self.WEIGHTS, 0
                )
                for e in (1e-5, -1e-5)
            ]
            slope = (tensors[which].grad.numpy().ravel() * direction.ravel()).sum()
            assert slope == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6)

    def distil(self, models, start=SERVER, steps=200, weights=None, **kw):
        rng = np.random.default_rng(1)
        z = torch.tensor(rng.normal(size=(steps, B, D)))
        shares = torch.tensor(self.WEIGHTS if weights is None else weights).expand(steps, -1, -1)
        h = hparams(lr_distillation=2e-2, **kw)
        seen = []
        return distill_pools(one(pools([start])), pools(models), z, shares, h, seen.append), seen

    @pytest.mark.parametrize("reduction", ["sum", "mean"])
    def test_regression_moves_the_server_to_its_teacher(self, reduction):
        result, seen = self.distil(
            [CLIENTS[0]], weights=np.ones((B, 1)), mse_reduction=reduction, steps=300
        )
        assert len(seen) == 300
        moved = {"key.0": result.keys.numpy(), "prompt.0": result.prompts.reshape(M, L, D).numpy()}
        gap = [
            prompt_gap(s, [CLIENTS[0]], Z, np.ones((B, 1)), 0)
            for s in ({**SERVER, **moved}, SERVER)
        ]
        assert gap[0] < 0.2 * gap[1]

    def test_a_server_that_equals_its_teachers_stays_bit_equal(self):
        result, seen = self.distil([SERVER] * K)
        assert torch.equal(result.prompts, one(pools([SERVER])).prompts)
        assert torch.equal(result.keys, one(pools([SERVER])).keys)
        assert not any(seen)

    def test_the_first_step_of_adam_is_its_rate(self):
        result, _ = self.distil(CLIENTS, steps=1)
        moved = (result.prompts - one(pools([SERVER])).prompts).abs()
        assert moved.median().item() == pytest.approx(2e-2, rel=1e-3)


class TestHead:
    def test_first_loss_is_the_mean_cross_entropy_of_hard_labels(self):
        seen = []
        own = one_hot(torch.tensor(LABELS), C)
        distill_head(
            Head(*_server_head()), torch.tensor(Z)[None], own[None], hparams(), seen.append
        )
        rows = [log_softmax(SERVER["head.weight"] @ z + SERVER["head.bias"]) for z in Z]
        expected = -np.mean([row[y] for row, y in zip(rows, LABELS, strict=True)])
        assert seen == pytest.approx([expected], rel=1e-10)

    def test_learns_the_labels(self):
        seen = []
        z, own = torch.tensor(Z).expand(150, -1, -1), one_hot(torch.tensor(LABELS), C)
        h = hparams(lr_distillation=5e-2)
        trained = distill_head(Head(*_server_head()), z, own.expand(150, -1, -1), h, seen.append)
        assert seen[-1] < 0.1 * seen[0]
        assert (trained.logits(torch.tensor(Z)).argmax(1).numpy() == LABELS).all()


def test_the_cosine_of_the_reference_is_that_of_torch():
    a, b = Z[0], Z[1]
    got = torch.nn.functional.cosine_similarity(torch.tensor(a), torch.tensor(b), dim=0)
    assert got.item() == pytest.approx(cosine(a, b))
