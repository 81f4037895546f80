"""Federations that faults meet, one of each kind for a module."""

import pytest

from faults.kit import Scene


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    return Scene.make(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def masked_scene(tmp_path_factory):
    return Scene.masked(tmp_path_factory.mktemp("masked"))
