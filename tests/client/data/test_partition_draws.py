"""Draws and class orders are those of docs/partitions.md, worked out here once more by hand."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_client.data import partition_draws as draws
from fcil_protocol.errors import UsageError


def labels_of(sizes):
    return np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)


def table(labels, owner, clients):
    """Return images by client and class (K, C)."""
    found = np.zeros((clients, labels.max() + 1), int)
    for label, slot in zip(labels, owner, strict=True):
        found[slot, label] += 1
    return found


# --- quantity ------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "clients"), [(2, 10), (6, 10), (1, 12), (10, 3)])
def test_each_client_holds_alpha_classes_and_owners_of_a_class_share_it_equally(alpha, clients):
    labels = labels_of([53] * 10)
    owner = draws.quantity(alpha)(labels, clients, draws.task_stream(3, 1))
    found = table(labels, owner, clients)
    assert ((found > 0).sum(1) == alpha).all()
    assert found.sum(0).tolist() == [53] * 10
    for column in found.T:
        shares = column[column > 0]
        assert len(shares) >= 1
        assert shares.max() - shares.min() <= 1


def test_where_chance_alone_would_leave_classes_without_owner_it_is_drawn_again():
    labels = labels_of([20] * 10)
    uncovered = covered = 0
    for seed in range(30):
        rng = draws.task_stream(seed, 0)
        once = {int(c) for _ in range(10) for c in rng.choice(10, 2, replace=False)}
        uncovered += len(once) < 10
        owner = draws.quantity(2)(labels, 10, draws.task_stream(seed, 0))
        covered += (table(labels, owner, 10).sum(0) > 0).all()
    assert uncovered > 15  # P(covered) = 0.262
    assert covered == 30


def test_the_first_draw_that_covers_is_taken_as_it_is():
    seed = next(
        s
        for s in range(100)
        if len({int(c) for c in _choices(draws.task_stream(s, 0), 10, 2).ravel()}) == 10
    )
    held = _choices(draws.task_stream(seed, 0), 10, 2)
    labels = labels_of([30] * 10)
    found = table(labels, draws.quantity(2)(labels, 10, draws.task_stream(seed, 0)), 10)
    assert [set(np.flatnonzero(row).tolist()) for row in found] == [set(r.tolist()) for r in held]


def _choices(rng, clients, alpha):
    return np.stack([rng.choice(10, alpha, replace=False) for _ in range(clients)])


def test_after_the_last_draw_missing_classes_are_exchanged_for_classes_that_others_own(monkeypatch):
    monkeypatch.setattr(draws, "MAX_DRAWS", 1)
    labels = labels_of([20] * 10)
    for seed in range(40):
        drawn = _choices(draws.task_stream(seed, 0), 10, 1)
        found = table(labels, draws.quantity(1)(labels, 10, draws.task_stream(seed, 0)), 10)
        assert (found.sum(0) == 20).all()
        assert ((found > 0).sum(1) == 1).all()
        # Nobody gave up a class that was theirs alone.
        alone = {c for c, n in Counter(drawn.ravel().tolist()).items() if n == 1}
        for row, (mine,) in zip(found, drawn, strict=True):
            if mine in alone:
                assert row[mine] == 20


def test_with_lots_for_each_image_owners_of_a_class_have_unequal_shares_of_all_of_it():
    labels = labels_of([400] * 4)
    owner = draws.quantity(2, categorical=True)(labels, 6, draws.task_stream(0, 0))
    found = table(labels, owner, 6)
    assert ((found > 0).sum(1) == 2).all()
    spread = [c[c > 0].max() - c[c > 0].min() for c in found.T if (c > 0).sum() > 1]
    assert max(spread) > 1
    for column in found.T:
        owners = (column > 0).sum()
        sd = np.sqrt(400 / owners * (1 - 1 / owners))
        assert (np.abs(column[column > 0] - 400 / owners) <= 5 * sd + 1e-9).all()


def test_a_draw_in_which_a_client_would_have_too_few_images_is_drawn_again():
    labels = labels_of([4, 3, 3])  # of four clients two share a class: 4 images are enough for both
    smallest = {0: [], 2: []}
    for minimum, found in smallest.items():
        draw = draws.quantity(1, minimum=minimum)
        for seed in range(30):
            owner = draw(labels, 4, draws.task_stream(seed, 0))
            assert sorted(np.bincount(labels[owner == owner[0]], minlength=3))[:2] == [0, 0]
            found.append(np.bincount(owner, minlength=4).min())
    assert smallest[0].count(1) > 10
    assert set(smallest[2]) == {2}


# --- Dirichlet -----------------------------------------------------------------------------


def by_hand(labels, clients, beta, rng, *, balance=False):
    """One draw, with the cut points floor(cumsum(p) n_c) counted out image by image."""
    owner = np.full(len(labels), -1)
    for label in range(labels.max() + 1):
        rows = rng.permutation(np.flatnonzero(labels == label))
        p = rng.dirichlet([beta] * clients)
        if balance:
            full = np.bincount(owner[owner >= 0], minlength=clients) >= len(labels) / clients
            p = np.where(full, 0, p)
            p = p / p.sum()
        ends = [int(np.floor(p[: k + 1].sum() * len(rows))) for k in range(clients)]
        ends[-1] = len(rows)
        for place, row in enumerate(rows):
            owner[row] = next(k for k in range(clients) if place < ends[k])
    return owner


@pytest.mark.parametrize(("beta", "balance"), [(0.5, False), (5.0, False), (0.5, True)])
def test_shares_are_cut_at_the_floor_of_the_summed_dirichlet_weights(beta, balance):
    labels = labels_of([37, 50, 11, 42])
    owner = draws.dirichlet(beta, minimum=0, balance=balance)(labels, 5, draws.task_stream(7, 2))
    expected = by_hand(labels, 5, beta, draws.task_stream(7, 2), balance=balance)
    assert owner.tolist() == expected.tolist()


def test_a_task_is_drawn_again_until_every_client_has_the_images_asked_for():
    labels = labels_of([20] * 10)
    for seed in range(20):
        free = draws.dirichlet(0.05, minimum=0)(labels, 8, draws.task_stream(seed, 0))
        owner = draws.dirichlet(0.05)(labels, 8, draws.task_stream(seed, 0))
        assert np.bincount(owner, minlength=8).min() >= 1
        if np.bincount(free, minlength=8).min() >= 1:
            assert owner.tolist() == free.tolist()


def test_where_no_draw_suffices_the_last_of_a_thousand_counts(monkeypatch):
    labels = labels_of([10, 10])
    monkeypatch.setattr(draws, "MAX_DRAWS", 3)
    rng = draws.task_stream(0, 0)
    owner = draws.dirichlet(0.001, minimum=2)(labels, 9, rng)
    again = draws.task_stream(0, 0)
    last = [by_hand(labels, 9, 0.001, again) for _ in range(3)][-1]
    assert owner.tolist() == last.tolist()
    assert rng.bytes(4) == again.bytes(4)


def test_with_lots_for_each_image_a_class_follows_its_dirichlet_weights():
    labels = labels_of([5000])
    owner = draws.dirichlet(2.0, categorical=True)(labels, 4, draws.task_stream(1, 0))
    rng = draws.task_stream(1, 0)
    rng.permutation(5000)
    p = rng.dirichlet([2.0] * 4)
    counts = np.bincount(owner, minlength=4)
    assert np.abs(counts - 5000 * p).max() < 5 * np.sqrt(5000 * 0.25)
    cut = draws.dirichlet(2.0)(labels, 4, draws.task_stream(1, 0))
    assert np.bincount(cut, minlength=4).tolist() != counts.tolist()


def test_the_trick_of_balance_gives_nothing_more_to_clients_above_their_share():
    labels = labels_of([100] * 10)
    free, capped = (
        np.bincount(
            draws.dirichlet(0.05, balance=b)(labels, 5, draws.task_stream(4, 0)), minlength=5
        )
        for b in (False, True)
    )
    # A client below N / K = 200 can take one more class of 100 at most.
    assert capped.max() < 300 <= free.max()


def test_a_tiny_concentration_still_gives_every_image_an_owner():
    labels = labels_of([5] * 40)
    owner = draws.dirichlet(1e-6, minimum=0, balance=True)(labels, 10, draws.task_stream(0, 0))
    assert np.bincount(owner, minlength=10).sum() == 200
    assert owner.min() >= 0


# --- iid -----------------------------------------------------------------------------------


def test_iid_deals_each_class_and_the_whole_as_equally_as_possible():
    labels = labels_of([7, 8, 9, 10])
    found = table(labels, draws.even()(labels, 4, draws.task_stream(0, 0)), 4)
    assert found.sum(1).max() - found.sum(1).min() <= 1
    assert all(column.max() - column.min() <= 1 for column in found.T)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    clients=st.integers(1, 7),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_whatever_is_drawn_every_image_has_exactly_one_owner_and_the_same_next_time(
    sizes, clients, seed, data
):
    labels = labels_of(sizes)
    lowest = -(-len(sizes) // clients)
    lots = data.draw(st.booleans())
    draw = data.draw(
        st.sampled_from(
            [
                draws.even(),
                draws.quantity(data.draw(st.integers(lowest, len(sizes))), minimum=0),
                draws.dirichlet(
                    data.draw(st.floats(0.01, 100)), minimum=0, categorical=lots, balance=lots
                ),
            ]
        )
    )
    owner = draw(labels, clients, draws.task_stream(seed, 0))
    assert owner.shape == labels.shape
    assert ((owner >= 0) & (owner < clients)).all()
    assert owner.tolist() == draw(labels, clients, draws.task_stream(seed, 0)).tolist()


# --- HePCo ---------------------------------------------------------------------------------


def test_hepco_shows_six_of_cifars_ten_classes_with_fifty_images_each():
    assert draws.hepco_counts(10, 5000, 0.6, 0.1, 1.0) == [50] * 6
    labels = labels_of([500] * 10)
    chosen = draws.hepco(labels, draws.hepco_stream(0, 1, 2, 3), kappa=0.6, gamma=0.1, beta=1.0)
    assert {len(rows) for rows in chosen.values()} == {50}
    assert len(chosen) == 6
    for label, rows in chosen.items():
        assert (labels[rows] == label).all()
        assert len(set(rows.tolist())) == 50


@pytest.mark.parametrize("beta", [0.05, 0.01])
def test_hepcos_imbalance_is_its_formula_and_small_tails_are_absent(beta):
    expected = [int(int(500.0 * beta ** (i / 5)) * 0.1) for i in range(6)]
    assert draws.hepco_counts(10, 5000, 0.6, 0.1, beta) == expected
    assert expected[0] == 50
    tails = draws.hepco_counts(10, 100, 0.6, 0.1, beta)  # 10 images a class: 1, then none
    assert tails == [1, 0, 0, 0, 0, 0]
    chosen = draws.hepco(
        labels_of([10] * 10), draws.hepco_stream(0, 0, 0, 0), kappa=0.6, gamma=0.1, beta=beta
    )
    assert [len(rows) for rows in chosen.values()] == [1]


@pytest.mark.parametrize(
    ("kappa", "kept"), [(0.1, 1), (0.6, 6), (0.7, 7), (0.8, 8), (0.9, 9), (0.95, 10), (1.0, 10)]
)
def test_hepco_shows_the_share_of_the_classes_that_is_written(kappa, kept):
    assert len(draws.hepco_counts(10, 1000, kappa, 1.0, 1.0)) == kept


@pytest.mark.parametrize(("gamma", "shown"), [(0.29, 29), (0.57, 57), (0.1, 10), (1.0, 100)])
def test_hepco_shows_the_share_of_the_images_that_is_written(gamma, shown):
    assert draws.hepco_counts(10, 1000, 1.0, gamma, 1.0) == [shown] * 10


def test_hepco_with_a_single_class_uses_the_exponent_zero():
    assert draws.hepco_counts(1, 80, 0.6, 0.25, 0.01) == [20]
    assert draws.hepco_counts(4, 320, 0.25, 0.25, 0.01) == [20]


def test_hepco_draws_anew_for_every_client_round_and_task_and_gives_small_classes_whole():
    labels = labels_of([40] * 5)

    def drawn(task, round_, slot):
        rng = draws.hepco_stream(5, task, round_, slot)
        chosen = draws.hepco(labels, rng, kappa=0.6, gamma=0.5, beta=1.0)
        return {label: rows.tolist() for label, rows in chosen.items()}

    one = drawn(0, 0, 0)
    assert one == drawn(0, 0, 0)
    assert all(one != other for other in (drawn(1, 0, 0), drawn(0, 1, 0), drawn(0, 0, 1)))
    few = draws.hepco(
        labels_of([1, 99]), draws.hepco_stream(0, 0, 0, 0), kappa=1.0, gamma=1.0, beta=1.0
    )
    assert sorted(map(len, few.values())) == [1, 50]  # n_max is the mean: 50


# --- classes and tasks ---------------------------------------------------------------------


def test_pycils_order_is_the_permutation_of_its_legacy_seed():
    state = np.random.get_state()  # noqa: NPY002  the papers' generator
    np.random.seed(1993)  # noqa: NPY002
    expected = np.random.permutation(100).tolist()  # noqa: NPY002
    np.random.set_state(state)  # noqa: NPY002
    assert draws.pycil_order(100) == expected
    assert expected[:5] == [68, 56, 78, 8, 23]
    names = [f"c{i:02d}" for i in range(100)]
    assert draws.class_order(names, "pycil", 5) == [f"c{i:02d}" for i in expected]


def test_hepcos_order_is_a_shuffle_by_the_seed_and_natural_order_counts_numbers():
    expected = list(range(20))
    random.seed(4)
    random.shuffle(expected)
    names = [str(i) for i in range(20)]
    assert draws.class_order(names, "shuffled", 4) == [str(i) for i in expected]
    assert draws.class_order(names[::-1], "natural", 0) == names
    assert draws.class_order(["b", "10", "9"], "natural", 0) == ["10", "9", "b"]


def test_an_order_that_is_listed_is_taken_as_it_is_and_may_leave_classes_out():
    assert draws.class_order(["a", "b", "c"], ["c", "a"], 0) == ["c", "a"]
    with pytest.raises(UsageError, match="names 'z', which is not among the 3 classes"):
        draws.class_order(["a", "b", "c"], ["c", "z"], 0)
    with pytest.raises(UsageError, match="names 'c' twice"):
        draws.class_order(["a", "b", "c"], ["c", "a", "c"], 0)
    with pytest.raises(UsageError, match="unknown class order 'abc'; known are pycil, natural"):
        draws.class_order(["a", "b"], "abc", 0)


def test_classes_are_cut_into_tasks_as_asked():
    order = [str(i) for i in range(10)]

    def sizes(tasks, per_task):
        return [len(task) for task in draws.make_tasks(order, tasks, per_task)]

    assert sizes(0, 0) == [1] * 10
    assert sizes(5, 0) == [2] * 5
    assert sizes(4, 0) == [3, 3, 2, 2]
    assert sizes(0, 4) == [4, 4, 2]
    assert sizes(2, 3) == [3, 3]
    assert draws.make_tasks(order, 2, 3) == (("0", "1", "2"), ("3", "4", "5"))
    with pytest.raises(UsageError, match="10 classes cannot make 11 tasks"):
        sizes(11, 0)
    with pytest.raises(UsageError, match="3 tasks of 4 classes need 12 classes; the data has 10"):
        sizes(3, 4)
