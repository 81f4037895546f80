"""A client cannot move a class that it does not hold farther than docs/lying-clients.md says.

Five honest clients hold the classes 0, 1 and 2; the sixth holds 1 and 2 and sends the largest
values that pass for class 0, and everything else as an honest client would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from adapters.kit import Federation, client_id, make_tasks, toy_images
from fcil_adapters.contract import Update
from fcil_adapters.numerics.client_weights import sample_weights
from fcil_adapters.numerics.outliers import OutlierRule, kind_sizes, screen
from fcil_adapters.numerics.update_list import UpdateList
from fcil_adapters.toolkit.prototypes.options import ReweightOptions
from fcil_adapters.toolkit.prototypes.reweighting import reweight
from fcil_protocol.ids import ClientId
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import Kind

RULE = OutlierRule(factor=6, min_clients=5)
K, LIAR = 6, 5
CLIENTS = [*(toy_images({0: 4 + k, 1: 3, 2: 2 + k % 2}, k) for k in range(5)),
           toy_images({1: 4, 2: 4}, 5)]  # fmt: skip
SHARE = 0.5  # the default of [trust] max_weight_share

LORA = {"rank": 2, "epochs": 2, "batch_size": 4}
PROMPTS = {"blocks": [0], "epochs": 2, "batch_size": 4, "prompt_length": 2, "pool_size": 3}


@dataclass(frozen=True)
class Case:
    """Where a method keeps what class 0 is predicted with.

    Attributes:
        sent: the tensor that clients send, a row per class.
        kept: the state's tensor.
        kind: the kind of the former.
    """

    options: dict
    sent: str
    kept: str
    kind: Kind


PILORA = {**LORA, "lr_prototype": 1e-2, "init": "random"}
HEAD = ("head.weight", "head.weight", Kind.HEAD)
CASES = {
    "pilora": Case(PILORA, "proto", "task.0.proto", Kind.PROTOTYPE),
    "plora": Case({**PILORA, "blocks": [0]}, "proto", "task.0.proto", Kind.PROTOTYPE),
    "fed_talora": Case(
        {**LORA, "blocks": [0]}, "head.weight", "task.0.head.weight", Kind.HEAD
    ),
    "hgp": Case(
        {"blocks": [0], "epochs": 2, "batch_size": 4, "prompts": 3, "length": 2,
         "rebalance": "off"}, *HEAD),
    "hepco": Case({**PROMPTS, "distill": "none"}, *HEAD),
}  # fmt: skip


@cache
def uploads(name: str, extra: tuple = ()) -> tuple[Federation, list[Payload]]:
    options = {
        **CASES[name].options,
        **{k: dict(v) if isinstance(v, tuple) else v for k, v in extra},
    }
    fed = Federation.of(name, CLIENTS, max_weight_share=SHARE, **options)
    fed.open(make_tasks([0, 1, 2])[0])
    return fed, [fed.upload("train", k) for k in range(K)]


def of(payloads) -> UpdateList:
    return UpdateList.of(Update(client_id(k), p) for k, p in enumerate(payloads))


def lie(payload: Payload, tensor: str, value: float) -> Payload:
    rows = payload.tensors[tensor].copy()
    rows[0] = value
    return replace(payload, tensors={**payload.tensors, tensor: rows})


def kept_row(fed: Federation, case: Case, payloads) -> np.ndarray:
    return fed.aggregate("train", of(payloads)).tensors[case.kept][0].astype(np.float64)


def excluded(fed: Federation, payloads) -> set[ClientId]:
    exchange = next(e for e in fed.exchanges if e.kind == "train")
    return set(screen(RULE, of(payloads), exchange.upload))


def size_limit(fed: Federation, case: Case, sent: list[Payload]) -> float:
    """The largest size of the kind that the liar may have beside the honest clients.

    Its own size enters the median and the spread, so the limit is found by halving.
    """
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        passes = not excluded(fed, [*sent[:LIAR], lie(sent[LIAR], case.sent, middle)])
        low, high = (middle, high) if passes else (low, middle)
    return low


def moved(fed: Federation, case: Case, sent: list[Payload], value: float) -> float:
    """How far the liar takes the kept row of class 0 from where the others alone put it."""
    alone = kept_row(fed, case, sent[:LIAR])
    return float(
        np.linalg.norm(kept_row(fed, case, [*sent[:LIAR], lie(sent[LIAR], case.sent, value)])
                       - alone)
    )  # fmt: skip


def rows_of(case: Case, sent: list[Payload]) -> np.ndarray:
    return np.stack([p.tensors[case.sent][0] for p in sent]).astype(np.float64)


@pytest.mark.parametrize("name", CASES)
def test_the_largest_values_that_the_schema_allows_are_excluded(name):
    case = CASES[name]
    fed, sent = uploads(name)
    bad = [*sent[:LIAR], lie(sent[LIAR], case.sent, 1e4)]
    exchange = next(e for e in fed.exchanges if e.kind == "train")
    assert exchange.upload.check_upload(bad[LIAR], fed.dims) == []
    assert excluded(fed, bad) == {client_id(LIAR)}
    assert moved(fed, case, sent, 1e4) > 10  # what it would have done


@pytest.mark.parametrize("name", ["fed_talora", "hgp", "hepco"])
def test_averaged_rows_move_at_most_by_the_weight_times_the_limit(name):
    case = CASES[name]
    fed, sent = uploads(name)
    limit = size_limit(fed, case, sent)
    samples = [int(p.i64("n")[0]) for p in sent]
    weight = 1 / K if name == "hepco" else sample_weights(samples, SHARE)[LIAR]
    others = rows_of(case, sent[:LIAR])
    d = others.shape[1]
    bound = weight * (math.sqrt(d) * limit + np.linalg.norm(others, axis=1).max())
    honest = kind_sizes(sent[0], fed.exchanges[0].upload)[case.kind]
    # SGD on few images moves a head little, so Fed-TaLoRA's clients differ most here.
    assert 5 * honest < limit < (150 if name == "fed_talora" else 20) * honest
    for value in (limit, -limit, 0.0):
        assert moved(fed, case, sent, value) <= bound
    assert moved(fed, case, sent, limit) > 0.5 * bound  # the bound says something


@pytest.mark.parametrize("options", [{"head_average": "rows"}])
def test_rows_averaged_by_their_owners_do_not_move_at_all(options):
    case = CASES["fed_talora"]
    fed, sent = uploads("fed_talora", tuple(options.items()))
    assert moved(fed, case, sent, 1e4) == 0


@pytest.mark.parametrize("name", ["pilora", "plora"])
def test_prototypes_move_by_the_weight_of_one_who_lies_far_and_by_the_others_spread(name):
    case = CASES[name]
    fed, sent = uploads(name)
    limit = size_limit(fed, case, sent)
    others = rows_of(case, sent[:LIAR])
    spread = max(np.linalg.norm(a - b) for a in others for b in others)
    weight = 1 / (math.e**5 + K - 1)
    far = np.linalg.norm(others, axis=1).max() + math.sqrt(others.shape[1]) * limit
    for value in (limit, -limit):
        assert moved(fed, case, sent, value) <= spread + weight * far
    assert weight < 0.0066  # e^5 against 1 for each of the others


@pytest.mark.parametrize("name", ["pilora", "plora"])
def test_with_owners_only_prototypes_do_not_move_at_all(name):
    case = CASES[name]
    fed, sent = uploads(name, (("reweight", (("owners_only", True),)),))
    assert moved(fed, case, sent, 1e4) == 0


def test_hgps_gaussians_of_a_class_are_its_owners_alone():
    fed, sent = uploads("hgp")
    alone, beside = (
        fed.aggregate("train", of(payloads)).tensors
        for payloads in (sent[:LIAR], [*sent[:LIAR], lie(sent[LIAR], "head.weight", 1e4)])
    )
    rows = [t["gauss.0.mean"][t["gauss.0.label"] == 0] for t in (alone, beside)]
    np.testing.assert_array_equal(*rows)


def test_hgps_rebalanced_row_moves_less_than_the_average_does():
    case = CASES["hgp"]
    fed, sent = uploads("hgp")
    limit = size_limit(fed, case, sent)
    plain = moved(fed, case, sent, limit)
    again, sent = uploads("hgp", (("rebalance", "seen"), ("server_epochs", 20)))
    assert moved(again, case, sent, limit) < plain


def test_hepcos_teachers_of_a_class_are_its_owners_alone():
    from fcil_adapters.methods.hepco.options import HepcoHparams
    from fcil_adapters.methods.hepco.teachers import label_shares

    counts = np.array([[5.0, 1], [3, 1], [0, 90]])
    for weights, share in (("per_class", 0), ("repo", 0), ("none", 1)):
        shares, _ = label_shares(counts, np.zeros(2), 3, HepcoHparams(weights=weights), SHARE)
        assert shares[2, 0] == share  # "none" is the paper's: everybody teaches every class


class TestClaims:
    """Who says that it holds the class is an owner to the server, with a capped weight."""

    D = 16

    def prototype_weight(self, true_owners, max_share, delta=10.0, count=1, **options):
        """The liar's weight; its mean lies at its own prototype, ``delta`` from the true ones."""
        rng = np.random.default_rng(true_owners)
        own = np.arange(K)[:, None] < true_owners
        mean = rng.normal(size=self.D)
        means = np.where(own, mean + 0.02 * rng.normal(size=(K, self.D)), 0)
        protos = np.where(own, mean, 0) + 0.1 * rng.normal(size=(K, self.D))
        counts = np.where(own, 10, 0)
        protos[LIAR] = means[LIAR] = mean + delta / math.sqrt(self.D)
        counts[LIAR] = count
        _, omega = reweight(
            torch.tensor(protos)[:, None],
            torch.tensor(means)[:, None],
            torch.tensor(counts),
            torch.zeros(1, self.D),
            torch.full((K,), 1 / K),
            options=ReweightOptions(**options),
            max_share=max_share,
        )
        assert omega.sum() == pytest.approx(1)
        return float(omega[LIAR, 0])

    @pytest.mark.parametrize("true_owners", [1, 2, 4])
    @pytest.mark.parametrize(
        "options", [{}, {"owners_only": True}, {"count_weighted": True, "count": 10**9}]
    )
    def test_a_claimed_prototype_weighs_at_most_the_share(self, true_owners, options):
        deltas = (0.5, 3, 30)
        weights = [self.prototype_weight(true_owners, SHARE, d, **options) for d in deltas]
        assert max(weights) <= SHARE + 1e-9

    @pytest.mark.parametrize("options", [{"owners_only": True}, {"count": 10**9,
                                                                 "count_weighted": True}])  # fmt: skip
    def test_without_a_cap_it_may_take_a_class_over(self, options):
        deltas = (0.5, 3, 30)
        assert max(self.prototype_weight(1, 1.0, d, **options) for d in deltas) > 0.7

    def test_a_cap_leaves_a_sole_owner_and_those_who_hold_nothing_alone(self):
        protos = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0))
        counts = torch.tensor([[3, 1], [0, 9], [0, 0], [0, 0], [0, 0]])
        free, capped = (
            reweight(protos, protos, counts, torch.zeros(2, 4), torch.full((5,), 0.2),
                     options=ReweightOptions(), max_share=share)[1]
            for share in (1.0, 0.5)
        )  # fmt: skip
        assert torch.equal(free[:, 0], capped[:, 0])
        assert torch.equal(free[2:], capped[2:])
        assert capped[:2, 1].sum() == pytest.approx(float(free[:2, 1].sum()))
        assert capped[0, 1] == pytest.approx(float(capped[1, 1]))

    def federation(self, share, claimed):
        fed = Federation.of("running_mean", CLIENTS, max_weight_share=share)
        fed.open(make_tasks([0, 1, 2])[0])
        sent = [fed.upload("train", k) for k in range(K)]
        count = sent[LIAR].i64("count").copy()
        count[0] = claimed
        more = {"count": count, "n": count.sum().reshape(1)}
        bad = replace(sent[LIAR], tensors={**sent[LIAR].tensors, **more})
        case = Case({}, "mean", "task.0.mean", Kind.PROTOTYPE)
        alone = kept_row(fed, case, sent[:LIAR])
        told = kept_row(fed, case, [*sent[:LIAR], lie(bad, "mean", 1.0)])
        return np.linalg.norm(told - alone) / np.linalg.norm(1.0 - alone)

    def test_without_a_claim_a_class_mean_does_not_move(self):
        assert self.federation(1.0, 0) == 0

    def test_a_claim_moves_it_by_the_capped_share(self):
        assert self.federation(1.0, 10**9) == pytest.approx(1, abs=1e-6)
        assert self.federation(SHARE, 10**9) == pytest.approx(SHARE, abs=1e-6)
        assert self.federation(0.1, 10**9) == pytest.approx(1 / K, abs=1e-6)  # never below 1/K

    def test_hgp_gives_an_inflated_task_no_more_samples(self):
        from fcil_adapters.toolkit.gaussians.mixture import make_mixture
        from fcil_adapters.toolkit.gaussians.store import read_entries

        fed, sent = uploads("hgp")
        state = fed.aggregate("train", of(sent))
        entries = read_entries(state, [0])
        big = [
            replace(e, gaussian=replace(e.gaussian, count=10**9))
            if (e.client, e.label) == (client_id(LIAR), 1) else e
            for e in entries
        ]  # fmt: skip
        later = [replace(e, task=1, label=3) for e in entries if e.label == 0]
        omega = make_mixture([*big, *later], (0, 1, 2, 3), "counts", SHARE).omega
        assert omega[3] > 0.2
        assert make_mixture([*big, *later], (0, 1, 2, 3), "counts", 1.0).omega[3] < 1e-6

    def test_hgp_lends_no_covariance_that_one_client_made_up(self):
        from fcil_adapters.toolkit.gaussians.gaussian import Gaussian
        from fcil_adapters.toolkit.gaussians.mixture import make_mixture
        from fcil_adapters.toolkit.gaussians.store import ClassEntry

        def entry(client, count, variance):
            none, flat = np.zeros((0, 2), np.float32), np.full(2, variance, np.float32)
            return ClassEntry(0, 7, client, Gaussian(count, np.zeros(2, np.float32), none, flat))

        entries = [entry("a", 1, 0.0), entry("b", 8, 1.0), entry("c", 10**9, 100.0)]
        for share, largest in ((SHARE, 51), (1.0, 101)):
            lonely = make_mixture(entries, (7,), "counts", share).gaussians[0][0]
            assert largest - 3 < lonely.covariance()[0, 0] < largest

    def test_hepcos_one_total_leaves_a_class_to_all_its_owners(self):
        from fcil_adapters.methods.hepco.options import HepcoHparams
        from fcil_adapters.methods.hepco.teachers import label_shares

        counts = np.array([[1.0, 9], [9, 0]])
        shares, _ = label_shares(counts, np.zeros(2), 0, HepcoHparams(weights="repo"), SHARE)
        np.testing.assert_allclose(shares[:2, 0], [5 / 19, 5 / 19])

    def test_weighted_distances_use_lowered_counts(self):
        protos = torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(0))
        means = torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(1))
        inflated, lowered = (
            reweight(protos, means, torch.tensor([[n], [4], [6]]), torch.zeros(1, 4),
                     torch.full((3,), 1 / 3), options=ReweightOptions(count_weighted=True),
                     max_share=0.5)[1]
            for n in (10**9, 10)
        )  # fmt: skip
        torch.testing.assert_close(inflated, lowered)
