"""The analytic method: one solution, whoever holds which image, and whenever it comes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.frozen_kit import WIDTH, Colours, exact_ridge, pooled
from adapters.kit import Federation, Images, client_id, make_tasks, toy_images
from fcil_adapters.contract import Update
from fcil_adapters.contract.privacy import Privacy
from fcil_adapters.methods.analytic import forms, solving, sums
from fcil_adapters.methods.analytic.lift import make_lift, projection
from fcil_adapters.methods.analytic.options import AnalyticHparams
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.payloads.payload import Payload

CLASSES = (0, 1, 2, 3, 4)
DATA = toy_images({0: 9, 1: 3, 2: 6, 3: 1, 4: 7}, seed=4)
DOUBLE = {"projection": 20, "precision": "double"}
COLOURS = Colours()
SEED = np.array([1, 2, 3, 4])


def split(data: Images, owner) -> list[Images]:
    owner = np.asarray(owner)
    return [
        Images(data.pictures[owner == k], data.labels[owner == k]) for k in range(owner.max() + 1)
    ]


def federation(clients, **options) -> Federation:
    return Federation.of("analytic", clients, COLOURS, **options)


def learned(clients, groups=(CLASSES,), **options) -> Federation:
    fed = federation(clients, **options)
    for task in make_tasks(*groups):
        fed.run(task)
    return fed


def rows(fed) -> dict[int, np.ndarray]:
    """The classifier, by class id."""
    state = fed.state
    return dict(zip(state.i64("classes").tolist(), state.f32("weight").astype(float), strict=True))


def expected(fed, data: Images) -> dict[int, np.ndarray]:
    """The solution of one machine with all images, without any code of the method but its map."""
    lift = make_lift(fed.hparams, WIDTH, fed.state.i64("seed"))
    phi = lift(COLOURS.features(data.pictures))
    classes, weight = exact_ridge(phi, data.labels, fed.hparams.rho, fed.hparams.balance)
    return dict(zip(classes.tolist(), weight, strict=True))


def assert_same(got, wanted, tolerance):
    assert set(got) == set(wanted)
    largest = max(np.abs(row).max() for row in wanted.values())
    for c, row in wanted.items():
        np.testing.assert_allclose(got[c], row, atol=tolerance * largest, rtol=0, err_msg=str(c))


class TestExactness:
    @settings(max_examples=40, derandomize=True)
    @given(
        owner=st.lists(st.integers(0, 4), min_size=len(DATA), max_size=len(DATA)),
        order=st.permutations(CLASSES),
        cuts=st.sets(st.integers(1, 4)),
        wave=st.lists(st.integers(0, 2), min_size=5, max_size=5),
        balance=st.sampled_from(["server", "plain"]),
    )
    def test_it_is_the_solution_of_one_machine(self, owner, order, cuts, wave, balance):
        """For any split over clients, any tasks in any order, and whoever is late within them."""
        clients = split(DATA, owner)
        fed = federation(clients, balance=balance, **DOUBLE)
        edges = [0, *sorted(cuts), len(order)]
        for task in make_tasks(*(order[a:b] for a, b in zip(edges, edges[1:], strict=False))):
            fed.open(task)
            sent = [Update(client_id(k), fed.upload("train", k)) for k in range(len(clients))]
            for late in range(3):  # what comes late is added to what was there
                came = UpdateList.of(u for k, u in enumerate(sent) if wave[k] == late)
                if len(came):
                    fed.state = fed.aggregate("train", came)
        assert_same(rows(fed), expected(fed, DATA), 1e-6)

    @pytest.mark.parametrize("features", ["relu_projection", "linear"])
    @pytest.mark.parametrize("balance", ["server", "plain"])
    @pytest.mark.parametrize(
        "owner", [lambda i: 0 * i, lambda i: i % 4, lambda i: i], ids=["one", "four", "each"]
    )
    def test_sums_of_single_precision_are_close(self, features, balance, owner):
        """Rounded once to float32, which the ridge makes up to D / rho times as large."""
        clients = split(DATA, [owner(i) for i in range(len(DATA))])[:10]
        fed = learned(clients, features=features, balance=balance, projection=20)
        assert_same(rows(fed), expected(fed, pooled(clients)), 1e-3)

    def test_it_recognises_new_pictures(self):
        fed = learned(split(DATA, np.arange(len(DATA)) % 3), ((0, 1), (2,), (3, 4)), projection=20)
        test = toy_images(dict.fromkeys(CLASSES, 6), 9)
        predictor = fed.predictor()
        best = np.array(predictor.classes)[predictor.logits(test.pictures).argmax(1)]
        assert (best == test.labels).mean() > 0.9

    def test_a_truncated_factor_gives_another_solution_and_a_near_one(self):
        clients = split(DATA, np.arange(len(DATA)) % 2)
        exact = learned(clients, **DOUBLE)
        distances = []
        for rank in (2, 4, 8):
            got = rows(learned(clients, truncate=rank, **DOUBLE))
            distances.append(max(np.abs(got[c] - row).max() for c, row in rows(exact).items()))
        assert distances[0] > distances[1] > distances[2] > 0

    def test_a_truncation_that_leaves_nothing_out_is_exact(self):
        clients = split(DATA, np.arange(len(DATA)) % 2)
        fed = learned(clients, truncate=20, **DOUBLE)
        assert_same(rows(fed), expected(fed, DATA), 1e-6)

    def test_frequent_classes_are_not_favoured_unless_asked(self):
        many = toy_images({0: 40, 1: 2}, 3)
        sizes = {}
        for balance in ("server", "plain"):
            found = rows(learned([many], ((0, 1),), balance=balance, projection=20))
            sizes[balance] = np.linalg.norm(found[0]) / np.linalg.norm(found[1])
        assert sizes["plain"] > 5 * sizes["server"]


class TestWeights:
    CLIENTS = (toy_images({0: 30, 1: 30}, 1), toy_images({0: 2, 1: 2}, 2))

    def test_every_image_counts_once_whatever_the_cap(self):
        fed = learned(self.CLIENTS, ((0, 1),), max_weight_share=0.5, **DOUBLE)
        assert_same(rows(fed), expected(fed, pooled(self.CLIENTS)), 1e-6)

    def test_a_capped_client_weighs_no_more_than_its_share(self):
        """Two clients, half each: the larger one is lowered to the four images of the smaller.

        That is as if the smaller one's images were there 15 times, and G as small as without.
        """
        fed = learned(self.CLIENTS, ((0, 1),), max_weight_share=0.5, weights="capped", **DOUBLE)
        alike = expected(fed, pooled([self.CLIENTS[0], *[self.CLIENTS[1]] * 15]))
        assert_same(rows(fed), {c: 15 * row for c, row in alike.items()}, 1e-6)


class TestForms:
    @pytest.mark.parametrize(("images", "form"), [(10, "factor"), (11, "triangle")])
    def test_the_smaller_form_travels(self, images, form):
        """At D = 20 the triangle has 210 numbers, as many as a factor of 10.5 rows."""
        fed = federation([toy_images({0: images})], projection=20)
        fed.open(make_tasks((0,))[0])
        sent = fed.upload("train", 0).tensors
        assert [n for n in ("factor", "triangle") if n in sent] == [form]
        assert sent[form].size <= 210

    def test_no_row_of_a_factor_is_an_images_feature(self):
        data = toy_images({0: 3})
        fed = federation([data], features="linear")
        fed.open(make_tasks((0,))[0])
        phi = make_lift(fed.hparams, WIDTH, SEED)(COLOURS.features(data.pictures))
        factor = fed.upload("train", 0).f32("factor")
        assert np.abs(np.abs(factor[:, None]) - np.abs(phi)).max(axis=2).min() > 1e-3
        np.testing.assert_allclose(factor.T @ factor, phi.T @ phi, atol=1e-6)

    @pytest.mark.parametrize("images", [8, 30])
    def test_what_a_truncated_factor_leaves_out_is_there_as_a_diagonal(self, images):
        """Of few images and of many, which are summed up in another way."""
        data = toy_images({0: images})
        fed = federation([data], features="linear", truncate=2)
        fed.open(make_tasks((0,))[0])
        phi = make_lift(fed.hparams, WIDTH, SEED)(COLOURS.features(data.pictures))
        sent = fed.upload("train", 0)
        assert sent.tensors["factor"].shape == (2, WIDTH)
        gram = sums.unpack_triangle(forms.read_upload(sent).triangle, WIDTH)
        np.testing.assert_allclose(np.diag(gram), np.diag(phi.T @ phi), rtol=1e-5)
        values = np.linalg.eigvalsh(phi.T @ phi)[::-1]
        lost = np.trace(phi.T @ phi) - (sent.f32("factor") ** 2).sum()
        assert lost == pytest.approx(values[2:].sum(), rel=1e-3)

    def test_a_triangle_comes_back_symmetric(self):
        square = np.arange(16.0).reshape(4, 4)
        square += square.T
        back = sums.unpack_triangle(sums.pack_triangle(square), 4)
        np.testing.assert_array_equal(back, square)

    def test_two_floats_hold_what_one_rounds_off(self):
        x = np.array([1 / 3, -1e6 / 7, 0.0])
        pair = sums.split({"x": x})
        np.testing.assert_allclose(sums.joined(pair, "x"), x, rtol=2**-47)
        assert np.abs(pair["x"] - x).max() > 1e-9

    def test_contradictions_are_named(self):
        fed = federation([toy_images({0: 3, 1: 12})], **DOUBLE)
        task = make_tasks((0, 1, 2))[0]
        fed.open(task)
        sent = dict(fed.upload("train", 0).tensors)

        def faults(**changes):
            tensors = {n: a for n, a in {**sent, **changes}.items() if a is not None}
            return forms.upload_faults(fed.hparams, Payload(tensors), task)

        assert faults() == []
        assert faults(triangle=None) == ["expected either 'triangle' or 'factor', got none of them"]
        rows_of = np.zeros((2, 20), np.float32)
        assert faults(factor=rows_of)[0] == (
            "expected either 'triangle' or 'factor', got 'triangle' and 'factor'"
        )
        assert faults(**{"triangle.low": None}) == [
            "'triangle.low' is not of the shape of 'triangle'"
        ]
        wrong = sent["sum"].copy()
        wrong[2, 3] = 1
        assert faults(sum=wrong) == ["'sum' holds more than zero for a class without images"]
        assert faults(n=np.array([7])) == ["'n': expected 15, the sum of 'count', got 7"]

    def test_a_negative_rest_is_named(self):
        fed = federation([toy_images({0: 5})], truncate=2, projection=20)
        fed.open(make_tasks((0,))[0])
        sent = fed.upload("train", 0).tensors
        rest = sent["rest"].copy()
        assert rest.max() > 0
        rest[4] = -1
        wrong = Payload({**sent, "rest": rest})
        assert forms.upload_faults(fed.hparams, wrong, fed.task) == [
            "'rest' holds a negative square"
        ]


class TestProjection:
    def test_it_is_the_same_on_every_machine(self):
        """Pinned: another projection than the server's would make every sum useless."""
        matrix = projection(SEED, 8, 50)
        heads = np.round(matrix * 4 / np.sqrt(2 / 50)).astype(np.int8)
        digest = hashlib.sha256(heads.tobytes()).hexdigest()
        assert digest == ("ec2eab356842a95ece5ddc4f8de79cd57eca68402de504ea3bd43e35e429675c")

    def test_its_entries_are_normal_and_its_features_have_length_one_on_average(self):
        matrix = projection(SEED, 64, 4000) / np.sqrt(2 / 4000)
        assert abs(matrix.mean()) < 0.01
        assert abs(matrix.std() - 1) < 0.01
        assert abs((matrix**4).mean() - 3) < 0.1
        lift = make_lift(AnalyticHparams(projection=4000), 64, SEED)
        lengths = np.linalg.norm(lift(np.random.default_rng(0).normal(size=(30, 64))), axis=1)
        assert abs(lengths.mean() - 1) < 0.05

    def test_runs_have_projections_of_their_own(self):
        seeds = [federation([DATA], seed=s).state.i64("seed").tolist() for s in (0, 0, 1)]
        assert seeds[0] == seeds[1] != seeds[2]

    def test_a_feature_of_zeros_stays_zero(self):
        for features in ("linear", "relu_projection"):
            lift = make_lift(AnalyticHparams(features=features), WIDTH, SEED)
            assert not lift(np.zeros((1, WIDTH))).any()


class TestSolving:
    def test_products_that_noise_made_impossible_are_solved_all_the_same(self):
        """What is negative counts as zero: the ridge alone holds those directions."""
        rng = np.random.default_rng(1)
        basis = np.linalg.qr(rng.normal(size=(5, 5)))[0]
        gram = basis * [4.0, 2.0, 1.0, -0.5, -3.0] @ basis.T
        nearest = basis * [4.0, 2.0, 1.0, 0.0, 0.0] @ basis.T
        targets = rng.normal(size=(2, 5))
        penalty = 0.1 * np.trace(nearest) / 5
        wanted = targets @ np.linalg.inv(nearest + penalty * np.eye(5))
        np.testing.assert_allclose(solving.ridge(gram, targets, 0.1), wanted)

    def test_slightly_negative_products_do_not_use_up_the_ridge(self):
        """Of lambda = 0.1, noise takes 0.09 away in one direction: the row there stays small."""
        gram = np.diag([2.09, 1.0, -0.09])
        row = solving.ridge(gram, np.ones((1, 3)), 0.1)[0]
        assert row[2] < 11

    @pytest.mark.parametrize("rho", [1e-9, 1e3])
    def test_the_smallest_and_the_largest_ridge_end_with_finite_rows(self, rho):
        """One image has far fewer directions than the projection."""
        fed = learned([toy_images({0: 1})], ((0,),), projection=100, rho=rho)
        row = fed.state.f32("weight")
        assert np.isfinite(row).all()
        assert row.any()

    @pytest.mark.parametrize("rho", [0, 0.9e-9, 1.1e3, float("inf"), float("nan")])
    def test_another_ridge_is_refused(self, rho):
        with pytest.raises(ValueError, match="rho"):
            AnalyticHparams(rho=rho)

    @pytest.mark.parametrize("size", [0.0, -1.0])
    def test_products_of_nothing_but_noise_give_zeros(self, size):
        assert not solving.ridge(size * np.eye(3), np.ones((1, 3)), 1e-3).any()

    @pytest.mark.parametrize("seed", range(5))
    def test_a_noised_federation_ends_with_finite_rows(self, seed):
        noise = Privacy(9.0, 1.0, np.random.default_rng(seed).standard_normal)
        fed = learned([DATA], ((0, 1), (2, 3, 4)), projection=20, privacy=noise)
        assert np.isfinite(fed.state.f32("weight")).all()


class TestEdges:
    def test_a_first_task_of_one_class_is_learned(self):
        fed = learned([toy_images({3: 4})], ((3,),), projection=20)
        assert fed.predictor().classes == (3,)
        assert rows(fed)[3].any()

    def test_before_the_first_update_there_are_no_candidates(self):
        fed = federation([DATA], projection=20)
        fed.open(make_tasks(CLASSES)[0])
        assert fed.predictor().classes == ()
        assert fed.predictor().logits(DATA.pictures).shape == (len(DATA), 0)

    def test_a_client_without_images_sends_zeros_and_is_dropped(self):
        fed = federation([toy_images({})], projection=20)
        fed.open(make_tasks(CLASSES)[0])
        sent = fed.upload("train", 0)
        assert sent.tensors["factor"].shape == (0, 20)
        assert len(UpdateList.of([Update(client_id(0), sent)])) == 0
