"""Methods with the same frozen features share them, and learn what they learn without."""

from contextlib import closing, contextmanager

import numpy as np
import pytest

from adapters.kit import Federation, make_tasks, toy_backbone, toy_images
from adapters.small import SMALL
from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.backbones.frozen_features import plain_features
from fcil_adapters.backbones.probes import probe_features
from fcil_adapters.toolkit.prompts.prefix import query_features, with_pixels
from fcil_adapters.worker.feature_files import FeatureFiles
from fcil_adapters.worker.feature_folder import FeatureFolder, counted
from fcil_protocol.payloads.payload import Payload, pack

CLIENTS = [toy_images({0: 9, 1: 7, 2: 5}, seed=1), toy_images({0: 4, 1: 3, 2: 11}, seed=2)]
TEST = toy_images({0: 6, 1: 6, 2: 6}, seed=3)
IMAGES = sum(len(images) for images in (*CLIENTS, TEST))
TASKS = make_tasks([0, 1], [2])


@contextmanager
def shared(folder, backbone=None):
    """Provide a backbone as a worker of a cell loads it."""
    place = FeatureFolder(folder / "features", 1 << 30, folder / "counts")
    with closing(FeatureFiles(place, "torch, one thread")) as files:
        backbone = backbone or toy_backbone()
        backbone.memory.store = files
        yield backbone


def learned(method, backbone):
    """Return the state after all tasks, and the scores of test images."""
    federation = Federation.of(method, CLIENTS, backbone, **SMALL[method])
    for task in TASKS:
        federation.run(task, rounds=2)
    scores = federation.predictor().logits(TEST.pictures)
    return pack(Payload(federation.state.tensors, federation.state.meta)), scores.tobytes()


@pytest.mark.parametrize("method", ["fedncm", "gaussian_head", "analytic", "hgp"])
def test_results_are_equal_to_the_bit_without_and_with_new_and_with_known_features(
    tmp_path, method
):
    bare = learned(method, toy_backbone())
    with shared(tmp_path) as backbone:
        assert learned(method, backbone) == bare
    first = counted(tmp_path / "counts")
    assert (first.read, first.computed) == (0, IMAGES)
    with shared(tmp_path) as backbone:
        assert learned(method, backbone) == bare
    both = counted(tmp_path / "counts")
    assert (both.read, both.computed) == (IMAGES, IMAGES)


def test_methods_of_every_family_share_one_computation(tmp_path):
    for method in ("fedncm", "hgp", "analytic"):
        with shared(tmp_path) as backbone:
            learned(method, backbone)
    counts = counted(tmp_path / "counts")
    assert (counts.computed, counts.read) == (IMAGES, 2 * IMAGES)


def test_other_weights_never_get_features_even_through_the_same_memory(tmp_path):
    """As with a method that adapts the backbone once and then keeps it frozen."""
    with shared(tmp_path) as backbone:
        known = plain_features(backbone, TEST.pictures)
        other = toy_backbone(seed=1)
        adapted = Backbone(other.module, other.info, "cpu")
        adapted.memory = backbone.memory
        wanted = other.features(TEST.pictures)
        assert not np.allclose(wanted, known)
        np.testing.assert_array_equal(plain_features(adapted, TEST.pictures), wanted)
        np.testing.assert_array_equal(query_features(adapted, TEST.pictures).numpy(), wanted)


def test_another_preparation_of_the_pixels_is_another_feature(tmp_path):
    with shared(tmp_path) as backbone:
        query_features(with_pixels(backbone, "unit"), TEST.pictures)
        found, wanted = plain_features(backbone, TEST.pictures), backbone.features(TEST.pictures)
        np.testing.assert_array_equal(found, wanted)
    assert counted(tmp_path / "counts").computed == 2 * len(TEST)


def test_augmented_views_and_the_probe_pictures_are_always_computed(tmp_path):
    with shared(tmp_path) as backbone:
        query_features(backbone, TEST.pictures.astype(np.float32))
        probe_features(backbone)
    assert not (tmp_path / "counts").exists()
