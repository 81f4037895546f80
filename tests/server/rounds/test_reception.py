"""Which updates the open round takes: as many as it wants, in the order of the disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import sample_run
from fcil_adapters.contract import TaskInfo
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.contract.registry import load_method
from fcil_protocol.envelopes.header import Core
from fcil_protocol.errors import AlreadyHave, NotYet, RoundClosed, StaleUpdate, Surplus
from fcil_protocol.ids import RoundKey
from fcil_protocol.payloads.payload import Payload
from fcil_server.ledger.enums import Answer, UpdateStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rounds import Training
from fcil_server.reports.results.round_views import RoundReader
from fcil_server.rounds.classes import ClassRegistry
from fcil_server.rounds.events import Answers, Phase, RoundRules
from fcil_server.rounds.machine import Round
from fcil_server.rounds.position import RunContext, RunProgress
from fcil_server.rounds.reception import NO_SAMPLES, Reception
from fcil_server.rounds.schedule import Step
from fcil_server.sessions.uploads import Accepted
from sample_run import ALICE, BOB, CLIENTS, GONE, RUN, Clock, digest

KEY = RoundKey(RUN, 0, "train", 0)

BACKBONE = replace(NO_BACKBONE, dim=8, depth=12, heads=2, mlp_dim=16)


@dataclass
class Desk:
    """A reception with a real ledger, in an open round that asked all three clients."""

    ledger: Ledger
    take: int = 0
    heard: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        ClassRegistry(self.ledger, RUN).announce(ALICE, ["cat"])
        self.ledger.tasks.open(RUN, 0, [0])
        self.ledger.rounds.open(KEY, asked=CLIENTS, base_state=0, remaining_s=9.0)
        round_ = Round(rules=RoundRules(take=self.take), seed=(1,), phase=Phase.OPEN)
        round_.answers = Answers(dict.fromkeys(CLIENTS, Answer.NONE))
        self.at = RunProgress(task=TaskInfo(0, (0,), ()), step=Step("train", 0, 1), round=round_)
        self.at.number = 0
        kit = SimpleNamespace(
            run=RUN,
            ledger=self.ledger,
            method=SimpleNamespace(name="m"),
            schema_digest="s",
            is_asynchronous=lambda _kind: False,
            continues_after=lambda _step: False,
        )
        self.reception = Reception(kit, self.at, self._updated, self._empty)

    def _updated(self, client):
        self.heard.append(f"{client[0]} updated")

    def _empty(self, client, reason):
        self.heard.append(f"{client[0]} {reason}")

    def core(self, client):
        return Core(
            protocol=1, federation="f", run=RUN, direction="update", sender=client,
            sender_key="k", recipient="server", method="m", schema="s", task=0, round=0,
            kind="train", base=0,
        )  # fmt: skip

    def store(self, client, samples=5, **metrics):
        accepted = Accepted(
            client=client,
            digest=digest(client),
            core=self.core(client),
            tensor_bytes=1,
            sealed_bytes=2,
            samples=samples,
            metrics=metrics,
        )  # fmt: skip
        self.reception.stored(accepted)
        self.reception.committed(accepted)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite", clock=Clock()) as opened:
        sample_run.add_clients(opened)
        sample_run.add_run(opened)
        yield opened


def test_of_one_batch_those_made_durable_first_are_taken_and_the_rest_never_acknowledged(ledger):
    desk = Desk(ledger, take=2)
    desk.store(GONE)
    desk.store(ALICE)
    with pytest.raises(Surplus, match="takes 2 updates and has them") as caught:
        desk.store(BOB)
    assert caught.value.code == "surplus"
    assert caught.value.default_action()
    assert {u.client for u in ledger.updates.accepted(KEY)} == {GONE, ALICE}
    assert ledger.updates.get(KEY, BOB) is None
    assert desk.heard == ["c updated", "a updated"]


def test_a_header_is_refused_before_its_chunks_once_there_are_enough(ledger):
    desk = Desk(ledger, take=1)
    desk.store(ALICE)
    with pytest.raises(Surplus):
        desk.reception.expect(BOB, desk.core(BOB))
    with pytest.raises(AlreadyHave):  # who was taken is told that it was
        desk.reception.expect(ALICE, desk.core(ALICE))


def test_without_a_limit_all_that_come_are_taken(ledger):
    desk = Desk(ledger)
    for client in CLIENTS:
        desk.store(client)
    assert len(ledger.updates.accepted(KEY)) == 3


def test_an_excluded_update_makes_room_for_another(ledger):
    """Its sender was revoked."""
    desk = Desk(ledger, take=1)
    desk.store(ALICE)
    ledger.updates.exclude(KEY, ALICE, "revoked")
    desk.store(BOB)
    assert [u.client for u in ledger.updates.accepted(KEY)] == [BOB]


def test_an_update_made_from_nothing_takes_no_place_and_is_no_answer(ledger):
    desk = Desk(ledger, take=1)
    desk.store(ALICE, samples=0)
    assert ledger.updates.get(KEY, ALICE).status is UpdateStatus.EXCLUDED
    desk.store(BOB)
    assert desk.heard == [f"a {NO_SAMPLES}", "b updated"]


def test_whoever_comes_after_the_end_is_told_how_it_ended(ledger):
    desk = Desk(ledger, take=1)
    ledger.answers.set(KEY, BOB, Answer.SURPLUS, "")
    ledger.answers.set(KEY, GONE, Answer.STRAGGLER, "")
    ledger.rounds.close(KEY, "done", why="taken")
    desk.at.round.phase = Phase.CLOSED
    with pytest.raises(Surplus, match="closed with enough updates"):
        desk.reception.expect(BOB, desk.core(BOB))
    with pytest.raises(RoundClosed, match=r"continued without this update and is closed \(taken\)"):
        desk.reception.expect(GONE, desk.core(GONE))


def test_a_restarted_server_asks_for_patience_until_the_open_round_is_open_again(ledger):
    """A refusal would cost the client its stored work."""
    desk = Desk(ledger)
    desk.at.round = None
    with pytest.raises(NotYet, match="resumes shortly"):
        desk.reception.expect(ALICE, desk.core(ALICE))
    ledger.rounds.close(KEY, "done", why="answered")
    with pytest.raises(RoundClosed):
        desk.reception.expect(ALICE, desk.core(ALICE))


def test_what_was_counted_is_known_after_the_round_too(ledger):
    """Its sender may not have heard: the server was killed before the Ack was out."""
    desk = Desk(ledger)
    desk.store(ALICE)
    ledger.updates.mark_counted(KEY)
    ledger.rounds.close(KEY, "done", why="answered")
    desk.at.round = None
    assert desk.reception.recorded(digest(ALICE))
    assert not desk.reception.recorded(digest(BOB))


@dataclass
class Asynchronous:
    """A reception in round 3 of 5, which starts from state 3; the bound is two states."""

    ledger: Ledger
    take: int = 0

    def __post_init__(self) -> None:
        self.desk = Desk(self.ledger, take=self.take)
        self.ledger.rounds.close(KEY, "done", new_state=1)
        for number in (1, 2):
            self.enter(number)
            self.ledger.rounds.close(self.key, "done", new_state=number + 1)
        self.enter(3)
        kit = self.desk.reception.context
        kit.is_asynchronous = lambda kind: kind == "train"
        kit.continues_after = lambda step: RunContext.continues_after(kit, step)

    def enter(self, number):
        self.key = KEY._replace(round=number)
        self.ledger.rounds.open(self.key, asked=CLIENTS, base_state=number, remaining_s=9.0)
        self.desk.at.number, self.desk.at.step = number, Step("train", number, 5)
        self.desk.at.oldest_base = max(number - 2, 0)

    def core(self, client, number, **other):
        return replace(self.desk.core(client), **{"round": number, "base": number, **other})

    def store(self, client, number, name=""):
        accepted = Accepted(
            client=client,
            digest=digest(name or client),
            core=self.core(client, number),
            tensor_bytes=1,
            sealed_bytes=2,
            samples=5,
        )  # fmt: skip
        self.desk.reception.stored(accepted)
        self.desk.reception.committed(accepted)

    def expect(self, client, number, **other):
        return self.desk.reception.expect(client, self.core(client, number, **other))


class TestAsynchronous:
    def test_an_update_of_an_earlier_round_is_one_of_the_open_round(self, ledger):
        scene = Asynchronous(ledger)
        scene.store(ALICE, 1)
        scene.store(BOB, 3)
        rows = {u.client: u for u in ledger.updates.accepted(scene.key)}
        assert {c: u.base_state for c, u in rows.items()} == {ALICE: 1, BOB: None}
        assert scene.desk.heard == ["a updated", "b updated"]
        assert ledger.updates.of_round(KEY._replace(round=1)) == []

    def test_it_counts_once_even_if_its_ack_was_lost_and_the_round_is_over(self, ledger):
        scene = Asynchronous(ledger)
        scene.store(ALICE, 1)
        with pytest.raises(AlreadyHave):
            scene.expect(ALICE, 2)
        ledger.updates.mark_counted(scene.key)
        ledger.rounds.close(scene.key, "done", new_state=4)
        scene.enter(4)
        assert scene.desk.reception.recorded(digest(ALICE))

    def test_one_that_is_too_old_is_refused_with_the_bound(self, ledger):
        scene = Asynchronous(ledger)
        with pytest.raises(StaleUpdate, match="the oldest that the round takes is state 1"):
            scene.expect(ALICE, 0)

    def test_one_whose_round_did_not_start_from_its_state_is_refused(self, ledger):
        scene = Asynchronous(ledger)
        with pytest.raises(StaleUpdate, match="did not start from that state"):
            scene.expect(ALICE, 2, base=1)

    @pytest.mark.parametrize("other", [{"task": 1}, {"kind": "finish"}, {"round": 4}])
    def test_another_task_or_kind_or_a_later_round_is_not_taken(self, ledger, other):
        with pytest.raises(RoundClosed):
            Asynchronous(ledger).expect(ALICE, 2, **other)

    @pytest.mark.parametrize("phase", [Phase.GATHERING, Phase.CLOSED])
    def test_between_two_rounds_it_is_to_be_offered_again(self, ledger, phase):
        scene = Asynchronous(ledger)
        if phase is Phase.CLOSED:
            ledger.rounds.close(scene.key, "done", new_state=4)
        scene.desk.at.round.phase = phase
        with pytest.raises(NotYet, match="in its next round"):
            scene.expect(ALICE, 2)

    def test_before_the_last_round_opens_too(self, ledger):
        """It is published first, and asks nobody yet."""
        scene = Asynchronous(ledger)
        ledger.rounds.close(scene.key, "done", new_state=4)
        scene.desk.at.round, scene.desk.at.step = None, Step("train", 4, 5)
        with pytest.raises(NotYet, match="in its next round"):
            scene.expect(ALICE, 3)

    def test_a_server_that_has_just_started_asks_for_patience(self, ledger):
        scene = Asynchronous(ledger)
        at = scene.desk.at
        at.task = at.step = at.round = None
        with pytest.raises(NotYet):
            scene.expect(ALICE, 1)
        ledger.rounds.close(scene.key, "done", new_state=4)
        ledger.tasks.close(RUN, 0)
        with pytest.raises(RoundClosed):
            scene.expect(ALICE, 1)

    def test_one_that_connects_while_the_round_is_open_is_asked_first(self, ledger):
        scene = Asynchronous(ledger)
        rounds = scene.desk.at.round
        rounds.rules = RoundRules(asynchronous=True)
        del rounds.answers[ALICE]
        with pytest.raises(NotYet, match="is asked shortly"):
            scene.expect(ALICE, 2)
        rounds.connected[ALICE] = False  # it has no images of the task any more
        with pytest.raises(RoundClosed, match="was not asked"):
            scene.expect(ALICE, 2)

    def test_after_the_rest_of_the_task_was_closed_it_is_refused(self, ledger):
        scene = Asynchronous(ledger)
        ledger.rounds.close(scene.key, "short", why="rest_of_task")
        scene.desk.at.round.phase = Phase.CLOSED
        with pytest.raises(RoundClosed):
            scene.expect(ALICE, 2)

    def test_after_the_last_round_it_is_refused(self, ledger):
        scene = Asynchronous(ledger)
        ledger.rounds.close(scene.key, "done", new_state=4)
        scene.enter(4)
        ledger.rounds.close(scene.key, "done", new_state=5)
        scene.desk.at.round.phase = Phase.CLOSED
        with pytest.raises(RoundClosed):
            scene.expect(ALICE, 3)

    def test_a_full_round_asks_for_patience_and_the_last_one_has_enough(self, ledger):
        scene = Asynchronous(ledger, take=1)
        scene.store(BOB, 3)
        with pytest.raises(NotYet, match="the next one opens shortly"):
            scene.store(ALICE, 2)
        ledger.updates.mark_counted(scene.key)
        ledger.rounds.close(scene.key, "done", new_state=4)
        scene.enter(4)
        scene.store(BOB, 4, "second")
        with pytest.raises(Surplus):
            scene.store(ALICE, 2)

    def test_an_update_that_was_complete_as_its_round_closed_waits_for_the_next(self, ledger):
        scene = Asynchronous(ledger)
        ledger.rounds.close(scene.key, "done", new_state=4)
        scene.desk.at.step = Step("train", 4, 5)
        with pytest.raises(NotYet):
            scene.store(ALICE, 3)
        assert ledger.updates.of_client(RUN, ALICE) == []


def expectation(ledger, method="fedavg_lora"):
    """What an open round of a method expects of an upload, and one with these metrics."""
    desk, found = Desk(ledger), load_method(method)
    kit = desk.reception.context
    kit.method, kit.hparams, kit.info = found, found.hparams(), BACKBONE
    kit.exchange = {e.kind: e for e in found.exchanges(kit.hparams, BACKBONE)}.get
    core = replace(desk.core(ALICE), method=method)
    return desk.reception.expect(ALICE, core)


@pytest.mark.parametrize("loss", [1e9, -1e9])
def test_a_loss_that_no_training_has_is_refused(ledger, loss):
    wanted = expectation(ledger)
    update = Payload({"n": np.ones(1, np.int64)}, {"train_loss": loss})
    (fault,) = wanted.check(update, wanted.task)
    assert "train_loss" in fault
    assert {m.name for m in wanted.schema.meta} >= {"train_loss", "train_accuracy"}


def test_a_method_without_gradients_expects_no_training_metrics(ledger):
    assert expectation(ledger, "running_mean").schema.meta == ()


def test_a_lying_client_has_its_own_line_and_is_left_out_once_excluded(ledger):
    desk = Desk(ledger)
    desk.store(ALICE, samples=1, train_loss=2.0, train_accuracy=0.5)
    desk.store(BOB, samples=3, train_loss=1.0)
    desk.store(GONE, samples=10**9, train_loss=1e6, train_accuracy=0.0)
    ledger.updates.exclude(KEY, GONE, "far from the others")
    view = RoundReader(ledger.database).view(ledger.rounds.get(KEY))
    assert view.training == Training(loss=1.25, accuracy=0.5)
    assert view.trained[GONE] == Training(1e6, 0.0)
    assert view.line()["training"]["clients"][BOB] == {"loss": 1.0, "accuracy": None}
    ledger.rounds.close(KEY, "done")
    newest = ledger.updates.newest_training(RUN)
    assert newest is not None
    assert (newest["loss"], newest["accuracy"]) == (1.25, 0.5)


def test_a_round_of_clients_that_report_nothing_has_no_loss(ledger):
    desk = Desk(ledger)
    desk.store(ALICE)
    view = RoundReader(ledger.database).view(ledger.rounds.get(KEY))
    assert (view.training, view.trained) == (Training(), {})
    assert ledger.updates.newest_training(RUN) is None
