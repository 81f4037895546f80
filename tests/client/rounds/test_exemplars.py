"""Images of past classes: a door for the methods that declare it, and shut for all others."""

from dataclasses import replace

import numpy as np
import pytest

from adapters import half_method, worker_kit
from adapters.worker_kit import Direct, context, fields_of, fill
from client.round_kit import TERMS
from fcil_adapters.contract import Preprocessing, registry
from fcil_adapters.contract.exemplars import (
    EXEMPLARS,
    exemplar_digests,
    exemplar_notice,
    with_exemplars,
)
from fcil_adapters.contract.local_images import as_digests
from fcil_adapters.images.decoding import open_source
from fcil_client.daemon.status import terms_of
from fcil_client.data.local_data import LocalData
from fcil_client.data.manifest import scan
from fcil_client.rounds.worker import ClientWorker
from fcil_client.state.privacy_budget import NO_LIMITS
from fcil_protocol.errors import InternalError, WireError
from fcil_protocol.payloads.payload import Payload

PREPROCESSING = Preprocessing(size=32, mean=(0.5,) * 3, std=(0.5,) * 3)
SALT = b"s" * 16


@pytest.fixture
def root(tmp_path):
    for number, cls in enumerate(("ant", "bee", "cat")):
        fill(tmp_path / "data", "train", cls, range(100 * number, 100 * number + 9))
        fill(tmp_path / "data", "test", cls, range(1000 + 100 * number, 1003 + 100 * number))
    return tmp_path / "data"


@pytest.fixture
def data(root):
    source = open_source(root)
    opened = LocalData(source, scan(source, None, SALT), PREPROCESSING, memory_bytes=1 << 20)
    yield opened
    opened.close()


def of(data, cls, side="train"):
    """Return the digests of a class's images on one side."""
    return [i.digest for i in data.manifest.images if (i.entry.class_name, i.side) == (cls, side)]


# --- the door ---------------------------------------------------------------------------------


def test_exemplars_come_in_the_order_in_which_they_are_named_each_once(data):
    ants, bees = of(data, "ant"), of(data, "bee")
    asked = [bees[2], ants[1], bees[0], ants[1]]
    door = data.exemplar_images({"ant": 5, "bee": 7}, asked)
    assert door.digests == asked[:3]
    assert door.labels.tolist() == [7, 5, 7]
    first = data.learner_images({"bee": 7})
    same = first.take(np.array([first.digests.index(bees[2])]))
    assert np.array_equal(door.take(np.array([0])), same)


def test_test_images_and_images_of_other_classes_stay_shut(data):
    asked = [*of(data, "ant", "test"), *of(data, "ant", "select"), of(data, "cat")[0], "0" * 64]
    assert len(data.exemplar_images({"ant": 0, "bee": 1}, asked)) == 0


def test_a_class_of_which_too_few_are_left_is_left_out(data):
    ants, bees = of(data, "ant"), of(data, "bee")
    door = data.exemplar_images({"ant": 0, "bee": 1}, [*ants[:3], *bees[:2]], 3)
    assert door.labels.tolist() == [0, 0, 0]


def test_an_image_that_was_deleted_is_no_exemplar_any_more(data, root):
    ants = of(data, "ant")
    (root / next(i.entry.name for i in data.manifest.images if i.digest == ants[0])).unlink()
    assert data.exemplar_images({"ant": 0}, ants[:2]).digests == [ants[1]]


# --- the worker -------------------------------------------------------------------------------


class Keeper:
    """Keeps its first two images of each task, and notes what it was shown."""

    def __init__(self):
        self.shown = []

    def run(self, ctx, state, broadcast, data):
        again = ctx.exemplars
        self.shown.append(
            None if again is None else again.images.take(np.arange(len(again.images)))
        )
        if again is not None:
            assert again.current.shape == (len(data), 32)
            state = with_exemplars(state, np.concatenate([again.digests, again.current[:2]]))
        _, sent = half_method.Learner().run(ctx, state, broadcast, data)
        return state, sent


@pytest.fixture
def keeper(monkeypatch):
    learner = Keeper()
    monkeypatch.setattr(registry, "load_half", lambda _path: learner)
    return learner


@pytest.fixture
def declare(monkeypatch):
    """Return a function that says how many exemplars the tests' method declares."""

    def declare(most):
        method = replace(half_method.METHOD, exemplars=lambda _hparams: most)
        for module in (registry, worker_kit):
            monkeypatch.setattr(module, "load_method", lambda _name: method)

    return declare


def call(root, state, classes, past=None, worker=None):
    cache = root.parent / "cache"
    cache.mkdir(exist_ok=True)
    past = past or {}
    ctx = context("half_method", classes=tuple(classes.values()), past=tuple(past.values()))
    fields = fields_of(
        "half_method", ctx, classes=classes, past=past, parts=[], data=str(root),
        cache=str(cache), salt=SALT, memory_bytes=1 << 20, min_count=1,
    )  # fmt: skip
    reply, (state, _) = (worker or Direct(ClientWorker()))("run", fields, [state])
    return reply, state


def test_a_method_that_declares_exemplars_sees_those_of_its_state_again(root, keeper, declare):
    declare(4)
    reply, state = call(root, Payload(), {"ant": 0, "bee": 1})
    assert (reply["exemplars"], len(keeper.shown[0])) == (0, 0)
    assert state.tensors[EXEMPLARS].shape == (2, 32)
    reply, later = call(root, state, {"cat": 2}, {"ant": 0, "bee": 1})
    assert (reply["exemplars"], reply["faults"]) == (2, [])
    assert keeper.shown[1].shape == (2, 32, 32, 3)
    assert exemplar_digests(later)[:2] == exemplar_digests(state)
    assert len(exemplar_digests(later)) == 4


def test_a_late_client_has_none(root, keeper, declare):
    declare(4)
    reply, _ = call(root, Payload(), {"cat": 2}, {"ant": 0, "bee": 1})
    assert reply["exemplars"] == 0


def test_deleted_exemplars_drop_out_with_a_note(root, keeper, declare, data):
    declare(4)
    ants = of(data, "ant")
    state = with_exemplars(Payload(), as_digests(ants[:2]))
    (root / next(i.entry.name for i in data.manifest.images if i.digest == ants[0])).unlink()
    reply, _ = call(root, state, {"cat": 2}, {"ant": 0})
    assert reply["exemplars"] == 1
    assert reply["faults"] == ["1 of 2 exemplars are gone or too few; the others are used."]


def test_no_other_method_sees_an_image_of_a_past_class(root, keeper, declare, data):
    """Rehearsal has one door; a state that names images does not open it."""
    declare(0)
    state = with_exemplars(Payload(), as_digests(of(data, "ant")[:2]))
    with pytest.raises(InternalError, match="keeps 2 exemplars, its method declares 0"):
        call(root, state, {"cat": 2}, {"ant": 0})
    assert keeper.shown == [None]


def test_a_state_may_name_no_more_than_the_method_declares(root, keeper, declare, data):
    declare(3)
    state = with_exemplars(Payload(), as_digests(of(data, "ant")[:2]))
    with pytest.raises(InternalError, match="keeps 4 exemplars, its method declares 3"):
        call(root, state, {"cat": 2}, {"ant": 0})
    assert len(keeper.shown) == 1
    state = with_exemplars(Payload(), as_digests(of(data, "ant")[:4]))
    with pytest.raises(InternalError, match="keeps 4 exemplars, its method declares 3"):
        call(root, state, {"cat": 2}, {"ant": 0})
    assert len(keeper.shown) == 1  # the learner was not called


def test_classes_that_are_not_past_cannot_be_opened_as_past(root, keeper, declare):
    declare(4)
    worker = Direct(ClientWorker())
    ctx = context("half_method", classes=(2,), past=(0,))
    cache = root.parent
    fields = fields_of(
        "half_method", ctx, classes={"cat": 2}, past={"bee": 1}, parts=[], data=str(root),
        cache=str(cache), salt=SALT, memory_bytes=1 << 20, min_count=1,
    )  # fmt: skip
    with pytest.raises(WireError, match=r"class ids \[1\] do not belong"):
        worker("run", fields, [Payload()])


def test_what_a_client_is_told_names_how_many_and_that_they_stay():
    assert exemplar_notice(0) == ""
    assert "up to 2,000 images of past classes" in exemplar_notice(2000)


def test_a_running_client_says_how_many_its_method_may_keep():
    method = replace(TERMS.method, exemplars=lambda _hparams: 7)
    assert terms_of(replace(TERMS, method=method), NO_LIMITS)["exemplars"] == 7
    assert terms_of(TERMS, NO_LIMITS)["exemplars"] == 0
    assert terms_of(None, NO_LIMITS)["exemplars"] is None
