"""The analytic method: one solution, whoever holds which image, and whenever it comes."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.frozen_kit import WIDTH, Colours, cross_validated, exact_analytic, pooled
from adapters.kit import Federation, Images, client_id, make_tasks, toy_images
from digits import load_digits
from fcil_adapters.contract import Update
from fcil_adapters.contract.privacy import Privacy
from fcil_adapters.methods.analytic import METHOD
from fcil_adapters.numerics.symmetric import pack_triangle, unpack_triangle
from fcil_adapters.numerics.update_list import UpdateList
from fcil_adapters.toolkit.closed_form import forms, solving, sums
from fcil_adapters.toolkit.closed_form.learner import draw_groups
from fcil_adapters.toolkit.closed_form.lift import make_lift, projection
from fcil_adapters.toolkit.closed_form.options import AnalyticHparams
from fcil_protocol.errors import ConfigError
from fcil_protocol.payloads.payload import Payload

CLASSES = (0, 1, 2, 3, 4)
DATA = toy_images({0: 9, 1: 3, 2: 6, 3: 1, 4: 7}, seed=4)
DOUBLE = {"projection": 20, "precision": "double"}
RIDGE = {"form": "ridge", "rho": 1e-3, "features": "relu_projection"}
# Every way to solve, each with its own ridge.
FORMS = [
    {},
    {"prior": "none", "features": "linear"},
    {"rho": 0.01},
    {"form": "ridge"},
    RIDGE,
    {**RIDGE, "balance": "plain"},
]
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
    """The classifier, by class id: a row and its bias."""
    weight, bias = (fed.state.f32(n).astype(float) for n in ("weight", "bias"))
    both = np.column_stack([weight, bias])
    return dict(zip(fed.state.i64("classes").tolist(), both, strict=True))


def expected(fed, data: Images) -> dict[int, np.ndarray]:
    """The solution of one machine with all images, without any code of the method but its map."""
    lift = make_lift(fed.hparams, WIDTH, fed.state.i64("seed"))
    phi = lift(COLOURS.features(data.pictures))
    classes, weight, bias = exact_analytic(fed.hparams, phi, data.labels)
    return dict(zip(classes.tolist(), np.column_stack([weight, bias]), strict=True))


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
        form=st.sampled_from(FORMS),
    )
    def test_it_is_the_solution_of_one_machine(self, owner, order, cuts, wave, form):
        """For any split over clients, any tasks in any order, and whoever is late within them."""
        clients = split(DATA, owner)
        fed = federation(clients, **{**DOUBLE, **form})
        edges = [0, *sorted(cuts), len(order)]
        for task in make_tasks(*(order[a:b] for a, b in zip(edges, edges[1:], strict=False))):
            fed.open(task)
            sent = [Update(client_id(k), fed.upload("train", k)) for k in range(len(clients))]
            for late in range(3):  # what comes late is added to what was there
                came = UpdateList.of(u for k, u in enumerate(sent) if wave[k] == late)
                if len(came):
                    fed.state = fed.aggregate("train", came)
        assert_same(rows(fed), expected(fed, DATA), 1e-6)

    @pytest.mark.parametrize("form", [form for form in FORMS if "rho" in form])
    @pytest.mark.parametrize(
        "owner", [lambda i: 0 * i, lambda i: i % 4, lambda i: i], ids=["one", "four", "each"]
    )
    def test_sums_of_single_precision_are_close(self, form, owner):
        """Rounded once to float32, which the ridge makes up to D / rho times as large."""
        clients = split(DATA, [owner(i) for i in range(len(DATA))])[:10]
        fed = learned(clients, **{"projection": 20, **form})
        assert_same(rows(fed), expected(fed, pooled(clients)), 1e-3)

    def test_it_recognises_new_pictures(self):
        fed = learned(split(DATA, np.arange(len(DATA)) % 3), ((0, 1), (2,), (3, 4)), projection=20)
        test = toy_images(dict.fromkeys(CLASSES, 6), 9)
        predictor = fed.predictor()
        best = np.array(predictor.classes)[predictor.logits(test.pictures).argmax(1)]
        assert (best == test.labels).mean() > 0.9

    def test_a_truncated_factor_gives_another_solution_and_a_near_one(self):
        clients = split(DATA, np.arange(len(DATA)) % 2)
        exact = learned(clients, **RIDGE, **DOUBLE)
        distances = []
        for rank in (2, 4, 8):
            got = rows(learned(clients, truncate=rank, **RIDGE, **DOUBLE))
            distances.append(max(np.abs(got[c] - row).max() for c, row in rows(exact).items()))
        assert distances[0] > distances[1] > distances[2] > 0

    def test_a_truncation_that_leaves_nothing_out_is_exact(self):
        clients = split(DATA, np.arange(len(DATA)) % 2)
        fed = learned(clients, truncate=26, **DOUBLE)
        assert_same(rows(fed), expected(fed, DATA), 1e-6)

    def test_frequent_classes_are_not_favoured_unless_asked(self):
        many = toy_images({0: 40, 1: 2}, 3)
        sizes = {}
        for balance in ("server", "plain"):
            found = rows(learned([many], ((0, 1),), **{**RIDGE, "balance": balance}, projection=20))
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
        fed = learned(
            self.CLIENTS, ((0, 1),), max_weight_share=0.5, weights="capped", **RIDGE, **DOUBLE
        )
        alike = expected(fed, pooled([self.CLIENTS[0], *[self.CLIENTS[1]] * 15]))
        assert_same(rows(fed), {c: 15 * row for c, row in alike.items()}, 1e-6)


class TestForms:
    @pytest.mark.parametrize(("images", "form"), [(10, "factor"), (11, "triangle")])
    def test_the_smaller_form_travels(self, images, form):
        """At D = 20 the triangle has 210 numbers, as many as a factor of 10.5 rows."""
        fed = federation([toy_images({0: images})], projection=20, features="relu_projection")
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
        gram = unpack_triangle(forms.read_upload(fed.hparams, sent).triangle, WIDTH)
        np.testing.assert_allclose(np.diag(gram), np.diag(phi.T @ phi), rtol=1e-5)
        values = np.linalg.eigvalsh(phi.T @ phi)[::-1]
        lost = np.trace(phi.T @ phi) - (sent.f32("factor") ** 2).sum()
        assert lost == pytest.approx(values[2:].sum(), rel=1e-3)

    def test_a_triangle_comes_back_symmetric(self):
        square = np.arange(16.0).reshape(4, 4)
        square += square.T
        back = unpack_triangle(pack_triangle(square), 4)
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
        rows_of = np.zeros((2, 26), np.float32)
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
        h = AnalyticHparams(projection=4000, features="relu_projection")
        lift = make_lift(h, 64, SEED)
        lengths = np.linalg.norm(lift(np.random.default_rng(0).normal(size=(30, 64))), axis=1)
        assert abs(lengths.mean() - 1) < 0.05

    def test_runs_have_projections_of_their_own(self):
        seeds = [federation([DATA], seed=s).state.i64("seed").tolist() for s in (0, 0, 1)]
        assert seeds[0] == seeds[1] != seeds[2]

    def test_a_feature_of_zeros_stays_zero(self):
        for features in ("linear", "relu_projection", "both"):
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
        penalty = solving.find_penalty(0.1, gram, targets, 9, 9)
        assert penalty == pytest.approx(0.1 * np.trace(nearest) / 5)
        wanted = np.linalg.inv(nearest + penalty * np.eye(5))
        np.testing.assert_allclose(solving.inverse(gram, penalty), wanted, atol=1e-12)

    def test_slightly_negative_products_do_not_use_up_the_ridge(self):
        """Of lambda = 0.1, noise takes 0.09 away in one direction: the row there stays small."""
        gram = np.diag([2.09, 1.0, -0.09])
        penalty = solving.find_penalty(0.1, gram, np.ones((1, 3)), 9, 9)
        assert (np.ones(3) @ solving.inverse(gram, penalty))[2] < 11

    @pytest.mark.parametrize("rho", [1e-9, 1e3])
    def test_the_smallest_and_the_largest_ridge_end_with_finite_rows(self, rho):
        """One image has far fewer directions than the projection."""
        fed = learned([toy_images({0: 1})], ((0,),), projection=100, rho=rho)
        row = fed.state.f32("weight")
        assert np.isfinite(row).all()
        assert row.any()

    @pytest.mark.parametrize("rho", ["loo", 0, 0.9e-9, 1.1e3, float("inf"), float("nan")])
    def test_another_ridge_is_refused(self, rho):
        with pytest.raises(ValueError, match="rho"):
            AnalyticHparams(rho=rho)

    @pytest.mark.parametrize("size", [0.0, -1.0])
    def test_products_of_nothing_but_noise_give_zeros(self, size):
        triangle = pack_triangle(size * np.eye(3))
        noise = sums.ProductSums(triangle, np.array([4]), np.ones((1, 3)), np.ones(1), 1.0)
        for form in ("ridge", "within"):
            found = solving.solve(AnalyticHparams(form=form, rho=1e-3), noise)
            assert found.classes.tolist() == [4]
            assert not found.weight.any()

    @pytest.mark.parametrize("seed", range(5))
    def test_a_noised_federation_ends_with_finite_rows(self, seed):
        noise = Privacy(9.0, 1.0, np.random.default_rng(seed).standard_normal)
        fed = learned([DATA], ((0, 1), (2, 3, 4)), projection=20, privacy=noise)
        assert np.isfinite(fed.state.f32("weight")).all()


class TestChoiceOfTheRidge:
    @pytest.mark.parametrize(("n", "width"), [(20, 50), (50, 50), (50, 20)])
    def test_it_is_generalised_cross_validation_by_definition(self, n, width):
        """With fewer images than directions, as many, and more."""
        rng = np.random.default_rng(n + width)
        labels = np.arange(n) % 5
        phi = (
            rng.normal(size=(n, width)) * 0.9 ** np.arange(width)
            + rng.normal(size=(5, width))[labels] / 3
        )
        targets = np.eye(5)[labels]
        best, scores = cross_validated(phi, targets)
        gram, totals = phi.T @ phi, targets.T @ phi
        values, vectors = np.linalg.eigh(gram)
        along = np.square(totals @ vectors).sum(0)
        got = solving.cross_validation(np.maximum(values, 0), along, n, n)
        assert np.isfinite(got).sum() == len(scores) > 10
        np.testing.assert_allclose(got[np.isfinite(got)], list(scores.values()), rtol=1e-6)
        found = solving.find_penalty("gcv", gram, totals, n, n)
        assert found == pytest.approx(best * np.trace(gram) / width)

    @pytest.mark.parametrize("owners", [1, 3])
    @pytest.mark.parametrize("groups", [(CLASSES,), ((3, 0), (1,), (4, 2))])
    def test_it_does_not_depend_on_the_split(self, owners, groups):
        """The scores of all candidates are the same, so that no tie decides the test."""
        fed = learned(split(DATA, np.arange(len(DATA)) % owners), groups, **DOUBLE)
        total = sums.ProductSums.read(fed.state.tensors, "total")
        phi = make_lift(fed.hparams, WIDTH, fed.state.i64("seed"))(COLOURS.features(DATA.pictures))
        _, wanted = cross_validated(phi, np.eye(len(CLASSES))[DATA.labels])
        values, vectors = np.linalg.eigh(unpack_triangle(total.triangle, 26))
        along = np.square(total.sums @ vectors).sum(0)
        n = len(DATA)
        assert (total.observations, total.counts.sum()) == (n, n)
        found = solving.cross_validation(np.maximum(values, 0), along, n, n)
        judged = solving.GRID > 1e-3  # below it the toy features leave next to no residual
        scores = [score for rho, score in wanted.items() if rho > 1e-3]
        np.testing.assert_allclose(found[judged & np.isfinite(found)], scores, rtol=1e-4)

    def test_of_equal_scores_the_largest_is_taken(self):
        """Features that tell nothing: no ridge explains the targets better than another."""
        values, along = np.ones(4), np.zeros(4)
        scores = solving.choose_rho(values, along, 1e9, 1e9)
        assert scores == pytest.approx(1e3)

    def test_without_an_allowed_candidate_it_is_the_largest(self):
        assert solving.choose_rho(np.full(3, 1.0), np.ones(3), 1e-3, 1.0) == pytest.approx(1e3)
        assert solving.choose_rho(np.zeros(3), np.zeros(3), 5, 5.0) == pytest.approx(1e3)

    def test_noise_makes_it_at_least_as_large_as_the_most_negative_eigenvalue(self):
        gram = np.diag([50.0, 1.0, -3.0])
        assert solving.find_penalty("gcv", gram, np.ones((2, 3)), 40, 40) >= 3

    def test_where_images_are_as_many_as_directions_class_means_are_not_better(self):
        """There a fixed small ridge interpolates."""
        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        train, test = order[:300], order[300:]
        phi = digits.images.reshape(-1, 64) - digits.images.reshape(-1, 64).mean(0)
        h = AnalyticHparams(projection=300 - 64)
        phi = make_lift(h, 64, SEED)(phi)
        assert phi.shape[1] == len(train)
        triangle = pack_triangle(phi[train].T @ phi[train])
        targets = np.eye(10)[digits.target[train]]
        total = sums.ProductSums(
            triangle, np.arange(10), targets.T @ phi[train], targets.sum(0), float(len(train))
        )
        right = {}
        for name, options in {"gcv": {}, "fixed": {"form": "ridge", "rho": 1e-3}}.items():
            found = solving.solve(AnalyticHparams(projection=236, **options), total)
            scores = phi[test] @ found.weight.T + found.bias
            right[name] = (scores.argmax(1) == digits.target[test]).mean()
        means = total.sums / total.counts[:, None]
        near = ((phi[test][:, None] - means) ** 2).sum(2).argmin(1) == digits.target[test]
        assert right["gcv"] > 0.02 + max(near.mean(), right["fixed"])


class TestWithin:
    PHI = np.random.default_rng(2).normal(size=(60, 7))
    LABELS = np.repeat([0, 1, 2], (40, 15, 5))

    def found(self, penalty, *, corrects):
        targets = np.eye(3)[self.LABELS]
        return solving.within(
            self.PHI.T @ self.PHI,
            targets.T @ self.PHI,
            targets.sum(0),
            penalty,
            60,
            corrects=corrects,
        )

    def test_a_huge_ridge_gives_the_nearest_class_mean(self):
        weight, bias = self.found(1e12, corrects=False)
        means = np.stack([self.PHI[c == self.LABELS].mean(0) for c in range(3)])
        distances = -((self.PHI[:, None] - means) ** 2).sum(2) / 2
        distances += (self.PHI**2).sum(1, keepdims=True) / 2
        scores = (self.PHI @ weight.T + bias) * 1e12 / 57
        np.testing.assert_allclose(scores, distances, atol=1e-6)

    def test_a_tiny_ridge_gives_gaussians_with_one_covariance(self):
        """Log-posteriors, but for the correction and a constant for each image."""
        weight, bias = self.found(1e-12, corrects=False)
        means = np.stack([self.PHI[c == self.LABELS].mean(0) for c in range(3)])
        residuals = self.PHI - means[self.LABELS]
        precision = np.linalg.inv(residuals.T @ residuals / 57)
        apart = self.PHI[:, None] - means
        wanted = -0.5 * np.einsum("ncd,de,nce->nc", apart, precision, apart)
        got = self.PHI @ weight.T + bias
        np.testing.assert_allclose(got - got[:, :1], wanted - wanted[:, :1], atol=1e-6)

    def test_equal_counts_are_corrected_alike(self):
        targets = np.eye(3)[np.arange(60) % 3]
        sums_of = (self.PHI.T @ self.PHI, targets.T @ self.PHI, targets.sum(0), 0.5, 60)
        plain, corrected = (solving.within(*sums_of, corrects=c)[1] for c in (False, True))
        assert np.ptp(corrected - plain) == pytest.approx(0, abs=1e-12)

    def test_single_images_give_nearest_means_without_a_correction(self):
        """There is no scatter within classes to learn from."""
        phi = self.PHI[:3]
        weight, bias = solving.within(phi.T @ phi, phi, np.ones(3), 2.0, 3, corrects=True)
        np.testing.assert_allclose(weight, phi / 2, atol=1e-12)
        np.testing.assert_allclose(bias, -(phi**2).sum(1) / 4, atol=1e-12)


class TestGroups:
    def test_groups_are_observations(self):
        """By definition: z = sum / sqrt(n) of each group, with sqrt(n) as its target."""
        data = toy_images({0: 9, 1: 3, 2: 6, 3: 1, 4: 7}, 4)
        fed = learned([data], group=3, **DOUBLE)
        groups = draw_groups(replace(fed.context("train"), seed=(0, 0)), data.labels)
        lift = make_lift(fed.hparams, WIDTH, fed.state.i64("seed"))
        phi = lift(COLOURS.features(data.pictures))
        z = np.stack(
            [
                phi[groups == g].sum(0) / np.sqrt((groups == g).sum())
                for g in range(groups.max() + 1)
            ]
        )
        total = sums.ProductSums.read(fed.state.tensors, "total")
        assert total.observations == len(z) == 3 + 1 + 2 + 2
        np.testing.assert_allclose(unpack_triangle(total.triangle, 26), z.T @ z, atol=1e-9)
        assert total.counts.tolist() == [9, 3, 6, 0, 7]
        for c in (0, 1, 2, 4):
            np.testing.assert_allclose(total.sums[c], phi[data.labels == c].sum(0), atol=1e-9)

    @pytest.mark.parametrize(
        ("images", "sizes"), [(2, []), (3, [3]), (5, [5]), (8, [4, 4]), (11, [3, 4, 4])]
    )
    def test_every_group_is_large_enough_and_none_twice_as_large(self, images, sizes):
        fed = federation([DATA], group=3)
        found = draw_groups(fed.context("train"), np.full(images, 7))
        assert sorted(np.bincount(found[found >= 0]).tolist()) == sizes

    def test_they_are_drawn_and_drawn_alike_again(self):
        fed = federation([DATA], group=2)
        labels = np.zeros(40, dtype=np.int64)
        once, again = (draw_groups(fed.context("train"), labels) for _ in range(2))
        assert once.tolist() == again.tolist() != (np.arange(40) % 20).tolist()

    def test_a_later_round_of_the_same_images_shows_the_same_groups(self):
        """Others would give the server the differences between groups, down to single images."""
        ctx = federation([DATA], group=2).context("train")
        labels = np.zeros(40, dtype=np.int64)
        once, again = (draw_groups(replace(ctx, round=n), labels) for n in (0, 1))
        assert once.tolist() == again.tolist()

    @pytest.mark.parametrize(("groups", "fits"), [(0, False), (1, True), (2, True), (3, False)])
    def test_a_number_of_groups_that_the_images_do_not_make_is_refused(self, groups, fits):
        """Less than they make is what a sum of clients' uploads has."""
        fed = federation([toy_images({0: 9})], group=4)
        fed.open(make_tasks((0,))[0])
        sent = fed.upload("train", 0).tensors
        assert sent["groups"].tolist() == [2]
        wrong = Payload({**sent, "groups": np.array([groups])})
        faults = forms.upload_faults(fed.hparams, wrong, fed.task)
        assert faults == ([] if fits else [f"'groups' is {groups}, expected 1 to 2"])

    def test_a_class_smaller_than_a_group_is_refused(self):
        fed = federation([toy_images({0: 4})], group=4)
        fed.open(make_tasks((0,))[0])
        sent = fed.upload("train", 0).tensors
        few = {"count": np.array([3]), "n": np.array([3]), "groups": np.array([0])}
        wrong = Payload({**sent, **few})
        fault, _ = forms.upload_faults(fed.hparams, wrong, fed.task)
        assert fault == "'count' has a class with fewer images than a group of 4"

    def test_they_give_nearly_the_classifier_of_all_images(self):
        many = toy_images(dict.fromkeys(CLASSES, 24), 5)
        test = toy_images(dict.fromkeys(CLASSES, 6), 9)
        fed = learned(
            split(many, np.arange(len(many)) % 3), ((0, 1), (2, 3, 4)), group=4, projection=40
        )
        predictor = fed.predictor()
        best = np.array(predictor.classes)[predictor.logits(test.pictures).argmax(1)]
        assert (best == test.labels).mean() > 0.9

    def test_noise_refuses_them(self):
        with pytest.raises(ConfigError, match="method.group is 4"):
            METHOD.statistics(AnalyticHparams(group=4), "train", make_tasks((0,))[0])


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"group": 1}, "at least 2"),
            ({"balance": "plain"}, "form = 'ridge'"),
            ({"form": "ridge", "prior": "none"}, "form = 'within'"),
        ],
    )
    def test_options_without_effect_are_refused(self, options, words):
        with pytest.raises(ValueError, match=words):
            AnalyticHparams(**options)

    @pytest.mark.parametrize("options", [{}, {"form": "ridge"}, {"form": "ridge", "rho": 2.0}])
    def test_what_a_server_sends_is_accepted(self, options):
        """A client gets every option, defaults included."""
        h = AnalyticHparams(**options)
        assert AnalyticHparams.model_validate_json(h.model_dump_json()) == h


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
        assert sent.tensors["factor"].shape == (0, 26)
        assert len(UpdateList.of([Update(client_id(0), sent)])) == 0
