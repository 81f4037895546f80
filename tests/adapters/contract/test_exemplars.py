"""Exemplars are chosen by herding, as iCaRL defines it."""

import numpy as np
import pytest

from fcil_adapters.contract.exemplars import check_state, class_share, herd, with_exemplars
from fcil_adapters.contract.registry import load_method, make_hparams, method_names
from fcil_protocol.errors import InternalError
from fcil_protocol.payloads.payload import Payload


def herd_by_definition(phi, most):
    """Algorithm 4 of iCaRL with a loop for every candidate."""
    mu, chosen = phi.mean(axis=0), []
    for k in range(1, min(most, len(phi)) + 1):
        costs = {
            i: np.linalg.norm(mu - (phi[i] + sum(phi[j] for j in chosen)) / k)
            for i in range(len(phi))
            if i not in chosen
        }
        chosen.append(min(costs, key=costs.get))
    return chosen


@pytest.mark.parametrize("seed", range(4))
def test_herding_follows_its_definition(seed):
    phi = np.random.default_rng(seed).normal(size=(12, 5))
    assert herd(phi, 7).tolist() == herd_by_definition(phi, 7)


def test_a_shorter_list_is_the_beginning_of_a_longer_one_and_none_comes_twice():
    phi = np.random.default_rng(0).normal(size=(9, 3))
    whole = herd(phi, 20).tolist()
    assert sorted(whole) == list(range(9))
    assert herd(phi, 4).tolist() == whole[:4]


def test_equal_images_and_none_at_all_are_fine():
    assert herd(np.ones((3, 2)), 2).tolist() == [0, 1]
    assert herd(np.zeros((0, 2)), 2).tolist() == []
    assert class_share(10, 0) == 0
    assert class_share(10, 4) == 2


def test_a_state_that_names_no_digests_is_refused():
    check_state(Payload(), 0)
    with pytest.raises(InternalError, match=r"expected uint8 \(m, 32\)"):
        check_state(with_exemplars(Payload(), np.zeros((2, 31), np.uint8)), 9)


def test_icarl_alone_declares_exemplars():
    kept = {n for n in method_names() if (m := load_method(n)).exemplars(make_hparams(m, {}))}
    assert kept == {"icarl"}
