"""Who brings what was learned before, and which new names somebody here can teach."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import sample_run
from fcil_adapters.contract import Exchange, PayloadSchema, TaskInfo
from fcil_protocol.errors import DiskFull, StorageError
from fcil_protocol.ids import RoundKey, UpdateId
from fcil_protocol.payloads.schema import class_key
from fcil_server.federation.config import Config
from fcil_server.ledger.enums import Answer
from fcil_server.ledger.ledger import Ledger
from fcil_server.rounds import coordinator as coordinator_module
from fcil_server.rounds import discovery as discovery_module
from fcil_server.rounds import restore
from fcil_server.rounds.asking import list_available
from fcil_server.rounds.classes import ClassRegistry
from fcil_server.rounds.coordinator import Coordinator
from fcil_server.rounds.discovery import Discovery, OldClasses
from fcil_server.rounds.events import Ask, Declined, Phase, Present, RoundRules, Widened
from fcil_server.rounds.late_images import LateImages
from fcil_server.rounds.machine import Round
from fcil_server.rounds.position import Mode
from fcil_server.rounds.schedule import Step, late_step, task_steps
from sample_run import ALICE, BOB, GONE, RUN, Clock, digest


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A run in which alice taught cat in task 0, which is over."""
    with Ledger(tmp_path / "ledger.sqlite", clock=Clock()) as ledger:
        sample_run.add_clients(ledger)
        sample_run.add_run(ledger)
        classes = ClassRegistry(ledger, RUN)
        classes.announce(ALICE, ["Cat"])
        classes.open_task(0)
        key = RoundKey(RUN, 0, "train", 0)
        ledger.rounds.open(key, asked=[ALICE], base_state=0)
        with ledger.transaction():
            ledger.updates.accept(
                key, ALICE, update_id=UpdateId(digest("u")), samples=5, tensor_bytes=1,
                sealed_bytes=2,
            )  # fmt: skip
            ledger.updates.mark_counted(key)
        ledger.rounds.close(key, "done")
        ledger.tasks.close(RUN, 0)
        classes.announce(ALICE, ["dog"])
        notes: list[str] = []
        peers: list[SimpleNamespace] = []
        yield SimpleNamespace(
            run=RUN, ledger=ledger, classes=classes, notes=notes, here=peers,
            counts_late=False, forgotten=frozenset(), masked_kinds=frozenset(), fewest_classes=1, is_asynchronous=lambda _kind: False,
            notify=lambda level, code, text: notes.append(f"{level} {code} {text}"),
            peers=SimpleNamespace(announced=lambda: peers),
            config=SimpleNamespace(
                tasks=SimpleNamespace(min_new_classes=1, max_wait_s=60.0, settle_s=0.01),
                round=SimpleNamespace(min_clients=1),
            ),
        )  # fmt: skip


def peer(client, name, **train):
    counts = {class_key(n): count for n, count in train.items()}
    return SimpleNamespace(client=client, name=name, train=counts, untrained=())


class TestOldClasses:
    def test_who_taught_a_class_is_not_told_of_it(self, kit) -> None:
        alice = peer(ALICE, "alice", cat=5, dog=3)
        OldClasses(kit).notice(alice)
        assert (kit.notes, alice.untrained) == ([], ())

    def test_a_latecomer_with_it_is_a_note_once(self, kit) -> None:
        old, bob = OldClasses(kit), peer(BOB, "bob", cat=5, dog=3)
        for _ in range(2):
            old.notice(bob)
        [note] = kit.notes
        assert note.startswith("info learned_before bob brings images of Cat (task 0): learned")
        assert bob.untrained == ("Cat",)

    def test_more_images_of_it_are_a_note_and_fewer_are_not(self, kit) -> None:
        old = OldClasses(kit)
        for count in (5, 4, 9):
            old.notice(peer(ALICE, "alice", cat=count))
        assert len(kit.notes) == 1
        assert "alice brings more images of Cat" in kit.notes[0]

    def test_a_name_that_stands_for_it_is_it(self, kit) -> None:
        kit.classes.alias("kitty", "cat")
        OldClasses(kit).notice(peer(BOB, "bob", kitty=2))
        assert "bob brings images of Cat" in kit.notes[0]

    def test_test_images_alone_and_classes_of_a_task_under_way_are_no_news(self, kit) -> None:
        kit.classes.open_task(1)
        OldClasses(kit).notice(peer(BOB, "bob", cat=0, dog=3))
        assert kit.notes == []


ONCE = Exchange("train", PayloadSchema(), rounds=1, keeps_state=True, counts_once=True)
LATE_EXCHANGE = replace(ONCE, kind="late")


class TestLate:
    """Alice has taught Cat with five images, and was not asked since the server's start."""

    TASK = TaskInfo(0, (0,))
    now = 1e9

    @pytest.fixture
    def late(self, kit) -> LateImages:
        kit.counts_late, kit.exchanges = True, (ONCE, replace(ONCE, kind="late"))
        kit.exchange = {e.kind: e for e in kit.exchanges}.get
        kit.config.round.late_every_s = 60.0
        kit.config.least_updates = 0
        return LateImages(kit)

    def has(self, late, task=TASK, **counts) -> bool:
        return late.clients(task, [peer(ALICE, "alice", **counts)], self.now) == {ALICE}

    def ask(self, kit, late, number=0, *, answer="counted", kind="late", task=TASK, **counts):
        """Let a round ask alice, who has announced these images."""
        key = RoundKey(RUN, task.index, kind, number)
        row = kit.ledger.rounds.open(key, asked=[ALICE], base_state=0)
        late.begin(task, kind)
        late.ask(peer(ALICE, "alice", **counts))
        late.ask(peer(ALICE, "alice", cat=99))  # again, after it has connected again
        if answer in ("counted", "excluded"):
            with kit.ledger.transaction():
                kit.ledger.updates.accept(
                    key, ALICE, update_id=UpdateId(digest(f"{kind}{row.seq}")), samples=3,
                    tensor_bytes=1, sealed_bytes=2,
                )  # fmt: skip
                if answer == "excluded":
                    kit.ledger.updates.exclude(key, ALICE, "too few")
                kit.ledger.updates.mark_counted(key)
        else:
            kit.ledger.answers.set(key, ALICE, Answer.DECLINED, answer)
        kit.ledger.rounds.close(key, "done" if answer == "counted" else "skipped")
        return late.close(key, 7.0)

    def test_after_a_restart_each_client_with_images_is_asked_once(self, kit, late) -> None:
        assert self.has(late, cat=5)
        assert not self.has(late, cat=0, dog=9), "dog has no task yet"
        self.ask(kit, late, answer="nothing_left", cat=5)
        assert not self.has(late, cat=5)

    def test_other_numbers_of_a_class_are_asked_about(self, kit, late) -> None:
        assert self.ask(kit, late, cat=5) == {ALICE: 3}
        assert not self.has(late, cat=5)
        assert self.has(late, cat=6)
        assert self.has(late, cat=4), "new ones may be among them"

    def test_a_tasks_own_round_is_such_a_round_for_its_classes(self, kit, late) -> None:
        kit.classes.open_task(1)
        second = TaskInfo(1, (1,), (0,))
        self.ask(kit, late, kind="train", task=second, cat=5, dog=3)
        assert self.has(late, second, cat=5, dog=3), "it was not asked for cats"
        self.ask(kit, late, task=second, cat=5, dog=3)
        assert not self.has(late, second, cat=5, dog=3)
        assert self.has(late, second, cat=5, dog=4)

    @pytest.mark.parametrize(
        ("answer", "asked_again"),
        [
            ("data_error", True),
            ("excluded", True),
            ("privacy_refused", False),
            ("egress_refused", False),
        ],
    )
    def test_who_may_have_something_after_all_is_asked_again(
        self, kit, late, answer, asked_again
    ) -> None:
        self.ask(kit, late, answer=answer, cat=5)
        assert self.has(late, cat=5) is asked_again

    def test_who_cannot_answer_is_asked_ever_more_seldom_unless_its_numbers_change(
        self, kit, late
    ) -> None:
        """Each time the others would compute, and pay with noise, for too few updates."""

        def left_alone_s(number: int, answer: str, **counts: int) -> float:
            self.ask(kit, late, number, answer=answer, **counts)  # at 7 s
            waits = [60.0 * 4**n for n in range(9)]
            for after in waits[1:]:
                self.now = 7.0 + after + 1
                if self.has(late, **counts):
                    self.now = 7.0 + after - 1
                    assert not self.has(late, **counts)
                    assert self.has(late, **{**counts, "cat": counts["cat"] + 1})
                    return after
            raise AssertionError("it is never asked again")

        assert left_alone_s(0, "worker_died", cat=5) == 240
        assert late.left_alone_s(7.0) == 240, "it wakes the run"
        assert left_alone_s(1, "worker_died", cat=5) == 960
        assert left_alone_s(2, "worker_died", cat=6) == 240
        self.now = 8.0
        assert not self.has(late, cat=6)
        self.ask(kit, late, 3, answer="excluded", cat=6)
        assert self.has(late, cat=6), "it has sent an update"
        assert late.left_alone_s(8.0) == 0

    def test_who_rests_is_asked_when_it_says_that_it_is_ready(self, kit, late) -> None:
        self.ask(kit, late, answer="not_now", cat=5)
        assert not self.has(late, cat=5)
        assert late.left_alone_s(8.0) == 0, "nothing else wakes the run for it"
        late.on_ready(ALICE)
        assert self.has(late, cat=5)

    def test_who_was_away_is_asked_as_soon_as_it_is_back(self, kit, late) -> None:
        key = RoundKey(RUN, 0, "late", 0)
        kit.ledger.rounds.open(key, asked=[ALICE], base_state=0)
        late.begin(self.TASK, "late")
        late.ask(peer(ALICE, "alice", cat=5))
        kit.ledger.answers.set(key, ALICE, Answer.LOST, "")
        kit.ledger.rounds.close(key, "skipped")
        late.close(key, 7.0)
        self.now = 8.0
        assert self.has(late, cat=5)

    def test_what_another_round_asked_for_is_not_taken_for_what_this_one_did(
        self, kit, late
    ) -> None:
        late.begin(self.TASK, "evaluate")
        late.ask(peer(ALICE, "alice", cat=8))
        assert self.ask(kit, late, cat=5) == {ALICE: 3}
        assert not self.has(late, cat=5)
        assert self.has(late, cat=8)

    def test_a_class_that_gets_its_name_during_a_round_was_not_asked_for(self, kit, late) -> None:
        key = RoundKey(RUN, 0, "late", 0)
        kit.ledger.rounds.open(key, asked=[ALICE], base_state=0)
        late.begin(self.TASK, "late")
        late.ask(peer(ALICE, "alice", cat=5, kitty=7))
        kit.classes.alias("kitty", "cat")
        kit.ledger.answers.set(key, ALICE, Answer.DECLINED, "nothing_left")
        kit.ledger.rounds.close(key, "skipped")
        late.close(key, 7.0)
        assert not self.has(late, cat=5)
        assert self.has(late, cat=5, kitty=7)

    def test_a_fork_and_a_forgotten_client_are_left_alone(self, kit) -> None:
        kit.forgotten = frozenset({(ALICE, 0)})
        assert not self.has(LateImages(kit), cat=9)
        kit.forgotten = frozenset()
        assert self.has(LateImages(kit), cat=9), "nothing else holds it back"
        kit.ledger.database.write("UPDATE runs SET inherited = 9 WHERE run_id = ?", (RUN,))
        assert not self.has(LateImages(kit), cat=9)

    def test_a_round_needs_as_many_clients_as_a_state(self, kit, late) -> None:
        kit.here[:] = [peer(ALICE, "alice", cat=1)]
        assert late.suffice(self.TASK, self.now)
        kit.config.least_updates = 2
        assert not late.suffice(self.TASK, self.now)

    def test_while_the_run_waits_rounds_are_apart_and_the_first_lets_others_connect(
        self, kit, late
    ) -> None:
        assert late.wait_s(0.0) == 10.0
        assert late.wait_s(4.0) == 6.0
        assert late.wait_s(11.0) == 0.0
        self.ask(kit, late, kind="train", number=1, cat=5)
        assert late.wait_s(11.0) == 0.0, "a task's own round is none of them"
        self.ask(kit, late, cat=5)
        assert late.wait_s(8.0) == 59.0

    def test_the_note_says_that_they_count_and_the_client_is_not_called_untrained(
        self, kit, late
    ) -> None:
        bob = peer(BOB, "bob", cat=2)
        OldClasses(kit).notice(bob)
        assert kit.notes[0].endswith("learned before, counted between rounds")
        assert bob.untrained == ()

    def test_a_round_asks_the_late_ones_alone(self, kit, late) -> None:
        progress = SimpleNamespace(task=self.TASK, step=late_step(0))
        here = [peer(ALICE, "alice", cat=5), peer(BOB, "bob", cat=5)]
        found = list_available(kit, progress, here, 0.0, {BOB})
        assert [(e.client, e.holds) for e in found] == [(ALICE, False), (BOB, True)]

    def test_one_late_client_opens_it_and_no_decline_holds_it_up(self, kit, late) -> None:
        kit.config = Config.model_validate({"round": {"min_clients": 3, "retry_s": 60}})
        key = RoundKey(RUN, 0, "late", 0)
        progress = SimpleNamespace(mode=Mode.RUNNING, unheld_since=None)
        round_ = restore.machine_of(kit, progress, key, None, 0.0)
        opened = round_.handle(Present(((ALICE, False), (BOB, True)), 0.0))
        assert Ask(BOB) in opened
        assert Ask(ALICE) not in opened
        (close,) = round_.handle(Declined(BOB, "data_invalid", 1.0))
        assert close.outcome == "skipped"

    def test_its_rounds_are_none_of_the_tasks(self, kit) -> None:
        key = RoundKey(RUN, 0, "late", 0)
        before = kit.ledger.rounds.count_closed(RUN, 0)
        kit.ledger.rounds.open(key, asked=[ALICE], base_state=0)
        assert kit.ledger.rounds.count_late(RUN, 0) == 0
        kit.ledger.rounds.close(key, "skipped")
        assert kit.ledger.rounds.count_late(RUN, 0) == 1
        assert kit.ledger.rounds.count_closed(RUN, 0) == before
        steps = task_steps((ONCE, LATE_EXCHANGE), 5, task=0, evaluate=True)
        assert [s.kind for s in steps] == ["train", "evaluate"]
        assert kit.ledger.rounds.was_learned(RUN, 0) is False

    @pytest.mark.parametrize(("kind", "resumed"), [("evaluate", []), ("late", [(0, "late", 3)])])
    def test_after_a_restart_the_open_round_comes_first(self, kit, late, kind, resumed) -> None:
        """A round of late images is resumed at once; while another is open, none opens."""
        kit.ledger.rounds.open(RoundKey(RUN, 0, kind, 3), asked=[ALICE], base_state=0)
        kit.here[:] = [peer(BOB, "bob", cat=9)]
        ran = []

        async def story() -> None:
            coordinator = Coordinator(kit, ports=None, task_closed=None)

            async def one_round(task, step) -> None:
                ran.append((task.index, step.kind, step.round))

            coordinator._one_round = one_round
            await coordinator._resume_late()
            assert not await coordinator._count_late(self.TASK)
            assert coordinator.progress.step is None

        asyncio.run(story())
        assert ran == resumed

    def test_a_round_whose_clients_have_left_closes(self, kit, late) -> None:
        kit.config = Config.model_validate({})
        progress = SimpleNamespace(mode=Mode.RUNNING, unheld_since=None)
        round_ = restore.machine_of(kit, progress, RoundKey(RUN, 0, "late", 0), None, 0.0)
        (close,) = round_.handle(Present((), 0.0))
        assert (close.outcome, close.why) == ("skipped", "no_holder")


class TestHeld:
    def test_only_names_that_somebody_here_has_images_of_count(self, kit) -> None:
        discovery = Discovery(kit, [].append, may_go_on)
        assert discovery.held_class_keys() == frozenset()
        kit.here.append(peer(BOB, "bob", cat=1))
        assert discovery.held_class_keys() == frozenset()
        kit.here.append(peer(ALICE, "alice", Dog=1))
        assert discovery.held_class_keys() == {"dog"}

    def test_a_waiting_name_is_held_under_its_other_name_too(self, kit) -> None:
        kit.classes.alias("hound", "dog")
        kit.here.append(peer(BOB, "bob", hound=1))
        assert Discovery(kit, [].append, may_go_on).held_class_keys() == {"dog"}


async def may_go_on() -> None:
    """Nobody holds the run."""


def test_who_leaves_is_no_longer_said_to_be_here(kit) -> None:
    kit.config.round.min_clients = 2
    kit.here.append(peer(ALICE, "alice", dog=2))

    async def story() -> str:
        coordinator = Coordinator(kit, ports=None, task_closed=None)
        waiting = asyncio.create_task(coordinator.discovery.wait())
        await asyncio.sleep(0)
        assert coordinator.progress.phase == "waiting"
        assert "(1 ready)" in coordinator.progress.waiting_for
        kit.here.clear()
        coordinator.on_client_left(ALICE)
        for _ in range(10):  # turns of the loop
            await asyncio.sleep(0)
        waiting.cancel()
        return coordinator.progress.waiting_for

    said = asyncio.run(story())
    assert said == "2 clients (0 ready) and at least 1 new class in all (0 waiting)"


@pytest.mark.parametrize(
    ("whys", "round_", "given_up"),
    [
        (("answered", "deadline"), 2, True),
        (("answered", "deadline"), 3, True),
        (("answered",), 1, False),
        (("answered", "void"), 2, False),
        (("operator", "answered"), 3, False),
        (("answered", "no_holder"), 2, False),
    ],
)
@pytest.mark.parametrize("updates", [0, 1])
def test_rounds_are_given_up_after_so_many_in_which_nobody_sent_an_update(
    kit, whys, round_, given_up, updates
) -> None:
    """Said once, as the first of them is passed over."""
    given_up = given_up and not updates
    exchange = Exchange("prepare", PayloadSchema(), gives_up=2)
    kit.exchange = {"prepare": exchange}.get
    for r in range(round_):
        key = RoundKey(RUN, 0, "prepare", r)
        kit.ledger.rounds.open(key, asked=[ALICE], base_state=0)
        if r < updates:
            with kit.ledger.transaction():
                kit.ledger.updates.accept(
                    key, ALICE, update_id=UpdateId(digest("v")), samples=1, tensor_bytes=1,
                    sealed_bytes=1,
                )  # fmt: skip
        kit.ledger.rounds.close(key, "skipped", why=whys[min(r, len(whys) - 1)])

    progress = SimpleNamespace(task=TaskInfo(0, (0,)), step=Step("prepare", round_, 5))
    why = restore.omission(kit, progress, RoundKey(RUN, 0, "prepare", round_))
    assert why == ("given_up" if given_up else None)
    said = [note for note in kit.notes if "warning given_up" in note]
    assert len(said) == (given_up and round_ == 2)
    assert all("the first 2 rounds brought no update of kind prepare" in note for note in said)


@pytest.mark.parametrize(
    ("right", "total", "why"),
    [(80, 200, None), (79, 200, "unsure"), (199, 199, "unsure"), (0, 0, "unsure")],
)
def test_unlabelled_images_are_used_after_a_good_evaluation(kit, right, total, why) -> None:
    """Of all clients; what the server's own test found is something else."""
    kit.exchange = {
        "pseudo": Exchange(
            "pseudo", PayloadSchema(), keeps_state=True, unlabelled=9, least_accuracy=0.4
        )
    }.get
    half = total // 2
    first = min(right, half)
    kit.ledger.evaluations.add(RUN, 0, ALICE, {0: (first, half)})
    kit.ledger.evaluations.add(RUN, 0, BOB, {0: (right - first, total - half)})
    kit.ledger.evaluations.add(RUN, 0, "central", {0: (999, 999)})
    progress = SimpleNamespace(task=TaskInfo(0, (0,)), step=Step("pseudo", 0, 1))
    assert restore.omission(kit, progress, RoundKey(RUN, 0, "pseudo", 0)) == why
    said = [f"classified {right} of {total} test images rightly" in note for note in kit.notes]
    assert said == [True] * (why is not None)


@pytest.mark.parametrize(
    ("outcome", "why"), [("done", None), ("short", None), ("skipped", "unchanged")]
)
def test_an_unchanged_model_is_not_evaluated_again(kit, outcome, why) -> None:
    pseudo = Exchange("pseudo", PayloadSchema(), rounds=1, unlabelled=9, keeps_state=True)
    kit.exchanges = (Exchange("train", PayloadSchema(), rounds=1), pseudo)
    key = RoundKey(RUN, 0, "pseudo", 0)
    kit.ledger.rounds.open(key, asked=[ALICE], base_state=0)
    kit.ledger.rounds.close(key, outcome)
    first, second = (key._replace(kind="evaluate", round=r) for r in (0, 1))
    assert restore.omission(kit, None, first) is None
    assert restore.omission(kit, None, second) is None, "a fork has no results of its last task"
    kit.ledger.evaluations.add(RUN, 0, ALICE, {0: (3, 10)})
    assert restore.omission(kit, None, second) == why


@pytest.mark.parametrize("optional", [False, True])
def test_after_a_restart_an_optional_round_awaits_no_client_that_declined(kit, optional) -> None:
    key = RoundKey(RUN, 0, "pseudo", 0)
    row = kit.ledger.rounds.open(key, asked=[ALICE, BOB], base_state=0)
    kit.ledger.answers.set(key, BOB, Answer.DECLINED, "not_now")
    machine = restore.restore(kit.ledger, row, RoundRules(optional=optional), (1,), 0.0)
    assert (machine.resting, machine.excluded) == (({BOB}, set()), (set(), {BOB}))[optional]


def test_results_of_a_task_are_added_up_over_clients(kit) -> None:
    evaluations = kit.ledger.evaluations
    assert evaluations.totals(RUN, 0) == (0, 0)
    for client in (ALICE, BOB, "central"):
        evaluations.add(RUN, 0, client, {0: (3, 10)})
    assert evaluations.totals(RUN, 0) == (6, 20)
    evaluations.add(RUN, 0, ALICE, {0: (9, 10)})
    assert evaluations.totals(RUN, 0) == (12, 20)


def test_a_fork_does_not_ask_again_who_has_counted_images_in_it(kit) -> None:
    """The client forgets what it counted; the fork's state does not."""
    updates, exchange = (
        kit.ledger.updates,
        Exchange("pseudo", PayloadSchema(), unlabelled=9, keeps_state=True),
    )
    for run, client in ((RUN, ALICE), ("other", BOB)):
        key = RoundKey(run, 0, "pseudo", 0)
        if run == "other":
            sample_run.add_run(kit.ledger, run)
            kit.ledger.tasks.open(run, 0, [0])
        kit.ledger.rounds.open(key, asked=[client], base_state=0)
        with kit.ledger.transaction():
            updates.accept(
                key, client, update_id=UpdateId(digest(run)), samples=5, tensor_bytes=1,
                sealed_bytes=2,
            )  # fmt: skip
            updates.mark_counted(key)
        kit.ledger.rounds.close(key, "done")
    assert updates.inherited_from(RUN, "pseudo") == frozenset()
    kit.ledger.database.write("UPDATE runs SET inherited = 9 WHERE run_id = ?", (RUN,))
    assert updates.inherited_from(RUN, "pseudo") == {ALICE}
    assert updates.inherited_from(RUN, "train") == {ALICE}
    kit.exchange, kit.forgotten = {"pseudo": exchange}.get, frozenset()
    progress = SimpleNamespace(task=TaskInfo(1, (1,), (0,)), step=Step("pseudo", 0, 1))
    here = [SimpleNamespace(client=c, holds=lambda *_: False) for c in (ALICE, BOB)]
    found = list_available(kit, progress, here, 0.0)
    assert [(one.client, one.holds) for one in found] == [(ALICE, False), (BOB, True)]


def test_it_waits_until_somebody_brings_a_new_name_and_says_for_what(kit) -> None:
    waits: list[str] = []

    async def story() -> None:
        discovery = Discovery(kit, waits.append, may_go_on)
        waiting = asyncio.create_task(discovery.wait())
        await asyncio.sleep(0)
        assert waits[-1] == "1 client (0 ready) and at least 1 new class in all (0 waiting)"
        kit.here.append(peer(ALICE, "alice", dog=2))
        discovery.news.set()
        await asyncio.wait_for(waiting, 60)

    asyncio.run(story())


def test_news_of_other_things_does_not_put_a_task_off(kit) -> None:
    """Clients come and go all the time; only a new name begins the settling anew."""

    async def story() -> None:
        kit.config.tasks.settle_s = 0.5
        kit.here.append(peer(ALICE, "alice", dog=2))
        discovery = Discovery(kit, [].append, may_go_on)
        waiting = asyncio.create_task(discovery.wait())
        chatter = 0
        while not waiting.done():
            discovery.news.set()
            chatter += 1
            await asyncio.wait({waiting}, timeout=0.01)
            assert chatter < 30_000, "the task never opens"
        await waiting

    asyncio.run(story())


def test_a_task_of_too_few_classes_does_not_open_however_long_it_waits(kit) -> None:
    waits: list[str] = []

    async def story() -> None:
        kit.fewest_classes = kit.config.tasks.min_new_classes = 2
        kit.config.tasks.max_wait_s = 0.0
        kit.here.append(peer(ALICE, "alice", dog=2))
        discovery = Discovery(kit, waits.append, may_go_on)
        waiting = asyncio.create_task(discovery.wait())
        for _ in range(5):  # as it is overdue from the start, it would be open by now
            discovery.news.set()
            await asyncio.sleep(0)
        assert not waiting.done()
        kit.classes.announce(BOB, ["emu"])
        kit.here.append(peer(BOB, "bob", emu=1))
        discovery.news.set()
        await asyncio.wait_for(waiting, 60)

    asyncio.run(story())
    assert "at least 2 new classes" in waits[-1]


def test_what_happens_between_rounds_is_not_kept_for_a_round(kit) -> None:
    """A run may wait for classes for months while clients come and go."""

    bob = peer(BOB, "bob")
    bob.holds = lambda *_: True

    async def story() -> None:
        coordinator = Coordinator(kit, ports=None, task_closed=None)
        for _ in range(3):
            coordinator.on_client_ready(bob)
            coordinator.on_client_left(BOB)
            coordinator.set_mode(Mode.PAUSED)
            coordinator.set_mode(Mode.RUNNING)
        assert coordinator._events.empty()

    asyncio.run(story())


@pytest.mark.parametrize(("round_", "before_s"), [(1, 120.0), (2, 0.0)])
def test_the_time_of_a_round_before_a_restart_counts(kit, monkeypatch, round_, before_s) -> None:
    """Round 1 was open for two minutes when the server began again; another one begins now."""
    for name, empty in (("mask_names", ()), ("sums_are_about", b""), ("oldest_base", -1)):
        monkeypatch.setattr(coordinator_module, name, lambda *_, empty=empty: empty)
    monkeypatch.setattr(coordinator_module, "header_stamp", lambda *_: None)
    kit.ledger.rounds.open(RoundKey(RUN, 0, "train", 1), asked=[ALICE], base_state=0)
    kit.ledger.database.clock.now += 120
    took: list[float] = []

    async def nothing(*_) -> list:
        return []

    async def collect(_key) -> SimpleNamespace:
        return SimpleNamespace(why="answered")

    async def close(_task, _step, _close, collect_s) -> None:
        took.append(collect_s)

    async def story() -> None:
        kit.publisher = SimpleNamespace(publish=nothing)
        ports = SimpleNamespace(round_opens=nothing, round_closed=nothing)
        coordinator = Coordinator(kit, ports=ports, task_closed=None)
        coordinator.closing = SimpleNamespace(close=close, check_void=lambda _key: "")
        coordinator.progress.parts = (object(),)
        coordinator._collect, coordinator._note_counted = collect, lambda _key: None
        await coordinator._one_round(TaskInfo(0, (0,)), Step("train", round_, 3))

    asyncio.run(story())
    assert took == [pytest.approx(before_s, abs=5)]


def test_timers_of_a_round_that_have_gone_off_are_let_go(kit) -> None:
    async def story() -> None:
        coordinator = Coordinator(kit, ports=None, task_closed=None)
        for _ in range(20):
            coordinator._set_timer(asyncio.get_running_loop().time())
            await coordinator._events.get()
        coordinator._set_timer(asyncio.get_running_loop().time() + 3600)
        assert len(coordinator._timers) <= 2

    asyncio.run(story())


def test_the_client_that_was_waited_for_begins_the_settling_anew(kit, monkeypatch) -> None:
    """Others that come with it, as after a power cut, bring their classes to the same task."""
    clock = SimpleNamespace(now=0.0)
    loop = SimpleNamespace(time=lambda: clock.now)
    mine = SimpleNamespace(get_running_loop=lambda: loop, wait_for=asyncio.wait_for)
    monkeypatch.setattr(discovery_module, "asyncio", mine)

    async def opens_after(discovery, waiting, now: float) -> bool:
        clock.now = now
        discovery.news.set()
        for _ in range(10):
            await asyncio.sleep(0)
        return bool(waiting.done())

    async def story() -> None:
        kit.config.round.min_clients, kit.config.tasks.settle_s = 2, 5.0
        kit.config.tasks.max_wait_s = 1e6
        kit.here.append(peer(ALICE, "alice", dog=2))
        discovery = Discovery(kit, [].append, may_go_on)
        waiting = asyncio.create_task(discovery.wait())
        assert not await opens_after(discovery, waiting, 10.0)
        kit.here.append(peer(BOB, "bob", dog=1))
        assert not await opens_after(discovery, waiting, 20.0)
        assert not await opens_after(discovery, waiting, 24.0)
        assert await opens_after(discovery, waiting, 25.0)

    asyncio.run(story())


def test_a_look_at_thousands_of_clients_is_not_taken_again_for_each_that_connects(
    kit, monkeypatch
) -> None:
    """While a look takes 0.01 s of the loop, clients connect in between, and are one piece of news."""
    spent, rests, looks, second = [0.0], [], [], asyncio.Event()

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    mine = SimpleNamespace(
        get_running_loop=asyncio.get_running_loop, wait_for=asyncio.wait_for, sleep=rest
    )
    monkeypatch.setattr(discovery_module, "asyncio", mine)
    monkeypatch.setattr(discovery_module, "time", SimpleNamespace(thread_time=lambda: spent[0]))

    def look() -> frozenset[str]:
        looks.append(1)
        if len(looks) == 2:
            second.set()
        spent[0] += 0.01
        return frozenset()

    async def story() -> None:
        kit.config.round.min_clients = 2
        discovery = Discovery(kit, [].append, may_go_on)
        discovery.held_class_keys = look
        waiting = asyncio.create_task(discovery.wait())
        await asyncio.sleep(0)
        assert (len(looks), rests) == (1, [])
        discovery.news.set()
        await second.wait()
        waiting.cancel()

    asyncio.run(story())
    assert rests == [pytest.approx(0.09)]


def test_a_client_that_declines_costs_the_loop_no_wait_for_the_disk(kit, monkeypatch) -> None:
    """In a round that asks everybody for what few have, thousands do in a moment."""
    said: list[str] = []
    execute = kit.ledger.database.execute
    monkeypatch.setattr(
        kit.ledger.database, "execute", lambda sql, *args: said.append(sql) or execute(sql, *args)
    )
    key = RoundKey(RUN, 1, "train", 0)
    kit.ledger.tasks.open(RUN, 1, [])
    kit.ledger.rounds.open(key, asked=[ALICE], base_state=0)

    async def story() -> None:
        coordinator = Coordinator(kit, ports=None, task_closed=None)
        progress = coordinator.progress
        progress.task, progress.step = TaskInfo(1, (), (0,)), Step("train", 0, 1)
        progress.round = Round(rules=RoundRules(min_clients=1), seed=(1,))
        progress.round.handle(Present(((ALICE, True),), 0.0))
        said.clear()
        assert coordinator.on_client_declined(ALICE, key, "busy")

    asyncio.run(story())
    assert said
    assert not [sql for sql in said if "FULL" in sql]
    assert kit.ledger.answers.get(key, ALICE).reason == "busy"
    assert kit.ledger.answers.get(key, BOB) is None


def test_new_names_cost_the_loop_no_wait_for_the_disk(kit, monkeypatch) -> None:
    said: list[str] = []
    execute = kit.ledger.database.execute
    monkeypatch.setattr(
        kit.ledger.database, "execute", lambda sql, *args: said.append(sql) or execute(sql, *args)
    )
    assert kit.classes.announce(BOB, ["axolotl"]).new == ("axolotl",)
    assert said
    assert not [sql for sql in said if "FULL" in sql]


def test_who_joins_a_round_is_written_with_the_others_that_join_in_the_same_moment(
    kit, monkeypatch
):
    """Each list of asked clients is longer than the one before: thousands of them would be gigabytes."""
    kit.ledger.tasks.open(RUN, 1, [])
    key = RoundKey(RUN, 1, "train", 0)
    kit.ledger.rounds.open(key, asked=[ALICE], base_state=0)
    written: list[tuple[str, ...]] = []
    set_asked = kit.ledger.rounds.set_asked
    monkeypatch.setattr(
        kit.ledger.rounds,
        "set_asked",
        lambda key, asked, **how: written.append(tuple(asked)) or set_asked(key, asked, **how),
    )

    async def story() -> None:
        coordinator = Coordinator(kit, ports=None, task_closed=None)
        for asked in ((ALICE, BOB), (ALICE, BOB, GONE)):
            await coordinator._execute(Widened(asked, declined=False), key)
        assert written == []
        coordinator._write_joined(key)  # as the timer does, and the end of the round
        assert written == [(ALICE, BOB, GONE)]
        coordinator._write_joined(key)
        await coordinator._execute(Widened((ALICE,), declined=False), key)
        await coordinator._execute(Widened((ALICE, BOB)), key)
        coordinator._write_joined(key)
        assert written[1:] == [(ALICE, BOB)]

    kit.config.round.deadline_s = 60.0
    monkeypatch.setattr("fcil_server.rounds.notes.describe_widened", lambda *_: "")
    asyncio.run(story())
    assert kit.ledger.rounds.get(key).asked == (ALICE, BOB)


def test_who_joined_while_the_disk_was_full_is_written_when_the_round_closes(kit, monkeypatch):
    kit.ledger.tasks.open(RUN, 1, [])
    key = RoundKey(RUN, 1, "train", 0)
    kit.ledger.rounds.open(key, asked=[ALICE], base_state=0)
    set_asked = kit.ledger.rounds.set_asked

    def full(*_, **__):
        raise DiskFull("the disk is full.")

    async def story() -> None:
        coordinator = Coordinator(kit, ports=None, task_closed=None)
        await coordinator._execute(Widened((ALICE, BOB), declined=False), key)
        monkeypatch.setattr(kit.ledger.rounds, "set_asked", full)
        coordinator._write_joined(key)  # as the timer does
        monkeypatch.setattr(kit.ledger.rounds, "set_asked", set_asked)
        coordinator._write_joined(key)

    asyncio.run(story())
    assert kit.ledger.rounds.get(key).asked == (ALICE, BOB)


def test_a_list_that_could_not_be_written_is_no_other_rounds(kit, monkeypatch):
    kit.ledger.tasks.open(RUN, 1, [])
    key = RoundKey(RUN, 1, "train", 0)

    def full(*_, **__):
        raise DiskFull("the disk is full.")

    class Ended:
        answers, phase = {}, Phase.GATHERING

        def handle(self, _):
            coordinator._joined = (ALICE, BOB)
            raise StorageError("the round ends with the server.")

    async def story() -> None:
        with pytest.raises(StorageError):
            await coordinator._collect(key)

    coordinator = Coordinator(kit, ports=None, task_closed=None)
    coordinator.progress.task = TaskInfo(1, (0,), ())
    monkeypatch.setattr(kit.ledger.rounds, "set_asked", full)
    monkeypatch.setattr(coordinator_module, "machine_of", lambda *_: Ended())
    monkeypatch.setattr(coordinator_module, "omission", lambda *_: None)
    monkeypatch.setattr(coordinator, "_list_available", lambda _: ())
    monkeypatch.setattr(coordinator.progress, "show_live", lambda *_: None)
    monkeypatch.setattr(coordinator.late_images, "begin", lambda *_: None)
    asyncio.run(story())
    assert coordinator._joined == ()


def test_who_joined_before_a_kill_and_declined_is_in_the_round_after_it(kit):
    """Its joining may be forgotten; its answer was written at once."""
    kit.ledger.tasks.open(RUN, 1, [])
    key = RoundKey(RUN, 1, "train", 0)
    row = kit.ledger.rounds.open(key, asked=[ALICE], base_state=0)
    kit.ledger.answers.set(key, BOB, Answer.DECLINED, "not_now")
    restored = restore.restore(kit.ledger, row, RoundRules(min_clients=1), (1,), 0.0)
    assert restored.answers == {ALICE: Answer.NONE, BOB: Answer.DECLINED}
    assert restored.resting == {BOB}


def test_who_sent_an_update_before_a_kill_and_was_not_written_yet_is_listed_after_it(kit):
    kit.ledger.tasks.open(RUN, 1, [])
    key = RoundKey(RUN, 1, "train", 0)
    kit.ledger.rounds.open(key, asked=[ALICE], base_state=0)
    with kit.ledger.transaction():
        kit.ledger.updates.accept(
            key, BOB, update_id=UpdateId(digest("v")), samples=5, tensor_bytes=1, sealed_bytes=2,
        )  # fmt: skip
    row = kit.ledger.rounds.get(key)
    restored = restore.restore(kit.ledger, row, RoundRules(min_clients=1), (1,), 0.0)
    coordinator = Coordinator(kit, ports=None, task_closed=None)
    coordinator._list_restored(row, tuple(restored.answers))
    assert kit.ledger.rounds.get(key).asked == (ALICE, BOB)
