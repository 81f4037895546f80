"""Features of plain images are kept by content, within a bound, and never mixed up."""

from dataclasses import replace

import numpy as np

from fcil_adapters.backbones.feature_cache import FeatureMemory, plain_tap
from fcil_adapters.contract.backbone_info import NO_BACKBONE

D = 4
ONE_BYTES = D * 4


def images(*values):
    return np.array(values, np.uint8).reshape(-1, 1, 1, 1).repeat(3, axis=3)


class Compute:
    def __init__(self, factor=1.0):
        self.asked = []
        self.factor = factor

    def __call__(self, some):
        self.asked.append(some[:, 0, 0, 0].tolist())
        values = self.factor * some[:, 0, 0, 0].astype(np.float32)
        return values[:, None].repeat(D, axis=1)


def test_only_unknown_images_are_computed_in_their_order():
    memory, compute = FeatureMemory(), Compute()
    assert memory.of(images(3, 1, 2), "cls", compute)[:, 0].tolist() == [3, 1, 2]
    assert memory.of(images(9, 2, 8, 3), "cls", compute)[:, 0].tolist() == [9, 2, 8, 3]
    assert memory.of(images(1, 1), "cls", compute)[:, 0].tolist() == [1, 1]
    assert compute.asked == [[3, 1, 2], [9, 8]]


def test_another_tap_is_another_feature():
    memory = FeatureMemory()
    assert memory.of(images(2), "cls", Compute())[0, 0] == 2
    assert memory.of(images(2), "unit", Compute(10))[0, 0] == 20
    assert memory.of(images(2), "cls", Compute(99))[0, 0] == 2


def test_the_least_used_go_first_when_the_bound_is_reached():
    memory, compute = FeatureMemory(3 * ONE_BYTES), Compute()
    memory.of(images(1, 2, 3), "cls", compute)
    memory.of(images(1), "cls", compute)
    memory.of(images(4), "cls", compute)
    assert len(memory) == 3
    compute.asked.clear()
    memory.of(images(1, 3, 4), "cls", compute)
    assert compute.asked == []
    memory.of(images(2), "cls", compute)
    assert compute.asked == [[2]]


def test_more_images_than_the_bound_holds_are_all_answered():
    memory, compute = FeatureMemory(2 * ONE_BYTES), Compute()
    assert memory.of(images(*range(9)), "cls", compute)[:, 0].tolist() == list(range(9))
    assert len(memory) == 2


def test_what_was_returned_can_be_changed_without_harm():
    memory = FeatureMemory()
    memory.of(images(5), "cls", Compute())[:] = 0
    assert memory.of(images(5), "cls", Compute(99))[0, 0] == 5


class Shelf(dict):
    """A store in memory, and what was asked of it."""

    def get(self, keys):
        self.asked = list(keys)
        return {key: self[key] for key in keys if key in self}

    put = dict.update


def test_a_store_is_asked_for_what_memory_lacks_and_gets_what_was_computed():
    shelf, compute = Shelf(), Compute()
    one, other = FeatureMemory(), FeatureMemory()
    one.store = other.store = shelf
    one.of(images(1, 2, 1), "cls", compute)
    assert len(shelf.asked) == 2
    assert other.of(images(3, 2, 1), "cls", compute)[:, 0].tolist() == [3, 2, 1]
    assert compute.asked == [[1, 2, 1], [3]]
    assert other.of(images(3, 2, 1), "cls", compute)[:, 0].tolist() == [3, 2, 1]
    assert shelf.asked == []
    assert len(shelf) == 3


def test_weights_image_size_and_preparation_are_part_of_a_plain_images_tap():
    info = replace(NO_BACKBONE, digest="1" * 64)
    unit = replace(info.preprocessing, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    others = (NO_BACKBONE, info, replace(info, preprocessing=unit))
    assert len({plain_tap(one) for one in others}) == 3
    assert plain_tap(replace(info, name="the same weights by another name")) == plain_tap(info)
