"""Masked rounds of every method whose updates are sums: the same state as without masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from adapters.kit import Federation, make_tasks, toy_backbone, toy_images
from adapters.masks.mask_kit import MaskedRounds, close_to
from adapters.small import SMALL
from fcil_adapters.contract.averaging import Additive
from fcil_adapters.contract.registry import load_method, make_hparams, method_names
from fcil_adapters.masks.exchanges import check_masks, fewest_classes, with_masks
from fcil_adapters.numerics.class_reports import tally
from fcil_adapters.numerics.weighted_sums import count_sum, with_common_bytes
from fcil_adapters.toolkit.gaussians.batches import unpack_gaussians
from fcil_adapters.toolkit.gaussians.gaussian import describe, pack_gaussians
from fcil_adapters.toolkit.gaussians.moment_sums import moment_sums
from fcil_protocol.errors import ConfigError
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import Kind, TensorSpec
from tiers import sampled

TASKS = make_tasks([1, 0], [4, 3], [6, 2])
CLIENTS = [
    toy_images({1: 5, 0: 3, 4: 4, 2: 2, 3: 3}, 1),
    toy_images({0: 1, 4: 1}, 2),
    toy_images({1: 3, 2: 6, 4: 2}, 3),
]
# At least two images of each class: nearly singular covariances of single ones make large weights.
PAIRED = [
    toy_images({1: 5, 0: 3, 4: 4, 2: 2, 3: 3}, 1),
    toy_images({0: 2, 4: 9}, 2),
    toy_images({1: 3, 2: 6, 4: 2}, 3),
]
ADDITIVE = (
    *("adapt_once", "analytic", "coda_prompt", "fed_cprompt", "fedavg_lora", "fedavg_prompt"),
    *("fedclm", "fedncm", "fedproto", "ewc", "ffa_lora", "l2p", "lwf", "lwf_mc"),
    "running_mean",
)
# Not compared: what is solved from sums, which magnifies their rounding; a digest of averages.
SOLVED = {"adapt_once": ("weight", "bias", "digest"), "analytic": ("weight", "bias")}
# Only their heads are compared: single Gaussians are lost in sums.
MOMENTS = [
    ("gaussian_head", {"head": "lda", "cov": "full"}),
    ("gaussian_head", {"head": "quadratic", "cov": "full", "own_rank": 3}),
    ("gaussian_head", {"head": "lda", "cov": "full", "min_count_upload": 3}),
    ("ccvr", {"head": "quadratic", "cov": "full", "own_rank": 3}),
]


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


@pytest.mark.parametrize(
    "name", sampled(ADDITIVE, ("running_mean", "analytic", "fedclm", "fed_cprompt"))
)
def test_a_masked_round_leads_to_the_state_of_a_plain_one(name, backbone):
    assert_same_state(name, SMALL[name], backbone)


def test_a_masked_round_of_groups_of_images_too(backbone):
    assert_same_state("analytic", {**SMALL["analytic"], "group": 2}, backbone)


def assert_same_state(name, options, backbone):
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
            assert close_to(after, plain.state, but=SOLVED.get(name, ()))
            masked.state = plain.state  # rounding does not add up
        rounds.cycle = 0


@pytest.mark.parametrize(("name", "options"), MOMENTS)
@pytest.mark.parametrize(
    ("clients", "atol"), [(PAIRED, 1e-3), (CLIENTS, 1e-2)], ids=["pairs", "single images too"]
)
def test_a_head_of_moments_is_the_same_of_sums(name, options, clients, atol, backbone):
    given = {**SMALL[name], **options}
    plain = Federation.of(name, clients, backbone, **given)
    masked = Federation.of(name, clients, backbone, **given)
    rounds = MaskedRounds(masked)
    for task in TASKS:
        plain.open(task)
        masked.open(task)
        for exchange in plain.exchanges:
            plain.round(exchange.kind)
            after = rounds.all(exchange.kind, range(len(clients)))
        rounds.cycle = 0
        heads = [n for n in plain.state.tensors if not n.startswith("gauss.")]
        assert heads
        for head in heads:
            assert np.allclose(
                after.tensors[head], plain.state.tensors[head], rtol=1e-3, atol=atol
            ), head


def test_sums_of_gaussians_give_the_moments_of_all_images_together():
    """Against the formula, in float64: of one class a client has one image, one is of one client."""
    rng = np.random.default_rng(5)
    h = make_hparams(load_method("gaussian_head"), {"head": "lda", "cov": "full"})
    additive, d = moment_sums(h), 4
    features = [[rng.normal(c, 2, (n, d)) for c, n in enumerate(own)] for own in ((1, 9), (3, 0))]
    sums: dict[str, Any] = {}
    for own in features:
        gaussians = [describe(x, "full", 0) for x in own if len(x)]
        counts = np.array([len(x) for x in own])
        packed = Payload({**pack_gaussians(gaussians, d, "full"), **tally((7, 3), counts)})
        for name, array in additive.read(packed).items():
            sums[name] = sums.get(name, 0) + array
    written = additive.write(sums, (7, 3))
    assert written.i64("count").tolist() == [4, 9]
    for c, found in enumerate(unpack_gaussians(written, [4, 9], "full", 0)):
        images = [own[c] for own in features if len(own[c])]
        shares = np.array([len(x) for x in images]) / sum(map(len, images))
        mean = sum(s * x.mean(0) for s, x in zip(shares, images, strict=True))
        square = sum(
            s * ((np.cov(x.T) if len(x) > 1 else 0) + np.outer(x.mean(0), x.mean(0)))
            for s, x in zip(shares, images, strict=True)
        )
        assert np.allclose(found.mean, mean, rtol=1e-6)
        assert np.allclose(found.covariance(), square - np.outer(mean, mean), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("analytic", "train"),
        ("adapt_once", "finish"),
        ("fedclm", "finish"),
        ("fedncm", "train"),
        ("fedproto", "train"),
        ("running_mean", "train"),
    ],
)
def test_the_noise_of_a_sum_covers_all_that_is_protected(name, kind, backbone):
    method = load_method(name)
    hparams = make_hparams(method, SMALL[name])
    exchanges = method.exchanges(hparams, backbone.info)
    additive = next(e.additive for e in exchanges if e.kind == kind)
    protected = {n for one in method.statistics(hparams, kind, TASKS[0]) for n in one.tensors}
    covered = {n for one in additive.noised for n in one.made_of}
    assert protected
    assert protected <= covered
    assert {one.name for one in additive.noised} <= {one.name for one in additive.sums}


@pytest.mark.parametrize("others", [2, 600])
def test_bytes_that_are_not_the_same_for_all_are_no_ones(others):
    """One client of many has other weights: its digest must not vanish in a mean."""
    spec = TensorSpec("digest", Kind.COUNT, (4,), "U8")
    counted = Additive((), lambda _: {}, lambda _s, _c: Payload({}))
    common = with_common_bytes(counted, spec)
    ours, theirs = np.array([7, 8, 9, 255], np.uint8), np.array([7, 8, 10, 0], np.uint8)

    def total(*digests):
        read = [common.read(Payload({"digest": digest})) for digest in digests]
        summed = {name: sum(r[name] for r in read) for name in read[0]}
        return common.write(summed, ()).tensors["digest"].tolist()

    assert total(*[ours] * others) == ours.tolist()
    assert total(*[ours] * others, theirs) == [0, 0, 0, 0]


def test_a_sum_takes_no_name_of_a_masked_uploads_own_fields():
    with pytest.raises(ValueError, match="'n'"):
        Additive((count_sum("n"),), lambda _: {}, lambda _s, _c: Payload({}))


@pytest.mark.parametrize("name", ["gaussian_head", "ccvr"])
def test_gaussians_from_which_the_server_draws_or_that_clients_cut_are_no_sums(name, backbone):
    method = load_method(name)
    for options in ({"cov": "full"}, {"head": "quadratic"}, {"head": "quadratic", "cov": "diag"}):
        hparams = make_hparams(method, {**SMALL[name], **options})
        with pytest.raises(ConfigError, match="needs each client's own update"):
            check_masks(method, hparams, backbone.info)


@pytest.mark.parametrize(
    ("name", "kind", "given", "wanted"),
    [
        ("fedncm", "train", None, 1),  # sums of the same images, whenever they are made
        ("fedncm", "train", 3, 1),
        ("ewc", "finish", 1, 1),
        ("fedavg_lora", "train", None, None),  # trained anew in each round
        ("fedavg_lora", "train", 3, 3),
        ("adapt_once", "train", 3, 3),
        ("adapt_once", "finish", 3, 1),
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


@pytest.mark.parametrize(
    ("name", "fewest"),
    [("fedncm", 1), ("analytic", 1), ("running_mean", 1), ("fedavg_lora", 2), ("fedclm", 2),
     ("adapt_once", 2), ("l2p", 2)],
)  # fmt: skip
def test_what_is_trained_behind_masks_has_two_classes(name, fewest):
    """In a task of one class its mean is sent instead, the same in each round."""
    method = with_masks(load_method(name))
    exchanges = method.exchanges(make_hparams(method, SMALL[name]), toy_backbone().info)
    assert fewest_classes(method, exchanges) == fewest
    plain = method.plain.exchanges(make_hparams(method, SMALL[name]), toy_backbone().info)
    assert fewest_classes(method.plain, plain) == 1
