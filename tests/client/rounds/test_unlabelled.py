"""Unlabelled images reach the rounds that declare them, and no other round."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from adapters import half_method, worker_kit
from adapters.worker_kit import Direct, context, fields_of, fill
from client.round_kit import KEYS, ORDER, SERVER, TERMS, fit, make
from fcil_adapters.contract import TaskInfo, registry
from fcil_adapters.contract.local_images import counted_digests, with_counted
from fcil_client.rounds.round_work import ClientOptions, RoundWork
from fcil_client.rounds.worker import ClientWorker
from fcil_client.state.privacy_budget import PrivacyLimits
from fcil_protocol.errors import DataError, InternalError, PrivacyRefused
from fcil_protocol.payloads.payload import Payload

PLAIN = half_method.METHOD
SALT = b"s" * 16


class Counter:
    """Counts its first images, of those that it is shown."""

    def __init__(self, most=2):
        self.shown, self.most = [], most

    def run(self, ctx, state, broadcast, data):
        self.shown.append((len(data), set(data.labels.tolist()), ctx.min_count))
        _, sent = half_method.Learner().run(ctx, state, broadcast, data)
        if ctx.digests is None:
            return state, sent
        assert ctx.digests.shape == (len(data), 32)
        return with_counted(state, ctx.digests[: self.most]), sent


@pytest.fixture
def learner(monkeypatch):
    made = Counter()
    monkeypatch.setattr(registry, "load_half", lambda _path: made)
    return made


@pytest.fixture
def declare(monkeypatch):
    """Return a function that says how many unlabelled images the tests' method declares."""

    def declare(most):
        (exchange,) = PLAIN.exchanges(None, TERMS.backbone)
        declared = replace(exchange, unlabelled=most, keeps_state=True, check=lambda *_: [])
        method = replace(PLAIN, exchanges=lambda *_: (declared,))
        for module in (registry, worker_kit):
            monkeypatch.setattr(module, "load_method", lambda _name: method)
        return method

    return declare


@pytest.fixture
def root(tmp_path):
    fill(tmp_path / "data", "train", "ant", range(9))
    fill(tmp_path / "data", "train", "bee", range(50, 59))
    fill(tmp_path, "camera", "may", range(100, 106))
    return tmp_path


def call(root, state, min_count=1):
    cache = root / "cache"
    cache.mkdir(exist_ok=True)
    fields = fields_of(
        "half_method", context("half_method", classes=(0, 1)), classes={"ant": 0, "bee": 1},
        parts=[], data=str(root / "data"), cache=str(cache), salt=SALT, memory_bytes=1 << 20,
        min_count=min_count, past={}, unlabelled=str(root / "camera"),
    )  # fmt: skip
    reply, (state, _) = Direct(ClientWorker())("run", fields, [state])
    return reply, state


def test_a_declared_round_shows_them_without_labels_until_they_count(root, learner, declare):
    declare(100)
    reply, state = call(root, Payload(), min_count=3)
    assert reply["images"] == 6
    assert len(counted_digests(state)) == 2
    reply, later = call(root, state)
    assert (reply["images"], len(counted_digests(later))) == (4, 4)
    assert learner.shown == [(6, {-1}, 3), (4, {-1}, 1)]


def test_it_shows_no_more_than_declared(root, learner, declare):
    declare(3)
    call(root, Payload())
    assert learner.shown[0][0] == 3


def test_any_other_round_shows_the_classes(root, learner, declare):
    declare(0)
    call(root, Payload())
    ((_, labels, _),) = learner.shown
    assert labels == {0, 1}


def test_a_learner_cannot_count_what_it_was_not_shown(root, learner, declare, monkeypatch):
    declare(100)
    monkeypatch.setattr(
        learner, "run",
        lambda *_: (with_counted(Payload(), np.zeros((1, 32), np.uint8)), Payload()),
    )  # fmt: skip
    with pytest.raises(InternalError, match="other images as counted than it was shown"):
        call(root, Payload())


def test_an_exchange_of_unlabelled_images_keeps_its_state(declare):
    (exchange,) = PLAIN.exchanges(None, TERMS.backbone)
    with pytest.raises(ValueError, match="keeps the state that names them"):
        replace(exchange, unlabelled=3, keeps_state=False)


def test_images_that_are_all_rejected_are_a_declined_round(root, declare, monkeypatch):
    declare(100)
    nothing = Payload({"n": np.zeros(1, np.int64)})
    rejecting = SimpleNamespace(run=lambda _ctx, state, *_: (state, nothing))
    monkeypatch.setattr(registry, "load_half", lambda _path: rejecting)
    with pytest.raises(DataError, match="none of 6 unlabelled images is clearly of one class"):
        call(root, Payload())


def test_a_client_that_offers_none_declines_before_it_fetches_anything(
    home, enrolment, tmp_path, declare
):
    terms = replace(TERMS, method=declare(5))
    (exchange,) = terms.exchanges
    work = make(home, enrolment, tmp_path)
    with pytest.raises(DataError, match="offers no unlabelled images"):
        work.check_able(exchange.kind, terms)
    work._options = replace(work._options, unlabelled=tmp_path)
    work.check_able(exchange.kind, terms)
    work.check_able("evaluate", terms)


def test_the_owners_limits_hold_for_them_too(home, enrolment, tmp_path, declare, monkeypatch):
    fit(monkeypatch)
    terms = replace(TERMS, method=declare(5))
    limits = PrivacyLimits(min_noise=0.5)
    work = RoundWork(home, enrolment, KEYS, ClientOptions(tmp_path, limits=limits))
    with pytest.raises(PrivacyRefused):
        work._begin(ORDER, terms, TaskInfo(0, (0, 1)), SERVER.public)
    work = RoundWork(home, enrolment, KEYS, ClientOptions(tmp_path))
    assert work._begin(ORDER, terms, TaskInfo(0, (0, 1)), SERVER.public).classes == {}
