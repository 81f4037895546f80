"""Which updates the open round takes: as many as it wants, in the order of the disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

import sample_run
from fcil_adapters.contract import TaskInfo
from fcil_protocol.envelopes.header import Core
from fcil_protocol.errors import AlreadyHave, NotYet, RoundClosed, Surplus
from fcil_protocol.ids import RoundKey
from fcil_server.ledger.enums import Answer, UpdateStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.rounds.classes import ClassRegistry
from fcil_server.rounds.events import Phase, RoundRules
from fcil_server.rounds.machine import Round
from fcil_server.rounds.position import RunProgress
from fcil_server.rounds.reception import NO_SAMPLES, Reception
from fcil_server.rounds.schedule import Step
from fcil_server.sessions.uploads import Accepted
from sample_run import ALICE, BOB, CLIENTS, GONE, RUN, Clock, digest

KEY = RoundKey(RUN, 0, "train", 0)


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
        round_.answers = dict.fromkeys(CLIENTS)
        self.at = RunProgress(task=TaskInfo(0, (0,), ()), step=Step("train", 0, 1), round=round_)
        self.at.number = 0
        kit = SimpleNamespace(
            run=RUN, ledger=self.ledger, method=SimpleNamespace(name="m"), schema_digest="s"
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

    def store(self, client, samples=5):
        self.reception.stored(
            Accepted(
                client=client,
                digest=digest(client),
                core=self.core(client),
                tensor_bytes=1,
                sealed_bytes=2,
                samples=samples,
            )  # fmt: skip
        )


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
    with pytest.raises(Surplus, match="had as many updates as it takes"):
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
    assert desk.reception.recorded(ALICE, desk.core(ALICE), digest(ALICE))
    assert not desk.reception.recorded(ALICE, desk.core(ALICE), digest(BOB))
    assert not desk.reception.recorded(BOB, desk.core(BOB), digest(BOB))
