"""Images are counted once: what a worker shows, names as counted, and charges."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from adapters import half_method, worker_kit
from adapters.worker_kit import Direct, context, fields_of, fill
from client.round_kit import KEYS, ORDER, SERVER, TERMS, fit, make
from fcil_adapters.contract import TaskInfo, registry
from fcil_adapters.contract.local_images import counted_digests
from fcil_client.rounds.round_work import ClientOptions, RoundWork
from fcil_client.rounds.worker import ClientWorker
from fcil_client.state.privacy_budget import PrivacyLimits
from fcil_protocol.errors import DataError, NothingLeft, PrivacyRefused
from fcil_protocol.payloads.payload import Payload

PLAIN = half_method.METHOD
SALT = b"s" * 16


class Learner:
    """Sends how many images of each class it was shown; keeps those of class 1 at home on demand."""

    def __init__(self):
        self.shown, self.without = [], ()

    def run(self, ctx, state, broadcast, data):
        labels = data.labels.tolist()
        self.shown.append(sorted(labels))
        _, sent = half_method.Learner().run(ctx, state, broadcast, data)
        classes = ctx.task.seen
        count = [0 if c in self.without else labels.count(c) for c in classes]
        more = {"classes": np.array(classes), "count": np.array(count)}
        return state, Payload({**sent.tensors, **more})


@pytest.fixture
def learner(monkeypatch):
    made = Learner()
    monkeypatch.setattr(registry, "load_half", lambda _path: made)
    return made


@pytest.fixture
def declare(monkeypatch):
    """Return a function that makes the tests' method count images once."""

    def declare(kind="train", *, least=1):
        (exchange,) = PLAIN.exchanges(None, TERMS.backbone)
        declared = replace(
            exchange, kind=kind, counts_once=True, keeps_state=True, least_images=least,
            check=lambda *_: [],
        )  # fmt: skip
        method = replace(PLAIN, exchanges=lambda *_: (declared,))
        for module in (registry, worker_kit):
            monkeypatch.setattr(module, "load_method", lambda _name: method)
        return method

    return declare


@pytest.fixture
def root(tmp_path):
    fill(tmp_path / "data", "train", "ant", range(12))
    fill(tmp_path / "data", "train", "bee", range(50, 53))
    return tmp_path


def call(root, state, *, classes=(0, 1), past=(), kind="train", min_count=1):
    cache = root / "cache"
    cache.mkdir(exist_ok=True)
    ctx = context("half_method", classes=classes, kind=kind)
    ctx = replace(ctx, task=TaskInfo(1 if past else 0, classes, past))
    names = {"ant": 0, "bee": 1}
    fields = fields_of(
        "half_method", ctx, classes={n: c for n, c in names.items() if c in (*classes, *past)},
        parts=[], data=str(root / "data"), cache=str(cache), salt=SALT, memory_bytes=1 << 20,
        min_count=min_count, past={}, unlabelled="",
    )  # fmt: skip
    worker = Direct(ClientWorker())
    worker("scan", fields, [])
    reply, (state, _) = worker("run", fields, [state])
    return reply, state


def test_an_image_is_shown_until_the_state_names_it(root, learner, declare):
    declare()
    _, state = call(root, Payload())
    with pytest.raises(NothingLeft, match="counted already"):
        call(root, state)
    fill(root / "data", "train", "bee", range(60, 62))
    call(root, state)
    assert learner.shown[1] == [1, 1]


def test_a_state_that_is_not_kept_leaves_its_images_free(root, learner, declare):
    declare()
    call(root, Payload())
    call(root, Payload())
    assert learner.shown[0] == learner.shown[1]


def test_copies_and_images_of_another_classs_folder_do_not_count_again(root, learner, declare):
    declare()
    before, state = call(root, Payload())
    (one, *_) = sorted((root / "data" / "train" / "ant").iterdir())
    one.with_name("copy.png").write_bytes(one.read_bytes())
    one.rename(root / "data" / "train" / "bee" / "moved.png")
    with pytest.raises(NothingLeft, match="counted already"):
        call(root, state)
    learner.shown.clear()
    call(root, Payload())
    assert len(learner.shown[0]) == before["images"], "each content once"


def test_images_of_a_class_that_stays_at_home_stay_free(root, learner, declare):
    declare()
    learner.without = (1,)
    _, state = call(root, Payload())
    (first,) = learner.shown
    assert len(counted_digests(state)) == first.count(0)
    learner.without = ()
    _, later = call(root, state)
    assert learner.shown[1] == [1] * first.count(1)
    assert len(counted_digests(later)) == len(first)


@pytest.mark.parametrize(("least", "min_count"), [(4, 1), (1, 4)])
def test_too_few_uncounted_images_of_a_class_wait(root, learner, declare, least, min_count):
    declare(least=least)
    call(root, Payload(), min_count=min_count)
    assert set(learner.shown[0]) == {0}
    fill(root / "data", "train", "bee", range(60, 66))
    call(root, Payload(), min_count=min_count)
    assert set(learner.shown[1]) == {0, 1}


def test_a_late_round_shows_the_classes_of_all_tasks_and_another_its_own(root, learner, declare):
    declare()
    call(root, Payload(), classes=(1,))
    assert set(learner.shown[0]) == {1}
    declare("late")
    call(root, Payload(), classes=(1,), past=(0,), kind="late")
    assert set(learner.shown[1]) == {0, 1}


@pytest.mark.parametrize(("count", "charged"), [([3, 0], [["ant"]]), ([0, 0], [[]])])
def test_a_late_round_is_charged_for_the_classes_that_it_describes(
    home, enrolment, tmp_path, declare, monkeypatch, count, charged
):
    fit(monkeypatch)
    terms = replace(TERMS, method=declare("late"))
    order = ORDER.model_copy(update={"kind": "late"})
    work, charges = make(home, enrolment, tmp_path), []
    sent = Payload({"n": np.array([3]), "classes": np.array([0, 1]), "count": np.array(count)})

    async def computed(*_):
        return None, sent

    async def kept(*_):
        return None

    begun = SimpleNamespace(classes={"ant": 0, "bee": 1})
    monkeypatch.setattr(work, "_begin", lambda *_: begun)
    monkeypatch.setattr(work, "_compute", computed)
    monkeypatch.setattr(work, "_charge", lambda *given: charges.append(given[-1]))
    monkeypatch.setattr(work, "_seal_update", lambda *_: (None, "d"))
    monkeypatch.setattr(work._keeping, "keep", kept)
    asyncio.run(work.run(order, terms, SERVER.public, print))
    assert charges == charged


def test_the_owners_limits_hold_before_anything_is_computed(
    home, enrolment, tmp_path, declare, monkeypatch
):
    fit(monkeypatch)
    terms = replace(TERMS, method=declare("late"))
    order = ORDER.model_copy(update={"kind": "late"})
    limits = PrivacyLimits(min_noise=0.5)
    work = RoundWork(home, enrolment, KEYS, ClientOptions(tmp_path, limits=limits))
    monkeypatch.setattr(work, "_parts", lambda *_: ({"ant": 0}, {}))
    with pytest.raises(PrivacyRefused):
        work._begin(order, terms, TaskInfo(0, (0, 1)), SERVER.public)


def test_no_other_image_takes_the_place_of_one_that_breaks(root, learner, declare, monkeypatch):
    declare()

    def run(_ctx, _state, _broadcast, data):
        monkeypatch.setattr(data._store, "arrays", lambda pictures: [None] * len(pictures))
        data.take(np.array([0]))

    monkeypatch.setattr(learner, "run", run)
    with pytest.raises(DataError, match="each is counted once"):
        call(root, Payload())


def test_an_exchange_that_counts_images_keeps_its_state(declare):
    (exchange,) = PLAIN.exchanges(None, TERMS.backbone)
    with pytest.raises(ValueError, match="keeps the state that names them"):
        replace(exchange, counts_once=True, keeps_state=False)
    with pytest.raises(ValueError, match="counts an image once"):
        replace(exchange, kind="late")
