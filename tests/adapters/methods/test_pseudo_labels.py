"""Unlabelled images count once, under the class whose mean is clearly the nearest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from adapters.frozen_kit import WIDTH, Colours
from adapters.kit import Federation, Images, make_tasks, toy_images
from fcil_adapters.contract import State, TaskInfo
from fcil_adapters.contract.local_images import (
    as_digests,
    check_counted,
    counted_digests,
    with_counted,
)
from fcil_adapters.methods.analytic import METHOD
from fcil_adapters.toolkit.closed_form.lift import make_lift
from fcil_adapters.toolkit.closed_form.pseudo_labels import Centres, accepted, centre_width
from fcil_adapters.toolkit.closed_form.sums import ProductSums
from fcil_protocol.errors import ConfigError, InternalError

COLOURS = Colours()
LABELLED = toy_images({0: 4, 1: 3, 2: 5}, seed=1)
OFFERED = toy_images({0: 9, 1: 12, 2: 7}, seed=2)
NONE = toy_images({})
ON = {"pseudo": "margin", "features": "linear", "precision": "double", "projection": 20}
DIGESTS = as_digests([f"{i:064x}" for i in range(len(OFFERED))])


def federation(clients, offered, method="analytic", **options) -> Federation:
    return Federation.of(method, clients, COLOURS, unlabelled=offered, **{**ON, **options})


def learned(offered=OFFERED, tasks=((0, 1, 2),), **options) -> Federation:
    fed = federation([LABELLED], [offered], **options)
    for task in make_tasks(*tasks):
        fed.run(task)
    return fed


def by_definition(fed: Federation, images: Images, margin: float) -> np.ndarray:
    """The labels, image by image, from the features of the labelled images alone."""

    def unit(x):
        return x / np.linalg.norm(x)

    lift = make_lift(fed.hparams, WIDTH, fed.state.i64("seed"))
    width = centre_width(fed.hparams, fed.hparams.width(WIDTH))
    known = lift(COLOURS.features(LABELLED.pictures))[:, :width]
    grand = known.mean(axis=0)
    means = {c: known[LABELLED.labels == c].mean(axis=0) for c in (0, 1, 2)}
    labels = []
    for phi in lift(COLOURS.features(images.pictures))[:, :width]:
        near = {c: float(unit(phi - grand) @ unit(mean - grand)) for c, mean in means.items()}
        best = sorted(near, key=near.__getitem__, reverse=True)
        labels.append(best[0] if near[best[0]] - near[best[1]] > margin else -1)
    return np.array(labels)


@pytest.mark.parametrize("features", ["linear", "both", "relu_projection"])
@pytest.mark.parametrize("margin", [0.1, 0.7, 1.4])
def test_labels_are_those_of_the_definition(features, margin) -> None:
    fed = federation([LABELLED], [OFFERED], features=features, pseudo_margin=margin)
    fed.open(make_tasks([0, 1, 2])[0])
    fed.round("train")
    ctx = fed.context("pseudo")
    chosen = accepted(ctx, fed.parts(), OFFERED)
    wanted = by_definition(fed, OFFERED, margin)
    assert chosen.index.tolist() == np.flatnonzero(wanted >= 0).tolist()
    assert chosen.labels.tolist() == wanted[wanted >= 0].tolist()
    assert len(chosen) > 0 or margin > 1


def test_the_classifier_is_that_of_all_images_under_their_labels() -> None:
    fed = learned()
    labels = by_definition(fed, OFFERED, 0.1)
    taken = labels >= 0
    together = Images(
        np.concatenate([LABELLED.pictures, OFFERED.pictures[taken]]),
        np.concatenate([LABELLED.labels, labels[taken]]),
    )
    other = federation([together], [], pseudo="off")
    other.run(make_tasks([0, 1, 2])[0])
    for name in ("weight", "bias", "classes"):
        assert np.allclose(fed.state.tensors[name], other.state.tensors[name], rtol=1e-5), name
    assert taken.sum() > 10


def test_sums_of_labelled_images_stay_apart() -> None:
    fed, plain = learned(), learned(pseudo="off")
    for name in ("total.sum", "total.triangle", "total.count"):
        assert np.array_equal(fed.state.tensors[name], plain.state.tensors[name])
    assert not any(name.startswith("pseudo.") for name in plain.state.tensors)
    assert "mean" not in plain.parts()["current"].tensors


def test_an_image_counts_once_in_all_tasks_and_a_rejected_one_may_count_later() -> None:
    """Class 2 is unknown in the first task; its images are the nearest to none of two, or wrong."""
    fed = learned(tasks=((0, 1), (2,)))
    pseudo = ProductSums.read(fed.state.tensors, "pseudo")
    (state,) = fed._counted.values()
    assert pseudo.counts.sum() == len(counted_digests(state)) <= len(OFFERED)
    before = pseudo.counts.sum()
    fed.round("pseudo")  # again: what is left was rejected, and would be again
    assert ProductSums.read(fed.state.tensors, "pseudo").counts.sum() == before


def test_one_class_alone_labels_nothing() -> None:
    fed = federation([toy_images({0: 4})], [OFFERED])
    fed.run(make_tasks([0])[0])
    assert "pseudo.count" not in fed.state.tensors
    assert (
        Centres(np.array([3]), np.ones((1, 2)), np.zeros(2)).labels(np.ones((4, 2)), 0.1).max() < 0
    )


def test_no_offered_image_changes_nothing() -> None:
    fed, plain = learned(offered=NONE), learned(pseudo="off")
    assert np.array_equal(fed.state.tensors["weight"], plain.state.tensors["weight"])


@pytest.mark.parametrize(("min_count", "group"), [(11, 0), (1, 11)])
def test_classes_with_too_few_accepted_images_stay_at_home(min_count, group) -> None:
    fed = learned()
    grouped = fed.hparams.model_copy(update={"group": group})
    ctx = replace(fed.context("pseudo"), min_count=min_count, hparams=grouped)
    chosen = accepted(ctx, fed.parts(), OFFERED)
    wanted = by_definition(fed, OFFERED, 0.1)
    large = [c for c in (0, 1, 2) if (wanted == c).sum() >= 11]
    assert large
    assert set(chosen.labels.tolist()) == set(large)


def test_the_state_names_exactly_the_accepted_images() -> None:
    fed = federation([LABELLED], [OFFERED])
    fed.open(make_tasks([0, 1, 2])[0])
    fed.round("train")
    ctx = replace(fed.context("pseudo"), digests=DIGESTS)
    state, sent = fed.learner.run(ctx, State(), fed.parts(), OFFERED)
    index = accepted(ctx, fed.parts(), OFFERED).index
    assert counted_digests(state) == {f"{i:064x}" for i in index}
    assert sent.i64("n").tolist() == [len(index)]


def test_it_helps_where_labels_are_few() -> None:
    few = toy_images({0: 1, 1: 1, 2: 1, 3: 1}, seed=3)
    noise = np.random.default_rng(0).normal(0, 45, few.pictures.shape)
    few = Images(np.clip(few.pictures + noise, 0, 255).astype(np.uint8), few.labels)
    offered, test = (toy_images(dict.fromkeys(range(4), 30), seed=s) for s in (4, 5))

    def right(more) -> float:
        fed = Federation.of("analytic", [few], COLOURS, unlabelled=more, **ON)
        fed.run(make_tasks([0, 1, 2, 3])[0])
        logits = fed.predictor().logits(test.pictures)
        found = np.array(fed.predictor().classes)[logits.argmax(axis=1)]
        return float((found == test.labels).mean())

    assert right([offered]) >= right([])
    assert right([offered]) > 0.9


def test_adapt_once_counts_them_too() -> None:
    fed = federation([LABELLED], [OFFERED], "adapt_once", adapt={"rounds": 0})
    fed.run(make_tasks([0, 1, 2])[0])
    plain = learned()
    for name in ("pseudo.sum", "weight", "bias"):
        assert np.array_equal(fed.state.tensors[name], plain.state.tensors[name])


def test_what_the_manifest_says() -> None:
    on, off = METHOD.hparams(**ON), METHOD.hparams()
    sums, pseudo = METHOD.exchanges(on, COLOURS.info)
    assert (sums.unlabelled, pseudo.unlabelled, pseudo.least_accuracy) == (0, 2000, 0.4)
    assert pseudo.keeps_state
    assert len(METHOD.exchanges(off, COLOURS.info)) == 1
    assert METHOD.forgets(off) == ""
    assert "a model that it helped to make" in METHOD.forgets(on)
    assert METHOD.dims(on, COLOURS.info, TaskInfo(1, (2,), (0, 1)))["w"] == WIDTH


@pytest.mark.parametrize(
    "option", [{"pseudo_margin": 0.3}, {"pseudo_accuracy": 0.1}, {"pseudo_images": 5}]
)
def test_options_without_effect_are_refused(option) -> None:
    with pytest.raises(ConfigError, match="has no effect unless pseudo = 'margin'"):
        Federation.of("analytic", [], COLOURS, **option)
    again = METHOD.hparams(pseudo="margin", **option).model_dump(mode="json")
    assert METHOD.hparams.model_validate(again).model_dump(mode="json") == again
    assert METHOD.hparams.model_validate(METHOD.hparams().model_dump()) == METHOD.hparams()


def test_a_state_names_only_images_that_were_shown() -> None:
    one, two = DIGESTS[:1], DIGESTS[1:2]
    before, shown = (
        with_counted(State(), one),
        frozenset(counted_digests(with_counted(State(), two))),
    )
    check_counted(before, with_counted(before, two), shown)
    for after in (with_counted(before, DIGESTS[2:3]), with_counted(State(), two)):
        with pytest.raises(InternalError, match="other images as counted"):
            check_counted(before, after, shown)
