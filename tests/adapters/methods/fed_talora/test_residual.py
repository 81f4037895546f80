"""The residual: exact, thin, and the same for whoever reads the parts of a state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from adapters.fed_talora_reference import SHAPES, effective_change, mean_effective_change
from adapters.kit import DIM, Federation, client_id, make_tasks, toy_images
from fcil_adapters.backbones.backbone import backbone_digest
from fcil_adapters.contract import Update
from fcil_adapters.methods.fed_talora.parts import dense_bytes
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.payloads.payload import Payload, pack, unpack

TASKS = make_tasks([0, 1], [2, 3])
PLACES = [f"{b}.{m}" for b in (0, 1) for m in SHAPES]
FAST = {"rank": 2, "blocks": [0, 1], "epochs": 1, "lr_lora": 0.1, "augment": "none"}
CLIENTS = [
    toy_images({0: 6, 1: 2, 2: 3}, 1),
    toy_images({0: 3, 3: 3}, 2),
    toy_images({1: 4, 2: 2}, 3),
]


def federation(clients=CLIENTS, **kw) -> Federation:
    fed = Federation.of("fed_talora", clients, **{**FAST, **kw})
    fed.open(TASKS[0])
    return fed


def noisy(payload: Payload, seed: int, size=0.1) -> Payload:
    """The upload of a client that moved far, at random."""
    rng = np.random.default_rng(seed)
    moved = {
        n: (a + size * rng.normal(size=a.shape)).astype(np.float32)
        for n, a in payload.tensors.items()
        if n.startswith(("lora.", "head."))
    }
    return Payload({**payload.tensors, **moved}, payload.meta)


def noisy_updates(fed: Federation, seed: int, clients=None) -> UpdateList:
    """As many noisy uploads as there are clients, without training."""
    template = fed.upload("train", 0)
    sizes = [5, 1, 3, 2, 2, 4, 1, 2][: clients or len(fed.clients)]
    updates = []
    for k, n in enumerate(sizes):
        counts = {"count": np.array([n, 0]), "n": np.array([n])}
        sent = noisy(template, 100 * seed + k)
        updates.append(Update(client_id(k), Payload({**sent.tensors, **counts}, sent.meta)))
    return UpdateList.of(updates)


def weights_of(updates: UpdateList, *, uniform=False) -> np.ndarray:
    n = np.ones(len(updates)) if uniform else np.array(updates.samples, dtype=np.float64)
    return n / n.sum()


def exact_or_not(fed: Federation, updates: UpdateList, weights) -> float:
    """Aggregate; the largest relative error of any effective weight."""
    before = fed.parts()
    fed.state = fed.aggregate("train", updates)
    after = fed.parts()
    errors = []
    for place in PLACES:
        expected = mean_effective_change(updates, weights, before, place)
        error = np.abs(effective_change(after, place) - expected).max()
        errors.append(error / np.abs(expected).max())
    return max(errors)


class TestIdentity:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"residual": "dense"},
            {"catch_up": "factors"},
            {"weights": "uniform"},
            {"scale": 0.5},
        ],
        ids=str,
    )
    def test_the_effective_weight_is_the_mean_over_many_rounds(self, options):
        fed = federation(**options)
        for r in range(8):
            updates = noisy_updates(fed, r)
            weights = weights_of(updates, uniform=options.get("weights") == "uniform")
            assert exact_or_not(fed, updates, weights) < 1e-6

    @pytest.mark.parametrize("catch_up", ["cheapest", "factors"])
    def test_many_clients_are_summed_densely_and_exactly(self, catch_up):
        """(8 + 1) x 2 columns of factors would be wider than the matrices."""
        fed = federation(catch_up=catch_up)
        for r in range(2):
            updates = noisy_updates(fed, r, clients=8)
            assert exact_or_not(fed, updates, weights_of(updates)) < 1e-6
        kinds = {n.partition("/")[0] for n in fed.parts()} - {"current"}
        assert kinds == ({"base"} if catch_up == "cheapest" else {"residual"})

    def test_without_residual_it_is_not(self):
        fed = federation(residual="off")
        updates = noisy_updates(fed, 0)
        assert exact_or_not(fed, updates, weights_of(updates)) > 1e-2
        assert sorted(fed.parts()) == ["current"]

    def test_a_frozen_a_needs_none(self):
        fed = federation(freeze_a=True)
        for r in range(2):
            updates = noisy_updates(fed, r)
            assert not any(n.endswith(".A") for n in updates.updates[0].payload.tensors)
            assert exact_or_not(fed, updates, weights_of(updates)) < 1e-6
        assert sorted(fed.parts()) == ["current", "fixed"]

    def test_a_capped_weight_enters_mean_and_residual_alike(self):
        fed = federation(max_weight_share=0.4)
        updates = noisy_updates(fed, 0)  # 5, 1 and 3 images: 0.56 is capped, the rest 1 to 3
        assert exact_or_not(fed, updates, [0.4, 0.2, 0.4]) < 1e-6


class TestFactors:
    @pytest.mark.parametrize("clients", [2, 3, 5])
    def test_have_at_most_k_minus_1_times_r_columns(self, clients):
        fed = federation()
        fed.state = fed.aggregate("train", noisy_updates(fed, 1, clients))
        part = fed.parts()["residual/1"]
        ranks = {part.tensors[f"{place}.R"].shape[0] for place in PLACES}
        assert ranks == {(clients - 1) * 2}

    def test_equal_clients_leave_nothing(self):
        fed = federation()
        one = noisy(fed.upload("train", 0), 1)
        updates = UpdateList.of([Update(client_id(k), one) for k in range(3)])
        for residual in ("factored", "dense"):
            fed = federation(residual=residual)
            fed.state = fed.aggregate("train", updates)
            assert fed.state.meta["version"] == 0
            assert sorted(fed.parts()) == ["current"]

    def test_one_client_leaves_nothing(self):
        fed = federation()
        updates = noisy_updates(fed, 1, clients=1)
        assert exact_or_not(fed, updates, [1.0]) == 0.0
        assert fed.state.meta["version"] == 0

    def test_a_matrix_where_clients_agree_has_rank_zero_beside_others(self):
        fed = federation()
        updates = [
            Update(u.client, Payload({**u.payload.tensors, **same}, u.payload.meta))
            for u in noisy_updates(fed, 1)
            for same in [{n: a for n, a in fed.parts()["current"].tensors.items()
                          if n.startswith("lora.0.q.")}]
        ]  # fmt: skip
        fed.state = fed.aggregate("train", UpdateList.of(updates))
        part = fed.parts()["residual/1"]
        assert part.tensors["0.q.L"].shape == (DIM, 0)
        assert part.tensors["1.q.L"].shape == (DIM, 4)

    @pytest.mark.parametrize(
        ("values", "rank"),
        [([1, 2**-10, 2**-23], 3), ([1, 2**-10, 2**-24], 2), ([1, 2**-24, 2**-25], 1)],
    )
    def test_singular_values_below_1e_7_of_the_largest_are_dropped(self, values, rank):
        """Two opposite clients: the means are 0, so W_res = B A has the given values.

        2^-23 is 1.2e-7, 2^-24 is 6.0e-8.
        """
        fed = federation(rank=3)
        moved = {}
        for place in PLACES:
            out, width = SHAPES[place.split(".")[1]]
            moved[f"lora.{place}.A"] = np.eye(3, width, dtype=np.float32)
            moved[f"lora.{place}.B"] = (np.eye(out, 3) * values).astype(np.float32)
        template = sized(fed.upload("train", 0), 2)
        sent = [{**template.tensors, **{n: s * a for n, a in moved.items()}} for s in (1, -1)]
        updates = [Update(client_id(k), Payload(t, template.meta)) for k, t in enumerate(sent)]
        fed.state = fed.aggregate("train", UpdateList.of(updates))
        part = fed.parts()["residual/1"]
        for place in PLACES:
            L, R = (part.tensors[f"{place}.{m}"].astype(np.float64) for m in "LR")
            assert L.shape[1] == rank
            got = np.linalg.svd(L @ R, compute_uv=False)[:rank]
            np.testing.assert_allclose(got, values[:rank], rtol=1e-5)

    @pytest.mark.parametrize("clients", [3, 8])  # as factors, and summed densely
    def test_matrices_of_one_shape_are_decomposed_together(self, clients, monkeypatch):
        """q and v of both blocks at once, then fc1 and fc2, whatever the number of clients."""
        fed = federation(catch_up="factors")
        updates = noisy_updates(fed, 1, clients)
        shapes = []
        svd = torch.linalg.svd
        monkeypatch.setattr(
            torch.linalg, "svd", lambda x, **kw: shapes.append(tuple(x.shape)) or svd(x, **kw)
        )
        fed.aggregate("train", updates)
        assert sorted(shape[0] for shape in shapes) == [2, 2, 4]

    def test_do_not_show_who_sent_what(self):
        """The columns are singular vectors: orthogonal, unlike any client's own factors."""
        fed = federation()
        fed.state = fed.aggregate("train", noisy_updates(fed, 1))
        L = fed.parts()["residual/1"].tensors["0.fc1.L"].astype(np.float64)
        gram = L.T @ L
        assert np.abs(gram - np.diag(np.diag(gram))).max() < 1e-5 * np.diag(gram).max()


class TestCatchUp:
    def names(self, fed):
        return sorted(n for n in fed.parts() if n.startswith(("residual/", "base/")))

    def test_a_log_becomes_a_dense_base_once_that_is_smaller(self):
        fed = federation()
        dense = dense_bytes(fed.hparams, fed.backbone.info)
        history = []
        for r in range(4):
            fed.state = fed.aggregate("train", noisy_updates(fed, r))
            history.append(self.names(fed))
            log = sum(p.tensor_bytes for n, p in fed.parts().items() if n.startswith("residual/"))
            assert log < dense
        # one round of 3 clients is 0.35 of a dense base: the third fills it
        assert history == [
            ["residual/1"], ["residual/1", "residual/2"], ["base/3"], ["base/3", "residual/4"],
        ]  # fmt: skip
        assert fed.parts()["base/3"].tensor_bytes == dense

    def test_never_with_factors_alone(self):
        fed = federation(catch_up="factors")
        for r in range(4):
            fed.state = fed.aggregate("train", noisy_updates(fed, r))
        assert self.names(fed) == [f"residual/{n}" for n in (1, 2, 3, 4)]

    def test_parts_of_the_past_keep_their_bytes(self):
        fed = federation(catch_up="factors")
        before: dict[str, bytes] = {}
        for r in range(3):
            fed.state = fed.aggregate("train", noisy_updates(fed, r))
            parts = fed.aggregator.broadcast(fed.context("train"), fed.state)
            after = {p.name: pack(p.payload) for p in parts}
            assert all(after[n] == b for n, b in before.items() if n != "current")
            before = after

    def test_a_client_that_missed_every_round_predicts_and_learns_the_same(self):
        """Nothing of a client's own past enters: it works from the parts of the state."""
        fed = federation()
        for r in range(5):
            fed.round("train", r, 5)
        late = [fed.parts() for _ in range(2)]
        pictures = CLIENTS[0].pictures
        one, two = (
            fed.model.compose(fed.context("evaluate"), p, fed.backbone).logits(pictures)
            for p in late
        )
        np.testing.assert_array_equal(one, two)
        first = pack(fed.upload("train", 2))
        newcomer = Federation.of("fed_talora", CLIENTS, **FAST)
        newcomer.state, newcomer.task = fed.state, fed.task
        assert pack(newcomer.upload("train", 2)) == first
        assert backbone_digest(fed.backbone.module.state_dict()) == fed.backbone.info.digest

    def test_an_upload_on_another_base_is_left_out(self):
        fed = federation()
        fed.state = fed.aggregate("train", noisy_updates(fed, 0))
        updates = noisy_updates(fed, 1)
        stale = Update(client_id(1), Payload(updates.updates[1].payload.tensors, {"version": 0}))
        kept = [updates.updates[0], updates.updates[2]]
        one = fed.aggregate("train", UpdateList.of([*kept, stale]))
        two = fed.aggregate("train", UpdateList.of(kept))
        assert pack(one) == pack(two)
        assert pack(fed.aggregate("train", UpdateList.of([stale]))) == pack(fed.state)


class Fleet:
    """Clients that keep the parts they fetched, and fetch only those that they lack."""

    def __init__(self, fed: Federation) -> None:
        self.fed = fed
        self.kept: dict[int, dict[str, bytes]] = {}

    def fetch(self, k: int) -> tuple[set[str], int]:
        """Bring client k up to date; the names of what it fetched besides, and its bytes."""
        state = {n: pack(p) for n, p in self.fed.parts().items()}
        before = self.kept.get(k, {})
        new = {n: b for n, b in state.items() if before.get(n) != b}
        self.kept[k] = {n: new.get(n, before.get(n)) for n in state}
        del new["current"]
        return set(new), sum(len(b) for b in new.values())

    def change(self, k: int, place: str) -> np.ndarray:
        """What client k adds to its frozen weight, from nothing but what it has kept."""
        return effective_change({n: unpack(b) for n, b in self.kept[k].items()}, place)


class TestManyRounds:
    """Client 0 is always there, 1 misses rounds 2, 3 and 6 to 8, 2 joins in round 7."""

    ROUNDS = 10
    PRESENT = (
        (0, 1), (0, 1), (0,), (0,), (0, 1), (0, 1), (0,), (0, 2), (0, 2), (0, 1, 2),
    )  # fmt: skip

    def run(self, **options):
        """Yield (round, fleet, present clients, what each fetched, the ideal weights)."""
        fed = federation(**options)
        fleet = Fleet(fed)
        base = {place: np.zeros(SHAPES[place.split(".")[1]]) for place in PLACES}
        ideal = dict(base)
        for r, present in enumerate(self.PRESENT):
            yield r, fleet, {k: fleet.fetch(k) for k in present}, ideal
            updates = UpdateList.of(
                Update(client_id(k), noisy(sent, 100 * r + k))
                for k in present
                for sent in [sized(fed.upload("train", 0), 2 * k + 1)]
            )
            w = weights_of(updates)
            base, ideal = exact_average(base, updates, w)
            fed.state = fed.aggregate("train", updates)
        yield self.ROUNDS, fleet, {k: fleet.fetch(k) for k in (0, 1, 2)}, ideal

    @pytest.mark.parametrize("residual", ["factored", "dense"])
    def test_everybody_has_the_mean_of_all_rounds_however_late_it_came(self, residual):
        """Against the recursion W_(n+1) = W_n + sum_k w_k B_k A_k - B A in float64 by hand."""
        for _, fleet, fetched, ideal in self.run(residual=residual):
            for k in fetched:
                for place in PLACES:
                    size = max(np.abs(ideal[place]).max(), 1e-3)
                    assert np.abs(fleet.change(k, place) - ideal[place]).max() < 1e-6 * size

    def test_a_client_that_missed_rounds_fetches_the_residuals_of_these_alone(self):
        """Rounds with more than one client leave a residual: 0, 1, 4, 5, 7 and 8."""
        rounds = {r: fetched for r, _, fetched, _ in self.run(catch_up="factors")}
        assert [sorted(rounds[r][0][0]) for r in (1, 2, 3)] == [["residual/1"], ["residual/2"], []]
        assert sorted(rounds[4][1][0]) == ["residual/2"]
        assert sorted(rounds[9][1][0]) == [f"residual/{n}" for n in (4, 5, 6)]
        assert sorted(rounds[7][2][0]) == [f"residual/{n}" for n in (1, 2, 3, 4)]

    def test_a_newcomer_fetches_no_more_than_two_dense_sums(self):
        dense = dense_bytes(federation().hparams, federation().backbone.info)
        fetched = {r: f for r, _, f, _ in self.run(rank=4)}
        names, size = fetched[7][2]
        assert sorted(names) == ["base/3", "residual/4"]
        assert size < 2 * dense


def sized(payload: Payload, n: int) -> Payload:
    """The upload of a client with n images of the first class."""
    counts = {"count": np.array([n, 0]), "n": np.array([n])}
    return Payload({**payload.tensors, **counts}, payload.meta)


def exact_average(base, updates, weights):
    """The next base and effective weights in float64, from the uploads alone."""
    after, ideal = {}, {}
    for place in PLACES:
        pairs = [
            tuple(u.payload.tensors[f"lora.{place}.{m}"].astype(np.float64) for m in "AB")
            for u in updates
        ]
        ideal[place] = base[place] + sum(
            w * B @ A for w, (A, B) in zip(weights, pairs, strict=True)
        )
        A = sum(w * A for w, (A, _) in zip(weights, pairs, strict=True))
        B = sum(w * B for w, (_, B) in zip(weights, pairs, strict=True))
        after[place] = ideal[place] - B @ A
    return after, ideal


def test_a_wide_model_pays_the_published_sizes():
    """ViT-B/16, 10 clients: 718,888 bytes up; a dense base of 94,371,840 bytes."""
    fed = Federation.of("fed_talora", [])
    info = replace(fed.backbone.info, dim=768, depth=12, mlp_dim=3072)
    task = make_tasks(range(10))[0]
    upload = fed.method.exchanges(fed.hparams, info)[0].upload
    dims = fed.method.dims(fed.hparams, info, task)
    counts = (10 + 10 + 1) * 8
    lone_mean = 768 * 4  # only tasks of a single class send it
    assert upload.max_bytes(dims) == 718_888 + counts + lone_mean
    schemas = fed.method.broadcast(fed.hparams, info)
    assert schemas["base"].max_bytes(dims) == dense_bytes(fed.hparams, info) == 94_371_840
