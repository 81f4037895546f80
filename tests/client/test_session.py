"""The client's machine: link and work side by side, every event in every state."""

from __future__ import annotations

import os
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_client.session import (
    PASSING,
    Acked,
    Announce,
    Announced,
    BackboneReady,
    CancelWork,
    Drop,
    Event,
    Fetch,
    FolderChanged,
    Forget,
    Greet,
    Instruction,
    Link,
    LinkDown,
    LinkUp,
    LoadBackbone,
    Nacked,
    Offer,
    OfferLater,
    PartsLost,
    PartsReady,
    Refuse,
    RetryDue,
    RoundKey,
    RoundOpened,
    RoundOver,
    Session,
    Settle,
    Train,
    Welcomed,
    Work,
    WorkDone,
    WorkFailed,
    key_of,
)
from fcil_protocol.messages import RoundOpen, Verdict

RUN = "r20260102-030405-0a0b"
D1, D2, D3 = (c * 64 for c in "123")


def order(number: int = 0, *, base: int = 5, verdict: Verdict | None = None) -> RoundOpen:
    return RoundOpen(
        run=RUN,
        task=0,
        kind="train",
        round=number,
        rounds=3,
        base=base,
        classes=[0, 1],
        past=[],
        seed=[1],
        remaining_s=60.0,
        parts=[],
        verdict=verdict,
    )


KEY = key_of(order())
OTHER = key_of(order(1))


def session(work: Work = Work.IDLE, link: Link = Link.READY) -> Session:
    """A session in these states, reached as a daemon would reach them."""
    made = Session(link=Link.READY)
    if work is not Work.IDLE:
        made.handle(RoundOpened(order()))
    if work in (Work.WORKING, Work.SENDING):
        made.handle(PartsReady(KEY))
    if work is Work.SENDING:
        made.handle(WorkDone(KEY, D1))
    made.link = link
    assert made.work is work
    return made


WORK = list(Work)
BUSY = [Work.FETCHING, Work.WORKING, Work.SENDING]


class TestTable:
    def test_the_two_regions_have_no_state_of_the_same_name(self) -> None:
        """One table serves both: a shared name would mix them up."""
        assert not {s.value for s in Link} & {s.value for s in Work}

    def test_every_event_is_in_the_table_and_nothing_else(self) -> None:
        assert {kind for _, kind in Session.TABLE} == set(get_args(Event))

    def test_no_event_is_listed_for_a_state_and_for_all(self) -> None:
        general = {kind for state, kind in Session.TABLE if state is None}
        assert not general & {kind for state, kind in Session.TABLE if state is not None}

    @pytest.mark.parametrize("work", WORK)
    @pytest.mark.parametrize("link", list(Link))
    @pytest.mark.parametrize("kind", get_args(Event), ids=lambda k: k.__name__)
    def test_what_is_not_in_the_table_is_ignored(self, link: Link, work: Work, kind: type) -> None:
        samples: dict[type, Event] = {
            LinkUp: LinkUp(),
            LinkDown: LinkDown(),
            Welcomed: Welcomed(ready=True),
            BackboneReady: BackboneReady(),
            Announced: Announced(),
            FolderChanged: FolderChanged(),
            RoundOpened: RoundOpened(order()),
            PartsReady: PartsReady(KEY),
            PartsLost: PartsLost(KEY),
            WorkDone: WorkDone(KEY, D1),
            WorkFailed: WorkFailed(KEY, "x"),
            Acked: Acked(D1),
            Nacked: Nacked(D1, "stale_update"),
            RetryDue: RetryDue(D1),
            RoundOver: RoundOver(KEY),
        }
        made = session(work, link)
        listed = {(link, kind), (work, kind), (None, kind)} & set(Session.TABLE)
        before = vars(made).copy()
        out = made.handle(samples[kind])
        if not listed:
            assert (out, vars(made)) == ([], before)


class TestLink:
    def test_the_way_from_nothing_to_ready(self) -> None:
        made = Session()
        assert made.handle(LinkUp()) == [Greet()]
        assert made.handle(Welcomed(ready=False)) == [LoadBackbone()]
        assert made.handle(BackboneReady()) == [Greet()]
        assert made.backbone_ready
        assert made.handle(Welcomed(ready=True)) == [Announce()]
        assert made.handle(Announced()) == []
        assert (made.link, made.work) == (Link.READY, Work.IDLE)

    def test_who_is_ready_at_once_announces_at_once(self) -> None:
        made = Session()
        made.handle(LinkUp())
        assert made.handle(Welcomed(ready=True)) == [Announce()]

    @pytest.mark.parametrize("ready", [True, False])
    def test_a_verdict_in_the_welcome_is_settled_before_anything_else(self, ready: bool) -> None:
        made = Session(link=Link.GREETING)
        verdict = Verdict(update=D1, counted=True)
        assert made.handle(Welcomed(ready, verdict))[0] == Settle(verdict)

    @pytest.mark.parametrize("link", list(Link))
    def test_the_link_may_go_at_any_moment_and_come_back(self, link: Link) -> None:
        made = Session(link=link)
        assert made.handle(LinkDown()) == []
        assert made.link is Link.OFFLINE
        assert made.handle(LinkUp()) == [Greet()]

    def test_a_backbone_that_is_ready_while_the_link_is_away_is_loaded_again_later(self) -> None:
        """The worker has it in memory, so this costs a message, no time."""
        made = Session(link=Link.PREPARING)
        made.handle(LinkDown())
        assert made.handle(BackboneReady()) == []
        made.handle(LinkUp())
        assert made.handle(Welcomed(ready=False)) == [LoadBackbone()]
        assert made.handle(BackboneReady()) == [Greet()]

    def test_an_old_answer_after_the_link_is_gone_changes_nothing(self) -> None:
        made = Session(link=Link.OFFLINE)
        assert made.handle(Welcomed(ready=True)) == []
        assert made.handle(Announced()) == []
        assert made.link is Link.OFFLINE


class TestReconnect:
    def reconnect(self, made: Session) -> list[Instruction]:
        made.handle(LinkDown())
        made.handle(LinkUp())
        made.handle(Welcomed(ready=True))
        return made.handle(Announced())

    def test_idle_nothing_happens(self) -> None:
        assert self.reconnect(session()) == []

    def test_fetching_goes_on_when_the_server_asks_again(self) -> None:
        made = session(Work.FETCHING)
        assert self.reconnect(made) == []
        assert made.handle(RoundOpened(order())) == [Fetch(order())]

    def test_working_goes_on_undisturbed(self) -> None:
        made = session(Work.WORKING)
        assert self.reconnect(made) == []
        assert made.handle(RoundOpened(order())) == []
        assert made.work is Work.WORKING

    def test_sending_offers_the_same_update_again(self) -> None:
        made = session(Work.SENDING)
        assert self.reconnect(made) == [Offer(D1)]
        assert made.handle(RoundOpened(order())) == [Offer(D1)]

    @pytest.mark.parametrize("link", [s for s in Link if s is not Link.READY])
    def test_work_that_ends_while_the_link_is_away_is_offered_when_it_is_back(
        self, link: Link
    ) -> None:
        made = session(Work.WORKING, link)
        assert made.handle(WorkDone(KEY, D1)) == []
        assert made.work is Work.SENDING
        assert self.reconnect(made) == [Offer(D1)]

    @pytest.mark.parametrize("work", BUSY)
    def test_losing_the_link_stops_no_work(self, work: Work) -> None:
        made = session(work)
        assert made.handle(LinkDown()) == []
        assert (made.work, made.key) == (work, KEY)


class TestWork:
    def test_the_way_of_one_round(self) -> None:
        made = session()
        assert made.handle(RoundOpened(order())) == [Fetch(order())]
        assert made.handle(PartsReady(KEY)) == [Train(order())]
        assert made.handle(WorkDone(KEY, D1)) == [Offer(D1)]
        assert made.handle(Acked(D1)) == [Forget(D1)]
        assert (made.work, made.order, made.outgoing) == (Work.IDLE, None, "")

    def test_a_damaged_part_is_fetched_again(self) -> None:
        made = session(Work.WORKING)
        assert made.handle(PartsLost(KEY)) == [Fetch(order())]
        assert made.handle(PartsReady(KEY)) == [Train(order())]

    @pytest.mark.parametrize("event", [PartsReady(OTHER), PartsLost(OTHER)])
    @pytest.mark.parametrize("work", WORK)
    def test_parts_of_another_round_change_nothing(self, work: Work, event: Event) -> None:
        made = session(work)
        assert made.handle(event) == []
        assert made.work is work

    @pytest.mark.parametrize("work", [Work.WORKING, Work.SENDING, Work.IDLE])
    def test_parts_that_are_ready_twice_do_not_start_the_work_twice(self, work: Work) -> None:
        made = session(work)
        assert made.handle(PartsReady(KEY)) == []

    def test_failed_work_is_declined_and_the_client_is_free(self) -> None:
        made = session(Work.WORKING)
        assert made.handle(WorkFailed(KEY, "no memory")) == [Refuse(KEY, "no memory")]
        assert (made.work, made.order) == (Work.IDLE, None)

    @pytest.mark.parametrize("work", WORK)
    def test_work_of_another_round_that_failed_changes_nothing(self, work: Work) -> None:
        made = session(work)
        assert made.handle(WorkFailed(OTHER, "x")) == []
        assert made.work is work

    @pytest.mark.parametrize("work", [Work.FETCHING, Work.SENDING])
    def test_a_failure_of_work_that_was_stopped_does_not_decline_the_round(
        self, work: Work
    ) -> None:
        """The round was asked for again from another state, or its update is already sealed."""
        made = session(work)
        assert made.handle(WorkFailed(KEY, "cancelled")) == []
        assert made.work is work

    @pytest.mark.parametrize("work", WORK)
    def test_an_update_of_a_round_that_is_over_is_dropped(self, work: Work) -> None:
        made = session(work)
        out = made.handle(WorkDone(OTHER, D2))
        assert [type(i) for i in out] == [Drop]
        assert out[0].digest == D2
        assert made.work is work

    def test_an_update_that_started_from_an_older_state_is_dropped(self) -> None:
        """The work was stopped, but its end was already on the way."""
        made = session(Work.WORKING)
        made.handle(RoundOpened(order(base=6)))
        out = made.handle(WorkDone(KEY, D1))
        assert [type(i) for i in out] == [Drop]
        assert made.work is Work.FETCHING

    def test_a_second_update_of_the_round_is_dropped_and_the_first_is_kept(self) -> None:
        made = session(Work.SENDING)
        assert [i.digest for i in made.handle(WorkDone(KEY, D2))] == [D2]
        assert made.outgoing == D1

    def test_the_same_update_reported_twice_is_not_dropped(self) -> None:
        made = session(Work.SENDING)
        assert made.handle(WorkDone(KEY, D1)) == []
        assert made.outgoing == D1


class TestAskedAgain:
    def test_the_same_round_twice_while_fetching_fetches_again(self) -> None:
        """After a reconnect what was on its way is gone."""
        made = session(Work.FETCHING)
        assert made.handle(RoundOpened(order())) == [Fetch(order())]

    def test_another_round_while_fetching_takes_over(self) -> None:
        made = session(Work.FETCHING)
        assert made.handle(RoundOpened(order(1))) == [Fetch(order(1))]
        assert made.key == OTHER

    @pytest.mark.parametrize("new", [order(1), order(base=6)], ids=["round", "base"])
    def test_another_round_or_state_while_working_stops_the_work(self, new: RoundOpen) -> None:
        made = session(Work.WORKING)
        assert made.handle(RoundOpened(new)) == [CancelWork(KEY), Fetch(new)]
        assert made.order == new

    @pytest.mark.parametrize("new", [order(1), order(base=6)], ids=["round", "base"])
    def test_another_round_or_state_while_sending_drops_the_update(self, new: RoundOpen) -> None:
        made = session(Work.SENDING)
        out = made.handle(RoundOpened(new))
        assert out == [Drop(D1, "another round has begun"), Fetch(new)]
        assert made.outgoing == ""

    @pytest.mark.parametrize("work", WORK)
    def test_a_verdict_in_the_order_is_settled_before_anything_is_dropped(self, work: Work) -> None:
        """The update may have been counted although its Ack was lost: its state is kept."""
        verdict = Verdict(update=D1, counted=True)
        made = session(work)
        out = made.handle(RoundOpened(order(1, verdict=verdict)))
        assert out[0] == Settle(verdict)
        assert out[-1] == Fetch(order(1, verdict=verdict))


class TestAnswers:
    @pytest.mark.parametrize("work", WORK)
    def test_an_ack_of_another_update_forgets_that_one_only(self, work: Work) -> None:
        made = session(work)
        assert made.handle(Acked(D3)) == [Forget(D3)]
        assert made.work is work

    def test_already_have_keeps_the_state_provisional(self) -> None:
        """The server holds this very update: only its verdict decides about the state."""
        made = session(Work.SENDING)
        assert made.handle(Nacked(D1, "already_have")) == [Forget(D1)]
        assert (made.work, made.outgoing) == (Work.IDLE, "")

    @pytest.mark.parametrize("code", ["round_closed", "stale_update", "schema_mismatch"])
    def test_a_refused_update_is_dropped_with_its_state(self, code: str) -> None:
        made = session(Work.SENDING)
        assert made.handle(Nacked(D1, code)) == [Drop(D1, code)]
        assert (made.work, made.order, made.outgoing) == (Work.IDLE, None, "")

    @pytest.mark.parametrize("work", WORK)
    def test_a_refusal_of_another_update_leaves_the_work_alone(self, work: Work) -> None:
        made = session(work)
        assert made.handle(Nacked(D3, "round_closed")) == [Drop(D3, "round_closed")]
        assert (made.work, made.key) == (work, None if work is Work.IDLE else KEY)


class TestServerInTrouble:
    @pytest.mark.parametrize("code", sorted(PASSING))
    def test_an_update_that_the_server_cannot_keep_now_is_kept_and_offered_later(
        self, code: str
    ) -> None:
        made = session(Work.SENDING)
        assert made.handle(Nacked(D1, code)) == [OfferLater(D1)]
        assert (made.work, made.outgoing) == (Work.SENDING, D1)
        assert made.handle(RetryDue(D1)) == [Offer(D1)]
        assert made.handle(Acked(D1)) == [Forget(D1)]

    @pytest.mark.parametrize("code", sorted(PASSING))
    @pytest.mark.parametrize("work", WORK)
    def test_trouble_with_an_update_that_is_not_being_sent_changes_nothing(
        self, work: Work, code: str
    ) -> None:
        made = session(work)
        assert made.handle(Nacked(D3, code)) == []
        assert made.work is work

    @pytest.mark.parametrize("work", WORK)
    def test_a_pause_that_ends_for_another_update_changes_nothing(self, work: Work) -> None:
        assert session(work).handle(RetryDue(D3)) == []

    def test_a_pause_that_ends_while_the_link_is_away_offers_nothing(self) -> None:
        """The update is offered when the link is ready again anyway."""
        made = session(Work.SENDING, Link.OFFLINE)
        assert made.handle(RetryDue(D1)) == []


class TestOver:
    @pytest.mark.parametrize("work", [Work.FETCHING, Work.WORKING])
    def test_work_for_a_round_that_is_over_is_stopped(self, work: Work) -> None:
        made = session(work)
        assert made.handle(RoundOver(KEY)) == [CancelWork(KEY)]
        assert (made.work, made.order) == (Work.IDLE, None)

    def test_an_update_that_came_too_late_is_dropped(self) -> None:
        made = session(Work.SENDING)
        assert made.handle(RoundOver(KEY)) == [Drop(D1, "its round is over")]
        assert (made.work, made.outgoing) == (Work.IDLE, "")

    def test_idle_nothing_is_stopped(self) -> None:
        assert session().handle(RoundOver(KEY)) == []

    @pytest.mark.parametrize("work", WORK)
    def test_the_end_of_another_round_stops_nothing(self, work: Work) -> None:
        made = session(work)
        assert made.handle(RoundOver(OTHER)) == []
        assert made.work is work

    def test_a_counted_update_whose_ack_was_lost_keeps_its_state(self) -> None:
        """The verdict is carried out before the update and its state are dropped."""
        verdict = Verdict(update=D1, counted=True)
        out = session(Work.SENDING).handle(RoundOver(KEY, verdict))
        assert out == [Settle(verdict), Drop(D1, "its round is over")]

    def test_a_verdict_is_settled_in_any_state(self) -> None:
        verdict = Verdict(update=D3, counted=False, reason="norm")
        for work in WORK:
            assert Settle(verdict) in session(work).handle(RoundOver(OTHER, verdict))


class TestFolder:
    def test_a_change_is_announced_at_once_when_idle(self) -> None:
        made = session()
        assert made.handle(FolderChanged()) == [Announce()]
        assert not made.folder_changed

    @pytest.mark.parametrize("work", BUSY)
    def test_a_change_during_a_round_waits_for_its_end(self, work: Work) -> None:
        made = session(work)
        assert made.handle(FolderChanged()) == []
        assert made.handle(RoundOver(KEY))[-1] == Announce()

    @pytest.mark.parametrize(
        ("work", "end"),
        [
            (Work.SENDING, Acked(D1)),
            (Work.SENDING, Nacked(D1, "round_closed")),
            (Work.WORKING, WorkFailed(KEY, "x")),
        ],
        ids=["ack", "nack", "failure"],
    )
    def test_any_end_of_a_round_brings_the_announcement(self, work: Work, end: Event) -> None:
        made = session(work)
        made.handle(FolderChanged())
        assert made.handle(end)[-1] == Announce()
        assert made.handle(FolderChanged()) == [Announce()], "a later change is announced too"

    @pytest.mark.parametrize("link", [s for s in Link if s is not Link.READY])
    def test_a_change_while_away_is_announced_when_ready(self, link: Link) -> None:
        made = session(link=link)
        assert made.handle(FolderChanged()) == []
        made.handle(LinkUp())
        made.handle(Welcomed(ready=True))
        assert made.handle(Announced()) == [Announce()]

    def test_many_changes_are_one_announcement(self) -> None:
        made = session(Work.WORKING)
        for _ in range(5):
            made.handle(FolderChanged())
        made.handle(WorkDone(KEY, D1))
        assert made.handle(Acked(D1)) == [Forget(D1), Announce()]


class TestResume:
    def test_an_update_in_the_outbox_is_offered_as_soon_as_the_link_allows(self) -> None:
        made = Session.resume(order(), D1)
        assert (made.work, made.key) == (Work.SENDING, KEY)
        made.handle(LinkUp())
        made.handle(Welcomed(ready=True))
        assert made.handle(Announced()) == [Offer(D1)]
        assert made.handle(Acked(D1)) == [Forget(D1)]

    def test_an_empty_outbox_is_a_fresh_start(self) -> None:
        assert Session.resume(None, "") == Session()
        assert Session.resume(order(), "") == Session()

    def test_it_may_be_dropped_for_a_new_round(self) -> None:
        made = Session.resume(order(), D1)
        made.link = Link.READY
        assert made.handle(RoundOpened(order(1)))[0] == Drop(D1, "another round has begun")


# --- any order of events --------------------------------------------------------------------

EXAMPLES = int(os.environ.get("FCIL_FUZZ_EXAMPLES", "200"))
verdicts = st.none() | st.builds(Verdict, update=st.sampled_from([D1, D2]), counted=st.booleans())
orders = st.builds(order, st.integers(0, 1), base=st.sampled_from([5, 6]), verdict=verdicts)
keys = st.sampled_from([KEY, OTHER, RoundKey(RUN, 1, "finish", 0)])
digests = st.sampled_from([D1, D2, D3])
events = st.one_of(
    st.sampled_from([LinkUp(), LinkDown(), BackboneReady(), Announced(), FolderChanged()]),
    st.builds(Welcomed, st.booleans(), verdicts),
    st.builds(RoundOpened, orders),
    st.builds(PartsReady, keys),
    st.builds(PartsLost, keys),
    st.builds(WorkDone, keys, digests),
    st.builds(WorkFailed, keys, st.just("x")),
    st.builds(Acked, digests),
    st.builds(Nacked, digests, st.sampled_from(["already_have", "round_closed", "disk_full"])),
    st.builds(RetryDue, digests),
    st.builds(RoundOver, keys, verdicts),
)


def check(made: Session, event: Event, before: Session, out: list[Instruction]) -> None:
    """What must hold after any event."""
    assert bool(made.outgoing) == (made.work is Work.SENDING)
    assert (made.order is None) == (made.work is Work.IDLE)
    kinds = [type(i) for i in out]
    assert sum(k in (Fetch, Train) for k in kinds) <= 1, "one order at a time"
    assert Offer not in kinds or made.link is Link.READY, "offered into the dark"
    assert Announce not in kinds or made.link in (Link.READY, Link.ANNOUNCING)
    for instruction in out:
        match instruction:
            case Train(wanted):
                assert (made.work, made.order) == (Work.WORKING, wanted)
            case Fetch(wanted):
                assert (made.work, made.order) == (Work.FETCHING, wanted)
            case Offer(digest) | OfferLater(digest):
                assert digest == made.outgoing
            case Drop(digest) | Forget(digest):
                assert digest != made.outgoing, "what is being sent was removed"
    if before.outgoing and made.outgoing != before.outgoing:
        gone = {i.digest for i in out if isinstance(i, Drop | Forget)}
        assert before.outgoing in gone, "an update was left behind in the outbox"
    if before.work is Work.WORKING and made.work is not Work.WORKING:
        ended = isinstance(event, WorkDone | WorkFailed | PartsLost)
        assert ended or CancelWork in kinds, "work goes on that nobody waits for"
    settled = [i for i, k in enumerate(kinds) if k is Settle]
    dropped = [i for i, k in enumerate(kinds) if k is Drop]
    assert not settled or not dropped or max(settled) < min(dropped)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(events, max_size=30))
def test_fuzz_no_order_of_events_loses_an_update_or_starts_two(script: list[Event]) -> None:
    made = Session()
    for event in script:
        before = Session(**vars(made))
        check(made, event, before, made.handle(event))


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(st.lists(events, max_size=30))
def test_fuzz_from_any_state_a_good_link_leads_to_work_again(script: list[Event]) -> None:
    """Whatever came before: connect, be asked, work, be acknowledged."""
    made = Session()
    for event in script:
        made.handle(event)
    for event in (LinkDown(), LinkUp(), Welcomed(ready=True), Announced()):
        made.handle(event)
    final = order(7)
    assert Fetch(final) in made.handle(RoundOpened(final))
    assert made.handle(PartsReady(key_of(final))) == [Train(final)]
    assert made.handle(WorkDone(key_of(final), D3)) == [Offer(D3)]
    assert made.handle(Acked(D3))[0] == Forget(D3)
    assert made.work is Work.IDLE
