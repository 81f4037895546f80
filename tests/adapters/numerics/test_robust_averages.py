"""The rules of averaging follow their definitions, and one client cannot rule them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from adapters.kit import Federation, client_id, make_tasks, toy_images
from adapters.numerics.test_averages import DEVICES, OneAtATime
from fcil_adapters.contract import Update
from fcil_adapters.contract.averaging import Averaging, every_rule
from fcil_adapters.contract.manifest_checks import check_averaging
from fcil_adapters.contract.registry import load_method, make_hparams
from fcil_adapters.numerics import averaging
from fcil_adapters.numerics.client_weights import allowed_counts, class_weights, sample_weights
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.errors import ConfigError
from fcil_protocol.payloads.payload import Payload

RULES = every_rule(None)
NAMES = ("a", "b")


def updates(K=6, seed=0):
    rng = np.random.default_rng(seed)
    return UpdateList(
        tuple(
            Update(
                client_id(k),
                Payload(
                    {
                        "a": rng.normal(size=(3, 4)).astype(np.float32),
                        "b": rng.normal(size=7).astype(np.float16),
                        "n": np.array([k + 1]),
                    }
                ),
            )
            for k in range(K)
        )
    )


START = {"a": np.full((3, 4), 0.5, np.float32), "b": np.zeros(7, np.float32)}


def context(rule, trim=0.2, clip=2.0, device="cpu"):
    fed = Federation.of("running_mean", [])
    ctx = fed.context("train")
    return replace(ctx, device=device, averaging=Averaging(rule, trim, clip))


def expanded(values, weights, parts=1000):
    """Lay out each value as often as its weight says: percentiles of this are the definition."""
    return np.sort(np.repeat(values, np.rint(weights * parts).astype(int)))


class TestByDefinition:
    # Multiples of 1/1000, so that the definition can be counted out.
    WEIGHTS = np.array([0.1, 0.25, 0.15, 0.05, 0.2, 0.25])

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("trim", [0.1, 0.25, 0.4])
    def test_the_trimmed_mean_drops_weight_at_both_ends(self, trim, device):
        values = torch.randn(6, 5, 3, generator=torch.Generator().manual_seed(0)).to(device)
        got = averaging.combine_entries(values, self.WEIGHTS, trim).cpu().numpy()
        cut = round(1000 * trim)
        for i, j in np.ndindex(5, 3):
            line = expanded(values[:, i, j].double().cpu().numpy(), self.WEIGHTS)
            assert got[i, j] == pytest.approx(line[cut : 1000 - cut].mean(), abs=1e-12)

    @pytest.mark.parametrize("device", DEVICES)
    def test_the_median_halves_the_weight(self, device):
        values = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)).to(device)
        got = averaging.combine_entries(values, self.WEIGHTS, None).cpu().numpy()
        for j in range(40):
            line = expanded(values[:, j].double().cpu().numpy(), self.WEIGHTS)
            assert got[j] == pytest.approx((line[499] + line[500]) / 2, abs=1e-12)

    def test_with_equal_weights_the_median_is_numpys(self):
        for K in (1, 2, 3, 4, 7, 10):
            values = torch.randn(K, 9, generator=torch.Generator().manual_seed(K))
            got = averaging.combine_entries(values, np.full(K, 1 / K), None)
            np.testing.assert_allclose(got, np.median(values.double(), 0), atol=1e-12)

    def test_clip_shortens_long_steps_of_each_tensor(self):
        many = updates()
        weights = sample_weights(many.samples)
        got = averaging.average(context("clip", clip=1.0), many, NAMES, weights, START)
        for name in NAMES:
            steps = [u.payload.tensors[name].astype(np.float64) - START[name] for u in many]
            lengths = [np.linalg.norm(s) for s in steps]
            bound = np.median(lengths)
            assert max(lengths) > bound
            cut = [
                w * s * min(1, bound / n)
                for w, s, n in zip(weights, steps, lengths, strict=True)
            ]  # fmt: skip
            np.testing.assert_allclose(got[name], START[name] + sum(cut), rtol=1e-5, atol=1e-6)

    def test_a_wide_clip_is_the_mean(self):
        many = updates()
        weights = sample_weights(many.samples)
        got = averaging.average(context("clip", clip=1e6), many, NAMES, weights, START)
        plain = averaging.average(context("mean"), many, NAMES, weights, START)
        for name in NAMES:
            np.testing.assert_allclose(got[name], plain[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
class TestEveryRule:
    def test_one_client_is_the_identity(self, rule):
        many = updates(1)
        got = averaging.average(context(rule), many, NAMES, np.ones(1), START)
        for name in NAMES:
            np.testing.assert_array_equal(got[name], many.updates[0].payload.f32("a") if name == "a"
                                          else many.updates[0].payload.tensors["b"])  # fmt: skip
            assert got[name].dtype == np.float32

    def test_equal_clients_give_what_they_agree_on(self, rule):
        one = updates(1).updates[0]
        many = UpdateList(tuple(Update(client_id(k), one.payload) for k in range(5)))
        got = averaging.average(context(rule), many, NAMES, np.full(5, 0.2), START)
        np.testing.assert_allclose(got["a"], one.payload.tensors["a"], rtol=1e-6)

    def test_the_order_of_clients_does_not_matter(self, rule):
        many = updates()
        weights = sample_weights(many.samples)
        turned = UpdateList(many.updates[::-1])
        one, other = (
            averaging.average(context(rule), u, NAMES, w, START)
            for u, w in ((many, weights), (turned, weights[::-1].copy()))
        )
        np.testing.assert_allclose(one["a"], other["a"], rtol=1e-6)

    def test_no_update_is_held_longer_than_its_turn(self, rule):
        many = OneAtATime(updates().updates)
        averaging.average(context(rule), many, NAMES, np.full(6, 1 / 6), START)

    def test_stacks_are_bounded_and_groups_change_nothing(self, rule, monkeypatch):
        many = updates()
        weights = sample_weights(many.samples)
        whole = averaging.average(context(rule), many, NAMES, weights, START)
        monkeypatch.setattr(averaging, "_STACK_BYTES", 1)
        monkeypatch.setattr(averaging, "_SORTED_NUMBERS", 7)
        pieces = averaging.average(context(rule), many, NAMES, weights, START)
        for name in NAMES:
            np.testing.assert_array_equal(whole[name], pieces[name])


def liar(many, size, claimed=None):
    """The last client sends a constant, and says that it has many images."""
    *others, last = many.updates
    n = last.payload.tensors["n"] if claimed is None else np.array([claimed])
    tensors = {name: np.full_like(last.payload.tensors[name], size) for name in NAMES}
    return UpdateList((*others, Update(last.client, Payload({**tensors, "n": n}))))


@pytest.mark.parametrize("claimed", [None, 10**9])
@pytest.mark.parametrize("rule", RULES)
def test_a_liars_pull_is_bounded_unless_the_plain_mean_is_chosen(rule, claimed):
    """Whatever it sends and claims, the result stays where the honest clients are."""
    honest = updates(5)
    stack = np.stack([u.payload.tensors["a"] for u in honest])
    moved = []
    for size in (1e3, 6e4):
        many = liar(updates(6), size, claimed)
        weights = sample_weights(many.samples, 0.5)
        got = averaging.average(context(rule), many, ("a",), weights, START)["a"]
        moved.append(np.abs(got - stack.mean(0)).max())
    if rule == "mean":
        assert moved[1] > 50 * moved[0] > 1000
    elif rule == "clip":
        lengths = np.linalg.norm((stack - START["a"]).reshape(5, -1), axis=1)
        assert moved[1] == pytest.approx(moved[0], rel=1e-2)
        assert moved[1] < 2 * 2.0 * np.max(lengths)
    else:
        assert moved[1] == moved[0]  # not one entry is the liar's
        assert moved[1] <= (stack.max(0) - stack.min(0)).max()


METHODS = {
    "pilora": ({"rank": 2, "epochs": 1, "batch_size": 4, "lr_lora": 1e-2}, "task.0.lora.0.q.A"),
    "plora": ({"rank": 2, "epochs": 1, "batch_size": 4, "blocks": [0]}, "lora.0.q.A"),
    "fed_talora": ({"rank": 2, "epochs": 1, "batch_size": 4, "blocks": [0], "residual": "off"},
                   "task.0.head.weight"),
    "hgp": ({"blocks": [0], "epochs": 1, "batch_size": 4, "prompts": 3, "length": 2,
             "rebalance": "off"}, "head.weight"),
    "hepco": ({"blocks": [0], "epochs": 1, "batch_size": 4, "pool_size": 3, "prompt_length": 2,
               "distill": "none"}, "head.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_every_method_averages_by_the_rule_of_the_run(name):
    """The same uploads with one liar among six: only the plain mean follows it."""
    options, tensor = METHODS[name]
    clients = [toy_images({0: 3, 1: 2 + k % 2}, k) for k in range(6)]
    fed = Federation.of(name, clients, **options)
    fed.open(make_tasks([0, 1])[0])
    sent = [fed.upload("train", k) for k in range(6)]
    bad = {
        n: (np.full_like(a, 1e3) if n.startswith(("lora", "head")) else a)
        for n, a in sent[5].tensors.items()
    }
    sent[5] = replace(sent[5], tensors=bad)
    many = UpdateList.of(Update(client_id(k), p) for k, p in enumerate(sent))
    largest = {}
    for rule in RULES:
        fed.averaging = Averaging(rule)
        largest[rule] = float(np.abs(fed.aggregate("train", many).tensors[tensor]).max())
    assert largest["mean"] > 100
    assert max(largest[r] for r in RULES if r != "mean") < 5


class TestWhatAMethodOffers:
    @pytest.mark.parametrize("name", ["pilora", "plora", "hgp", "hepco", "fedavg_lora"])
    def test_every_rule(self, name):
        method = load_method(name)
        for rule in RULES:
            check_averaging(method, make_hparams(method, {}), rule)

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("running_mean", {}),
            ("fed_talora", {}),
            ("fed_talora", {"residual": "off", "head_average": "rows"}),
        ],
    )
    def test_the_mean_alone(self, name, options):
        method = load_method(name)
        hparams = make_hparams(method, options)
        check_averaging(method, hparams, "mean")
        with pytest.raises(ConfigError, match="works only with: mean") as caught:
            check_averaging(method, hparams, "median")
        assert caught.value.action.startswith("Set trust.averaging to 'mean'")

    @pytest.mark.parametrize("options", [{"residual": "off"}, {"freeze_a": True}])
    def test_fed_talora_without_a_residual_offers_every_rule(self, options):
        method = load_method("fed_talora")
        check_averaging(method, make_hparams(method, options), "median")


class TestAllowedCounts:
    def test_have_the_shares_of_the_weights_and_never_grow(self):
        rng = np.random.default_rng(0)
        for share in (1.0, 0.5, 0.2, 0.01):
            counts = rng.integers(1, 1000, 6)
            allowed = allowed_counts(counts.tolist(), share)
            assert (allowed <= counts * (1 + 1e-12)).all()
            np.testing.assert_allclose(
                allowed / allowed.sum(), class_weights(counts[:, None], share)[:, 0]
            )

    def test_a_count_below_the_cap_stays(self):
        np.testing.assert_allclose(allowed_counts([10**9, 3, 5], 0.5), [8, 3, 5])
        assert allowed_counts([4, 6], 1.0).tolist() == [4, 6]
        assert allowed_counts([10**9], 0.5).tolist() == [10**9]
