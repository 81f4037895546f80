"""Changes of weights in factors: the product is the change, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from adapters.kit import toy_backbone
from fcil_adapters.export.peft_adapter import adapter_layers
from fcil_adapters.toolkit.lora.low_rank import Change, Changes
from fcil_adapters.toolkit.lora.tensors import lora_names, module_shape

INFO = toy_backbone().info
RNG = np.random.default_rng(3)


def pair(module: str, rank: int):
    out, width = module_shape(module, INFO)
    A, B = RNG.standard_normal((rank, width)), RNG.standard_normal((out, rank))
    return A.astype(np.float32), B.astype(np.float32)


def product(pairs):
    return sum(B.astype(np.float64) @ A.astype(np.float64) for A, B in pairs)


def test_pairs_stand_side_by_side_as_they_are():
    many = (pair("q", 2), pair("q", 3), pair("q", 1))
    A, B, factored = Change(many).factors()
    assert (A.shape, B.shape, factored) == ((6, 16), (16, 6), False)
    np.testing.assert_array_equal(A[2:5], many[1][0])
    np.testing.assert_array_equal(B[:, 2:5], many[1][1])
    np.testing.assert_allclose(B.astype(float) @ A.astype(float), product(many), rtol=0, atol=1e-14)


def test_more_ranks_than_the_matrix_are_factored_to_its_own():
    many = tuple(pair("q", 4) for _ in range(4))
    change = Change(many)
    A, B, factored = change.factors()
    assert (len(A), factored) == (16, True)
    error = np.abs(B.astype(float) @ A.astype(float) - product(many)).max()
    assert error < 1e-6 * np.abs(change.total()).max()


def test_a_dense_part_is_added_and_its_rank_is_found():
    left, right = pair("fc1", 2), pair("fc1", 3)
    dense = product([right]).astype(np.float32)
    change = Change((left,), dense)
    A, B, factored = change.factors()
    assert (len(A) >= 5, factored) == (True, True)
    wanted = product([left]) + dense.astype(np.float64)
    np.testing.assert_array_equal(change.total(), wanted)
    assert np.abs(B.astype(float) @ A.astype(float) - wanted).max() < 1e-6 * np.abs(wanted).max()


def test_nothing_but_zeros_has_rank_one():
    A, B, factored = Change((pair("q", 1),), -product([pair("q", 1)]).astype(np.float32)).factors()
    assert factored
    zero = Change(((np.zeros((20, 16), np.float32), np.zeros((16, 20), np.float32)),))
    A, B, _ = zero.factors()
    assert (A.shape, B.shape) == ((1, 16), (16, 1))
    assert not (B @ A).any()


def test_changes_of_several_loras_keep_their_order():
    names = lora_names(("0.q", "1.fc2"))
    loras = [{n: np.full((1, 1), i + 1, np.float32) for n in names} for i in range(3)]
    changes = Changes.of(2.0, loras)
    assert list(changes.places) == ["0.q", "1.fc2"]
    assert [A.item() for A, _ in changes.places["0.q"].pairs] == [1, 2, 3]
    assert changes.scale == 2


@pytest.mark.parametrize("modules", [("q", "v"), ("q", "k", "v"), ("v",), ("qkv",), ("fc1", "fc2")])
def test_a_linear_gets_one_pair_whose_product_is_that_of_its_slices(modules):
    """q, k and v are the thirds of qkv; ranks differ between them."""
    places = {
        f"1.{m}": Change(tuple(pair(m, r) for r in range(1, i + 2))) for i, m in enumerate(modules)
    }
    layers = adapter_layers(Changes(0.5, places), INFO)
    for name, layer in layers.items():
        got = layer.B.astype(np.float64) @ layer.A.astype(np.float64)
        own = name.rpartition(".")[2]
        if own == "qkv" and modules != ("qkv",):
            thirds = [
                places[f"1.{m}"].total() if m in modules else np.zeros((16, 16)) for m in "qkv"
            ]
            wanted = np.concatenate(thirds)
        else:
            wanted = places[f"1.{own}"].total()
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-13)
        assert not layer.factored
    linears = {"q": "attn.qkv", "k": "attn.qkv", "v": "attn.qkv", "qkv": "attn.qkv"}
    assert set(layers) == {f"blocks.1.{linears.get(m, f'mlp.{m}')}" for m in modules}
