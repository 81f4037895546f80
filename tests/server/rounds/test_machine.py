"""The round machine: who is asked, when it closes, and how; every event in every phase."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_protocol.ids import ClientId
from fcil_server.ledger.enums import Answer, Outcome
from fcil_server.rounds.events import (
    Answers,
    Ask,
    Available,
    Close,
    Declined,
    Event,
    Hold,
    Instruction,
    Left,
    Opened,
    Phase,
    Present,
    Reopened,
    Resume,
    RoundRules,
    SetTimer,
    Stop,
    Tick,
    Unable,
    Unheld,
    Updated,
    Why,
    Widened,
    Withdrawn,
)
from fcil_server.rounds.machine import Round
from fcil_server.rounds.restore import restored_round

A, B, C, D, E = CLIENTS = tuple(ClientId(c * 26) for c in "abcde")
RULES = RoundRules(min_clients=2, deadline_s=100.0, grace_s=10.0, max_reopens=2)


def opened(rules: RoundRules = RULES, clients: Sequence[ClientId] = (A, B, C)) -> Round:
    """A round that has asked these clients at time 0."""
    clients = sorted(clients)
    wait = Round(rules=RoundRules(**{**vars(rules), "min_clients": len(clients)}), seed=(1,))
    for client in clients:
        wait.handle(Available(client, holds=True, now=0.0))
    assert wait.phase is Phase.OPEN
    wait.rules = rules
    return wait


@given(
    st.dictionaries(st.sampled_from(CLIENTS), st.sampled_from(Answer)),
    st.lists(st.tuples(st.sampled_from(CLIENTS), st.sampled_from([*Answer, None]))),
)
def test_answers_are_counted_whatever_becomes_of_them(
    first: dict[ClientId, Answer], changes: list[tuple[ClientId, Answer | None]]
) -> None:
    answers, expected = Answers(first), dict(first)
    for client, answer in changes:
        if answer is not None:
            answers[client] = expected[client] = answer
        else:
            assert answers.pop(client, None) is expected.pop(client, None)
    assert answers == expected
    for kind in Answer:
        assert answers.number_of(kind) == list(expected.values()).count(kind)


@pytest.fixture(autouse=True)
def checked_by_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every test of this file, no event leads to a phase that the table does not name."""
    handle = Round.handle

    def check(self: Round, event: Event) -> list[Instruction]:
        before = self.phase
        out = handle(self, event)
        _, after = Round.TABLE.get((before, type(event)), (None, (before,)))
        assert self.phase in after, (before, event)
        return out

    monkeypatch.setattr(Round, "handle", check)


def close_of(instructions: list[Instruction]) -> Close:
    assert [type(i) for i in instructions] == [Close]
    assert isinstance(instructions[0], Close)
    return instructions[0]


EVENTS: dict[type, Event] = {
    Present: Present(((A, True), (B, True)), now=1.0),
    Available: Available(A, holds=True, now=1.0),
    Left: Left(A, now=1.0),
    Updated: Updated(A, now=1.0),
    Declined: Declined(A, "no data", now=1.0),
    Withdrawn: Withdrawn(A, "revoked", now=1.0),
    Tick: Tick(now=1.0),
    Stop: Stop(now=1.0),
    Hold: Hold(now=1.0),
    Resume: Resume(now=1.0),
}


class TestTable:
    def test_these_samples_are_all_events(self) -> None:
        assert set(EVENTS) == set(get_args(Event))

    def test_the_table_names_only_phases_and_events(self) -> None:
        for phase, kind in Round.TABLE:
            assert phase in Phase
            assert kind in EVENTS

    def test_an_open_round_hears_every_event(self) -> None:
        assert {kind for phase, kind in Round.TABLE if phase is Phase.OPEN} == set(EVENTS)

    @pytest.mark.parametrize("kind", EVENTS, ids=lambda k: k.__name__)
    def test_a_closed_round_answers_nothing(self, kind: type) -> None:
        """Nor does it change: what was decided stays decided."""
        done = opened()
        done.handle(Stop(now=1.0))
        before = (dict(done.answers), dict(done.connected), done.deadline)
        assert done.handle(EVENTS[kind]) == []
        assert (done.phase, (dict(done.answers), dict(done.connected), done.deadline)) == (
            Phase.CLOSED,
            before,
        )

    @pytest.mark.parametrize("kind", [Updated, Declined, Withdrawn, Tick], ids=lambda k: k.__name__)
    def test_a_gathering_round_does_not_hear_what_only_an_open_one_can(self, kind: type) -> None:
        gathering = Round(rules=RULES, seed=(1,))
        assert gathering.handle(EVENTS[kind]) == []
        assert (gathering.phase, gathering.answers) == (Phase.GATHERING, {})


class TestGathering:
    def test_it_opens_with_the_client_that_makes_the_number(self) -> None:
        gathering = Round(rules=RULES, seed=(1,))
        assert gathering.handle(Available(B, holds=True, now=3.0)) == []
        assert gathering.handle(Available(A, holds=True, now=5.0)) == [
            Opened((A, B)),
            Ask(A),
            Ask(B),
            SetTimer(105.0),
        ]
        assert gathering.phase is Phase.OPEN
        assert gathering.answers == {A: Answer.NONE, B: Answer.NONE}

    def test_the_same_client_twice_is_one_client(self) -> None:
        gathering = Round(rules=RULES, seed=(1,))
        for _ in range(3):
            assert gathering.handle(Available(A, holds=True, now=1.0)) == []

    def test_those_who_are_here_when_it_begins_are_judged_as_one(self) -> None:
        """Nobody is left out because somebody else was looked at first."""
        gathering = Round(rules=RULES, seed=(1,))
        everybody = Present(((C, True), (A, True), (B, False), (D, True)), now=5.0)
        asked = (A, C, D)
        assert gathering.handle(everybody) == [
            Opened(asked),
            *(Ask(c) for c in asked),
            SetTimer(105.0),
        ]

    def test_too_few_at_the_beginning_are_completed_by_who_comes_later(self) -> None:
        gathering = Round(rules=RULES, seed=(1,))
        assert gathering.handle(Present((), now=1.0)) == []
        assert gathering.handle(Present(((C, True),), now=1.0)) == []
        assert gathering.handle(Available(A, holds=True, now=2.0))[0] == Opened((A, C))

    def test_who_left_is_not_counted(self) -> None:
        gathering = Round(rules=RULES, seed=(1,))
        gathering.handle(Available(A, holds=True, now=1.0))
        assert gathering.handle(Left(A, now=2.0)) == []
        assert gathering.handle(Available(B, holds=True, now=3.0)) == []
        assert gathering.handle(Left(C, now=3.0)) == []  # one it never saw
        assert gathering.phase is Phase.GATHERING

    def test_enough_clients_without_data_wait_for_one_that_has_some(self) -> None:
        gathering = Round(rules=RULES, seed=(1,))
        assert gathering.handle(Available(A, holds=False, now=1.0)) == []
        assert gathering.handle(Available(B, holds=False, now=1.0)) == [Unheld(None)]
        assert gathering.handle(Available(C, holds=True, now=1.0))[0] == Opened((C,))

    def test_a_client_may_come_to_hold_data_later(self) -> None:
        """It announces again after images were added."""
        gathering = Round(rules=RULES, seed=(1,))
        gathering.handle(Available(A, holds=False, now=1.0))
        gathering.handle(Available(B, holds=False, now=1.0))
        assert gathering.handle(Available(A, holds=True, now=2.0))[0] == Opened((A,))

    def test_one_client_is_enough_where_the_rules_say_so(self) -> None:
        alone = Round(rules=RoundRules(min_clients=1), seed=(1,))
        assert alone.handle(Available(A, holds=True, now=0.0))[0] == Opened((A,))


class TestSettling:
    SLOW = RoundRules(min_clients=2, deadline_s=100.0, settle_s=5.0)

    def test_who_comes_shortly_after_the_others_is_asked_with_them(self) -> None:
        """At the start of a fleet the round does not go to the two fastest."""
        gathering = Round(rules=self.SLOW, seed=(1,))
        assert gathering.handle(Available(A, holds=True, now=1.0)) == []
        assert gathering.handle(Available(B, holds=True, now=2.0)) == [SetTimer(7.0)]
        assert gathering.handle(Available(C, holds=True, now=3.0)) == []
        assert gathering.handle(Tick(now=6.9)) == []
        assert gathering.handle(Tick(now=7.0))[0] == Opened((A, B, C))
        assert gathering.deadline == 107.0

    def test_who_left_meanwhile_is_not_asked(self) -> None:
        gathering = Round(rules=self.SLOW, seed=(1,))
        for client in (A, B, C):
            gathering.handle(Available(client, holds=True, now=1.0))
        gathering.handle(Left(A, now=2.0))
        assert gathering.handle(Tick(now=6.0))[0] == Opened((B, C))

    def test_too_few_when_the_time_is_over_wait_for_more_and_settle_again(self) -> None:
        gathering = Round(rules=self.SLOW, seed=(1,))
        for client in (A, B):
            gathering.handle(Available(client, holds=True, now=1.0))
        gathering.handle(Left(A, now=2.0))
        assert gathering.handle(Tick(now=6.0)) == []
        assert gathering.handle(Available(C, holds=True, now=20.0)) == [SetTimer(25.0)]
        assert gathering.handle(Tick(now=25.0))[0] == Opened((B, C))

    def test_those_who_are_all_here_already_are_not_waited_for(self) -> None:
        gathering = Round(rules=self.SLOW, seed=(1,))
        assert gathering.handle(Present(((A, True), (B, True)), now=1.0))[0] == Opened((A, B))


class TestHearing:
    """The first round of a task lets those who are here say what they hold of it."""

    SLOW = RoundRules(min_clients=2, deadline_s=100.0, settle_s=5.0)

    def new(self, *clients: tuple[ClientId, bool], first: bool = True, **rules: object) -> Round:
        made = RoundRules(**{**vars(self.SLOW), **rules})
        gathering = Round(rules=made, seed=(1,), first=first)
        gathering.handle(Present(clients, now=1.0))
        return gathering

    def test_it_does_not_go_to_whoever_scanned_its_folder_first(self) -> None:
        gathering = Round(rules=self.SLOW, seed=(1,), first=True)
        assert gathering.handle(Present(((A, False), (B, True)), now=1.0)) == [SetTimer(6.0)]
        assert gathering.handle(Available(A, holds=True, now=1.2))[0] == Opened((A, B))

    def test_who_holds_nothing_of_it_is_waited_for_once(self) -> None:
        gathering = self.new((A, False), (B, True))
        assert gathering.handle(Available(B, holds=True, now=2.0)) == []
        assert gathering.handle(Tick(now=5.9)) == []
        assert gathering.handle(Tick(now=6.0))[0] == Opened((B,))

    def test_nobody_is_waited_for_where_all_hold_some_or_the_task_is_not_new(self) -> None:
        assert self.new((A, True), (B, True)).phase is Phase.OPEN
        assert self.new((A, False), (B, True), first=False).phase is Phase.OPEN
        assert self.new((A, False), (B, True), settle_s=0.0).phase is Phase.OPEN

    def test_who_leaves_is_waited_for_no_more(self) -> None:
        gathering = self.new((A, False), (B, True), (C, True))
        assert gathering.handle(Left(A, now=2.0))[0] == Opened((B, C))

    def test_who_comes_meanwhile_may_be_followed_by_others(self) -> None:
        gathering = self.new((A, False), (B, True))
        assert gathering.handle(Available(C, holds=True, now=2.0)) == []
        assert gathering.handle(Available(A, holds=True, now=3.0)) == []
        assert gathering.handle(Tick(now=6.0))[0] == Opened((A, B, C))

    def test_after_a_pause_they_are_heard_too(self) -> None:
        gathering = self.new((A, False), (B, True))
        assert gathering.handle(Hold(now=2.0)) == []
        assert gathering.handle(Tick(now=6.0)) == []
        assert gathering.handle(Resume(now=50.0)) == [SetTimer(55.0)]
        assert gathering.handle(Available(A, holds=True, now=51.0))[0] == Opened((A, B))
        held = self.new((A, False), (B, True))
        held.handle(Hold(now=2.0))
        held.handle(Available(A, holds=True, now=3.0))
        assert held.handle(Resume(now=50.0))[0] == Opened((A, B)), "all have said"

    def test_where_too_few_are_here_or_nobody_holds_any_it_waits_as_ever(self) -> None:
        assert self.new((A, True)).opens_at is None
        nobody = Round(rules=self.SLOW, seed=(1,), first=True)
        assert nobody.handle(Present(((A, False), (B, False)), now=1.0)) == [Unheld(None)]
        assert nobody.handle(Available(A, holds=True, now=2.0)) == [SetTimer(7.0)]
        assert nobody.handle(Tick(now=7.0))[0] == Opened((A,))

    def test_the_operator_can_close_it_meanwhile(self) -> None:
        gathering = self.new((A, False), (B, True))
        assert close_of(gathering.handle(Stop(now=2.0))).outcome is Outcome.SKIPPED


class TestNobodyHolds:
    SKIP = RoundRules(min_clients=2, no_holder_s=0.0)
    LATER = RoundRules(min_clients=2, no_holder_s=60.0)

    def test_enough_clients_without_data_end_the_round_where_the_rules_say_so(self) -> None:
        gathering = Round(rules=self.SKIP, seed=(1,))
        assert gathering.handle(Available(A, holds=False, now=1.0)) == []
        close = close_of(gathering.handle(Available(B, holds=False, now=1.0)))
        assert (close.outcome, dict(close.answers)) == (Outcome.SKIPPED, {})
        assert close.why is Why.NO_HOLDER

    def test_it_is_said_once_that_enough_are_here_and_none_has_data(self) -> None:
        waits = Round(rules=RULES, seed=(1,))
        assert waits.handle(Present(((A, False), (B, False)), now=1.0)) == [Unheld(None)]
        assert waits.handle(Available(C, holds=False, now=2.0)) == []
        assert waits.handle(Tick(now=1e9)) == [], "the rules say wait"
        assert waits.handle(Available(D, holds=True, now=3e9))[0] == Opened((D,))

    def test_too_few_clients_are_no_sign_that_nobody_has_data(self) -> None:
        """A fleet that sleeps at night must find its task there in the morning."""
        waits = Round(rules=self.LATER, seed=(1,))
        assert waits.handle(Available(A, holds=False, now=1.0)) == []
        assert waits.handle(Tick(now=1e6)) == []
        assert waits.unheld_since is None

    def test_it_is_skipped_when_nobody_has_had_data_for_so_long(self) -> None:
        waits = Round(rules=self.LATER, seed=(1,))
        out = waits.handle(Present(((A, False), (B, False)), now=5.0))
        assert out == [Unheld(65.0), SetTimer(65.0)]
        assert waits.handle(Available(C, holds=False, now=30.0)) == []
        assert waits.handle(Tick(now=64.9)) == []
        assert close_of(waits.handle(Tick(now=65.0))).why is Why.NO_HOLDER

    def test_the_time_begins_anew_when_a_holder_was_here_or_too_few(self) -> None:
        waits = Round(rules=self.LATER, seed=(1,))
        waits.handle(Present(((A, False), (B, False)), now=5.0))
        waits.handle(Left(B, now=40.0))
        assert waits.handle(Tick(now=65.0)) == []
        assert waits.handle(Available(B, holds=False, now=70.0)) == [Unheld(130.0), SetTimer(130.0)]
        assert waits.handle(Tick(now=129.0)) == []
        assert waits.handle(Tick(now=130.0)) != []

    def test_a_moment_with_too_few_is_enough_for_that(self) -> None:
        waits = Round(rules=self.LATER, seed=(1,))
        waits.handle(Present(((A, False), (B, False)), now=5.0))
        waits.handle(Left(B, now=40.0))
        assert waits.handle(Available(B, holds=False, now=50.0)) == [Unheld(110.0), SetTimer(110.0)]

    def test_it_has_its_time_also_where_clients_settle_first(self) -> None:
        rules = RoundRules(min_clients=2, no_holder_s=60.0, settle_s=5.0)
        waits = Round(rules=rules, seed=(1,))
        waits.handle(Available(A, holds=False, now=0.0))
        assert waits.handle(Available(B, holds=False, now=1.0)) == [SetTimer(6.0)]
        assert waits.handle(Tick(now=6.0)) == [Unheld(66.0), SetTimer(66.0)]
        assert waits.handle(Available(C, holds=False, now=64.0)) == [SetTimer(69.0)]
        assert waits.handle(Tick(now=66.0)) == [], "C may bring what is missing"
        assert close_of(waits.handle(Tick(now=69.0))).why is Why.NO_HOLDER

    def test_the_next_round_of_the_task_does_not_wait_once_more(self) -> None:
        following = Round(rules=self.LATER, seed=(1,), unheld_since=5.0)
        close = close_of(following.handle(Present(((A, False), (B, False)), now=65.5)))
        assert close.why is Why.NO_HOLDER

    def test_the_next_round_opens_if_a_holder_came_meanwhile(self) -> None:
        following = Round(rules=self.LATER, seed=(1,), unheld_since=5.0)
        assert following.handle(Present(((A, False), (B, True)), now=65.5))[0] == Opened((B,))
        assert following.unheld_since is None

    def test_one_holder_is_enough_to_open_it(self) -> None:
        gathering = Round(rules=self.SKIP, seed=(1,))
        out = gathering.handle(Present(((A, False), (B, True)), now=1.0))
        assert out[0] == Opened((B,))

    def test_the_operator_ends_a_round_that_waits_for_clients(self) -> None:
        gathering = Round(rules=RULES, seed=(1,))
        gathering.handle(Available(A, holds=True, now=1.0))
        close = close_of(gathering.handle(Stop(now=2.0)))
        assert (close.outcome, dict(close.answers)) == (Outcome.SKIPPED, {})


class TestSampling:
    LIMITED = RoundRules(clients_per_round=2, min_clients=5)

    def asked(self, seed: tuple[int, ...], order: Sequence[ClientId]) -> tuple[ClientId, ...]:
        gathering = Round(rules=self.LIMITED, seed=seed)
        out: list[Instruction] = []
        for client in order:
            out = gathering.handle(Available(client, holds=True, now=0.0))
        assert isinstance(out[0], Opened)
        assert [i.client for i in out if isinstance(i, Ask)] == list(out[0].asked)
        return out[0].asked

    @settings(max_examples=30)
    @given(st.permutations(CLIENTS))
    def test_the_sample_does_not_depend_on_who_came_first(self, order: list[ClientId]) -> None:
        assert self.asked((1993, 0, 4), order) == self.asked((1993, 0, 4), CLIENTS)

    def test_the_sample_has_the_size_asked_for_and_changes_with_the_round(self) -> None:
        samples = [self.asked((1993, 0, n), CLIENTS) for n in range(40)]
        assert all(len(set(s)) == 2 for s in samples)
        assert {c for s in samples for c in s} == set(CLIENTS), "nobody is left out for ever"

    @settings(max_examples=30)
    @given(st.permutations(CLIENTS), st.integers(1, 5))
    def test_the_sample_is_of_all_who_were_here_at_the_beginning(
        self, order: list[ClientId], least: int
    ) -> None:
        """However few would have been enough."""
        rules = RoundRules(clients_per_round=2, min_clients=least)
        out = Round(rules=rules, seed=(1993, 0, 4)).handle(
            Present(tuple((c, True) for c in order), now=0.0)
        )
        assert out[0] == Opened(self.asked((1993, 0, 4), CLIENTS))

    def test_only_holders_are_drawn(self) -> None:
        gathering = Round(rules=self.LIMITED, seed=(7,))
        for client in CLIENTS:
            out = gathering.handle(Available(client, holds=client in (B, D, E), now=0.0))
        assert isinstance(out[0], Opened)
        assert set(out[0].asked) < {B, D, E}

    def test_zero_asks_all(self) -> None:
        gathering = Round(rules=RoundRules(clients_per_round=0, min_clients=5), seed=(7,))
        for client in CLIENTS:
            out = gathering.handle(Available(client, holds=True, now=0.0))
        assert out[0] == Opened(CLIENTS)


class TestClosing:
    def test_it_closes_when_all_have_answered(self) -> None:
        going = opened()
        assert going.handle(Updated(A, now=1.0)) == []
        assert going.handle(Updated(C, now=2.0)) == []
        close = close_of(going.handle(Updated(B, now=3.0)))
        assert close.outcome is Outcome.DONE
        assert set(close.answers.values()) == {Answer.UPDATED}

    def test_a_quorum_does_not_close_it_early(self) -> None:
        """Others are still at work, and the deadline has not passed."""
        going = opened(RoundRules(min_clients=1, quorum=1, deadline_s=100.0))
        assert going.handle(Updated(A, now=1.0)) == []
        assert going.handle(Tick(now=99.9)) == []

    def test_a_quorum_closes_it_at_the_deadline_and_the_others_are_late(self) -> None:
        going = opened()
        going.handle(Updated(A, now=1.0))
        going.handle(Updated(B, now=1.0))
        close = close_of(going.handle(Tick(now=100.0)))
        assert (close.outcome, close.answers[C]) == (Outcome.DONE, Answer.STRAGGLER)

    def test_an_update_after_the_deadline_closes_what_a_lost_timer_left_open(self) -> None:
        going = opened()
        going.handle(Updated(A, now=1.0))
        assert close_of(going.handle(Updated(B, now=100.5))).outcome is Outcome.DONE

    def test_the_same_update_twice_counts_once(self) -> None:
        going = opened()
        for _ in range(3):
            assert going.handle(Updated(A, now=1.0)) == []

    def test_an_update_of_a_client_that_was_not_asked_counts_for_nothing(self) -> None:
        going = opened(clients=(A, B))
        assert going.handle(Updated(E, now=1.0)) == []
        assert going.handle(Declined(E, "x", now=1.0)) == []
        assert E not in going.answers

    def test_who_declines_leaves_the_denominator(self) -> None:
        """Two of three decline: the third completes the round although two were wanted."""
        going = opened()
        going.handle(Declined(A, "no data", now=1.0))
        going.handle(Declined(B, "battery", now=1.0))
        close = close_of(going.handle(Updated(C, now=2.0)))
        assert close.outcome is Outcome.DONE
        assert going.reasons == {A: "no data", B: "battery"}

    def test_a_decline_after_an_update_changes_nothing(self) -> None:
        going = opened()
        going.handle(Updated(A, now=1.0))
        going.handle(Declined(A, "late thought", now=2.0))
        assert going.answers[A] is Answer.UPDATED
        assert A not in going.reasons

    def test_when_all_decline_they_are_asked_again_later_and_then_the_round_is_skipped(
        self,
    ) -> None:
        """Or a run of a hundred rounds would be over in a second, with nothing learned."""
        going = opened(clients=(A, B))
        going.handle(Declined(A, "x", now=1.0))
        now = 1.0
        for pause in (30.0, 120.0):
            assert going.handle(Declined(B, "x", now=now)) == [
                Unable(now + pause), SetTimer(now + pause),
            ]  # fmt: skip
            assert going.handle(Tick(now=now + pause - 1)) == []
            now += pause
            assert going.handle(Tick(now=now)) == [
                Reopened((A, B), now + 100.0, declined=True), Ask(A), Ask(B), SetTimer(now + 100.0),
            ]  # fmt: skip
            going.handle(Declined(A, "x", now=now))
        assert going.handle(Declined(B, "x", now=now))[0] == Unable(now + 480.0)
        assert close_of(going.handle(Tick(now=now + 480.0))).outcome is Outcome.SKIPPED

    def test_one_that_can_again_is_asked_at_once(self) -> None:
        going = opened(clients=(A, B))
        going.handle(Declined(A, "x", now=1.0))
        going.handle(Declined(B, "x", now=1.0))
        assert going.handle(Available(A, holds=False, now=5.0)) == []
        assert going.handle(Available(A, holds=True, now=6.0)) == [Ask(A)]
        assert going.handle(Tick(now=31.0)) == [], "the pause is over"
        assert close_of(going.handle(Updated(A, now=40.0))).outcome is Outcome.DONE

    def test_who_declined_and_left_is_waited_for_until_the_deadline(self) -> None:
        going = opened(clients=(A, B))
        going.handle(Declined(A, "x", now=1.0))
        going.handle(Declined(B, "x", now=1.0))
        going.handle(Left(B, now=2.0))
        again = going.handle(Tick(now=31.0))
        assert [i for i in again if isinstance(i, Ask)] == [Ask(A)]
        assert going.answers == {A: Answer.NONE, B: Answer.LOST}

    def test_where_the_rules_say_so_it_is_skipped_after_a_pause_or_at_once(self) -> None:
        for rules, pause in (
            (RoundRules(on_short="close"), 30.0), (RoundRules(max_reopens=0), 30.0), (RoundRules(retry_s=0), 0.0),
        ):  # fmt: skip
            going = opened(rules, (A, B))
            going.handle(Declined(A, "x", now=1.0))
            out = going.handle(Declined(B, "x", now=1.0))
            if pause:
                out = going.handle(Tick(now=1.0 + pause))
            assert close_of(out).outcome is Outcome.SKIPPED

    def test_others_who_hold_data_are_asked_in_the_place_of_those_who_declined(self) -> None:
        going = Round(
            rules=RoundRules(clients_per_round=1, min_clients=1, deadline_s=100.0), seed=(1,)
        )
        out = going.handle(Present(((A, True), (B, True), (C, False)), now=0.0))
        assert isinstance(out[0], Opened)
        [first] = out[0].asked
        [other] = {A, B} - {first}
        assert going.handle(Declined(first, "disk_full", now=50.0)) == [
            Widened((first, other)), Ask(other), SetTimer(150.0),
        ]  # fmt: skip
        assert isinstance(going.handle(Declined(other, "x", now=51.0))[0], Unable)
        assert going.handle(Available(C, holds=False, now=52.0)) == []
        assert going.handle(Available(D, holds=True, now=53.0))[:2] == [
            Widened((first, other, D)), Ask(D),
        ]  # fmt: skip
        close = close_of(going.handle(Updated(D, now=54.0)))
        assert (close.outcome, close.answers[D]) == (Outcome.DONE, Answer.UPDATED)

    def test_an_asynchronous_round_asks_clients_that_connect_while_it_is_open(self) -> None:
        going = opened(RoundRules(asynchronous=True, take=2, deadline_s=100.0), (A, B))
        assert going.handle(Available(C, holds=False, now=5.0)) == []
        assert going.handle(Available(D, holds=True, now=6.0)) == [
            Widened((A, B, D), declined=False), Ask(D),
        ]  # fmt: skip
        going.handle(Updated(D, now=7.0))
        close = close_of(going.handle(Updated(B, now=8.0)))
        assert (close.why, close.answers[A]) == (Why.TAKEN, Answer.SURPLUS)

    def test_one_that_rests_leaves_the_denominator_and_asks_in_again(self) -> None:
        going = opened()
        assert going.handle(Declined(A, "not_now", now=1.0, resting=True)) == []
        assert A not in going.connected
        assert going.handle(Updated(B, now=2.0)) == []
        assert going.handle(Available(A, holds=True, now=3.0)) == [Ask(A)]
        assert going.handle(Updated(C, now=4.0)) == [], "it is waited for again"
        close = close_of(going.handle(Updated(A, now=5.0)))
        assert set(close.answers.values()) == {Answer.UPDATED}

    def test_a_decline_for_another_reason_is_not_taken_back(self) -> None:
        going = opened()
        going.handle(Declined(A, "data_invalid", now=1.0))
        assert going.handle(Available(A, holds=True, now=3.0)) == []

    def test_a_round_is_not_skipped_while_one_that_it_asked_rests(self) -> None:
        going = opened(RoundRules(on_short="close", retry_s=0, deadline_s=100.0), (A, B))
        going.handle(Declined(A, "not_now", now=1.0, resting=True))
        assert not going.is_idle, "B may be at work"
        assert going.handle(Declined(B, "not_now", now=1.0, resting=True)) == [Unable(None)]
        assert going.is_idle, "a server that drains may stop now"
        for now in (101.0, 10_000.0):
            assert going.handle(Tick(now=now)) == []
        assert going.handle(Available(B, holds=True, now=10_001.0)) == [
            Ask(B), SetTimer(10_101.0),
        ]  # fmt: skip
        assert not going.is_idle
        assert going.handle(Tick(now=10_002.0)) == []
        assert close_of(going.handle(Updated(B, now=10_003.0))).outcome is Outcome.DONE

    def test_others_are_asked_again_while_one_rests_and_then_it_is_waited_for(self) -> None:
        going = opened(RoundRules(max_reopens=1, retry_s=30.0, deadline_s=100.0), (A, B))
        going.handle(Declined(A, "not_now", now=1.0, resting=True))
        assert going.handle(Declined(B, "disk_full", now=1.0))[0] == Unable(31.0)
        assert going.is_idle
        assert going.handle(Tick(now=31.0))[:2] == [
            Reopened((B,), 131.0, declined=True), Ask(B),
        ]  # fmt: skip
        assert not going.is_idle
        assert going.handle(Declined(B, "disk_full", now=32.0))[0] == Unable(152.0)
        assert going.handle(Tick(now=152.0)) == [Unable(None)]
        assert going.handle(Tick(now=500.0)) == []
        assert going.handle(Stop(now=501.0))[0].outcome is Outcome.SKIPPED  # type: ignore[union-attr]

    def test_one_that_rested_when_the_server_stopped_is_waited_for_again(self) -> None:
        answers = {A: Answer.DECLINED, B: Answer.DECLINED}
        going = restored_round(
            RULES, (1,), asked=answers, remaining_s=5.0, now=0.0, resting=[A, B]
        )  # fmt: skip
        assert going.handle(Tick(now=1.0)) == [Unable(None)]
        assert going.handle(Available(A, holds=True, now=2.0))[0] == Ask(A)

    def test_nobody_waits_for_one_that_rested_and_was_revoked(self) -> None:
        going = opened(RoundRules(max_reopens=0, retry_s=30.0, deadline_s=100.0), (A, B))
        going.handle(Declined(A, "not_now", now=1.0, resting=True))
        going.handle(Declined(B, "disk_full", now=1.0))
        assert going.handle(Tick(now=31.0)) == [Unable(None)], "it waits for A"
        assert going.handle(Withdrawn(A, "revoked", now=40.0))[0] == Unable(70.0)
        assert close_of(going.handle(Tick(now=70.0))).outcome is Outcome.SKIPPED

    def test_nobody_waits_for_one_that_was_revoked_and_rested(self) -> None:
        going = opened(RoundRules(max_reopens=0, retry_s=30.0, deadline_s=100.0), (A, B))
        going.handle(Declined(A, "not_now", now=1.0, resting=True))
        going.handle(Withdrawn(A, "revoked", now=2.0))
        assert going.handle(Declined(B, "disk_full", now=3.0))[0] == Unable(33.0)
        assert close_of(going.handle(Tick(now=33.0))).outcome is Outcome.SKIPPED

    @pytest.mark.parametrize("asked", [(A, B), (B,)])
    def test_nobody_waits_for_one_that_rests_and_cannot_take_part(
        self, asked: Sequence[ClientId]
    ) -> None:
        going = opened(RoundRules(max_reopens=0, retry_s=30.0, deadline_s=100.0), asked)
        going.handle(Withdrawn(A, "revoked", now=1.0))
        going.handle(Declined(A, "not_now", now=2.0, resting=True))
        assert going.handle(Declined(B, "disk_full", now=3.0))[0] == Unable(33.0)
        assert close_of(going.handle(Tick(now=33.0))).outcome is Outcome.SKIPPED

    def test_nobody_waits_for_one_that_rested_and_has_no_data_any_more(self) -> None:
        going = opened(RoundRules(max_reopens=0, retry_s=30.0, deadline_s=100.0), (A,))
        assert going.handle(Declined(A, "not_now", now=1.0, resting=True)) == [Unable(None)]
        assert going.handle(Available(A, holds=False, now=5.0)) == [SetTimer(5.0)]
        assert going.handle(Tick(now=5.0)) == [Unable(35.0), SetTimer(35.0)]
        assert close_of(going.handle(Tick(now=35.0))).outcome is Outcome.SKIPPED

    @pytest.mark.parametrize("on_short", ["close", "reopen"])
    def test_a_round_with_one_that_rests_and_one_that_is_lost_or_silent_is_not_skipped(
        self, on_short: str
    ) -> None:
        rules = RoundRules(
            on_short=on_short, max_reopens=0, min_clients=2, deadline_s=100.0, grace_s=10.0
        )
        going = opened(rules, (A, B, C))
        going.handle(Declined(A, "not_now", now=1.0, resting=True))
        going.handle(Left(B, now=2.0))
        assert going.handle(Tick(now=100.0)) == [Unable(None)]
        assert going.handle(Tick(now=500.0)) == []
        assert going.handle(Available(A, holds=True, now=600.0)) == [Ask(A), SetTimer(700.0)]
        assert going.handle(Updated(A, now=601.0)) == [], "the others may come until the deadline"
        assert close_of(going.handle(Tick(now=700.0))).answers[A] is Answer.UPDATED

    def test_those_whose_update_is_void_are_not_asked_again(self) -> None:
        going = opened(clients=(A, B))
        going.handle(Declined(A, "made from nothing", now=1.0, final=True))
        going.handle(Declined(B, "x", now=1.0))
        assert [i for i in going.handle(Tick(now=31.0)) if isinstance(i, Ask)] == [Ask(B)]
        going.handle(Withdrawn(B, "revoked", now=32.0))
        assert going.phase is Phase.CLOSED

    def test_a_round_that_no_asked_client_can_ever_do_is_skipped_at_once(self) -> None:
        going = opened(RoundRules(retry_s=30.0), clients=(A, B))
        going.handle(Declined(A, "method_mismatch", now=1.0, final=True))
        close = close_of(going.handle(Declined(B, "method_mismatch", now=1.0, final=True)))
        assert (close.outcome, close.why) == (Outcome.SKIPPED, Why.ANSWERED)

    def test_a_patient_round_waits_for_others_that_can(self) -> None:
        rules = RoundRules(retry_s=30.0, patient=True)
        going = opened(rules, clients=(A,))
        said = going.handle(Declined(A, "method_mismatch", now=1.0, final=True))
        assert said == [Unable(31.0), SetTimer(31.0)]
        assert Ask(B) in going.handle(Available(B, holds=True, now=5.0))
        going = opened(rules, clients=(A,))
        going.handle(Declined(A, "method_mismatch", now=1.0, final=True))
        close = close_of(going.handle(Tick(now=31.0)))
        assert (close.outcome, close.why) == (Outcome.SKIPPED, Why.ANSWERED)

    def test_an_optional_round_asks_and_awaits_no_client_that_declined(self) -> None:
        rules = RoundRules(retry_s=0.0, quorum=1, on_short="close", optional=True)
        going = opened(rules, clients=(A, B, C))
        assert going.handle(Declined(A, "not_now", now=1.0, resting=True)) == []
        assert going.handle(Declined(B, "data_invalid", now=1.0)) == []
        assert going.handle(Available(A, holds=True, now=2.0)) == []
        close = close_of(going.handle(Updated(C, now=3.0)))
        assert (close.outcome, close.why) == (Outcome.DONE, Why.ANSWERED)

    def test_an_optional_round_that_all_decline_is_skipped_at_once(self) -> None:
        rules = RoundRules(retry_s=0.0, quorum=1, on_short="close", optional=True)
        going = opened(rules, clients=(A, B))
        going.handle(Declined(A, "not_now", now=1.0, resting=True))
        close = close_of(going.handle(Declined(B, "data_invalid", now=1.0)))
        assert (close.outcome, close.why) == (Outcome.SKIPPED, Why.ANSWERED)

    def test_the_operator_closes_it_short(self) -> None:
        going = opened()
        going.handle(Updated(A, now=1.0))
        close = close_of(going.handle(Stop(now=2.0)))
        assert close.outcome is Outcome.SHORT
        assert close.answers == {A: Answer.UPDATED, B: Answer.STRAGGLER, C: Answer.STRAGGLER}

    def test_the_operator_can_mean_the_rest_of_its_task_too(self) -> None:
        assert close_of(opened().handle(Stop(now=2.0, why=Why.REST))).why is Why.REST

    def test_the_operator_closes_it_without_any_update_as_skipped(self) -> None:
        assert close_of(opened().handle(Stop(now=2.0))).outcome is Outcome.SKIPPED

    def test_the_answers_given_out_do_not_change_afterwards(self) -> None:
        going = opened()
        close = close_of(going.handle(Stop(now=2.0)))
        before = dict(close.answers)
        going.answers.clear()
        assert close.answers == before


class TestTaking:
    FIRST_TWO = RoundRules(
        clients_per_round=4, take=2, min_clients=1, deadline_s=100.0, grace_s=10.0
    )

    def test_it_closes_with_the_update_that_makes_the_number_and_blames_nobody(self) -> None:
        going = opened(self.FIRST_TWO, (A, B, C, D))
        going.handle(Declined(D, "no data", now=1.0))
        assert going.handle(Updated(C, now=2.0)) == []
        close = close_of(going.handle(Updated(A, now=3.0)))
        assert (close.outcome, close.why) == (Outcome.DONE, Why.TAKEN)
        assert close.answers == {
            A: Answer.UPDATED, B: Answer.SURPLUS, C: Answer.UPDATED, D: Answer.DECLINED,
        }  # fmt: skip

    def test_who_was_given_up_before_is_lost_and_not_surplus(self) -> None:
        going = opened(self.FIRST_TWO, (A, B, C, D))
        going.handle(Left(B, now=1.0))
        going.handle(Tick(now=11.0))
        going.handle(Updated(A, now=12.0))
        close = close_of(going.handle(Updated(C, now=12.0)))
        assert (close.answers[B], close.answers[D]) == (Answer.LOST, Answer.SURPLUS)

    def test_a_revoked_clients_update_makes_room_for_another(self) -> None:
        going = opened(self.FIRST_TWO, (A, B, C, D))
        going.handle(Updated(A, now=1.0))
        going.handle(Withdrawn(A, "revoked", now=2.0))
        assert going.handle(Updated(B, now=3.0)) == []
        assert close_of(going.handle(Updated(C, now=4.0))).answers[D] is Answer.SURPLUS

    def test_fewer_than_are_taken_close_it_at_the_deadline_if_they_are_a_quorum(self) -> None:
        going = opened(RoundRules(take=3, min_clients=1, deadline_s=100.0), (A, B, C, D))
        going.handle(Updated(A, now=1.0))
        close = close_of(going.handle(Tick(now=100.0)))
        assert (close.outcome, close.why, close.answers[B]) == (
            Outcome.DONE, Why.DEADLINE, Answer.STRAGGLER,
        )  # fmt: skip

    def test_the_quorum_is_never_more_than_are_taken(self) -> None:
        """Five must be connected, two are enough."""
        going = opened(RoundRules(take=2, min_clients=5, deadline_s=100.0), CLIENTS)
        going.handle(Updated(A, now=1.0))
        assert close_of(going.handle(Updated(B, now=2.0))).outcome is Outcome.DONE

    def test_a_restored_round_that_has_them_closes_at_the_first_tick(self) -> None:
        asked = {A: Answer.UPDATED, B: Answer.UPDATED, C: Answer.NONE}
        again = restored_round(self.FIRST_TWO, (1,), asked=asked, remaining_s=40.0, now=1000.0)
        close = close_of(again.handle(Tick(now=1000.0)))
        assert (close.why, close.answers[C]) == (Why.TAKEN, Answer.SURPLUS)


class TestHolding:
    def test_a_held_round_asks_nobody_until_it_may_go_on(self) -> None:
        held = Round(rules=RULES, seed=(1,), held=True)
        assert held.handle(Present(((A, True), (B, True)), now=1.0)) == []
        assert held.handle(Available(C, holds=True, now=2.0)) == []
        assert held.handle(Tick(now=1e6)) == []
        assert held.handle(Resume(now=3.0))[0] == Opened((A, B, C))

    def test_who_left_meanwhile_is_not_asked(self) -> None:
        held = Round(rules=RULES, seed=(1,), held=True)
        held.handle(Present(((A, True), (B, True)), now=1.0))
        held.handle(Left(A, now=2.0))
        assert held.handle(Resume(now=3.0)) == []
        assert held.handle(Available(C, holds=True, now=4.0))[0] == Opened((B, C))

    def test_holding_it_stops_what_was_about_to_happen(self) -> None:
        settling = Round(rules=RoundRules(min_clients=2, settle_s=5.0, no_holder_s=9.0), seed=(1,))
        settling.handle(Available(A, holds=False, now=0.0))
        settling.handle(Available(B, holds=False, now=0.0))
        settling.handle(Hold(now=1.0))
        assert settling.handle(Tick(now=5.0)) == []
        assert settling.handle(Tick(now=1e6)) == []
        assert settling.handle(Resume(now=2e6))[0] == Unheld(2e6 + 9.0)

    def test_while_it_is_held_no_time_runs_against_a_task_without_data(self) -> None:
        waits = Round(rules=RoundRules(min_clients=2, no_holder_s=9.0), seed=(1,))
        waits.handle(Present(((A, False), (B, False)), now=1.0))
        waits.handle(Hold(now=2.0))
        assert waits.handle(Tick(now=10.0)) == []
        assert waits.handle(Resume(now=50.0)) == [Unheld(59.0), SetTimer(59.0)]

    def test_an_open_round_goes_on_to_its_end(self) -> None:
        going = opened(clients=(A, B))
        assert going.handle(Hold(now=1.0)) == []
        going.handle(Updated(A, now=2.0))
        assert close_of(going.handle(Updated(B, now=2.0))).outcome is Outcome.DONE

    def test_the_operator_can_end_a_held_round(self) -> None:
        held = Round(rules=RULES, seed=(1,), held=True)
        assert close_of(held.handle(Stop(now=1.0))).why is Why.OPERATOR


class TestShort:
    def test_without_a_quorum_it_is_reopened_as_often_as_the_rules_say_then_closed(self) -> None:
        going = opened()
        going.handle(Updated(A, now=1.0))
        assert going.handle(Tick(now=100.0)) == [Reopened((B, C), 200.0), SetTimer(200.0)]
        assert going.handle(Tick(now=200.0)) == [Reopened((B, C), 300.0), SetTimer(300.0)]
        assert close_of(going.handle(Tick(now=300.0))).outcome is Outcome.SHORT

    def test_a_stale_timer_does_not_reopen_it_again(self) -> None:
        going = opened()
        going.handle(Tick(now=100.0))
        assert going.handle(Tick(now=100.0)) == []
        assert going.handle(Tick(now=199.9)) == []

    def test_an_update_after_reopening_still_counts(self) -> None:
        going = opened(clients=(A, B))
        going.handle(Updated(A, now=1.0))
        going.handle(Tick(now=100.0))
        assert close_of(going.handle(Updated(B, now=150.0))).outcome is Outcome.DONE

    def test_it_closes_short_where_the_rules_say_so(self) -> None:
        going = opened(RoundRules(min_clients=2, deadline_s=100.0, on_short="close"))
        going.handle(Updated(A, now=1.0))
        assert close_of(going.handle(Tick(now=100.0))).outcome is Outcome.SHORT

    def test_without_any_update_it_is_skipped(self) -> None:
        going = opened(RoundRules(min_clients=2, deadline_s=100.0, on_short="close"))
        close = close_of(going.handle(Tick(now=100.0)))
        assert (close.outcome, set(close.answers.values())) == (Outcome.SKIPPED, {Answer.STRAGGLER})

    def test_a_quorum_larger_than_the_sample_is_all_of_the_sample(self) -> None:
        going = opened(RoundRules(min_clients=2, quorum=50, deadline_s=100.0), clients=(A, B))
        going.handle(Updated(A, now=1.0))
        assert close_of(going.handle(Updated(B, now=2.0))).outcome is Outcome.DONE


class TestTooFew:
    """However it ends, a round with fewer updates than `min_updates` makes no state."""

    TWO = RoundRules(min_clients=2, min_updates=2, deadline_s=100.0, max_reopens=1, retry_s=30.0)

    def test_whoever_declines_never_lowers_what_is_needed(self) -> None:
        """Nine of ten decline: what the tenth sent stays its own."""
        ten = [ClientId(c * 26) for c in "abcdefghij"]
        going = opened(RoundRules(min_clients=10, quorum=8, min_updates=2, retry_s=0.0), ten)
        for client in ten[1:]:
            assert going.handle(Declined(client, "epsilon spent", now=1.0)) == []
        close = close_of(going.handle(Updated(ten[0], now=2.0)))
        assert (close.outcome, close.why) == (Outcome.SKIPPED, Why.ANSWERED)

    def test_those_who_declined_are_asked_again_after_a_pause(self) -> None:
        going = opened(self.TWO, (A, B))
        going.handle(Updated(A, now=1.0))
        assert going.handle(Declined(B, "disk_full", now=1.0)) == [Unable(31.0), SetTimer(31.0)]
        assert going.handle(Tick(now=31.0)) == [
            Reopened((B,), 131.0, declined=True), Ask(B), SetTimer(131.0),
        ]  # fmt: skip
        close = close_of(going.handle(Updated(B, now=40.0)))
        assert (close.outcome, set(close.answers.values())) == (Outcome.DONE, {Answer.UPDATED})

    def test_others_who_hold_data_are_asked_in_their_place(self) -> None:
        going = opened(self.TWO, (A, B))
        going.handle(Updated(A, now=1.0))
        going.handle(Declined(B, "x", now=1.0))
        assert going.handle(Available(C, holds=True, now=2.0))[:2] == [Widened((A, B, C)), Ask(C)]
        assert close_of(going.handle(Updated(C, now=3.0))).outcome is Outcome.DONE

    def test_it_waits_for_those_that_rest(self) -> None:
        going = opened(self.TWO, (A, B))
        going.handle(Updated(A, now=1.0))
        assert going.handle(Declined(B, "not_now", now=2.0, resting=True)) == [Unable(None)]
        assert going.handle(Tick(now=5000.0)) == []

    def test_at_the_last_deadline_and_at_the_operators_word_it_is_skipped(self) -> None:
        going = opened(self.TWO)
        going.handle(Updated(A, now=1.0))
        assert isinstance(going.handle(Tick(now=100.0))[0], Reopened)
        close = close_of(going.handle(Tick(now=200.0)))
        assert (close.outcome, close.why) == (Outcome.SKIPPED, Why.DEADLINE)
        going = opened(self.TWO)
        going.handle(Updated(A, now=1.0))
        assert close_of(going.handle(Stop(now=2.0))).outcome is Outcome.SKIPPED

    def test_who_is_revoked_leaves_too_few(self) -> None:
        going = opened(self.TWO, (A, B))
        going.handle(Updated(A, now=1.0))
        close = close_of(going.handle(Withdrawn(B, "revoked", now=2.0)))
        assert close.outcome is Outcome.SKIPPED
        assert close.answers == {A: Answer.UPDATED, B: Answer.DECLINED}

    def test_as_many_as_are_taken_are_not_enough_if_they_are_too_few(self) -> None:
        going = opened(RoundRules(min_clients=1, take=1, min_updates=2, deadline_s=100.0))
        assert going.handle(Updated(A, now=1.0)) == []
        assert close_of(going.handle(Updated(B, now=2.0))).why is Why.TAKEN

    def test_a_round_that_was_open_before_a_restart_needs_them_too(self) -> None:
        again = restored_round(
            self.TWO, (1,), asked={A: Answer.UPDATED, B: Answer.DECLINED}, remaining_s=50.0,
            now=0.0, reopens=1,
        )  # fmt: skip
        assert again.handle(Tick(now=0.0))[0] == Unable(120.0)
        assert close_of(again.handle(Tick(now=120.0))).outcome is Outcome.SKIPPED

    def test_it_does_not_open_while_too_few_here_have_data(self) -> None:
        wait = Round(rules=self.TWO, seed=(1,))
        assert wait.handle(Present(((A, True), (B, False)), now=0.0)) == [Unheld(None)]
        assert wait.holders == 1
        assert wait.handle(Available(B, holds=True, now=5.0))[0] == Opened((A, B))


class TestLosing:
    def test_a_client_that_leaves_has_the_grace_period_to_return(self) -> None:
        going = opened()
        assert going.handle(Left(A, now=5.0)) == [SetTimer(15.0)]
        assert going.handle(Tick(now=14.9)) == []
        assert going.answers[A] is Answer.NONE
        going.handle(Tick(now=15.0))
        assert going.answers[A] is Answer.LOST

    def test_who_returns_in_time_is_asked_again(self) -> None:
        going = opened()
        going.handle(Left(A, now=5.0))
        assert going.handle(Available(A, holds=True, now=9.0)) == [Ask(A)]
        going.handle(Tick(now=15.0))
        assert going.answers[A] is Answer.NONE, "the old timer does not count any more"

    def test_who_returns_too_late_is_asked_again_as_long_as_the_round_is_open(self) -> None:
        going = opened()
        going.handle(Left(A, now=5.0))
        going.handle(Tick(now=15.0))
        assert going.handle(Available(A, holds=True, now=50.0)) == [Ask(A)]
        assert going.answers[A] is Answer.NONE

    def test_leaving_twice_starts_the_grace_period_anew(self) -> None:
        going = opened()
        going.handle(Left(A, now=5.0))
        going.handle(Available(A, holds=True, now=9.0))
        assert going.handle(Left(A, now=12.0)) == [SetTimer(22.0)]
        going.handle(Tick(now=15.0))
        assert going.answers[A] is Answer.NONE

    def test_with_a_quorum_a_lost_client_is_not_waited_for(self) -> None:
        going = opened()
        going.handle(Updated(A, now=1.0))
        going.handle(Updated(B, now=1.0))
        going.handle(Left(C, now=5.0))
        close = close_of(going.handle(Tick(now=15.0)))
        assert (close.outcome, close.answers[C]) == (Outcome.DONE, Answer.LOST)

    def test_without_a_quorum_a_lost_client_is_waited_for_until_the_deadline(self) -> None:
        going = opened()
        going.handle(Updated(A, now=1.0))
        going.handle(Declined(B, "x", now=1.0))
        going.rules = RoundRules(**{**vars(going.rules), "quorum": 2})
        going.handle(Left(C, now=5.0))
        assert going.handle(Tick(now=15.0)) == []
        assert going.handle(Tick(now=100.0))[0] == Reopened((C,), 200.0)

    @pytest.mark.parametrize(
        "answer", [Updated(A, now=6.0), Declined(A, "x", now=6.0)], ids=["update", "decline"]
    )
    def test_an_answer_that_is_stored_after_the_client_left_is_not_lost(self, answer) -> None:
        """The fsync of a batch may end after the connection: the update still counts."""
        going = opened()
        going.handle(Left(A, now=5.0))
        going.handle(answer)
        given = going.answers[A]
        going.handle(Tick(now=15.0))
        assert going.answers[A] is given
        assert given in (Answer.UPDATED, Answer.DECLINED)

    def test_an_update_of_a_lost_client_counts(self) -> None:
        """It was on its way when the grace period ended."""
        going = opened()
        going.handle(Left(A, now=5.0))
        going.handle(Tick(now=15.0))
        going.handle(Updated(A, now=16.0))
        assert going.answers[A] is Answer.UPDATED

    @pytest.mark.parametrize("event", [Updated(A, now=1.0), Declined(A, "x", now=1.0)])
    def test_who_has_answered_is_not_asked_again(self, event: Event) -> None:
        going = opened()
        going.handle(event)
        assert going.handle(Left(A, now=2.0)) == []
        assert going.handle(Available(A, holds=True, now=3.0)) == []

    def test_a_newcomer_is_not_asked_in_an_open_round(self) -> None:
        going = opened(clients=(A, B))
        assert going.handle(Available(E, holds=True, now=1.0)) == []
        assert going.handle(Left(E, now=2.0)) == []
        assert E not in going.answers


class TestRestore:
    def restored(self, **answers: Answer) -> Round:
        asked = {ClientId(c * 26): a for c, a in answers.items()}
        return restored_round(RULES, (1,), asked=asked, remaining_s=40.0, now=1000.0)

    def test_what_was_answered_before_the_restart_stays_answered(self) -> None:
        again = self.restored(a=Answer.UPDATED, b=Answer.NONE, c=Answer.DECLINED)
        assert again.phase is Phase.OPEN
        assert again.handle(Available(A, holds=True, now=1001.0)) == []
        assert again.handle(Available(B, holds=True, now=1001.0)) == [Ask(B)]
        close = close_of(again.handle(Updated(B, now=1002.0)))
        assert close.outcome is Outcome.DONE
        assert close.answers == {A: Answer.UPDATED, B: Answer.UPDATED, C: Answer.DECLINED}

    def test_the_rest_of_the_deadline_counts(self) -> None:
        again = self.restored(a=Answer.NONE, b=Answer.NONE)
        for client in (A, B):
            again.handle(Available(client, holds=True, now=1001.0))
        assert again.handle(Tick(now=1039.9)) == []
        assert again.handle(Tick(now=1040.0))[0] == Reopened((A, B), 1140.0)

    def test_clients_have_the_grace_period_to_come_back(self) -> None:
        again = restored_round(
            RULES, (1,), asked={A: Answer.NONE, B: Answer.NONE}, remaining_s=0.0, now=1000.0
        )
        assert again.handle(Tick(now=1009.9)) == []
        again.handle(Available(A, holds=True, now=1009.9))
        assert again.handle(Tick(now=1010.0))[0] == Reopened((A, B), 1110.0)
        assert again.answers == {A: Answer.NONE, B: Answer.LOST}

    def test_all_who_are_back_already_are_asked_again_unless_they_have_answered(self) -> None:
        again = self.restored(a=Answer.UPDATED, b=Answer.NONE, c=Answer.NONE)
        here = Present(((A, True), (B, True), (E, True)), now=1001.0)
        assert again.handle(here) == [Ask(B)]
        again.handle(Tick(now=1011.0))
        assert (again.answers[B], again.answers[C]) == (Answer.NONE, Answer.LOST)

    def test_a_restart_does_not_give_it_more_reopenings(self) -> None:
        again = restored_round(
            RULES, (1,), asked={A: Answer.NONE}, remaining_s=40.0, now=0.0, reopens=2
        )
        close = close_of(again.handle(Tick(now=40.0)))
        assert close.outcome is Outcome.SKIPPED

    def test_a_round_that_was_complete_closes_at_the_first_tick(self) -> None:
        again = self.restored(a=Answer.UPDATED, b=Answer.UPDATED)
        assert close_of(again.handle(Tick(now=1000.0))).outcome is Outcome.DONE


# --- any order of events --------------------------------------------------------------------

EXAMPLES = int(os.environ.get("FCIL_FUZZ_EXAMPLES", "150"))
# Which answer may follow which; LATE only when the round closes.
LEGAL = {
    Answer.NONE: {*Answer},
    Answer.LOST: {Answer.LOST, Answer.NONE, Answer.UPDATED, Answer.DECLINED},
    Answer.DECLINED: {Answer.DECLINED, Answer.UPDATED, Answer.NONE, Answer.LOST},
    Answer.UPDATED: {Answer.UPDATED},
    Answer.STRAGGLER: {Answer.STRAGGLER},
    Answer.SURPLUS: {Answer.SURPLUS},
}
KINDS = ("present", "available", "available", "left", "updated", "declined", "tick") * 4
KINDS += ("stop", "hold", "resume", "resume", "withdrawn")
moves = st.tuples(
    st.sampled_from(KINDS), st.sampled_from([A, B, C]), st.sampled_from([True] * 4 + [False])
)
rules = st.builds(
    RoundRules,
    clients_per_round=st.integers(0, 4),
    min_clients=st.integers(1, 3),
    quorum=st.integers(0, 5),
    take=st.integers(0, 3),
    min_updates=st.integers(0, 4),
    deadline_s=st.sampled_from([5.0, 50.0]),
    grace_s=st.sampled_from([0.0, 3.0]),
    on_short=st.sampled_from(["reopen", "close"]),
    max_reopens=st.integers(0, 3),
    settle_s=st.sampled_from([0.0, 0.0, 2.0]),
    retry_s=st.sampled_from([0.0, 1.0, 8.0]),
    no_holder_s=st.sampled_from([None, 0.0, 20.0]),
)


def event_of(move: tuple[str, ClientId, bool], now: float) -> Event:
    kind, client, holds = move
    match kind:
        case "present":
            return Present(tuple((c, holds) for c in (C, A) if c != client), now)
        case "available":
            return Available(client, holds, now)
        case "left":
            return Left(client, now)
        case "updated":
            return Updated(client, now)
        case "declined":
            return Declined(client, "reason", now, resting=not holds)
        case "withdrawn":
            return Withdrawn(client, "revoked", now)
        case "hold":
            return Hold(now)
        case "resume":
            return Resume(now)
        case "tick":
            return Tick(now)
        case _:
            return Stop(now)


def updates_in(answers: dict[ClientId, Answer]) -> int:
    return sum(a is Answer.UPDATED for a in answers.values())


class Watcher:
    """Feeds a round and checks after each event what must always hold."""

    def __init__(self, rules: RoundRules, *, first: bool) -> None:
        self.least = max(rules.min_updates, 1)
        self.round = Round(rules=rules, seed=(1, 2), first=first)
        self.pending: list[float] = []  # timers that will fire
        self.timers: set[float] = set()  # all that were ever asked for
        self.closes = 0
        self.asked: set[ClientId] = set()

    def fire(self, until: float) -> None:
        """Let the timers fire whose time has come, in order."""
        while self.pending and min(self.pending) <= until:
            at = min(self.pending)
            self.pending.remove(at)
            self.feed(Tick(at))

    def feed(self, event: Event) -> None:
        before, phase = dict(self.round.answers), self.round.phase
        out = self.round.handle(event)
        after = self.round.answers
        assert phase is not Phase.CLOSED or (not out and before == after)
        for instruction in out:
            match instruction:
                case Opened(asked):
                    assert phase is Phase.GATHERING
                    self.asked = set(asked)
                case Widened(asked):
                    assert self.asked < set(asked) <= self.asked | {*self.round.connected}
                    assert updates_in(before) < self.least
                    self.asked = set(asked)
                case Ask(client):
                    assert client in self.asked, "asked a client that is not in the sample"
                    assert client in self.round.connected, "asked a client that is not here"
                    assert after[client] is Answer.NONE
                case SetTimer(at):
                    assert at >= event.now
                    self.timers.add(at)
                    self.pending.append(at)
                case Reopened(missing, at):
                    assert set(missing) <= self.asked
                    assert at > event.now
                case Unheld():
                    assert sum(self.round.connected.values()) < self.least
                case Close(outcome, answers, why):
                    self.closes += 1
                    self.check_close(outcome, dict(answers), why)
        assert self.closes == (self.round.phase is Phase.CLOSED)
        assert set(after) == self.asked
        if before:
            for client, answer in after.items():
                if client not in before:
                    assert answer is Answer.NONE
                    continue
                gone = isinstance(event, Withdrawn) and event.client == client
                legal = {Answer.DECLINED} if gone and phase is Phase.OPEN else LEGAL[before[client]]
                # The round may close with it: whoever is silent then gets its last answer.
                assert answer in legal, (before[client], answer, event)
                if answer in (Answer.STRAGGLER, Answer.SURPLUS):
                    assert self.round.phase is Phase.CLOSED
        assert self.round.reopens <= self.round.rules.max_reopens
        if self.round.phase is Phase.OPEN:
            assert self.round.deadline in self.timers, "nothing would wake it"
        if self.round.phase is Phase.GATHERING and self.round.opens_at is not None:
            assert self.round.opens_at in self.timers
        if self.round.phase is Phase.OPEN and self.round.rules.take:
            updated = sum(a is Answer.UPDATED for a in after.values())
            assert updated < max(self.round.rules.take, self.least), "it has as many as it takes"
        if self.round.phase is Phase.OPEN and self.round.stuck_until is not None:
            may_come = bool(self.round.resting) or event.now in self.pending
            waits = self.round.stuck_until == math.inf and may_come
            assert waits or self.round.stuck_until in self.timers, "nobody would be asked again"
            assert Answer.NONE not in after.values()
            assert updates_in(after) < self.least
        since, limit = self.round.unheld_since, self.round.rules.no_holder_s
        if self.round.phase is Phase.GATHERING and since is not None and limit is not None:
            assert since + limit in self.timers, "nothing would skip it"

    def check_close(self, outcome: Outcome, answers: dict[ClientId, Answer], why: Why) -> None:
        assert set(answers) == self.asked
        assert Answer.NONE not in answers.values()
        updated = updates_in(answers)
        assert (outcome is Outcome.SKIPPED) == (updated < self.least)
        rules = self.round.rules
        assert (why is Why.TAKEN) == (rules.take > 0 and updated >= max(rules.take, self.least))
        assert Answer.SURPLUS not in answers.values() or why is Why.TAKEN
        assert Answer.STRAGGLER not in answers.values() or why in (Why.DEADLINE, Why.OPERATOR)


@settings(max_examples=EXAMPLES)
@given(rules, st.booleans(), st.lists(st.tuples(moves, st.floats(0, 4)), min_size=12, max_size=40))
def test_fuzz_no_order_of_events_breaks_a_promise_and_ticks_always_end_it(
    rules: RoundRules, first: bool, script: list[tuple[tuple, float]]
) -> None:
    watcher, now = Watcher(rules, first=first), 0.0
    for move, wait in script:
        now += wait
        watcher.fire(until=now)
        watcher.feed(event_of(move, now))
    watcher.fire(until=now + 10_000)
    if watcher.round.stuck_until == math.inf:
        for client in sorted(watcher.round.resting):
            watcher.feed(Available(client, holds=True, now=now + 10_000))
        watcher.fire(until=now + 20_000)
    assert watcher.round.phase is not Phase.OPEN, "its own timers end every round"


def test_two_rounds_with_the_same_events_decide_the_same() -> None:
    """No clock, no chance: the machine is a function of rules, seed and events."""
    script = [Available(c, holds=True, now=float(i)) for i, c in enumerate(CLIENTS)]
    rules = RoundRules(clients_per_round=2, min_clients=5)
    first, second = (Round(rules=rules, seed=(3,)) for _ in range(2))
    assert [first.handle(e) for e in script] == [second.handle(e) for e in script]


class TestWithdrawn:
    def test_an_update_that_had_come_counts_no_more(self) -> None:
        round_ = opened()
        round_.handle(Updated(A, now=1.0))
        round_.handle(Updated(B, now=2.0))
        assert round_.handle(Withdrawn(A, "revoked", now=3.0)) == []  # C is still waited for
        closed = close_of(round_.handle(Updated(C, now=4.0)))
        assert closed.outcome is Outcome.DONE
        assert closed.answers == {A: Answer.DECLINED, B: Answer.UPDATED, C: Answer.UPDATED}

    def test_the_last_one_that_was_waited_for_closes_the_round(self) -> None:
        round_ = opened()
        round_.handle(Updated(A, now=1.0))
        round_.handle(Updated(B, now=2.0))
        closed = close_of(round_.handle(Withdrawn(C, "revoked", now=3.0)))
        assert closed.outcome is Outcome.DONE

    def test_with_everybody_revoked_the_round_is_skipped(self) -> None:
        round_ = opened(clients=(A, B))
        round_.handle(Updated(A, now=1.0))
        round_.handle(Withdrawn(A, "revoked", now=2.0))
        closed = close_of(round_.handle(Withdrawn(B, "revoked", now=3.0)))
        assert closed.outcome is Outcome.SKIPPED

    def test_who_was_not_asked_changes_nothing(self) -> None:
        round_ = opened(clients=(A, B))
        assert round_.handle(Withdrawn(C, "revoked", now=1.0)) == []
        assert round_.answers == {A: Answer.NONE, B: Answer.NONE}


class TestMaskedRounds:
    """Rounds of a fixed list of clients, of which enough must answer together."""

    SHARES = RoundRules(
        min_clients=0, min_updates=3, quorum=3, deadline_s=100.0, no_holder_s=100.0, joinable=True
    )

    @staticmethod
    def unmasking() -> RoundRules:
        return RoundRules(
            min_clients=0,
            min_updates=1,
            deadline_s=100.0,
            no_holder_s=None,
            joinable=True,
            eager=True,
            endless=True,
            suffices=lambda clients: {A, B} <= set(clients) or len(clients) == 4,
        )

    def test_it_closes_as_soon_as_the_answers_suffice_and_not_by_their_number(self) -> None:
        machine = opened(self.unmasking(), (A, B, C, D))
        assert machine.handle(Updated(A, 1.0)) == []
        assert machine.handle(Updated(C, 2.0)) == []
        assert machine.handle(Updated(D, 3.0)) == []
        (close,) = machine.handle(Updated(B, 4.0))
        assert isinstance(close, Close)
        assert (close.outcome, close.why) == (Outcome.DONE, Why.TAKEN)

    def test_it_is_reopened_until_they_do_however_long_that_takes(self) -> None:
        machine = opened(self.unmasking(), (A, B, C))
        machine.handle(Updated(A, 1.0))
        machine.handle(Updated(C, 1.0))
        now = 100.0
        for _ in range(600):
            reopened, *_ = machine.handle(Tick(now))
            assert isinstance(reopened, Reopened)
            assert reopened.missing == (B,)
            now = machine.deadline
        machine.handle(Declined(B, "busy", now - 1))
        _reopened, ask, _timer = machine.handle(Tick(now))
        assert ask == Ask(B)
        (close,) = machine.handle(Updated(B, now))
        assert isinstance(close, Close)

    def test_all_others_have_answered_and_it_still_waits_for_the_one_that_is_away(self) -> None:
        machine = opened(self.unmasking(), (A, C, D))  # B is reconnecting
        for client in (A, C, D):
            assert machine.handle(Updated(client, 1.0)) == []
        widened, ask = machine.handle(Available(B, holds=True, now=5.0))
        assert ask == Ask(B)
        (close,) = machine.handle(Updated(B, 6.0))
        assert isinstance(close, Close)

    def test_one_that_begins_again_ends_without_a_state_if_they_do_not_suffice(self) -> None:
        rules = RoundRules(**{**vars(self.unmasking()), "endless": False, "max_reopens": 1})
        machine = opened(rules, (A, B, C))
        machine.handle(Updated(A, 1.0))
        machine.handle(Tick(100.0))
        (close,) = machine.handle(Tick(machine.deadline))
        assert isinstance(close, Close)
        assert close.outcome is Outcome.SKIPPED

    @pytest.mark.parametrize("endless", [True, False])
    def test_it_is_over_at_once_where_those_that_can_still_answer_would_not_suffice(
        self, endless: bool
    ) -> None:
        members = frozenset((A, B, C, D))
        rules = RoundRules(**{**vars(self.unmasking()), "endless": endless, "members": members})
        machine = opened(rules, (A, C))  # B and D are reconnecting
        assert machine.handle(Declined(C, "busy", now=1.0)) == []
        assert machine.handle(Declined(C, "method_mismatch", now=2.0, final=True)) == []
        machine.handle(Available(B, holds=True, now=5.0))
        (close,) = machine.handle(Declined(B, "method_mismatch", now=6.0, final=True))
        assert isinstance(close, Close)
        assert (close.outcome, close.why) == (Outcome.SKIPPED, Why.ANSWERED)

    def test_the_answers_of_a_thousand_are_not_looked_at_after_each_of_them(self) -> None:
        looks: list[set[ClientId]] = []

        def suffices(clients: Collection[ClientId]) -> bool:
            looks.append(set(clients))
            return {A, B} <= set(clients)

        members = frozenset((A, B, C, D))
        waits = {"eager": False, "members": members, "suffices": suffices}
        machine = opened(RoundRules(**{**vars(self.unmasking()), **waits}), (A, B, C, D))
        for client in (A, B, C):
            assert machine.handle(Updated(client, 1.0)) == []
        assert looks == [set(members)]  # whether it is hopeless, once
        (close,) = machine.handle(Updated(D, 2.0))
        assert isinstance(close, Close)
        assert close.outcome is Outcome.DONE
        assert len(looks) <= 3

    def test_whether_it_is_hopeless_is_asked_again_after_each_that_cannot_answer(self) -> None:
        members = frozenset((A, B, C))
        waits = {"eager": False, "members": members, "suffices": lambda c: len(c) >= 2}
        machine = opened(RoundRules(**{**vars(self.unmasking()), **waits}), (A, B, C))
        assert machine.handle(Declined(A, "method_mismatch", now=1.0, final=True)) == []
        (close,) = machine.handle(Declined(B, "method_mismatch", now=2.0, final=True))
        assert isinstance(close, Close)
        assert (close.outcome, close.why) == (Outcome.SKIPPED, Why.ANSWERED)

    def test_a_member_that_connects_while_it_is_open_is_asked_too(self) -> None:
        machine = opened(self.SHARES, (A, B, C))
        widened, ask = machine.handle(Available(D, holds=True, now=5.0))
        assert (type(widened), ask) == (Widened, Ask(D))
        assert machine.handle(Available(E, holds=False, now=5.0)) == []

    def test_it_does_not_wait_for_ever_for_members_that_have_left(self) -> None:
        machine = Round(rules=self.SHARES, seed=(1,))
        machine.handle(Present(((A, True), (B, True), (E, False)), 0.0))
        assert machine.phase is Phase.GATHERING
        (close,) = machine.handle(Tick(100.0))
        assert isinstance(close, Close)
        assert (close.outcome, close.why) == (Outcome.SKIPPED, Why.NO_HOLDER)
