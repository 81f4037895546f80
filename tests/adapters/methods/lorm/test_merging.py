"""RegMean by its definition: the weights nearest to all clients' on the inputs that these have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcil_adapters.methods.lorm.inputs import damped
from fcil_adapters.methods.lorm.merging import (
    RegMean,
    pack_triangle,
    root_of,
    task_shares,
    unpack_triangle,
)

K, OUT, WIDE, RANK, TOKENS = 4, 6, 9, 3, 50
EPS = 1e-10


def inputs(seed=0, k=K, wide=WIDE, tokens=TOKENS):
    """Tokens of each client, in directions and lengths of its own: (k, tokens, wide)."""
    rng = np.random.default_rng(seed)
    turn = rng.standard_normal((k, wide, wide))
    return rng.standard_normal((k, tokens, wide)) @ turn


def weights(seed=1, k=K, out=OUT, n=WIDE):
    return np.random.default_rng(seed).standard_normal((k, out, n))


def least_squares(W, X):
    """Return the minimiser of ``sum_k |(W - W_k) X_k|^2`` from the tokens themselves."""
    left = np.concatenate(X)  # (sum tokens, n)
    right = np.concatenate([x @ w.T for w, x in zip(W, X, strict=True)])
    return np.linalg.lstsq(left, right, rcond=None)[0].T


def merge(W, X, eps=EPS, *, share=None, roots=None, mean=None):
    """Merge by roots of the mean products, each client weighing as its tokens do."""
    share = np.array([len(x) for x in X], dtype=float) if share is None else np.asarray(share)
    share = share / share.sum()
    mean = np.tensordot(share, W, 1) if mean is None else mean
    if roots is None:
        roots = [root_of(torch.from_numpy(x.T @ x / max(len(x), 1))) for x in X]
    total = RegMean.around(torch.from_numpy(mean), diagonal=roots[0].ndim == 1)
    for s, w, root in zip(share, W, roots, strict=True):
        total.add(float(s), torch.from_numpy(w), root)
    return total.merged(eps).numpy()


def diagonals(X):
    return [torch.from_numpy(np.sqrt((x**2).mean(0))) for x in X]


def test_the_merge_is_the_least_squares_solution_on_explicit_inputs():
    W, X = weights(), inputs()
    X = [x[: 20 + 10 * k] for k, x in enumerate(X)]  # clients of different sizes
    np.testing.assert_allclose(merge(W, X), least_squares(W, X), rtol=1e-7, atol=1e-8)


def test_it_loses_less_on_the_inputs_than_the_weighted_mean_and_the_diagonals():
    W, X = weights(), inputs()

    def loss(merged):
        return sum(np.square((merged - w) @ x.T).sum() for w, x in zip(W, X, strict=True))

    merged, by_columns = merge(W, X), merge(W, X, roots=diagonals(X))
    assert loss(merged) < loss(by_columns) < 1.5 * loss(W.mean(0))
    assert loss(merged) < 0.9 * loss(W.mean(0))
    rng = np.random.default_rng(3)
    for _ in range(20):  # no step from there goes down
        assert loss(merged + 1e-3 * rng.standard_normal(merged.shape)) > loss(merged)


def test_products_of_the_low_rank_inputs_are_all_that_b_needs():
    """``M_k = A G_k A^T`` (r, r) gives the same B as the full Gram matrix (in, in)."""
    X, B = inputs(), weights(n=RANK)
    A = np.random.default_rng(5).standard_normal((RANK, WIDE))
    merged = merge(B, [x @ A.T for x in X])
    left = np.concatenate([x @ A.T for x in X])
    full = sum(x.T @ x for x in X)
    right = sum(b @ A @ (x.T @ x) for b, x in zip(B, X, strict=True)) @ A.T
    np.testing.assert_allclose(merged, right @ np.linalg.inv(A @ full @ A.T), rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(merged, least_squares(B, [x @ A.T for x in X]), atol=1e-7)
    assert left.shape == (K * TOKENS, RANK)


def test_with_diagonals_every_column_is_a_mean_by_its_own_squares():
    W, X = weights(), inputs()
    squares = np.stack([(x**2).sum(0) for x in X])  # (K, in)
    expected = (W * squares[:, None, :]).sum(0) / squares.sum(0)
    np.testing.assert_allclose(merge(W, X, roots=diagonals(X)), expected, rtol=1e-10)


def test_an_input_that_never_fires_keeps_the_mean_of_its_column():
    """A pseudo-inverse would erase it."""
    W, X = weights(), inputs()
    X[:, :, 4] = 0
    mean = W.mean(0)
    merged, columns = merge(W, X, eps=1e-6), merge(W, X, roots=diagonals(X))
    np.testing.assert_allclose(columns[:, 4], mean[:, 4], rtol=1e-12)
    np.testing.assert_allclose(merged[:, 4], mean[:, 4], rtol=1e-6)
    others = np.arange(WIDE) != 4
    expected = least_squares(W[:, :, others], X[:, :, others])
    np.testing.assert_allclose(merged[:, others], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("same", [1, 3])
def test_one_client_or_equal_ones_give_their_weights_to_the_bit(same):
    W = np.repeat(weights(k=1).astype(np.float32), same, axis=0)
    X = inputs(k=same)
    for roots in (None, diagonals(X)):
        merged = merge(W, X, eps=1e-6, roots=roots, mean=W[0])
        np.testing.assert_array_equal(merged.astype(np.float32), W[0])


def test_no_input_at_all_gives_the_mean():
    W = weights()
    for roots in ([torch.zeros(WIDE, WIDE)] * K, [torch.zeros(WIDE)] * K):
        merged = merge(W, inputs(), eps=1e-6, roots=roots)
        np.testing.assert_array_equal(merged, np.tensordot(np.full(K, 1 / K), W, 1))


def test_one_token_moves_its_own_direction_and_leaves_the_others_at_the_mean():
    W, X = weights(), inputs(tokens=1)
    X[1:] = 0  # the others have none
    merged, mean = merge(W, X, eps=1e-6), W.mean(0)
    x = X[0, 0] / np.linalg.norm(X[0, 0])
    np.testing.assert_allclose(merged @ x, W[0] @ x, rtol=1e-3, atol=1e-3)
    across = np.linalg.svd(x[None])[2][1:]  # (in - 1, in)
    np.testing.assert_allclose(merged @ across.T, mean @ across.T, atol=1e-6)


def test_a_larger_pull_ends_at_the_mean():
    W, X = weights(), inputs()
    gaps = [np.abs(merge(W, X, eps) - W.mean(0)).max() for eps in (1e-6, 1.0, 1e3, 1e9)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-6


def test_the_order_of_clients_does_not_matter():
    W, X = weights(), inputs()
    merged, other = merge(W, X), merge(W[::-1], X[::-1])
    np.testing.assert_allclose(merged, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tokens", [0, 1, 5, TOKENS])
def test_a_root_is_triangular_and_gives_its_matrix_back_in_float32(tokens):
    x = inputs(k=1, tokens=tokens)[0]
    gram = torch.from_numpy(x.T @ x)
    R = root_of(gram)
    assert torch.equal(R, R.triu())
    packed = pack_triangle(R)
    assert packed.shape == (WIDE * (WIDE + 1) // 2,)
    back = unpack_triangle(packed.float(), WIDE).double()
    scale = float(gram.abs().max()) or 1.0
    torch.testing.assert_close(back.mT @ back, gram, rtol=0, atol=1e-6 * scale)


def test_no_root_that_fits_the_schema_breaks_a_merge():
    """Any numbers are a root of something that is positive semi-definite."""
    rng = np.random.default_rng(0)
    for size in (1e-30, 1.0, 1e4):
        roots = [torch.from_numpy(size * rng.standard_normal((WIDE, WIDE))) for _ in range(K)]
        roots[0].zero_()
        assert np.isfinite(merge(weights(), inputs(), eps=1e-10, roots=roots)).all()


def test_the_heads_matrix_is_damped_off_its_diagonal():
    gram = torch.arange(9.0, dtype=torch.float64).reshape(3, 3)
    half = damped(gram, 0.25)
    torch.testing.assert_close(half.diagonal(), gram.diagonal())
    torch.testing.assert_close(half[0, 2], 0.25 * gram[0, 2])


class TestTasks:
    """``sum_t W_t D_t (sum_t D_t)^-1`` by columns, through shares of the tasks' columns."""

    def test_the_shares_give_the_merge_of_the_tasks(self):
        W, X = weights(k=3), inputs(k=3)
        squares = [torch.from_numpy((x**2).sum(0)) for x in X]
        shares = task_shares(squares).numpy()  # (T, in)
        expected = merge(W, X, roots=diagonals(X))
        np.testing.assert_allclose((W * shares[:, None, :]).sum(0), expected, rtol=1e-10)
        np.testing.assert_allclose(shares.sum(0), 1, rtol=1e-12)

    def test_without_any_squares_it_is_the_mean(self):
        assert task_shares([None, None]).tolist() == [[0.5], [0.5]]
        assert task_shares([None]).tolist() == [[1.0]]

    def test_a_task_that_nobody_measured_counts_as_the_mean_of_the_others(self):
        """So is the current one before its end: ``(t W_past + W_t) / (t + 1)``."""
        D = [torch.tensor([1.0, 4.0]), torch.tensor([3.0, 4.0])]
        shares = task_shares([*D, None])
        torch.testing.assert_close(shares[2], torch.full((2,), 1 / 3))
        torch.testing.assert_close(shares[:2], task_shares(D) * 2 / 3)

    def test_a_column_without_inputs_is_the_mean(self):
        shares = task_shares([torch.tensor([0.0, 1.0]), torch.tensor([0.0, 3.0])])
        torch.testing.assert_close(shares, torch.tensor([[0.5, 0.25], [0.5, 0.75]]))
