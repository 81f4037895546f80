"""Masked rounds of every method whose updates are sums: the same state as without masks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adapters.kit import Federation, make_tasks, toy_backbone, toy_images
from adapters.masks.mask_kit import MaskedRounds, close_to
from adapters.small import SMALL
from fcil_adapters.contract.registry import load_method, make_hparams, method_names
from fcil_adapters.masks.exchanges import check_masks, with_masks
from fcil_protocol.errors import ConfigError

TASKS = make_tasks([1, 0], [4], [6, 2])
CLIENTS = [
    toy_images({1: 5, 0: 3, 4: 4, 2: 2}, 1),
    toy_images({0: 1, 4: 1}, 2),
    toy_images({1: 3, 2: 6, 4: 2}, 3),
]
ADDITIVE = (
    *("analytic", "coda_prompt", "fed_cprompt", "fedavg_lora", "fedavg_prompt", "fedncm"),
    *("ewc", "ffa_lora", "l2p", "lwf", "lwf_mc", "running_mean"),
)


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


def test_every_method_says_whether_its_updates_are_sums(backbone):
    able = []
    for name in method_names():
        method = load_method(name)
        hparams = make_hparams(method, SMALL.get(name, {}))
        try:
            check_masks(method, hparams, backbone.info)
        except ConfigError:
            continue
        able.append(name)
    assert sorted(able) == sorted(ADDITIVE)


@pytest.mark.parametrize("name", ADDITIVE)
def test_a_masked_round_leads_to_the_state_of_a_plain_one(name, backbone):
    options = SMALL[name]
    plain = Federation.of(name, CLIENTS, backbone, **options)
    masked = Federation.of(name, CLIENTS, backbone, **options)
    rounds = MaskedRounds(masked)
    everyone = range(len(CLIENTS))
    for task in TASKS:
        plain.open(task)
        masked.open(task)
        for exchange in plain.exchanges:
            plain.round(exchange.kind)
            after = rounds.all(exchange.kind, everyone)
            # What follows from sums is as uncertain as they are, times a condition number.
            assert close_to(
                after, plain.state, but=("weight", "bias") if name == "analytic" else ()
            )
            masked.state = plain.state  # rounding does not add up
        rounds.cycle = 0


@pytest.mark.parametrize(
    ("name", "kind", "given", "wanted"),
    [
        ("fedncm", "train", None, 1),  # sums of the same images, whenever they are made
        ("fedncm", "train", 3, 1),
        ("ewc", "finish", 1, 1),
        ("fedavg_lora", "train", None, None),  # trained anew in each round
        ("fedavg_lora", "train", 3, 3),
    ],
)
def test_a_statistic_is_summed_once_and_what_is_trained_as_often_as_without_masks(
    name, kind, given, wanted
):
    method = load_method(name)
    hparams, info = make_hparams(method, SMALL[name]), toy_backbone().info

    def exchanges(hparams, backbone):
        return tuple(
            replace(e, rounds=given) if e.kind == kind else e
            for e in method.exchanges(hparams, backbone)
        )

    masked = with_masks(replace(method, exchanges=exchanges)).exchanges(hparams, info)
    assert next(e for e in masked if e.kind == kind).rounds == wanted
