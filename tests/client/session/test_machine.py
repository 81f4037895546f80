"""The client's machine: link and work side by side, every event in every state."""

from __future__ import annotations

import itertools
import os
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_client.session.events import (
    Acked,
    Announce,
    Announced,
    BackboneFailed,
    BackboneReady,
    CancelWork,
    Drop,
    EnterRun,
    Event,
    Fetch,
    FetchFailed,
    FetchModel,
    FolderChanged,
    Forget,
    Greet,
    HelloRefused,
    HoldNothing,
    Instruction,
    InventoryRefused,
    KeepModel,
    Later,
    Link,
    LinkDown,
    LinkUp,
    LoadBackbone,
    ModelFailed,
    ModelFetched,
    ModelKept,
    ModelOffered,
    Nacked,
    Offer,
    OfferFailed,
    PartsLost,
    PartsReady,
    Paused,
    PauseTimeout,
    Refuse,
    Resumed,
    RetryDue,
    RoundOpened,
    RoundOver,
    Scan,
    ScanFailed,
    Scanned,
    Settle,
    Train,
    TryAgain,
    Welcomed,
    Work,
    WorkDone,
    WorkFailed,
)
from fcil_client.session.machine import (
    DAMAGED,
    LOCAL_RETRY_S,
    NOT_YET_RETRY_S,
    OVER,
    PASSING,
    REFETCHES,
    RESENDS,
    SERVER_RETRY_S,
    ClientSession,
)
from fcil_client.session.model_offer import TRIES
from fcil_protocol.ids import RoundKey
from fcil_protocol.messages.messages import RoundOpen, UseModel, Verdict

RUN, RUN2 = "r20260102-030405-0a0b", "r20260102-030405-0a0c"
D1, D2, D3 = (c * 64 for c in "123")


def order(
    number: int = 0,
    *,
    base: int = 5,
    verdict: Verdict | None = None,
    run: str = RUN,
    oldest: int = -1,
) -> RoundOpen:
    return RoundOpen(
        run=run,
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
        oldest_base=oldest,
    )


KEY = order().key
OTHER = order(1).key


def offered(state: int = 5, *, run: str = RUN) -> UseModel:
    return UseModel(
        run=run, task=0, kind="evaluate", round=0, rounds=1, base=state, classes=[0], past=[],
        parts=[], promoted=True,
    )  # fmt: skip


MODEL, MODEL2 = offered(5), offered(6)


def session(work: Work = Work.IDLE, link: Link = Link.READY) -> ClientSession:
    """A session in these states, reached as a daemon would reach them."""
    made = ClientSession(link=Link.READY, run=RUN, backbone_ready=True, scanned=True)
    if work is not Work.IDLE:
        made.handle(RoundOpened(order()))
    if work in (Work.WORKING, Work.SENDING):
        made.handle(PartsReady(KEY))
    if work is Work.SENDING:
        made.handle(WorkDone(KEY, D1))
    made.link = link
    assert made.work is work
    return made


@pytest.fixture(autouse=True)
def checked_by_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every test of this file, no event leads to a state that the table does not name."""
    handle = ClientSession.handle

    def check(self: ClientSession, event: Event) -> list[Instruction]:
        link, work = self.link, self.work
        out = handle(self, event)
        rows = (ClientSession.TABLE.get((state, type(event))) for state in (link, work, None))
        _, after = next(filter(None, rows), (None, ()))
        assert self.link is link or self.link in after, (link, event)
        assert self.work is work or self.work in after, (work, event)
        return out

    monkeypatch.setattr(ClientSession, "handle", check)


WORK = list(Work)
BUSY = [Work.FETCHING, Work.WORKING, Work.SENDING]


# One event of each type, of the run and round that `session` is about.
SAMPLES: dict[type, Event] = {
    type(event): event
    for event in (
        LinkUp(),
        LinkDown(),
        Welcomed(RUN, ready=True),
        HelloRefused(),
        BackboneReady(RUN),
        BackboneFailed(RUN),
        Scanned(),
        ScanFailed(),
        Announced(),
        InventoryRefused("schema_mismatch"),
        TryAgain(Link.GREETING),
        Paused("on battery"),
        Resumed(),
        PauseTimeout(1),
        FolderChanged(),
        RoundOpened(order()),
        PartsReady(KEY),
        FetchFailed(KEY, "disk_full", "x"),
        PartsLost(KEY, "x"),
        WorkDone(KEY, D1),
        WorkFailed(KEY, "worker_died", "x"),
        OfferFailed(D1, "disk_full", "x"),
        Acked(D1),
        Nacked(D1, "stale_update"),
        RetryDue(D1),
        RoundOver(KEY),
        ModelOffered(MODEL),
        ModelFetched(MODEL),
        ModelKept(MODEL),
        ModelFailed(MODEL),
    )
}


class TestTable:
    def test_the_two_regions_have_no_state_of_the_same_name(self) -> None:
        """One table serves both: a shared name would mix them up."""
        assert not {s.value for s in Link} & {s.value for s in Work}

    def test_every_event_is_in_the_table_and_nothing_else(self) -> None:
        assert {kind for _, kind in ClientSession.TABLE} == set(get_args(Event))

    def test_no_event_is_listed_for_a_state_and_for_all(self) -> None:
        general = {kind for state, kind in ClientSession.TABLE if state is None}
        assert not general & {kind for state, kind in ClientSession.TABLE if state is not None}

    @pytest.mark.parametrize("kind", get_args(Event), ids=lambda k: k.__name__)
    def test_what_is_not_in_the_table_is_ignored(self, kind: type) -> None:
        for link, work in itertools.product(Link, WORK):
            made = session(work, link)
            listed = {(link, kind), (work, kind), (None, kind)} & set(ClientSession.TABLE)
            before = vars(made).copy()
            out = made.handle(SAMPLES[kind])
            if not listed:
                assert (out, vars(made)) == ([], before), (link, work)


class TestLink:
    def test_the_way_from_nothing_to_ready(self) -> None:
        made = ClientSession()
        assert made.handle(LinkUp()) == [Greet()]
        assert made.handle(Welcomed(RUN, ready=False)) == [EnterRun(RUN), LoadBackbone()]
        assert made.handle(BackboneReady(RUN)) == [Greet()]
        assert made.handle(Welcomed(RUN, ready=True)) == [Scan()]
        assert made.handle(Scanned()) == [Announce()]
        assert made.handle(Announced()) == []
        assert (made.link, made.work) == (Link.READY, Work.IDLE)

    def test_after_a_reconnect_to_the_same_run_it_announces_what_it_knows(self) -> None:
        """Nothing is loaded, nothing is looked through again."""
        made = session(link=Link.GREETING)
        assert made.handle(Welcomed(RUN, ready=True)) == [Announce()]
        assert made.link is Link.ANNOUNCING

    def test_what_the_server_holds_ready_counts_only_if_it_is_loaded_here(self) -> None:
        """A restarted client meets a server that remembers its backbone."""
        made = ClientSession(link=Link.GREETING)
        assert made.handle(Welcomed(RUN, ready=True)) == [EnterRun(RUN), LoadBackbone()]
        assert made.link is Link.PREPARING

    @pytest.mark.parametrize("ready", [True, False])
    def test_a_verdict_in_the_welcome_is_settled_before_anything_else(self, ready: bool) -> None:
        made = ClientSession(link=Link.GREETING)
        verdict = Verdict(update=D1, counted=True)
        assert made.handle(Welcomed(RUN, ready, verdict))[0] == Settle(verdict)

    @pytest.mark.parametrize("link", list(Link))
    def test_the_link_may_go_at_any_moment_and_come_back(self, link: Link) -> None:
        made = session(link=link)
        assert made.handle(LinkDown()) == []
        assert made.link is Link.OFFLINE
        assert made.handle(LinkUp()) == [Greet()]

    def test_a_backbone_that_is_ready_while_the_link_is_away_is_loaded_again_later(self) -> None:
        """The worker has it in memory, so this costs a message, no time."""
        made = ClientSession(link=Link.PREPARING, run=RUN)
        made.handle(LinkDown())
        assert made.handle(BackboneReady(RUN)) == []
        made.handle(LinkUp())
        assert made.handle(Welcomed(RUN, ready=False)) == [LoadBackbone()]
        assert made.handle(BackboneReady(RUN)) == [Greet()]

    @pytest.mark.parametrize("event", [BackboneReady(RUN2), BackboneFailed(RUN2)])
    def test_a_backbone_of_another_run_is_not_this_ones(self, event: Event) -> None:
        made = ClientSession(link=Link.PREPARING, run=RUN)
        assert made.handle(event) == []
        assert (made.link, made.backbone_ready) == (Link.PREPARING, False)

    def test_an_old_answer_after_the_link_is_gone_changes_nothing(self) -> None:
        made = session(link=Link.OFFLINE)
        for event in (Welcomed(RUN, ready=True), Announced(), InventoryRefused("too_large")):
            assert made.handle(event) == []
        assert made.link is Link.OFFLINE


class TestPauses:
    def test_a_server_that_cannot_take_the_hello_hears_it_again_later(self) -> None:
        made = session(link=Link.GREETING)
        assert made.handle(HelloRefused()) == [Later(TryAgain(Link.GREETING), SERVER_RETRY_S)]
        assert made.handle(TryAgain(Link.GREETING)) == [Greet()]

    def test_a_backbone_that_could_not_be_loaded_is_tried_again_later(self) -> None:
        made = ClientSession(link=Link.PREPARING, run=RUN)
        assert made.handle(BackboneFailed(RUN)) == [Later(TryAgain(Link.PREPARING), LOCAL_RETRY_S)]
        assert made.handle(TryAgain(Link.PREPARING)) == [LoadBackbone()]

    @pytest.mark.parametrize("link", [Link.ANNOUNCING, Link.READY])
    @pytest.mark.parametrize("code", sorted(PASSING))
    def test_an_inventory_that_the_server_cannot_take_now_is_announced_again_later(
        self, link: Link, code: str
    ) -> None:
        made = session(link=link)
        assert made.handle(InventoryRefused(code)) == [Later(TryAgain(link), SERVER_RETRY_S)]
        assert made.handle(TryAgain(link)) == [Announce()]

    @pytest.mark.parametrize("link", list(Link))
    @pytest.mark.parametrize("about", list(Link))
    def test_a_pause_that_ends_in_another_state_does_nothing(self, link: Link, about: Link) -> None:
        if link is not about:
            assert session(link=link).handle(TryAgain(about)) == []

    def test_a_folder_that_could_not_be_looked_through_is_tried_again_later(self) -> None:
        """What was known before is announced meanwhile: nobody waits for a broken disk."""
        made = session(link=Link.READY)
        assert made.handle(FolderChanged()) == [Scan()]
        assert made.handle(ScanFailed()) == [Later(FolderChanged(), LOCAL_RETRY_S), Announce()]
        assert made.handle(FolderChanged()) == [Scan()]

    def test_at_the_first_start_it_is_ready_although_the_folder_cannot_be_read(self) -> None:
        made = ClientSession(link=Link.GREETING, run=RUN, backbone_ready=True)
        assert made.handle(Welcomed(RUN, ready=True)) == [Scan()]
        assert Announce() in made.handle(ScanFailed())
        made.handle(Announced())
        assert made.link is Link.READY


class TestInventoryRefused:
    def test_a_refused_list_is_withdrawn_and_the_client_stays_ready(self) -> None:
        made = session(link=Link.ANNOUNCING)
        assert made.handle(InventoryRefused("schema_mismatch")) == [HoldNothing(), Announce()]
        assert made.link is Link.READY

    def test_an_update_in_the_outbox_is_offered_all_the_same(self) -> None:
        made = session(Work.SENDING, Link.ANNOUNCING)
        assert made.handle(InventoryRefused("schema_mismatch"))[-1] == Offer(D1)

    @pytest.mark.parametrize("code", sorted(DAMAGED))
    @pytest.mark.parametrize("link", [Link.ANNOUNCING, Link.READY])
    def test_a_list_that_was_damaged_on_its_way_is_announced_again_a_few_times(
        self, link: Link, code: str
    ) -> None:
        """Else the client would hold nothing until its folder changes."""
        made = session(link=link)
        for _ in range(2):  # an answer in between begins the count anew
            for _ in range(RESENDS):
                assert made.handle(InventoryRefused(code)) == [
                    Later(TryAgain(made.link), SERVER_RETRY_S)
                ]
                assert made.handle(TryAgain(made.link)) == [Announce()]
            made.handle(Announced())
        for _ in range(RESENDS):
            made.handle(InventoryRefused(code))
        assert made.handle(InventoryRefused(code)) == [HoldNothing(), Announce()]

    @pytest.mark.parametrize("link", [Link.ANNOUNCING, Link.READY])
    def test_an_empty_list_that_is_refused_too_is_left_alone(self, link: Link) -> None:
        """Otherwise the two sides would talk about it for ever."""
        made = session(link=link)
        made.handle(InventoryRefused("too_large"))
        assert made.handle(InventoryRefused("too_large")) == []

    def test_a_new_scan_is_a_new_list(self) -> None:
        made = session(link=Link.READY)
        made.handle(InventoryRefused("too_large"))
        made.handle(FolderChanged())
        assert made.handle(Scanned()) == [Announce()]
        assert made.handle(InventoryRefused("too_large")) == [HoldNothing(), Announce()]


class TestRuns:
    @pytest.mark.parametrize("work", WORK)
    def test_another_run_ends_the_work_for_the_last_one(self, work: Work) -> None:
        made = session(work, Link.GREETING)
        out = made.handle(Welcomed(RUN2, ready=True))
        ends = {
            Work.IDLE: [],
            Work.FETCHING: [CancelWork(KEY)],
            Work.WORKING: [CancelWork(KEY)],
            Work.SENDING: [Drop(D1, "another run has begun")],
        }
        assert out == [*ends[work], EnterRun(RUN2), LoadBackbone()]
        assert (made.work, made.run, made.backbone_ready) == (Work.IDLE, RUN2, False)

    @pytest.mark.parametrize("work", WORK)
    def test_the_same_run_is_not_entered_again(self, work: Work) -> None:
        made = session(work, Link.GREETING)
        assert EnterRun(RUN) not in made.handle(Welcomed(RUN, ready=True))
        assert made.work is (Work.IDLE if work is Work.FETCHING else work)

    @pytest.mark.parametrize("work", WORK)
    def test_an_order_of_a_run_that_was_not_welcomed_is_not_carried_out(self, work: Work) -> None:
        """Its method and options are not known."""
        made = session(work)
        before = vars(made).copy()
        assert made.handle(RoundOpened(order(run=RUN2))) == []
        assert vars(made) == before

    def test_an_update_found_in_the_outbox_of_another_run_is_dropped(self) -> None:
        made = ClientSession.resume(order(), D1)
        made.handle(LinkUp())
        out = made.handle(Welcomed(RUN2, ready=False))
        assert out == [Drop(D1, "another run has begun"), EnterRun(RUN2), LoadBackbone()]


class TestManners:
    """What the session makes of a device that may not work now."""

    PATIENCE = ClientSession().patience_s

    def barred(self, work: Work = Work.IDLE) -> ClientSession:
        made = session(work)
        made.handle(Paused("on battery"))
        return made

    def test_an_order_is_declined_at_once_and_nothing_is_fetched(self) -> None:
        made = self.barred()
        verdict = Verdict(update=D1, counted=True)
        assert made.handle(RoundOpened(order(verdict=verdict))) == [
            Settle(verdict), Refuse(KEY, "not_now", "on battery."),
        ]  # fmt: skip
        assert (made.work, made.order) == (Work.IDLE, None)

    def test_when_it_may_work_again_it_announces_itself_so_that_it_is_asked(self) -> None:
        made = self.barred()
        made.handle(RoundOpened(order()))
        assert made.handle(Resumed()) == [Announce()]
        assert made.handle(RoundOpened(order())) == [Fetch(order())]

    def test_who_declined_nothing_announces_nothing(self) -> None:
        assert self.barred().handle(Resumed()) == []

    def test_offline_the_welcome_brings_the_announcement(self) -> None:
        made = self.barred()
        made.handle(RoundOpened(order()))
        made.handle(LinkDown())
        assert made.handle(Resumed()) == []

    def test_a_folder_that_changed_in_a_round_is_scanned_when_patience_is_over(self) -> None:
        made = self.barred(Work.WORKING)
        assert made.handle(FolderChanged()) == []
        assert made.handle(PauseTimeout(1)) == [
            CancelWork(KEY), Refuse(KEY, "not_now", "on battery."), Scan(),
        ]  # fmt: skip
        made.handle(Scanned())
        assert made.handle(Resumed()) == [Announce()]

    def test_a_folder_that_changed_is_scanned_before_the_announcement(self) -> None:
        made = self.barred()
        made.handle(RoundOpened(order()))
        made.folder_changed = True
        assert made.handle(Resumed()) == [Scan()]
        assert made.handle(Scanned()) == [Announce()]

    @pytest.mark.parametrize("work", [Work.FETCHING, Work.WORKING])
    def test_begun_work_is_kept_until_patience_is_over(self, work: Work) -> None:
        made = session(work)
        assert made.handle(Paused("on battery")) == [Later(PauseTimeout(1), self.PATIENCE)]
        assert made.work is work
        assert made.handle(PauseTimeout(1)) == [
            CancelWork(KEY), Refuse(KEY, "not_now", "on battery."),
        ]  # fmt: skip
        assert (made.work, made.order) == (Work.IDLE, None)

    def test_work_that_may_go_on_in_time_is_not_given_up(self) -> None:
        made = self.barred(Work.WORKING)
        assert made.handle(Resumed()) == []
        assert made.handle(PauseTimeout(1)) == []
        assert made.handle(WorkDone(KEY, D1)) == [Offer(D1)]

    def test_patience_begins_anew_with_every_pause(self) -> None:
        made = self.barred(Work.WORKING)
        made.handle(Resumed())
        assert made.handle(Paused("hot")) == [Later(PauseTimeout(2), self.PATIENCE)]
        assert made.handle(PauseTimeout(1)) == []
        assert CancelWork(KEY) in made.handle(PauseTimeout(2))

    def test_another_reason_is_no_new_pause(self) -> None:
        made = self.barred(Work.WORKING)
        assert made.handle(Paused("on battery; hot")) == []
        assert made.handle(PauseTimeout(1))[-1] == Refuse(KEY, "not_now", "on battery; hot.")

    def test_an_update_that_is_ready_is_sent_all_the_same(self) -> None:
        made = self.barred(Work.SENDING)
        assert made.handle(PauseTimeout(1)) == []
        assert made.handle(RoundOpened(order())) == [Offer(D1)]
        assert made.handle(Acked(D1))[0] == Forget(D1)

    def test_a_newer_order_ends_older_work_and_is_declined(self) -> None:
        made = self.barred(Work.WORKING)
        assert made.handle(RoundOpened(order(1))) == [
            CancelWork(KEY), Refuse(OTHER, "not_now", "on battery."),
        ]  # fmt: skip
        made = self.barred(Work.SENDING)
        assert made.handle(RoundOpened(order(1))) == [
            Drop(D1, "another round has begun"), Refuse(OTHER, "not_now", "on battery."),
        ]  # fmt: skip


class TestReconnect:
    def reconnect(self, made: ClientSession) -> list[Instruction]:
        made.handle(LinkDown())
        made.handle(LinkUp())
        assert made.handle(Welcomed(RUN, ready=True)) == [Announce()]
        return made.handle(Announced())

    def test_idle_nothing_happens(self) -> None:
        assert self.reconnect(session()) == []

    def test_fetching_goes_on_when_the_server_asks_again(self) -> None:
        made = session(Work.FETCHING)
        assert self.reconnect(made) == []
        assert made.handle(RoundOpened(order())) == [Fetch(order())]

    def test_a_round_that_closed_meanwhile_keeps_nobody_from_new_classes(self) -> None:
        made = session(Work.FETCHING)
        assert made.handle(FolderChanged()) == []
        made.handle(LinkDown())
        made.handle(LinkUp())
        assert made.handle(Welcomed(RUN, ready=True)) == [Scan()]
        assert made.work is Work.IDLE

    def test_parts_that_were_lost_while_the_link_is_away_hold_up_nothing_either(self) -> None:
        made = session(Work.WORKING)
        made.handle(LinkDown())
        made.handle(PartsLost(KEY, "gone"))
        assert made.work is Work.FETCHING
        self.reconnect(made)
        assert made.work is Work.IDLE

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
        assert made.handle(PartsLost(KEY, "x")) == [Fetch(order())]
        assert made.handle(PartsReady(KEY)) == [Train(order())]

    def lose(self, made: ClientSession, times: int) -> None:
        for _ in range(times):
            assert made.handle(PartsLost(KEY, "x")) == [Fetch(order())]
            made.handle(PartsReady(KEY))

    def test_parts_that_the_disk_damages_again_and_again_are_not_fetched_for_ever(self) -> None:
        made = session(Work.WORKING)
        self.lose(made, REFETCHES)
        (refuse,) = made.handle(PartsLost(KEY, "part 'a' was damaged."))
        assert isinstance(refuse, Refuse)
        assert (refuse.key, refuse.code) == (KEY, "corrupt_file")
        assert refuse.text.startswith("part 'a' was damaged.")
        assert (made.work, made.order) == (Work.IDLE, None)

    def test_the_same_order_after_a_reconnect_does_not_make_parts_lost_less_often(self) -> None:
        made = session(Work.WORKING)
        self.lose(made, REFETCHES - 1)
        made.handle(PartsLost(KEY, "x"))
        assert made.handle(RoundOpened(order())) == [Fetch(order())]
        made.handle(PartsReady(KEY))
        assert isinstance(made.handle(PartsLost(KEY, "x"))[0], Refuse)

    @pytest.mark.parametrize("other", [order(1), order(base=6)])
    def test_another_order_may_fetch_as_often_as_the_first(self, other: RoundOpen) -> None:
        made = session(Work.WORKING)
        self.lose(made, REFETCHES)
        made.handle(RoundOpened(other))
        made.handle(PartsReady(other.key))
        assert made.handle(PartsLost(other.key, "x")) == [Fetch(other)]

    @pytest.mark.parametrize("event", [PartsReady(OTHER), PartsLost(OTHER, "x")])
    @pytest.mark.parametrize("work", WORK)
    def test_parts_of_another_round_change_nothing(self, work: Work, event: Event) -> None:
        made = session(work)
        assert made.handle(event) == []
        assert made.work is work

    @pytest.mark.parametrize("work", [Work.WORKING, Work.SENDING, Work.IDLE])
    def test_parts_that_are_ready_twice_do_not_start_the_work_twice(self, work: Work) -> None:
        made = session(work)
        assert made.handle(PartsReady(KEY)) == []

    @pytest.mark.parametrize(
        ("work", "event"),
        [
            (Work.WORKING, WorkFailed(KEY, "worker_died", "no memory")),
            (Work.FETCHING, FetchFailed(KEY, "worker_died", "no memory")),
        ],
    )
    def test_what_failed_is_declined_and_the_client_is_free(self, work: Work, event: Event) -> None:
        made = session(work)
        assert made.handle(event) == [Refuse(KEY, "worker_died", "no memory")]
        assert (made.work, made.order) == (Work.IDLE, None)

    @pytest.mark.parametrize("event", [WorkFailed(OTHER, "x", "x"), FetchFailed(OTHER, "x", "x")])
    @pytest.mark.parametrize("work", WORK)
    def test_what_failed_for_another_round_changes_nothing(self, work: Work, event: Event) -> None:
        made = session(work)
        assert made.handle(event) == []
        assert made.work is work

    @pytest.mark.parametrize("work", [Work.FETCHING, Work.SENDING])
    def test_a_failure_of_work_that_was_stopped_does_not_decline_the_round(
        self, work: Work
    ) -> None:
        """The round was asked for again from another state, or its update is already sealed."""
        made = session(work)
        assert made.handle(WorkFailed(KEY, "worker_died", "cancelled")) == []
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


class TestOfferFailed:
    def test_an_update_that_may_not_go_out_is_forgotten_and_its_round_declined(self) -> None:
        """Its state waits for the verdict: the server may have had the update before."""
        made = session(Work.SENDING)
        event = OfferFailed(D1, "disk_full", "no room")
        assert made.handle(event) == [Forget(D1), Refuse(KEY, "disk_full", "no room")]
        assert (made.work, made.order, made.outgoing) == (Work.IDLE, None, "")

    @pytest.mark.parametrize("work", WORK)
    def test_another_one_changes_nothing(self, work: Work) -> None:
        made = session(work)
        assert made.handle(OfferFailed(D3, "disk_full", "no room")) == []
        assert made.work is work


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

    @pytest.mark.parametrize("code", sorted(OVER - {"already_have"}))
    def test_an_update_that_came_too_late_is_dropped_with_its_state(self, code: str) -> None:
        made = session(Work.SENDING)
        assert made.handle(Nacked(D1, code)) == [Drop(D1, code)]
        assert (made.work, made.order, made.outgoing) == (Work.IDLE, None, "")

    @pytest.mark.parametrize("code", ["schema_mismatch", "too_large", "corrupt_file"])
    def test_a_refused_update_is_dropped_and_its_round_declined(self, code: str) -> None:
        """Nobody shall wait for another one until the deadline."""
        made = session(Work.SENDING)
        said = Refuse(KEY, code, f"the update was refused ({code})")
        assert made.handle(Nacked(D1, code)) == [Drop(D1, code), said]
        assert (made.work, made.order, made.outgoing) == (Work.IDLE, None, "")

    @pytest.mark.parametrize("code", sorted(DAMAGED))
    def test_an_update_that_was_damaged_on_its_way_is_offered_again_a_few_times(
        self, code: str
    ) -> None:
        made = session(Work.SENDING)
        for _ in range(RESENDS):
            assert made.handle(Nacked(D1, code)) == [Later(RetryDue(D1), SERVER_RETRY_S)]
            assert made.handle(RetryDue(D1)) == [Offer(D1)]
        assert made.handle(Nacked(D1, code))[0] == Drop(D1, code)
        assert made.work is Work.IDLE
        made.handle(RoundOpened(order(1)))
        made.handle(PartsReady(OTHER))
        made.handle(WorkDone(OTHER, D2))
        assert made.handle(Nacked(D2, code)) == [Later(RetryDue(D2), SERVER_RETRY_S)]

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
        pause_s = NOT_YET_RETRY_S if code == "not_yet" else SERVER_RETRY_S
        assert made.handle(Nacked(D1, code)) == [Later(RetryDue(D1), pause_s)]
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


class TestAsynchronous:
    """Work on an earlier round continues where the server's newer order allows it."""

    NEWER = RoundOpened(order(1, base=6, oldest=3))

    def test_work_continues_and_its_update_is_offered(self) -> None:
        made = session(Work.WORKING)
        assert made.handle(self.NEWER) == []
        assert (made.work, made.key, made.awaited) == (Work.WORKING, KEY, OTHER)
        assert made.handle(WorkDone(KEY, D1)) == [Offer(D1)]
        assert made.handle(Acked(D1)) == [Forget(D1)]
        assert (made.work, made.awaited) == (Work.IDLE, None)

    def test_an_update_that_found_no_room_is_offered_to_the_next_round_at_once(self) -> None:
        made = session(Work.SENDING)
        assert made.handle(Nacked(D1, "not_yet")) == [Later(RetryDue(D1), NOT_YET_RETRY_S)]
        assert made.handle(self.NEWER) == [Offer(D1)]
        assert made.work is Work.SENDING

    def test_offline_it_is_offered_once_the_link_is_ready(self) -> None:
        made = session(Work.SENDING, Link.ANNOUNCING)
        assert made.handle(self.NEWER) == []
        assert made.handle(Announced()) == [Offer(D1)]

    def test_parts_that_are_still_on_their_way_are_those_of_the_newer_round(self) -> None:
        made = session(Work.FETCHING)
        assert made.handle(self.NEWER) == [Fetch(self.NEWER.order)]
        assert made.key == made.awaited == OTHER

    @pytest.mark.parametrize(
        "other",
        [
            order(1, base=6),
            order(1, base=16, oldest=6),
            order(1, base=6, oldest=3).model_copy(update={"kind": "finish"}),
            order(1, base=6, oldest=3).model_copy(update={"task": 1}),
        ],
        ids=["synchronous", "too old", "another kind", "another task"],
    )
    def test_what_cannot_count_any_more_is_stopped(self, other: RoundOpen) -> None:
        made = session(Work.WORKING)
        assert made.handle(RoundOpened(other)) == [CancelWork(KEY), Fetch(other)]
        made = session(Work.SENDING)
        (drop, fetch) = made.handle(RoundOpened(other))
        assert (type(drop), fetch) == (Drop, Fetch(other))

    def test_an_update_that_has_counted_makes_room_for_new_work(self) -> None:
        """Its Ack was lost, and the order for the next round brings the verdict."""
        verdict = Verdict(update=D1, counted=True)
        newer = order(1, base=6, oldest=3, verdict=verdict)
        made = session(Work.SENDING)
        assert made.handle(RoundOpened(newer)) == [
            Settle(verdict),
            Drop(D1, "another round has begun"),
            Fetch(newer),
        ]

    @pytest.mark.parametrize("key", [KEY, OTHER])
    def test_the_end_of_the_newest_round_ends_the_work(self, key: RoundKey) -> None:
        made = session(Work.WORKING)
        made.handle(self.NEWER)
        assert made.handle(RoundOver(key)) == [CancelWork(KEY)]
        assert made.work is Work.IDLE

    def test_a_failure_declines_the_newest_round(self) -> None:
        made = session(Work.WORKING)
        made.handle(self.NEWER)
        assert made.handle(WorkFailed(KEY, "worker_died", "x")) == [
            Refuse(OTHER, "worker_died", "x")
        ]

    def test_a_device_barred_for_too_long_declines_the_newest_round(self) -> None:
        made = session(Work.WORKING)
        made.handle(Paused("on battery"))
        assert made.handle(self.NEWER) == []
        out = made.handle(PauseTimeout(made.pauses))
        assert out == [CancelWork(KEY), Refuse(OTHER, "not_now", "on battery.")]

    def test_a_lost_part_leads_to_the_newest_round(self) -> None:
        made = session(Work.WORKING)
        made.handle(self.NEWER)
        assert made.handle(PartsLost(KEY, "x")) == [Fetch(self.NEWER.order)]
        assert (made.key, made.awaited) == (OTHER, OTHER)

    def test_new_work_has_no_newer_round(self) -> None:
        made = session(Work.WORKING)
        made.handle(self.NEWER)
        made.handle(WorkDone(KEY, D1))
        made.handle(Acked(D1))
        made.handle(RoundOpened(order(2, base=7, oldest=3)))
        assert made.awaited == order(2).key


class TestFolder:
    def test_a_change_is_looked_at_at_once_when_idle_then_announced(self) -> None:
        made = session()
        assert made.handle(FolderChanged()) == [Scan()]
        assert made.handle(Scanned()) == [Announce()]
        assert (made.folder_changed, made.scanning) == (False, False)

    @pytest.mark.parametrize("work", BUSY)
    def test_a_change_during_a_round_waits_for_its_end(self, work: Work) -> None:
        made = session(work)
        assert made.handle(FolderChanged()) == []
        assert made.handle(RoundOver(KEY))[-1] == Scan()

    @pytest.mark.parametrize(
        ("work", "end"),
        [
            (Work.SENDING, Acked(D1)),
            (Work.SENDING, Nacked(D1, "round_closed")),
            (Work.SENDING, OfferFailed(D1, "x", "x")),
            (Work.WORKING, WorkFailed(KEY, "x", "x")),
            (Work.FETCHING, FetchFailed(KEY, "x", "x")),
        ],
        ids=["ack", "nack", "no offer", "failure", "no parts"],
    )
    def test_any_end_of_a_round_brings_the_look(self, work: Work, end: Event) -> None:
        made = session(work)
        made.handle(FolderChanged())
        assert made.handle(end)[-1] == Scan()

    def test_a_change_during_a_scan_brings_another_one(self) -> None:
        """What came in the middle may have been overlooked."""
        made = session()
        made.handle(FolderChanged())
        assert made.handle(FolderChanged()) == []
        assert made.handle(Scanned()) == [Announce(), Scan()]
        assert made.handle(Scanned()) == [Announce()]

    @pytest.mark.parametrize("link", [s for s in Link if s is not Link.READY])
    def test_a_change_while_away_is_looked_at_when_the_server_is_back(self, link: Link) -> None:
        made = session(link=link)
        assert made.handle(FolderChanged()) == []
        made.handle(LinkUp())
        assert made.handle(Welcomed(RUN, ready=True)) == [Scan()]
        assert made.handle(Scanned()) == [Announce()]

    def test_a_worker_that_learns_is_not_asked_to_scan_at_a_reconnect(self) -> None:
        """The client would count as away until it is done."""
        made = session(Work.WORKING, Link.GREETING)
        made.handle(FolderChanged())
        assert made.handle(Welcomed(RUN, ready=True)) == [Announce()]
        made.handle(Announced())
        made.handle(WorkDone(KEY, D1))
        assert made.handle(Acked(D1)) == [Forget(D1), Scan()]

    def test_many_changes_are_one_scan(self) -> None:
        made = session(Work.WORKING)
        for _ in range(5):
            made.handle(FolderChanged())
        made.handle(WorkDone(KEY, D1))
        assert made.handle(Acked(D1)) == [Forget(D1), Scan()]
        assert made.handle(Scanned()) == [Announce()]

    def test_a_scan_that_ends_while_the_link_is_away_is_announced_when_it_is_back(self) -> None:
        made = session()
        made.handle(FolderChanged())
        made.handle(LinkDown())
        assert made.handle(Scanned()) == []
        made.handle(LinkUp())
        assert made.handle(Welcomed(RUN, ready=True)) == [Announce()]

    def test_a_scan_under_way_at_a_reconnect_is_waited_for(self) -> None:
        made = session()
        made.scanned = False
        made.handle(FolderChanged())
        made.handle(LinkDown())
        made.handle(LinkUp())
        assert made.handle(Welcomed(RUN, ready=True)) == []
        assert made.handle(Scanned()) == [Announce()]


class TestModelOffered:
    def test_an_idle_client_fetches_and_keeps_it(self) -> None:
        made = session()
        assert made.handle(ModelOffered(MODEL)) == [FetchModel(MODEL)]
        assert made.handle(ModelFetched(MODEL)) == [KeepModel(MODEL)]
        assert made.handle(ModelKept(MODEL)) == []
        assert made.handle(FolderChanged()) == [Scan()], "nothing is left of it"

    @pytest.mark.parametrize("work", [Work.FETCHING, Work.WORKING, Work.SENDING])
    def test_a_round_comes_first(self, work: Work) -> None:
        made = session(work)
        assert made.handle(ModelOffered(MODEL)) == []
        assert made.handle(RoundOver(KEY))[-1] == FetchModel(MODEL)

    def test_a_round_that_begins_meanwhile_takes_its_place_and_then_it_goes_on(self) -> None:
        made = session()
        made.handle(ModelOffered(MODEL))
        assert made.handle(RoundOpened(order())) == [Fetch(order())]
        assert made.handle(ModelFetched(MODEL)) == [], "its parts may be gone"
        assert made.handle(FetchFailed(KEY, "disk_full", "x"))[-1] == FetchModel(MODEL)

    def test_a_newer_offer_replaces_it_at_any_stage(self) -> None:
        made = session()
        made.handle(ModelOffered(MODEL))
        assert made.handle(ModelOffered(MODEL2)) == [FetchModel(MODEL2)]
        assert made.handle(ModelFetched(MODEL)) == []
        assert made.handle(ModelFetched(MODEL2)) == [KeepModel(MODEL2)]

    @pytest.mark.parametrize("end", [ModelKept, ModelFailed])
    def test_a_newer_offer_waits_for_one_that_is_being_kept(self, end: type) -> None:
        """Both would else be written at the same time, and the older one might be the last."""
        made = session()
        for event in (ModelOffered(MODEL), ModelFetched(MODEL)):
            made.handle(event)
        assert made.handle(ModelOffered(MODEL2)) == []
        assert made.handle(end(MODEL)) == [FetchModel(MODEL2)]
        assert made.handle(ModelFetched(MODEL2)) == [KeepModel(MODEL2)]
        assert made.handle(ModelKept(MODEL2)) == []

    def test_a_model_that_is_being_replaced_is_offered_again_and_comes_back(self) -> None:
        made = session()
        for event in (ModelOffered(MODEL), ModelFetched(MODEL)):
            made.handle(event)
        assert made.handle(ModelOffered(MODEL2, held=True)) == []
        assert made.handle(ModelKept(MODEL)) == [FetchModel(MODEL2)]

    def test_an_offer_of_the_model_that_is_there_ends_one_that_waits(self) -> None:
        made = session(Work.WORKING)
        made.handle(ModelOffered(MODEL))
        assert made.handle(ModelOffered(MODEL2, held=True)) == []
        assert FetchModel(MODEL) not in made.handle(RoundOver(KEY))

    def test_it_is_tried_a_few_times(self) -> None:
        made = session()
        made.handle(ModelOffered(MODEL))
        for _ in range(TRIES - 1):
            assert made.handle(ModelFailed(MODEL)) == [FetchModel(MODEL)]
            assert made.handle(ModelFetched(MODEL)) == [KeepModel(MODEL)]
        assert made.handle(ModelFailed(MODEL)) == []
        assert made.handle(ModelFetched(MODEL)) == []

    def test_it_ends_with_the_link_and_the_run(self) -> None:
        made = session()
        made.handle(ModelOffered(MODEL))
        made.handle(LinkDown())
        assert made.handle(ModelFetched(MODEL)) == []
        made = session()
        assert made.handle(ModelOffered(offered(run=RUN2))) == []

    def test_a_device_that_may_not_work_fetches_it_later(self) -> None:
        made = session()
        made.handle(Paused("on battery"))
        assert made.handle(ModelOffered(MODEL)) == []
        assert made.handle(Resumed()) == [FetchModel(MODEL)]


class TestResume:
    def test_an_update_in_the_outbox_is_offered_as_soon_as_the_link_allows(self) -> None:
        made = ClientSession.resume(order(), D1)
        assert (made.work, made.key) == (Work.SENDING, KEY)
        for event in (LinkUp(), Welcomed(RUN, ready=False), BackboneReady(RUN)):
            made.handle(event)
        assert made.handle(Welcomed(RUN, ready=True)) == [Scan()]
        made.handle(Scanned())
        assert made.handle(Announced()) == [Offer(D1)]
        assert made.handle(Acked(D1)) == [Forget(D1)]

    def test_an_empty_outbox_is_a_fresh_start(self) -> None:
        assert ClientSession.resume(None, "") == ClientSession()
        assert ClientSession.resume(order(), "") == ClientSession()

    def test_it_may_be_dropped_for_a_new_round(self) -> None:
        made = ClientSession.resume(order(), D1)
        made.link, made.run = Link.READY, RUN
        assert made.handle(RoundOpened(order(1)))[0] == Drop(D1, "another round has begun")


# --- any order of events --------------------------------------------------------------------

EXAMPLES = int(os.environ.get("FCIL_FUZZ_EXAMPLES", "200"))
verdicts = st.none() | st.builds(Verdict, update=st.sampled_from([D1, D2]), counted=st.booleans())
orders = st.builds(
    order,
    st.integers(0, 1),
    base=st.sampled_from([5, 6]),
    verdict=verdicts,
    run=st.sampled_from([RUN, RUN, RUN2]),
)
keys = st.sampled_from([KEY, OTHER, RoundKey(RUN, 1, "finish", 0), order(run=RUN2).key])
digests = st.sampled_from([D1, D2, D3])
runs = st.sampled_from([RUN, RUN, RUN, RUN2])
codes = st.sampled_from(["already_have", "round_closed", "disk_full", "malformed", "too_large"])
plain = [
    LinkUp(),
    LinkDown(),
    Announced(),
    FolderChanged(),
    Scanned(),
    ScanFailed(),
    HelloRefused(),
]
events = st.one_of(
    st.sampled_from(plain),
    st.sampled_from([Paused("on battery"), Resumed(), PauseTimeout(1), PauseTimeout(2)]),
    st.builds(Welcomed, runs, st.booleans(), verdicts),
    st.builds(BackboneReady, runs),
    st.builds(BackboneFailed, runs),
    st.builds(InventoryRefused, codes),
    st.builds(TryAgain, st.sampled_from(Link)),
    st.builds(RoundOpened, orders),
    st.builds(PartsReady, keys),
    st.builds(FetchFailed, keys, codes, st.just("x")),
    st.builds(PartsLost, keys, st.just("x")),
    st.builds(WorkDone, keys, digests),
    st.builds(WorkFailed, keys, codes, st.just("x")),
    st.builds(OfferFailed, digests, codes, st.just("x")),
    st.builds(Acked, digests),
    st.builds(Nacked, digests, codes),
    st.builds(RetryDue, digests),
    st.builds(RoundOver, keys, verdicts),
    st.sampled_from(
        [
            kind(model)
            for kind in (ModelOffered, ModelFetched, ModelKept, ModelFailed)
            for model in (MODEL, MODEL2)
        ]
    ),
)


def check(made: ClientSession, event: Event, before: ClientSession, out: list[Instruction]) -> None:
    """What must hold after any event."""
    assert bool(made.outgoing) == (made.work is Work.SENDING)
    assert (made.order is None) == (made.work is Work.IDLE)
    kinds = [type(i) for i in out]
    assert sum(k in (Fetch, Train) for k in kinds) <= 1, "one order at a time"
    idle = made.work is Work.IDLE and made.link is Link.READY and not made.pause_reason
    assert FetchModel not in kinds or idle, "a round comes first"
    assert made.order is None or made.order.run == made.run or not made.run, "of another run"
    assert Scan not in kinds or (made.scanning and not before.scanning) or kinds[0] is Announce
    assert LoadBackbone not in kinds or made.link is Link.PREPARING
    assert Greet not in kinds or made.link is Link.GREETING
    assert Offer not in kinds or made.link is Link.READY, "offered into the dark"
    assert Announce not in kinds or made.link in (Link.READY, Link.ANNOUNCING)
    for instruction in out:
        match instruction:
            case Train(wanted):
                assert (made.work, made.order) == (Work.WORKING, wanted)
            case Fetch(wanted):
                assert (made.work, made.order) == (Work.FETCHING, wanted)
            case Offer(digest) | Later(RetryDue(digest)):
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


@settings(max_examples=EXAMPLES)
@given(st.lists(events, max_size=30))
def test_fuzz_no_order_of_events_loses_an_update_or_starts_two(script: list[Event]) -> None:
    made = ClientSession()
    for event in script:
        before = ClientSession(**vars(made))
        check(made, event, before, made.handle(event))


@settings(max_examples=EXAMPLES // 2)
@given(st.lists(events, max_size=30))
def test_fuzz_from_any_state_a_good_link_leads_to_work_again(script: list[Event]) -> None:
    """Whatever came before: connect, be asked, work, be acknowledged."""
    made = ClientSession()
    for event in script:
        made.handle(event)
    for event in (LinkDown(), LinkUp(), Welcomed(RUN, ready=True)):
        made.handle(event)
    if made.link is Link.PREPARING:
        assert made.handle(BackboneReady(RUN)) == [Greet()]
        made.handle(Welcomed(RUN, ready=True))
    made.handle(Scanned())
    made.handle(Announced())
    made.handle(Resumed())
    assert made.link is Link.READY
    final = order(7)
    assert Fetch(final) in made.handle(RoundOpened(final))
    assert made.handle(PartsReady(final.key)) == [Train(final)]
    assert made.handle(WorkDone(final.key, D3)) == [Offer(D3)]
    assert made.handle(Acked(D3))[0] == Forget(D3)
    assert made.work is Work.IDLE
