"""Clipping and noise: what one image can move, how much noise stands on it, and whose it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from adapters.kit import Federation, Images, make_tasks, toy_backbone, toy_images
from adapters.small import SMALL
from fcil_adapters.contract import privacy as module
from fcil_adapters.contract.manifest_checks import check_privacy, unprotected
from fcil_adapters.contract.privacy import OFF, Privacy, system_normal
from fcil_adapters.contract.registry import load_method, make_hparams, method_names, schema_digest
from fcil_adapters.toolkit.gaussians.gaussian import Gaussian, describe, factor_rows
from fcil_adapters.toolkit.gaussians.reports import describe_with
from fcil_protocol.errors import ConfigError
from fcil_protocol.messages.messages import NO_PRIVACY, PrivacyTerms
from fcil_protocol.payloads.schema import Kind
from tiers import sampled

CLIP = 1.5


def seeded(seed: int) -> Callable[[tuple[int, ...]], np.ndarray]:
    return np.random.default_rng(seed).standard_normal


def quiet(clip: float = CLIP) -> Privacy:
    """Clipping as with noise, and noise of zero."""
    return Privacy(1.0, clip, np.zeros)


def features(n: int, d: int = 5, seed: int = 0) -> np.ndarray:
    """Lengths on both sides of the clip."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, d)) * rng.uniform(0.1, 3, (n, 1))


# --- the generator --------------------------------------------------------------------------


def test_the_systems_bits_become_standard_normal_numbers(monkeypatch):
    rng = np.random.default_rng(3)
    monkeypatch.setattr(module.os, "urandom", rng.bytes)
    x = system_normal((400, 501))
    assert x.shape == (400, 501)
    assert abs(x.mean()) < 0.02
    assert abs(x.var() - 1) < 0.02
    assert abs((x**3).mean()) < 0.05
    assert abs((x**4).mean() - 3) < 0.1
    assert abs((np.abs(x) > 1.959964).mean() - 0.05) < 0.005
    assert abs((x[:, :-1] * x[:, 1:]).mean()) < 0.02


def test_the_largest_and_smallest_words_give_finite_numbers(monkeypatch):
    for byte in (b"\x00", b"\xff"):
        monkeypatch.setattr(module.os, "urandom", lambda n, byte=byte: byte * n)
        assert np.isfinite(system_normal((3,))).all()


def test_noise_asks_the_operating_system_each_time(monkeypatch):
    asked = []
    real = os.urandom
    monkeypatch.setattr(module.os, "urandom", lambda n: (asked.append(n), real(n))[1])
    first, second = (OFF.draw((8,)) for _ in range(2))
    assert len(asked) == 8
    assert not (first == second).any()


# --- clipping and noise ---------------------------------------------------------------------


def test_longer_features_are_cut_and_shorter_ones_stay():
    x = features(60)
    cut = quiet().clipped(x)
    lengths = np.linalg.norm(x, axis=1)
    short = lengths <= CLIP
    assert 5 < short.sum() < 55
    np.testing.assert_array_equal(cut[short], x[short])
    np.testing.assert_allclose(np.linalg.norm(cut[~short], axis=1), CLIP)
    np.testing.assert_allclose(cut[~short] * (lengths[~short] / CLIP)[:, None], x[~short])
    assert not quiet().clipped(np.zeros((2, 3))).any()


def test_nothing_is_touched_without_noise():
    x = features(4)
    assert OFF.clipped(x) is x
    assert OFF.released_sums(x, np.ones(4, np.int64)) is x
    got, plain = describe_with(OFF, x, "lowrank", 2), describe(x, "lowrank", 2)
    np.testing.assert_array_equal(got.factor, plain.factor)


def test_a_clip_without_noise_clips_all_the_same():
    """Masked sums get their noise later."""
    x, later = features(4), Privacy(0.0, CLIP)
    cut = later.clipped(x)
    assert np.linalg.norm(x, axis=1).max() > CLIP
    np.testing.assert_array_equal(cut, quiet().clipped(x))
    np.testing.assert_array_equal(later.released_sums(cut, np.ones(4, np.int64)), cut)


def test_one_image_moves_the_sums_by_no_more_than_the_clip():
    x, labels = features(20), np.arange(20) % 3
    cut = quiet().clipped(x)
    moved = []
    for i in range(20):
        less = quiet().clipped(np.delete(x, i, axis=0))
        sums = [
            np.stack([c[of == k].sum(0) for k in range(3)])
            for c, of in ((cut, labels), (less, np.delete(labels, i)))
        ]
        moved.append(np.linalg.norm(sums[0] - sums[1]))  # all classes together
    assert max(moved) <= CLIP * (1 + 1e-12)
    assert max(moved) > 0.99 * CLIP, "the bound is reached, so no smaller noise would do"


@pytest.mark.parametrize("diagonal", [False, True])
def test_one_image_moves_the_scatter_by_no_more_than_the_clip_squared(diagonal):
    x = features(20)
    whole = quiet().released_scatter(x, diagonal=diagonal)
    moved = [
        np.linalg.norm(whole - quiet().released_scatter(np.delete(x, i, axis=0), diagonal=diagonal))
        for i in range(20)
    ]
    assert max(moved) <= CLIP**2 * (1 + 1e-12)
    assert diagonal or max(moved) > 0.99 * CLIP**2


def test_noise_on_sums_is_normal_of_multiplier_times_clip():
    noised = Privacy(2.0, CLIP, seeded(1))
    counts = np.array([4, 0, 7])
    sums = np.ones((3, 6)) * (counts > 0)[:, None]
    draws = np.stack([noised.released_sums(sums, counts) for _ in range(3000)])
    assert not draws[:, 1].any(), "a class without images says nothing"
    np.testing.assert_allclose(draws[:, [0, 2]].mean(0), 1, atol=0.3)
    np.testing.assert_allclose(draws[:, [0, 2]].std(0), 2 * CLIP, rtol=0.1)
    flat = draws[:, [0, 2]].reshape(3000, -1)
    np.testing.assert_allclose(np.corrcoef(flat.T) - np.eye(12), 0, atol=0.1)


def test_noise_on_the_scatter_is_symmetric_and_of_multiplier_times_clip_squared():
    noised = Privacy(0.5, CLIP, seeded(2))
    zero = np.zeros((3, 4))
    draws = np.stack([noised.released_scatter(zero, diagonal=False) for _ in range(3000)])
    np.testing.assert_array_equal(draws, draws.transpose(0, 2, 1))
    np.testing.assert_allclose(draws.std(0), 0.5 * CLIP**2, rtol=0.1)
    diagonals = np.stack([noised.released_scatter(zero, diagonal=True) for _ in range(3000)])
    np.testing.assert_allclose(diagonals.std(0), 0.5 * CLIP**2, rtol=0.1)


# --- Gaussians of noised sums ---------------------------------------------------------------


@pytest.mark.parametrize("covariance", ["diag", "lowrank", "full"])
@pytest.mark.parametrize("n", [2, 4, 30])
def test_without_noise_and_with_a_wide_clip_the_gaussian_is_the_plain_one(covariance, n):
    x = features(n)
    got, plain = describe_with(quiet(1e3), x, covariance, 2), describe(x, covariance, 2)
    np.testing.assert_allclose(got.mean, plain.mean)
    assert got.factor.shape[0] == plain.factor.shape[0] or covariance == "full"
    np.testing.assert_allclose(got.covariance(), plain.covariance(), atol=1e-9)


@pytest.mark.parametrize("covariance", ["diag", "lowrank", "full"])
@pytest.mark.parametrize("n", [1, 2, 4, 30])
def test_a_noised_gaussian_keeps_the_form_that_its_count_demands(covariance, n):
    got: Gaussian = describe_with(Privacy(5.0, CLIP, seeded(n)), features(n), covariance, 2)
    assert np.linalg.eigvalsh(got.covariance()).min() > -1e-9
    assert (got.rest >= 0).all()
    if covariance != "full" or n - 1 <= 3:
        assert len(got.factor) == factor_rows(n, 5, covariance, 2)


def test_the_covariance_is_made_of_the_noised_mean_and_the_noised_scatter():
    x = features(8)
    calls = []
    draw = seeded(5)
    noised = Privacy(1.0, CLIP, lambda shape: (calls.append(shape), draw(shape))[1])
    got = describe_with(noised, x, "diag", 2)
    assert calls == [(1, 5), (5,)]
    again = seeded(5)
    cut = noised.clipped(x)
    mean = (cut.sum(0) + CLIP * again((1, 5))[0]) / 8
    rest = (np.square(noised.clipped(cut - mean)).sum(0) + CLIP**2 * again((5,))) / 7
    np.testing.assert_allclose(got.mean, mean)
    np.testing.assert_allclose(got.rest, np.maximum(rest, 0))


# --- the methods ----------------------------------------------------------------------------


def federation(name: str, data: Images, privacy: Privacy, classes=(3, 4)) -> Federation:
    fed = Federation.of(name, [data], toy_backbone(), privacy=privacy, **SMALL[name])
    fed.open(make_tasks(classes)[0])
    return fed


def kinds(name: str, classes=(3, 4)) -> list[str]:
    fed = federation(name, toy_images({3: 1}), OFF, classes)
    return [e.kind for e in fed.exchanges]


CASES = [
    (name, classes, kind)
    for name in SMALL
    for classes in ((3, 4), (3,))
    for kind in kinds(name, classes)
]


def declared(name: str, classes: tuple[int, ...], kind: str) -> set[str]:
    """Return the tensors that the method says are noised."""
    method = load_method(name)
    hparams = make_hparams(method, SMALL[name])
    return {t for s in method.statistics(hparams, kind, make_tasks(classes)[0]) for t in s.tensors}


def means_of(sent) -> tuple[np.ndarray, np.ndarray]:
    """Return the means and counts that a client sent."""
    counts = sent.i64("count")
    if "sum" in sent.tensors:  # it sends the sums themselves
        return (sent.f32("sum") / np.maximum(counts, 1)[:, None]).astype(float), counts
    known = ("gauss.mean", "class_mean", "mean", "proto")
    tensor = next((t for t in known if t in sent.tensors), "head.weight")
    return sent.f32(tensor).astype(float), counts[counts > 0]


def test_every_installed_method_is_tried():
    assert set(SMALL) == set(method_names())


@pytest.mark.parametrize(
    ("name", "classes", "kind"), sampled([case for case in CASES if declared(*case)])
)
def test_removing_an_image_moves_what_a_method_sums_by_no_more_than_the_clip(name, classes, kind):
    """The models of broadcasts, not those trained here: else every feature would move."""
    data = toy_images(dict.fromkeys(classes, 4))
    first = federation(name, data, quiet(0.8), classes)
    means, counts = means_of(first.upload(kind, 0))
    assert np.linalg.norm(means * counts[:, None], axis=1).max() > 0.8, "several images count"
    for i in range(len(data)):
        keep = np.arange(len(data)) != i
        less = Images(data.pictures[keep], data.labels[keep])
        other = replace(first, clients=[less])
        other.open(first.task)
        fewer, left = means_of(other.upload(kind, 0))
        moved = np.linalg.norm(means * counts[:, None] - fewer * left[:, None])
        assert moved <= 0.8 * (1 + 1e-5)


@pytest.mark.parametrize(("name", "classes", "kind"), CASES)
def test_exactly_the_declared_tensors_carry_noise_and_no_seed_determines_it(name, classes, kind):
    fed = federation(name, toy_images(dict.fromkeys(classes, 4)), Privacy(1.0, 0.8), classes)
    first, second = (fed.upload(kind, 0) for _ in range(2))
    differ = {t for t in first.tensors if (first.tensors[t] != second.tensors[t]).any()}
    assert differ == declared(name, classes, kind) & set(first.tensors)


@pytest.mark.parametrize("name", sampled(SMALL))
def test_a_noised_federation_goes_through_its_tasks(name):
    clients = [toy_images({3: 5, 4: 5, 5: 4}), toy_images({3: 3, 4: 6, 5: 6}, seed=1)]
    fed = Federation.of(name, clients, toy_backbone(), privacy=Privacy(0.1, 4.0), **SMALL[name])
    for task in make_tasks((3, 4), (5,)):
        fed.run(task)
    scores = fed.predictor().logits(toy_images({3: 2}).pictures)
    assert np.isfinite(scores).all()


# --- terms ----------------------------------------------------------------------------------

NOISE = PrivacyTerms(noise_multiplier=1.0, clip=1.0)


def test_only_a_method_of_statistics_alone_can_be_private():
    backbone = toy_backbone().info
    open_kinds = {
        name: unprotected(load_method(name), make_hparams(load_method(name), SMALL[name]), backbone)
        for name in method_names()
    }
    assert open_kinds == {
        "running_mean": (),
        "fedncm": (),
        "adapt_once": ("head", "lora"),
        "analytic": (),
        "gaussian_head": (),
        "pilora": ("lora", "prototype"),
        "plora": ("lora", "prototype"),
        "hgp": ("head", "key", "prompt"),
        "hepco": ("head", "key", "prompt"),
        "fed_talora": ("head", "lora"),
        "ccvr": ("head", "lora"),
        "fedavg_lora": ("head", "lora"),
        "fedclm": ("head", "lora"),
        "ffa_lora": ("head", "lora"),
        "ewc": ("head", "importance", "lora"),
        "fedproto": ("head", "lora"),
        "icarl": ("head", "lora", "prototype"),
        "lorm": ("gaussian", "head", "lora"),
        "lwf": ("head", "lora"),
        "lwf_mc": ("head", "lora"),
        "coda_prompt": ("head", "key", "prompt"),
        "fed_cprompt": ("head", "key", "prompt"),
        "fedavg_prompt": ("head", "key", "prompt"),
        "l2p": ("head", "key", "prompt"),
    }


@pytest.mark.parametrize("name", SMALL)
def test_what_noise_does_not_cover_is_refused_unless_it_is_meant(name):
    method, backbone = load_method(name), toy_backbone().info
    hparams = make_hparams(method, SMALL[name])
    check_privacy(method, hparams, backbone, NO_PRIVACY)
    check_privacy(method, hparams, backbone, NOISE.model_copy(update={"partial": True}))
    if not unprotected(method, hparams, backbone):
        check_privacy(method, hparams, backbone, NOISE)
        return
    with pytest.raises(ConfigError, match=f"{name} also sends trained tensors"):
        check_privacy(method, hparams, backbone, NOISE)


@pytest.mark.parametrize("name", ["pilora", "plora"])
def test_means_of_a_model_that_trains_do_not_go_with_noise(name):
    method, backbone = load_method(name), toy_backbone().info
    hparams = make_hparams(method, {**SMALL[name], "mean_from": "training"})
    check_privacy(method, hparams, backbone, NO_PRIVACY)
    with pytest.raises(ConfigError, match="mean_from"):
        check_privacy(method, hparams, backbone, NOISE.model_copy(update={"partial": True}))


def masks_if(name: str) -> dict[str, str]:
    """Numbers of masked rounds are no terms of a run without them, whose digest stays."""
    return {"secure": "masks"} if name.startswith("secure_") else {}


def test_every_term_is_in_the_digest_that_both_sides_compare():
    method, backbone = load_method("running_mean"), toy_backbone().info
    hparams = make_hparams(method, {})
    other = PrivacyTerms(
        min_count=2, noise_multiplier=1, clip=2, delta=1e-6, max_epsilon=3, partial=True,
        secure="masks", secure_threshold=0.7, secure_min_clients=5, relay_sums=True,
    ).model_dump()  # fmt: skip
    assert all(other[name] != getattr(NO_PRIVACY, name) for name in other)
    terms = [
        NO_PRIVACY.model_copy(update={**masks_if(name), name: value})
        for name, value in other.items()
    ]
    digests = {schema_digest(method, hparams, backbone, t) for t in (NO_PRIVACY, *terms)}
    assert len(digests) == len(other) + 1
    assert schema_digest(method, hparams, backbone) in digests


def test_every_tensor_that_a_statistic_names_is_one_that_the_method_sends():
    for name in method_names():
        method = load_method(name)
        hparams = make_hparams(method, SMALL[name])
        for exchange in method.exchanges(hparams, toy_backbone().info):
            sent = {s.name for s in exchange.upload.tensors if s.kind is not Kind.COUNT}
            for task in make_tasks((0, 1), (2,)):
                for statistic in method.statistics(hparams, exchange.kind, task):
                    assert set(statistic.tensors) <= sent
